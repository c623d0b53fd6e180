"""Comparison on the GPU, next to the host's: python -m benchmarks.on_device [--json FILE]

On the first CUDA device where there is one, else on torch's CPU device. One bf16 tensor before and after a
simulated Adam step, chunk by chunk as a publication does it. Ways take turns within each round, the best of
all rounds counts. GB/s are bytes of *model* per second. `of bandwidth`: the bytes that a way cannot but move
through the device's memory, per second, as a share of what a copy within that memory moves here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from weightcast.publisher.weights.device_side import (
    Baselines,
    DeviceComparison,
    differing,
    on_host,
    span_lanes,
)
from weightcast.shared.base.elements import Chunk, TensorSpec, TensorTable, Words, grid
from weightcast.shared.codec.changes import compare
from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.digest.checksums import hash_bytes, span_sums

from .chunks import Case, simulated

_ALL = 1 << 50


@dataclass(frozen=True)
class Row:
    """`moved`: model bytes that must pass the device's memory, as a multiple of the model; 0: none."""

    way: str
    seconds: float
    nbytes: int
    moved: float

    @property
    def rate(self) -> float:
        """Bytes of model per second."""
        return self.nbytes / self.seconds


class _Step:
    """Old and new words on the host and on the device, chunk by chunk."""

    def __init__(self, case: Case, device: Any) -> None:
        spec = TensorSpec("t", "BF16", (len(case.old),), case.old.nbytes)
        table = TensorTable.of([spec])
        self.chunks: Sequence[Chunk] = list(grid(table, table.whole))
        self.case, self.device = case, device
        self.old, self.new = (on_host(words).to(device, copy=True) for words in (case.old, case.new))

    def scans(self, device_bytes: int, pinned_bytes: int) -> Callable[[], None]:
        """Scans all chunks, to the new words and back by turns: a scan moves the baseline."""
        turns = [(self.case.old, self.new), (self.case.new, self.old)]
        baselines = Baselines("always", device_bytes, pinned_bytes, whole_old=False)
        comparison = DeviceComparison(baselines, lambda _: turns[0][1], {0: self.device})

        def scan() -> None:
            for chunk in self.chunks:
                if comparison.scan(chunk, self.host(turns[0][0], chunk)) is None:
                    raise RuntimeError("not compared on the device: is it out of memory?")
            turns.reverse()

        return scan

    def host(self, words: Words, chunk: Chunk) -> Words:
        (span,) = chunk.spans
        return words[span.start : span.stop]


def ways(step: _Step) -> Mapping[str, tuple[Callable[[], object], float]]:
    """By name: the work over all chunks, and what it cannot but move."""
    spare = torch.empty_like(step.new)
    return {
        "copy on the device": (lambda: spare.copy_(step.new), 2),
        "compare": (lambda: [_compare(step, chunk) for chunk in step.chunks], 2),
        "hash": (lambda: [_hash(step, chunk) for chunk in step.chunks], 1),
        "all, baseline on the device": (step.scans(_ALL, 0), 2),
        "all, baseline pinned": (step.scans(0, _ALL), 3),
        "all, baseline brought": (step.scans(0, 0), 3),
        "all, on the host": (lambda: [_on_host(step, chunk) for chunk in step.chunks], 0),
    }


def _compare(step: _Step, chunk: Chunk) -> Any:
    (span,) = chunk.spans
    new = step.new[span.start : span.stop]
    place = differing(step.old[span.start : span.stop], new)
    return place.to(torch.int32), new[place]


def _hash(step: _Step, chunk: Chunk) -> Any:
    (span,) = chunk.spans
    return span_lanes(chunk, step.new[span.start : span.stop])


def _on_host(step: _Step, chunk: Chunk) -> object:
    """As for tensors that are not compared on their device: all new words cross."""
    (span,) = chunk.spans
    new = step.new[span.start : span.stop].cpu().numpy().view(np.uint16)
    old = step.host(step.case.old, chunk)
    changes = compare(old, new)
    hash_bytes(new.view(np.uint8), span.start // 4)
    return span_sums(chunk, old, changes.index, changes.new)


def _seconds(work: Callable[[], object], device: Any) -> float:
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(megabytes: float, density: float, rounds: int, device: Any) -> list[Row]:
    words = max(1, round(megabytes * 1e6 / 2 / 64)) * 64
    step = _Step(simulated(words, density, 0), device)
    each = ways(step)
    best = dict.fromkeys(each, float("inf"))
    for number in range(rounds + 1):
        for name, (work, _) in each.items():
            seconds = _seconds(work, device)
            if number:  # the first meets cold kernels and memory
                best[name] = min(best[name], seconds)
    return [Row(name, best[name], 2 * words, moved) for name, (_, moved) in each.items()]


def show(rows: Sequence[Row], device: Any) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "torch on the CPU, no GPU"
    bandwidth = rows[0].moved * rows[0].rate
    title = f"{name}: {rows[0].nbytes / 1e6:.0f} MB of bf16; a copy moves {bandwidth / 1e9:.0f} GB/s"
    table = Table("", title=title)
    for head in ("ms", "GB/s", "of bandwidth"):
        table.add_column(head, justify="right")
    for row in rows:
        share = f"{row.moved * row.rate / bandwidth:.0%}" if row.moved else ""
        table.add_row(row.way, f"{row.seconds * 1e3:.1f}", f"{row.rate / 1e9:.2f}", share)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, help="of the model (2000 on a GPU, else 100)")
    parser.add_argument("--density", type=float, default=0.014, help="share of changed elements (0.014)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every row")
    options = parser.parse_args()
    warm_up()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    usual = 2000.0 if device.type == "cuda" else 100.0
    megabytes = usual if options.megabytes is None else options.megabytes
    rows = measure(megabytes, options.density, options.rounds, device)
    show(rows, device)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
