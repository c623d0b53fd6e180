"""From a plan to files: runs it, writes results, page and plots, shows what was reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from weightcast.shared.files.durable import replace as put

from .plan import Plan
from .reach import goals
from .report import PAGE, write
from .results import Results, dump
from .run import PARTS, Part, check, run


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


def parts_of(names: Sequence[str] | None) -> tuple[Part, ...]:
    unknown = sorted(set(names or ()) - set(PARTS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(PARTS)}", param_hint="--part")
    return PARTS if not names else tuple(name for name in PARTS if name in names)


def show(results: Results, console: Console) -> None:
    """The goals that were measured."""
    table = Table(title="what is meant to be reached")
    for head in ("goal", "bound", "worst found", "reached", "where"):
        table.add_column(head)
    for goal in goals(results):
        if goal.found is not None:
            bound = f"{'>=' if goal.at_least else '<='} {goal.bound:g}"
            table.add_row(goal.text, bound, f"{goal.found:.3g}", "yes" if goal.held else "NO", goal.where)
    console.print(table)
