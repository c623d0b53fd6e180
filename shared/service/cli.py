"""The `weightcast` command. Its verbs come from entry points, so that a side that cannot be imported on
this machine (a rollout host has no torch) takes only its own verbs away."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, NoReturn

import typer

from weightcast.shared.errors import USAGE, NotInTime, WeightcastError
from weightcast.shared.service.output import Output, printable

VERBS = "weightcast.verbs"
_ALONE = {"publish": "publisher", "sync": "subscriber"}
"""whose verbs are called for every version"""
_BROKEN_INSTALLATION = (ImportError, AttributeError, OSError)
"""missing modules, missing names, shared libraries that do not load"""


@dataclass(frozen=True)
class MissingSide:
    name: str
    reason: str


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Console entry point. Exit codes: docs of `weightcast.shared.errors`, and 130 after Ctrl-C."""
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    if code == NotInTime.exit_code:
        # threads that hang in a mount would be waited for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str], sides: Sequence[EntryPoint] | None = None) -> int:
    app = new_app()
    known = entry_points(group=VERBS) if sides is None else sides
    missing = [] if register_alone(app, known, arguments) else register_sides(app, known)
    output = Output(json=_wants_json(arguments))
    try:
        typer.main.get_command(app)(arguments, prog_name="weightcast")
    except WeightcastError as error:
        output.error(error)
        return error.exit_code
    except OSError as error:
        output.error(WeightcastError(str(error)))
        return WeightcastError.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return _end(end, arguments, missing)
    return 0


def new_app() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Keeps a rollout fleet on the trainer's newest weights.",
    )
    app.callback()(_options)
    return app


def group(app: typer.Typer, name: str, help: str) -> typer.Typer:
    """The sub-command group `name` of `app`; made at the first call, whichever side that comes from."""
    for known in app.registered_groups:
        if known.name == name and known.typer_instance is not None:
            return known.typer_instance
    sub = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=help)
    # A callback keeps a group with one verb a group.
    sub.callback()(_nothing)
    app.add_typer(sub, name=name, help=help)
    return sub


def register_sides(app: typer.Typer, sides: Sequence[EntryPoint]) -> list[MissingSide]:
    """Lets every side add its verbs; returns the sides that cannot be imported here."""
    missing = []
    for side in sorted(sides, key=lambda side: side.name):
        try:
            side.load()(app)
        except _BROKEN_INSTALLATION as error:
            missing.append(MissingSide(side.name, str(error)))
    return missing


def register_alone(app: typer.Typer, sides: Iterable[EntryPoint], arguments: Sequence[str]) -> bool:
    """For a verb that has a module of its own, `verbs_<verb>` beside its side's: only that is imported, which
    takes a fraction of the time. False for others, and where it cannot be."""
    side = next((side for side in sides if arguments and side.name == _ALONE.get(arguments[0])), None)
    if side is None:
        return False
    try:
        import_module(f"{side.module}_{arguments[0]}").register(app)
    except _BROKEN_INSTALLATION:
        return False
    return True


def _end(end: SystemExit, arguments: Sequence[str], missing: Sequence[MissingSide]) -> int:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == USAGE and arguments:
        for side in missing:
            print(f"note: no verbs of {side.name} on this machine: {printable(side.reason)}", file=sys.stderr)
    return code


def _wants_json(arguments: Sequence[str]) -> bool:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:end]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("weightcast"))
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
