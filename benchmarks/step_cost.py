"""What publishing costs a trainer's step: python -m benchmarks.step_cost [--megabytes N] [--channel-in DIR]

A bf16 model in torch takes simulated Adam steps. Measured is how long the trainer stands still: in `publish`,
in `submit`, in `submit` when the channel takes its time (`--slow` seconds before each pointer, as the commit
of a bucket mount), in `submit` of fp32 masters, in `submit` of two ranks (threads of this process) that hold
half of each tensor, as they are or as a copy, and in `put` of a hand-over, whose publisher does not run. `in
the step` is the median; `published` is when the version is out, counted from the same moment. Beside them one
copy of as many bytes, which is what the machine's memory allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from weightcast.publisher import (
    Handle,
    Publisher,
    PublisherOptions,
    Shard,
    cast_like,
    init_channel,
)
from weightcast.publisher.submit import Hold
from weightcast.publisher.trainer.handover import HandOver
from weightcast.shared.codec.warm_up import warm_up

from .chunks import Masters

Given = dict[str, Any]
Begin = Callable[[Given], Callable[[], object]]
"""hands tensors over; returns what waits until the version is out"""

_LAYERS = 8
SHM = Path("/dev/shm")


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

    def step(self) -> Given:
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
        ways = dict(_ways(plan, stack, Place(room, channels, base)))
        rows = take_turns(ways, trainer.step, trainer.nbytes, plan.rounds)
    return [*rows, copied(trainer.tensors, plan.rounds)]


def take_turns(ways: Mapping[str, Begin], step: Callable[[], Given], nbytes: int, rounds: int) -> list[Row]:
    """Every way publishes every step; the first round is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        tensors = step()
        for name, begin in ways.items():
            times[name].append(_timed(begin, tensors))
    return [_row(name, found[1:], nbytes) for name, found in times.items()]


@dataclass(frozen=True)
class Place:
    room: Path
    channels: Path
    base: Path

    def publisher(
        self, plan: Plan, name: str, rank: int = 0, world_size: int = 1, **options: Any
    ) -> Publisher:
        """`options`: of `PublisherOptions`."""
        channel = self.channels / name
        if not channel.exists():
            init_channel(channel, self.base)
        return Publisher.open(
            channel,
            local=self.room / f"local-{name}",
            base=self.base,
            rank=rank,
            world_size=world_size,
            options=PublisherOptions(threads=plan.threads, **options),
        )


def _ways(plan: Plan, stack: ExitStack, place: Place) -> Iterator[tuple[str, Begin]]:
    def opened(name: str, **options: Any) -> Publisher:
        return stack.enter_context(place.publisher(plan, name, **options))

    yield "publish", publishing(opened("publish"))
    yield "submit", submitting(opened("submit"))
    yield f"submit, channel {plan.slow:g} s late", submitting(opened("late", post_write=_late(plan.slow)))
    yield "submit, fp32 masters", _submit_masters(opened("masters"))
    ranks = [opened("ranks", rank=rank, world_size=2) for rank in range(2)]
    pool = stack.enter_context(ThreadPoolExecutor(2))
    yield "submit, 2 ranks", _submit_halves(ranks, pool, "tensors")
    yield "submit, 2 ranks, hold a copy", _submit_halves(ranks, pool, "copy")
    shared = stack.enter_context(tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else place.room))
    yield "hand-over, put", putting(stack.enter_context(HandOver(Path(shared) / "hand-over")))


def publishing(publisher: Publisher) -> Begin:
    def begin(tensors: Given) -> Callable[[], object]:
        publisher.publish(tensors)
        return lambda: None

    return begin


def submitting(publisher: Publisher) -> Begin:
    return lambda tensors: publisher.submit(tensors).result


def _submit_masters(publisher: Publisher) -> Begin:
    """The same weights in fp32; making them is not counted."""
    masters: Given = {}

    def begin(tensors: Given) -> Callable[[], object]:
        return publisher.submit(cast_like(publisher, masters)).result

    def prepare(tensors: Given) -> None:
        masters.update({name: tensor.float() for name, tensor in tensors.items()})

    return _Prepared(prepare, begin)


@dataclass(frozen=True)
class _Prepared:
    """Something is done before the time counts."""

    prepare: Callable[[Given], None]
    begin: Begin

    def __call__(self, tensors: Given) -> Callable[[], object]:
        return self.begin(tensors)


def _submit_halves(ranks: Sequence[Publisher], pool: ThreadPoolExecutor, hold: Hold) -> Begin:
    def half(tensors: Given, rank: int) -> Given:
        found = {}
        for name, tensor in tensors.items():
            middle = tensor.shape[0] // 2
            rows = slice(0, middle) if rank == 0 else slice(middle, None)
            found[name] = Shard(tensor[rows], (rank * middle, 0), tuple(tensor.shape))
        return found

    steps = itertools.count()

    def begin(tensors: Given) -> Callable[[], object]:
        step = next(steps)

        def submit(rank: int) -> Handle:
            return ranks[rank].submit(half(tensors, rank), step=step, hold=hold)

        handles = list(pool.map(submit, range(len(ranks))))
        return lambda: [handle.result() for handle in handles]

    return begin


def putting(hand_over: HandOver) -> Begin:
    def begin(tensors: Given) -> Callable[[], object]:
        hand_over.put(tensors)
        return lambda: None

    return begin


def _late(seconds: float) -> Callable[[int, Path, str], None]:
    def post_write(version: int, directory: Path, phase: str) -> None:
        if phase == "version":
            time.sleep(seconds)

    return post_write


def _timed(begin: Begin, tensors: Given) -> tuple[float, float]:
    if isinstance(begin, _Prepared):
        begin.prepare(tensors)
    began = time.perf_counter()
    result = begin(tensors)
    free = time.perf_counter()
    result()
    return free - began, time.perf_counter() - began


def _row(way: str, times: list[tuple[float, float]], nbytes: int) -> Row:
    in_step, published = (statistics.median(each) for each in zip(*times, strict=True))
    return Row(way, in_step, published, nbytes / in_step)


def copied(tensors: Given, rounds: int) -> Row:
    """To the host's memory."""
    there = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for name, tensor in tensors.items():
            there[name].copy_(tensor)
        times.append(time.perf_counter() - began)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return _row("copy to host memory", [(each, each) for each in times[1:]], nbytes)


def show(rows: list[Row], plan: Plan, console: Console) -> None:
    title = f"{plan.nbytes >> 20} MiB of bf16, {plan.density:.1%} changed, {plan.threads} thread(s)"
    head = ("", "in the step, s", "published, s", "GB/s in the step", "copies in memory")
    table = Table(*head, title=title)
    for row in rows:
        copies = row.in_step / rows[-1].in_step
        seconds = (f"{row.in_step:.3f}", f"{row.published:.3f}")
        table.add_row(row.way, *seconds, f"{row.rate / 1e9:.2f}", f"{copies:.1f}")
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
