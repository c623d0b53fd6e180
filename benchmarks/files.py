"""End to end on real files: publications and syncs of daemons and of commands, contenders taking turns.

First every version is published by all, then, with the publishers' files gone, hosts are led through the same
versions. Before each round everything written is flushed, so that no one pays for another's dirty pages. In a
warm round the version's files have just been read, as they are where they have just been written: by then,
the versions of all contenders may be more than the page cache holds. In the end every host's bytes are
compared with the last checkpoint's.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from .checkpoints import Model, digests_in
from .contenders import Contender, ContenderFailed, Done, contender
from .probe import files_below, forget_pages, read_all
from .results import FileRow, ReadRow, Spread, Work

Doors = Literal["daemons", "commands"]
Cache = Literal["warm", "cold"]
Say = Callable[[str], None]
DEFAULT = 0.014


@dataclass(frozen=True)
class Block:
    """Rounds that belong to one row of each contender."""

    rounds: int
    density: float = DEFAULT
    doors: Doors = "daemons"
    cache: Cache = "warm"
    counts: bool = True
    """false: they only warm up"""


WARM_UP = Block(1, counts=False)


@dataclass(frozen=True)
class Scenario:
    nbytes: int
    threads: int
    blocks: tuple[Block, ...]
    """daemons first"""
    contenders: tuple[str, ...] = ("fast", "small", "field")
    experts: int = 0
    """so many tensors of one size are the model; 0: few large ones"""

    def in_order(self) -> tuple[Block, ...]:
        return (WARM_UP, *self.blocks)


@dataclass
class _Measured:
    """Rounds of one contender in one block."""

    published: list[Done] = field(default_factory=list)
    synced: list[Done] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class _Run:
    def __init__(self, scenario: Scenario, root: Path, seed: int, say: Say) -> None:
        self.scenario, self.root, self.say = scenario, root, say
        self.model = Model(scenario.nbytes, seed, scenario.experts)
        self.base = self.model.write(root / "base")
        self.contenders = [contender(name, root, self.base, scenario.threads) for name in scenario.contenders]
        self.measured: dict[tuple[int, str], _Measured] = {}
        self.version = 0

    def publications(self) -> None:
        with self._daemons(lambda one: one.start_publisher()) as daemons:
            forget_pages(self.base)
            for number, block, checkpoint in self._published_rounds():
                if block.doors == "commands":
                    daemons.close()
                for one in self._turns():
                    self._settle(block, checkpoint, one.places.publisher)
                    publish = one.publish if block.doors == "daemons" else one.publish_once
                    done = publish(checkpoint)
                    slot = self._slot(number, one)
                    slot.published.append(done)
                    slot.nbytes.append(one.places.version_bytes(self.version))
                    self._told("publish", one, block, done)
        for one in self.contenders:
            shutil.rmtree(one.places.publisher)

    def syncs(self) -> None:
        for one in self.contenders:
            one.places.point(0)
        self.version = 0
        with self._daemons(lambda one: one.start_host()) as daemons:
            forget_pages(self.base)
            for number, block in self._rounds():
                if block.doors == "commands":
                    daemons.close()
                for one in self._turns():
                    version = one.places.version(self.version)
                    self._settle(block, version, one.places.host)
                    if block.cache == "warm":
                        read_all(files_below(version), self.scenario.threads)
                    one.places.point(self.version)
                    done = one.sync(self.version) if block.doors == "daemons" else one.sync_once()
                    self._slot(number, one).synced.append(done)
                    self._told("sync", one, block, done)

    def check(self) -> None:
        """Raises ContenderFailed when a host does not hold the last checkpoint bit for bit."""
        wanted = self.model.digests()
        for one in self.contenders:
            if digests_in(one.places.host) != wanted:
                raise ContenderFailed(f"{one.name}: the host does not hold what was published")

    def reads(self) -> Iterator[ReadRow]:
        paths = sorted(self.base.glob("*.safetensors"))
        for cache in ("cold", "warm"):
            seconds = []
            for _ in range(1 if cache == "cold" else 3):
                if cache == "cold":
                    forget_pages(self.base)
                began = time.perf_counter()
                read_all(paths, self.scenario.threads)
                seconds.append(time.perf_counter() - began)
            yield ReadRow(
                model_bytes=self.model.nbytes,
                cache=cache,
                threads=self.scenario.threads,
                seconds=Spread.of(seconds),
            )

    def rows(self) -> Iterator[FileRow]:
        for number, block in enumerate(self.scenario.in_order()):
            changed = [done.changed for name in self.scenario.contenders for done in self._of(number, name)]
            for name in self.scenario.contenders if block.counts else ():
                slot = self.measured[number, name]
                yield FileRow(
                    doors=block.doors,
                    cache=block.cache,
                    model_bytes=self.model.nbytes,
                    experts=self.scenario.experts,
                    asked_density=block.density,
                    threads=self.scenario.threads,
                    encoding=name,
                    rounds=len(slot.published),
                    elements=self.model.elements,
                    changed=round(median([count for count in changed if count] or [0])),
                    version_bytes=round(median(slot.nbytes)),
                    publish=_work(slot.published),
                    sync=_work(slot.synced),
                )

    def _of(self, number: int, name: str) -> Sequence[Done]:
        return self.measured[number, name].published

    def _rounds(self) -> Iterator[tuple[int, Block]]:
        for number, block in enumerate(self.scenario.in_order()):
            for _ in range(block.rounds):
                self.version += 1
                yield number, block

    def _published_rounds(self) -> Iterator[tuple[int, Block, Path]]:
        for number, block in self._rounds():
            self.model.step(block.density)
            checkpoint = self.model.write(self.root / f"new{self.version}")
            yield number, block, checkpoint
            shutil.rmtree(checkpoint)

    def _turns(self) -> list[Contender]:
        """Everyone once; who begins changes from version to version."""
        first = self.version % len(self.contenders)
        return self.contenders[first:] + self.contenders[:first]

    def _settle(self, block: Block, *needed: Path) -> None:
        for one in self.contenders:
            one.settle()
        os.sync()
        if block.cache == "cold":
            forget_pages(*needed)

    def _slot(self, number: int, one: Contender) -> _Measured:
        return self.measured.setdefault((number, one.name), _Measured())

    def _daemons(self, start: Callable[[Contender], None]) -> ExitStack:
        with ExitStack() as stack:
            for one in self.contenders:
                stack.callback(one.stop)
                start(one)
            return stack.pop_all()

    def _told(self, verb: str, one: Contender, block: Block, done: Done) -> None:
        self.say(
            f"{self.model.nbytes / 1e9:.2f} GB {block.density:.1%} {block.doors} {block.cache} "
            f"{self.scenario.threads} threads: {verb} {one.name} {done.seconds:.2f} s"
        )


def _work(rounds: Sequence[Done]) -> Work:
    names = sorted({name for done in rounds for name in done.phases})
    phases: Mapping[str, float] = {
        name: median(done.phases.get(name, 0.0) for done in rounds) for name in names
    }
    pointers = [done.pointer for done in rounds if done.pointer is not None]
    return Work(
        seconds=Spread.of(done.seconds for done in rounds),
        pointer=Spread.of(pointers) if pointers else None,
        cpu=Spread.of(done.cpu for done in rounds),
        anon_bytes=max(done.anon_bytes for done in rounds),
        phases=dict(phases),
    )


@dataclass(frozen=True)
class FileResults:
    rows: tuple[FileRow, ...]
    reads: tuple[ReadRow, ...]


def measure_files(scenario: Scenario, root: Path, seed: int, say: Say) -> FileResults:
    """`root`: an empty directory with room for about ten times the model; emptied again. Raises
    ContenderFailed."""
    run = _Run(scenario, root, seed, say)
    try:
        run.publications()
        run.syncs()
        run.check()
        return FileResults(tuple(run.rows()), tuple(run.reads()))
    finally:
        for path in root.iterdir():
            shutil.rmtree(path)
