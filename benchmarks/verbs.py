"""The verb `weightcast bench`; `python -m benchmarks` is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weightcast.shared.files.durable import replace as put
from weightcast.shared.service.output import JsonOption, Output

from .plan import Plan, custom, full, quick
from .probe import cores
from .reach import goals
from .report import PAGE, write
from .results import Results, dump
from .run import PARTS, Part, check, run


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    quickly: Annotated[
        bool, typer.Option("--quick", help="Two minutes, at most 100 MB; else twenty minutes, up to 4 GB.")
    ] = False,
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="|".join(PARTS), help="Only this; repeatable.")
    ] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Leave out the traces that need torch.")
    ] = False,
    megabytes: Annotated[
        int | None, typer.Option("--megabytes", min=4, help="Files of this one size instead.")
    ] = None,
    density: Annotated[
        float,
        typer.Option("--density", min=0.0, max=1.0, help="Share of changed elements, with --megabytes."),
    ] = 0.014,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="With --megabytes.")] = 3,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="With --megabytes; unset: every core allowed.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where temporary files lie: ten times the model.")
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="File for the results.")] = Path(
        "weightcast-bench/results.json"
    ),
    docs: Annotated[
        Path | None, typer.Option("--docs", help="Directory for page and plots; unset: that of the results.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure encodings, daemons and commands on this machine beside the field's path."""
    parts = _parts(part)
    plan = quick(cores()) if quickly else full(cores())
    if untrained:
        plan = replace(plan, rates=())
    if megabytes is not None:
        many = cores() if threads is None else threads
        plan = replace(plan, scenarios=(custom(megabytes, density, rounds, many),))
    found = measure(plan, parts, directory, results, results.parent if docs is None else docs)
    Output(json=as_json).result(found, partial(_show, found))


def measure(plan: Plan, parts: Sequence[Part], directory: Path | None, results: Path, docs: Path) -> Results:
    """Runs, and writes results, page and plots; nothing is written unless all went well."""
    check(plan, parts, directory)
    progress = Console(stderr=True, highlight=False, markup=False)
    found = run(plan, parts, directory, progress.print)
    results.parent.mkdir(parents=True, exist_ok=True)
    put(results, dump(found).encode())
    write(found, docs)
    progress.print(f"written: {results}, {docs / PAGE}")
    return found


def _parts(names: Sequence[str] | None) -> tuple[Part, ...]:
    unknown = sorted(set(names or ()) - set(PARTS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(PARTS)}", param_hint="--part")
    return PARTS if not names else tuple(name for name in PARTS if name in names)


def _show(results: Results, console: Console) -> None:
    """The goals that were measured."""
    table = Table(title="what is meant to be reached")
    for head in ("goal", "bound", "worst found", "reached", "where"):
        table.add_column(head)
    for goal in goals(results):
        if goal.found is not None:
            bound = f"{'>=' if goal.at_least else '<='} {goal.bound:g}"
            table.add_row(goal.text, bound, f"{goal.found:.3g}", "yes" if goal.held else "NO", goal.where)
    console.print(table)
