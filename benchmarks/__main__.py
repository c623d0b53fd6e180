"""The verb `weightcast bench`; in a checkout also `python -m benchmarks`.

Every `weightcast` command reads this file, so what `bench` needs is imported when it is called.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated

import typer

from weightcast.shared.cli.app import JsonOption
from weightcast.shared.cli.output import Output


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    quickly: Annotated[
        bool, typer.Option("--quick", help="Two minutes, at most 100 MB; else twenty minutes, up to 4 GB.")
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", metavar="codec|files|first-use", help="Only this; repeatable."),
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
        Path | None, typer.Option("--dir", help="Directory for temporary files: ten times the model.")
    ] = None,
    results: Annotated[Path, typer.Option("--results", help="File for the results.")] = Path(
        "weightcast-bench/results.json"
    ),
    docs: Annotated[
        Path | None, typer.Option("--docs", help="Directory for page and plots; unset: that of the results.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure encodings, daemons and commands on this machine, next to slime's format."""
    from .files import cores
    from .run import custom, full, measure, parts_of, quick, show

    parts = parts_of(part)
    plan = quick(cores()) if quickly else full(cores())
    if untrained:
        plan = replace(plan, rates=())
    if megabytes is not None:
        many = cores() if threads is None else threads
        plan = replace(plan, scenarios=(custom(megabytes, density, rounds, many),))
    found = measure(plan, parts, directory, results, results.parent if docs is None else docs)
    Output(json=as_json).result(found, partial(show, found))


if __name__ == "__main__":
    from weightcast.shared.cli.main import VERBS, run

    verb = EntryPoint("bench", f"{__package__}.__main__:register", VERBS)
    sys.exit(run(["bench", *sys.argv[1:]], [verb]))
