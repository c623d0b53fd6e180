"""Comparison on the GPU, next to the host's; a part of benchmarks.gpu_proof.

One bf16 tensor before and after a simulated Adam step, chunk by chunk as a publication does it. Ways take
turns within each round; the best of all rounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightcast.publisher.weights.device_side import (
    Baselines,
    DeviceComparison,
    differing,
    span_lanes,
)
from weightcast.shared.base.elements import CHUNK_WORDS, Chunk, TensorSpec, TensorTable, grid
from weightcast.shared.codec.changes import compare
from weightcast.shared.digest.checksums import hash_bytes, span_sums
from weightcast.shared.kernels.parallel import ordered

from .chunks import step_rate

_ALL = 1 << 50
_STD, _UPDATE = 0.02, 0.3


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

    def __init__(self, words: int, density: float, device: Any, chunk_words: int, threads: int) -> None:
        random = torch.Generator(device).manual_seed(0)
        masters = torch.randn(words, generator=random, device=device).mul_(_STD)
        self.old = masters.bfloat16().view(torch.int16)
        masters.add_(torch.randn(words, generator=random, device=device), alpha=_UPDATE * step_rate(density))
        self.new = masters.bfloat16().view(torch.int16)
        self.on_host = [words.cpu().numpy().view("<u2") for words in (self.old, self.new)]
        table = TensorTable.of([TensorSpec("t", "BF16", (words,), 2 * words)])
        self.chunks: Sequence[Chunk] = list(grid(table, table.whole, chunk_words))
        self.device, self.threads = device, threads

    def scans(self, device_bytes: int, pinned_bytes: int) -> Callable[[], None]:
        """Scans all chunks, to the new words and back by turns: a scan moves the baseline."""
        turns = [(self.on_host[0], self.new), (self.on_host[1], self.old)]
        baselines = Baselines("always", device_bytes, pinned_bytes, whole_old=False)
        comparison = DeviceComparison(baselines, lambda _: turns[0][1], {0: self.device})

        def one(chunk: Chunk) -> None:
            if comparison.scan(chunk, _of(turns[0][0], chunk)) is None:
                raise RuntimeError("not compared on the device: is it out of memory?")

        def scan() -> None:
            for _ in ordered(one, self.chunks, self.threads):
                pass
            turns.reverse()

        return scan

    def compared(self) -> None:
        for chunk in self.chunks:
            new = _of(self.new, chunk)
            place = differing(_of(self.old, chunk), new)
            place.to(torch.int32), new[place]

    def hashed(self) -> None:
        for chunk in self.chunks:
            span_lanes(chunk, _of(self.new, chunk))

    def compared_on_host(self) -> None:
        for _ in ordered(self._on_host, self.chunks, self.threads):
            pass

    def _on_host(self, chunk: Chunk) -> object:
        """As for tensors that are not compared on their device: all new words cross."""
        new, old = _of(self.new, chunk).cpu().numpy().view(np.uint16), _of(self.on_host[0], chunk)
        changes = compare(old, new)
        hash_bytes(new.view(np.uint8), chunk.spans[0].start // 4)
        return span_sums(chunk, old, changes.index, changes.new)


def _of(words: Any, chunk: Chunk) -> Any:
    (span,) = chunk.spans
    return words[span.start : span.stop]


def _ways(step: _Step) -> Mapping[str, tuple[Callable[[], object], float]]:
    """By name: the work over all chunks, and what it cannot but move."""
    spare = torch.empty_like(step.new)
    return {
        "copy on the device": (lambda: spare.copy_(step.new), 2),
        "compare": (step.compared, 2),
        "hash": (step.hashed, 1),
        "all, baseline on the device": (step.scans(_ALL, 0), 2),
        "all, baseline pinned": (step.scans(0, _ALL), 3),
        "all, baseline brought": (step.scans(0, 0), 3),
        "all, on the host": (step.compared_on_host, 0),
    }


def wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Callable[[], object], device: Any) -> float:
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def measure(
    megabytes: float,
    density: float,
    rounds: int,
    device: Any,
    chunk_words: int = CHUNK_WORDS,
    threads: int = 1,
) -> list[Row]:
    words = max(1, round(megabytes * 1e6 / 2 / 64)) * 64
    each = _ways(_Step(words, density, device, chunk_words, threads))
    best = dict.fromkeys(each, float("inf"))
    for number in range(rounds + 1):
        for name, (work, _) in each.items():
            seconds = _seconds(work, device)
            if number:  # the first meets cold kernels and memory
                best[name] = min(best[name], seconds)
    return [Row(name, best[name], 2 * words, moved) for name, (_, moved) in each.items()]
