"""One run of the benchmark: each part in turn, results in one value."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table

from weightcast.shared.base.elements import CHUNK_WORDS
from weightcast.shared.base.errors import Refused, RetryLater
from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.files.durable import replace as put

from .chunks import (
    CHUNKS,
    DENSITIES,
    RATES,
    Case,
    Trace,
    measure_case,
    measure_floor,
    simulated,
    trained,
    unrelated,
)
from .files import Block, FileResults, Say, Scenario, machine, measure_files
from .report import PAGE, of_machine, write
from .results import ChunkRow, FirstUse, FloorRow, Results, dump, goals

_MB, _GB = 10**6, 10**9


@dataclass(frozen=True)
class Plan:
    quick: bool
    densities: tuple[float, ...]
    rates: tuple[float, ...]
    """learning rates of trained traces"""
    threads: tuple[int, ...]
    rounds: int
    scenarios: tuple[Scenario, ...]
    empty_cache: bool
    """whether first use is measured with every kernel still to be compiled"""


def full(cores: int) -> Plan:
    threads = _threads(cores)
    most = threads[-1]
    return Plan(
        quick=False,
        densities=DENSITIES,
        rates=RATES,
        threads=threads,
        rounds=5,
        scenarios=(
            Scenario(20 * _MB, most, (Block(5),)),
            Scenario(200 * _MB, most, (Block(5),)),
            Scenario(_GB, 1, (Block(2),), ("fast", "field")),
            Scenario(
                _GB, most, (Block(5), *(Block(3, density) for density in (0.003, 0.04, 0.08, 0.18, 0.5, 1.0)))
            ),
            # of 1.5 million words each, as many models have them; of few: benchmarks/many_tensors.py
            Scenario(_GB, most, (Block(3),), ("fast", "field"), experts=320),
            # every turn writes back a model: a third contender would take a third more of disk and time
            Scenario(
                4 * _GB,
                most,
                (Block(5), Block(3, doors="commands"), Block(1, doors="commands", cache="cold")),
                ("fast", "field"),
            ),
        ),
        empty_cache=True,
    )


def quick(cores: int) -> Plan:
    most = _threads(cores)[-1]
    return Plan(
        quick=True,
        densities=(0.0, 0.003, 0.014, 0.18, 1.0),
        rates=(),
        threads=(most,),
        rounds=2,
        scenarios=(
            Scenario(20 * _MB, most, (Block(2),)),
            Scenario(20 * _MB, most, (Block(1),), ("fast", "field"), experts=2_000),
            Scenario(100 * _MB, most, (Block(3), Block(1, 0.18), Block(1, doors="commands"))),
        ),
        empty_cache=False,
    )


def custom(megabytes: int, density: float, rounds: int, threads: int) -> Scenario:
    return Scenario(megabytes * _MB, threads, (Block(rounds, density), Block(1, density, "commands")))


def _threads(cores: int) -> tuple[int, ...]:
    """One, two, and all of up to eight."""
    return tuple(sorted({1, min(2, cores), min(8, cores)}))


_KERNELS = "from weightcast.shared.codec.warm_up import warm_up; warm_up()"
_FIELD = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import field_path"


def measure_first_use(directory: Path, *, empty_cache: bool) -> Iterator[FirstUse]:
    """`directory`: where an empty cache of kernels is made. Without `empty_cache` the user's own is used,
    filled first."""
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        environment = {**os.environ, "WEIGHTCAST_CACHE": cache} if empty_cache else dict(os.environ)
        first = _seconds(_KERNELS, environment)
        if empty_cache:
            yield FirstUse(what="weightcast, kernels compiled for the first time", seconds=first)
        ready = min(_seconds(_KERNELS, environment) for _ in range(3))
        yield FirstUse(what="weightcast, kernels read from their cache", seconds=ready)
    yield FirstUse(what="field's path", seconds=min(_seconds(_FIELD, dict(os.environ)) for _ in range(3)))


def _seconds(code: str, environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)
    return time.perf_counter() - began


Part = Literal["codec", "files", "first-use"]
PARTS: tuple[Part, ...] = ("codec", "files", "first-use")
SEED = 0
_TIMES_ON_DISK = 10
"""disk space of a scenario, in models"""


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


def measure(plan: Plan, parts: Sequence[Part], directory: Path | None, results: Path, docs: Path) -> Results:
    """Runs, and writes results, page and plots; nothing is written unless all went well."""
    check(plan, parts, directory)
    progress = Console(stderr=True, highlight=False, markup=False)
    found = run(plan, parts, directory, progress.print)
    results.parent.mkdir(parents=True, exist_ok=True)
    put(results, dump(found).encode())
    write(of_machine(found), docs)
    progress.print(f"written: {results}, {docs / PAGE}")
    return found


def parts_of(names: Sequence[str] | None) -> tuple[Part, ...]:
    unknown = sorted(set(names or ()) - set(PARTS))
    if unknown:
        raise click.BadParameter(f"{unknown[0]} is not one of {', '.join(PARTS)}", param_hint="--part")
    return PARTS if not names else tuple(name for name in PARTS if name in names)


def show(results: Results, console: Console) -> None:
    """The goals that were measured."""
    table = Table(title="goals")
    for head in ("goal", "bound", "worst found", "reached", "where"):
        table.add_column(head)
    for goal in goals(results):
        if goal.found is not None:
            bound = f"{'>=' if goal.at_least else '<='} {goal.bound:g}"
            table.add_row(goal.text, bound, f"{goal.found:.3g}", "yes" if goal.held else "NO", goal.where)
    console.print(table)
