"""One run of the benchmark: each part in turn, results in one value."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from weightcast.shared.base.elements import CHUNK_WORDS
from weightcast.shared.base.errors import Refused, RetryLater
from weightcast.shared.codec.warm_up import warm_up

from .codec import CHUNKS, Trace, measure_case, measure_floor
from .files import FileResults, Say, measure_files
from .first_use import measure_first_use
from .plan import Plan
from .probe import machine
from .results import ChunkRow, FirstUse, FloorRow, Results
from .steps import Case, simulated, trained, unrelated

Part = Literal["codec", "files", "first-use"]
PARTS: tuple[Part, ...] = ("codec", "files", "first-use")
SEED = 0
_TIMES_ON_DISK = 10
"""room that a scenario takes, in models"""


def check(plan: Plan, parts: Collection[Part], directory: Path | None) -> None:
    """Raises Refused where the trained traces need torch and there is none, RetryLater when the disk is too
    small."""
    if "codec" in parts and plan.rates and find_spec("torch") is None:
        raise Refused(
            "the trained traces need torch, which is not installed",
            remedy="pip install 'weightcast[bench]', or leave them out with --untrained",
        )
    needed = max((one.nbytes for one in plan.scenarios), default=0) * _TIMES_ON_DISK
    where = Path(tempfile.gettempdir()) if directory is None else directory
    if not where.is_dir():
        raise Refused(f"{where} is no directory", remedy="give --dir a directory that is there")
    if "files" in parts and shutil.disk_usage(where).free < needed:
        raise RetryLater(
            f"{where} has less than {needed / 1e9:.0f} GB free", remedy="give another --dir, or --quick"
        )


def run(plan: Plan, parts: Collection[Part], directory: Path | None, say: Say) -> Results:
    """`directory`: where the temporary files lie, None for the system's place; all are removed. Raises
    WeightcastError when a contender fails or brings other bytes than were published."""
    began = time.monotonic()
    with _room(directory) as root:
        warm_up()
        chunks = _chunks(plan, say) if "codec" in parts else _Chunks()
        files = _files(plan, root, say) if "files" in parts else []
        first = _first_use(plan, root, say) if "first-use" in parts else []
        return Results(
            quick=plan.quick,
            seed=SEED,
            seconds=time.monotonic() - began,
            machine=machine(root),
            chunks=chunks.rows,
            floors=chunks.floors,
            files=tuple(row for one in files for row in one.rows),
            reads=tuple(row for one in files for row in one.reads),
            first_use=tuple(first),
        )


@contextmanager
def _room(directory: Path | None) -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="weightcast-bench-", dir=directory))
    try:
        yield root
    finally:
        shutil.rmtree(root)


@dataclass(frozen=True)
class _Chunks:
    rows: tuple[ChunkRow, ...] = ()
    floors: tuple[FloorRow, ...] = ()


def _chunks(plan: Plan, say: Say) -> _Chunks:
    rows: list[ChunkRow] = []
    floors = []
    for threads in plan.threads:
        floors.append(measure_floor(threads, plan.rounds))
        for case, trace in _simulated(plan, threads):
            rows += measure_case(case, trace, threads, plan.rounds)
            say(f"chunks, {threads} threads: {case.name}")
    for case in trained(plan.rates) if plan.rates else ():
        rows += measure_case(case, "trained", plan.threads[-1], plan.rounds)
        say(f"chunks, {plan.threads[-1]} threads: {case.name}")
    return _Chunks(tuple(rows), tuple(floors))


def _simulated(plan: Plan, threads: int) -> Iterator[tuple[Case, Trace]]:
    words = CHUNKS * threads * CHUNK_WORDS
    for density in plan.densities:
        yield simulated(words, density, SEED), "simulated"
    yield unrelated(words, SEED), "unrelated"


def _files(plan: Plan, root: Path, say: Say) -> list[FileResults]:
    return [measure_files(scenario, root, SEED, say) for scenario in plan.scenarios]


def _first_use(plan: Plan, root: Path, say: Callable[[str], None]) -> list[FirstUse]:
    say("first use")
    return list(measure_first_use(root, empty_cache=plan.empty_cache))
