"""What publishing costs a trainer's step: python -m benchmarks.step_cost [--megabytes N] [--channel-in DIR]

A bf16 model in torch takes simulated Adam steps. Measured is how long the trainer stands still: in `publish`,
in `submit`, and in `submit` when the channel takes its time (`--slow` seconds before each pointer, as the
commit of a bucket mount). `in the step` is the median; `published` is when the version is out, counted from
the same moment. Beside them one copy of as many bytes, which is what the machine's memory allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from weightcast.publisher import Publisher, PublishReport, init_channel
from weightcast.shared.codec.warm_up import warm_up

from .steps import Masters

Begin = Callable[[Publisher, dict[str, Any]], Callable[[], PublishReport]]
"""publishes; returns what waits until the version is out"""

_LAYERS = 8


@dataclass(frozen=True)
class Row:
    """Seconds; `rate`: bytes of model per second in the step."""

    way: str
    in_step: float
    published: float
    rate: float


class _Trainer:
    """One ring of weights cut into layers; `tensors` change in place with each step."""

    def __init__(self, nbytes: int, density: float) -> None:
        words = nbytes // 2 // _LAYERS // 1024 * 1024 * _LAYERS
        self._masters, self._density = Masters(words, 0), density
        whole = torch.from_numpy(self._masters.words.view(np.int16)).view(torch.bfloat16)
        layers = whole.view(_LAYERS, -1, 1024)
        self.tensors = {f"model.layers.{n}.weight": layers[n] for n in range(_LAYERS)}
        self.nbytes = 2 * words

    def step(self) -> dict[str, Any]:
        self._masters.step(self._density)
        return self.tensors

    def write(self, directory: Path) -> Path:
        directory.mkdir()
        size, header = self.nbytes // _LAYERS, {}
        for number, (name, tensor) in enumerate(self.tensors.items()):
            header[name] = {
                "dtype": "BF16",
                "shape": list(tensor.shape),
                "data_offsets": [number * size, (number + 1) * size],
            }
        text = json.dumps(header).encode()
        with (directory / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(self._masters.words.data)
        (directory / "config.json").write_text("{}")
        return directory


@dataclass(frozen=True)
class Plan:
    nbytes: int
    density: float
    rounds: int
    threads: int
    slow: float


def measure(plan: Plan, room: Path, channels: Path) -> list[Row]:
    """`room`: for local checkpoints; `channels`: where the channels are made."""
    warm_up()
    trainer = _Trainer(plan.nbytes, plan.density)
    base = trainer.write(room / "base")
    with ExitStack() as stack:
        ways: list[tuple[str, Begin, Publisher]] = []
        plans: list[tuple[str, Begin, float]] = [
            ("publish", _publish, 0.0),
            ("submit", _submit, 0.0),
            (f"submit, channel {plan.slow:g} s late", _submit, plan.slow),
        ]
        for name, begin, slow in plans:
            number = len(ways)
            init_channel(channels / f"channel-{number}", base)
            opened = Publisher.open(
                channels / f"channel-{number}",
                local=room / f"local-{number}",
                base=base,
                threads=plan.threads,
                post_write=_late(slow),
            )
            ways.append((name, begin, stack.enter_context(opened)))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in ways}
        for _ in range(plan.rounds + 1):
            tensors = trainer.step()
            for name, begin, publisher in ways:
                times[name].append(_timed(begin, publisher, tensors))
    rows = [_row(name, found[1:], trainer.nbytes) for name, found in times.items()]
    return [*rows, _copied(trainer, plan.rounds)]


def _publish(publisher: Publisher, tensors: dict[str, Any]) -> Callable[[], PublishReport]:
    report = publisher.publish(tensors)
    return lambda: report


def _submit(publisher: Publisher, tensors: dict[str, Any]) -> Callable[[], PublishReport]:
    return publisher.submit(tensors).result


def _late(seconds: float) -> Callable[[int, Path, str], None]:
    def post_write(version: int, directory: Path, phase: str) -> None:
        if phase == "version":
            time.sleep(seconds)

    return post_write


def _timed(begin: Begin, publisher: Publisher, tensors: dict[str, Any]) -> tuple[float, float]:
    began = time.perf_counter()
    result = begin(publisher, tensors)
    free = time.perf_counter()
    result()
    return free - began, time.perf_counter() - began


def _row(way: str, times: list[tuple[float, float]], nbytes: int) -> Row:
    in_step, published = (statistics.median(each) for each in zip(*times, strict=True))
    return Row(way, in_step, published, nbytes / in_step)


def _copied(trainer: _Trainer, rounds: int) -> Row:
    there = {name: torch.empty_like(tensor) for name, tensor in trainer.tensors.items()}
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for name, tensor in trainer.tensors.items():
            there[name].copy_(tensor)
        times.append(time.perf_counter() - began)
    return _row("copy in memory", [(each, each) for each in times[1:]], trainer.nbytes)


def show(rows: list[Row], plan: Plan, console: Console) -> None:
    title = f"{plan.nbytes >> 20} MiB of bf16, {plan.density:.1%} changed, {plan.threads} thread(s)"
    table = Table("", "in the step, s", "published, s", "GB/s in the step", title=title)
    for row in rows:
        table.add_row(row.way, f"{row.in_step:.3f}", f"{row.published:.3f}", f"{row.rate / 1e9:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="What publishing costs a trainer's step.")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--density", type=float, default=0.014)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slow", type=float, default=2.0, help="seconds that the third channel is late")
    parser.add_argument("--dir", type=Path, help="for local checkpoints: four times the model")
    parser.add_argument("--channel-in", type=Path, help="directory for the channels: your shared file system")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plan = Plan(options.megabytes << 20, options.density, options.rounds, options.threads, options.slow)
    torch.set_num_threads(options.threads)
    with ExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        shared = options.channel_in or room
        channels = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared)))
        rows = measure(plan, room, channels)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows, plan, Console())


if __name__ == "__main__":
    main()
