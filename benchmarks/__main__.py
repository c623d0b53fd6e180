"""The command `weightcast bench`; in a checkout also `python -m benchmarks`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from weightcast.shared.cli.options import Number, json_option, option, path
from weightcast.shared.cli.output import Output


@click.command
@option(
    "--quick", "quickly", is_flag=True, help="Two minutes, at most 100 MB; else twenty minutes, up to 4 GB."
)
@option("--part", multiple=True, metavar="codec|files|first-use", help="Measure only this part; repeatable.")
@option("--untrained", is_flag=True, help="Leave out the traces that need torch.")
@option("--megabytes", type=click.IntRange(min=4), help="Measure files of this one size instead.")
@option(
    "--density",
    type=Number(0.0, 1.0),
    default=0.014,
    help="Share of changed elements, with --megabytes.",
)
@option("--rounds", type=click.IntRange(min=1), default=3, help="Number of rounds, with --megabytes.")
@option("--threads", type=click.IntRange(min=1), help="Threads, with --megabytes; unset: every core allowed.")
@option("--dir", "directory", type=path, help="Directory for temporary files: ten times the model.")
@option("--results", type=path, default="weightcast-bench/results.json", help="File for the results.")
@option("--docs", type=path, help="Directory for page and plots; unset: that of the results.")
@json_option
def bench(
    quickly: bool,
    part: Sequence[str],
    untrained: bool,
    megabytes: int | None,
    density: float,
    rounds: int,
    threads: int | None,
    directory: Path | None,
    results: Path,
    docs: Path | None,
    as_json: bool,
) -> None:
    """Measure encodings, daemons and commands on this machine, next to slime's format."""
    # imports torch's tools and web libraries, which help can do without
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
    from weightcast.shared.cli.main import main

    main(["bench", *sys.argv[1:]])
