"""Whole publications and syncs on real files: python -m benchmarks.pipeline [--gigabytes N] [--json FILE]

A bf16 model on disk takes simulated Adam steps that change about `--density` of its elements. Publisher and
host run in this process as the daemons run them: mappings held, every check, journal and fsync included.
`xor` is the field's encoding through the same pipeline. Encodings take turns within each round; medians of
all rounds but the first are shown. GB/s are bytes of *model* per second of wall clock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.steps import Masters
from weightcast.publisher import Publisher, init_channel
from weightcast.shared.channel.index import Encoding
from weightcast.shared.channel.store import Channel
from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.local.follow import Follower, FollowOptions

ENCODINGS: tuple[Encoding, ...] = ("fast", "small", "xor")
_LAYER = (4096, 4096)
_PHASES = ("diff", "stage", "commit", "patch")

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Round:
    """Seconds of one publication and one sync; `phases` of the publication."""

    encoding: str
    density: float
    publish: float
    phases: Mapping[str, float]
    sync: float
    delta_bytes: int
    bits_per_change: float


class _Site:
    """A channel in one encoding with its publisher and one host."""

    def __init__(self, root: Path, base: Path, encoding: Encoding, threads: int) -> None:
        self.encoding = encoding
        self._channel = root / encoding
        init_channel(self._channel, base, threads=threads)
        self.publisher = Publisher.open(
            self._channel, local=root / f"{encoding}-publisher", base=base, encoding=encoding, threads=threads
        )
        options = FollowOptions(threads=threads)
        self._host = Follower(self._channel, root / f"{encoding}-host", base, options)
        self._host.catch_up(Channel.open(self._channel))

    def round(self, weights: Weights) -> Round:
        began = time.monotonic()
        report = self.publisher.publish(weights)
        published = time.monotonic()
        self._host.catch_up(Channel.open(self._channel))
        return Round(
            encoding=self.encoding,
            density=report.density_elements,
            publish=published - began,
            phases=report.seconds,
            sync=time.monotonic() - published,
            delta_bytes=report.delta_bytes,
            bits_per_change=report.bits_per_change,
        )

    def close(self) -> None:
        self.publisher.close()
        self._host.close()


class _Model:
    """bf16 weights under simulated Adam steps."""

    def __init__(self, nbytes: int, density: float, seed: int) -> None:
        layers = max(1, nbytes // (2 * _LAYER[0] * _LAYER[1]))
        self._masters = [Masters(_LAYER[0] * _LAYER[1], density, seed + layer) for layer in range(layers)]
        self.weights: Weights = {}
        for layer, masters in enumerate(self._masters):
            words = torch.from_numpy(masters.words.view(np.int16)).view(torch.bfloat16)
            self.weights[f"model.layers.{layer}.weight"] = words.reshape(_LAYER)
            self.weights[f"model.layers.{layer}.norm.weight"] = torch.ones(_LAYER[1], dtype=torch.bfloat16)

    @property
    def nbytes(self) -> int:
        return sum(words.nbytes for words in self.weights.values())

    def step(self) -> None:
        for masters in self._masters:
            masters.step()


def rounds(options: argparse.Namespace, model: _Model, root: Path) -> Iterator[Round]:
    base = root / "base"
    base.mkdir()
    save_file(model.weights, base / "model.safetensors")
    with ExitStack() as stack:
        sites = [_Site(root, base, encoding, options.threads) for encoding in ENCODINGS]
        for site in sites:
            stack.callback(site.close)
        for number in range(options.rounds + 1):
            model.step()
            for site in sites:
                done = site.round(model.weights)
                if number:  # the first meets cold mappings
                    yield done


def _median(results: Sequence[Round], of: Callable[[Round], float]) -> float:
    return statistics.median(of(result) for result in results)


def show(results: Sequence[Round], nbytes: int) -> None:
    table = Table(title=f"whole pipeline, {nbytes / 1e9:.2f} GB, medians")
    for head in ("", "publish GB/s", "sync GB/s", "density", "bits/change", *_PHASES):
        table.add_column(head, justify="right")
    for encoding in ENCODINGS:
        mine = [result for result in results if result.encoding == encoding]
        phases = [f"{_median(mine, _seconds_of(phase)):.2f}s" for phase in _PHASES]
        table.add_row(
            encoding,
            f"{nbytes / _median(mine, lambda r: r.publish) / 1e9:.2f}",
            f"{nbytes / _median(mine, lambda r: r.sync) / 1e9:.2f}",
            f"{_median(mine, lambda r: r.density):.2%}",
            f"{_median(mine, lambda r: r.bits_per_change):.2f}",
            *phases,
        )
    Console(width=110).print(table)


def _seconds_of(phase: str) -> Callable[[Round], float]:
    return lambda result: result.phases[phase]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the model (1)")
    parser.add_argument("--density", type=float, default=0.014, help="share of changed elements (0.014)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where the files lie; a temporary directory")
    parser.add_argument("--json", type=Path, help="write every round")
    options = parser.parse_args()
    warm_up()
    model = _Model(round(options.gigabytes * 1e9), options.density, options.seed)
    root = Path(tempfile.mkdtemp(prefix="weightcast-bench-", dir=options.dir))
    try:
        results = list(rounds(options, model, root))
    finally:
        shutil.rmtree(root)
    show(results, model.nbytes)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
