"""The command line as typer has it: groups, and verbs that the sides add."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weightcast.shared.base.errors import USAGE, Refused
from weightcast.shared.cli.output import Output
from weightcast.shared.cli.plain import CHANNEL, JSON, SIGN_KEY, THREADS, TRUSTED_KEY, Option
from weightcast.shared.daemon.status import VERSION
from weightcast.shared.files.paths import at_home

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BROKEN_INSTALLATION = (ImportError, AttributeError, OSError)
"""missing modules, missing names, shared libraries that do not load"""


@dataclass(frozen=True)
class MissingSide:
    name: str
    reason: str


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
        except BROKEN_INSTALLATION as error:
            missing.append(MissingSide(side.name, str(error)))
    return missing


class BadUsage(Refused):
    exit_code = USAGE


_UsageError: Any = typer.BadParameter.__mro__[1]
"""click's, which is typer's own in some releases and a package in others"""


def call(app: typer.Typer, arguments: Sequence[str], output: Output) -> NoReturn:
    """Ends with SystemExit, or with what the verb raises."""
    _find_homes(app)
    command = typer.main.get_command(app)
    if not output.json:
        command(arguments, prog_name="weightcast")
    try:
        code = command.main(arguments, prog_name="weightcast", standalone_mode=False)
    except _UsageError as error:
        output.error(BadUsage(error.format_message(), remedy="see --help"))
        code = USAGE
    sys.exit(code)


def _find_homes(app: typer.Typer) -> None:
    """Paths that verbs are given may begin with ~/."""
    for one in app.registered_commands:
        if one.callback is not None:
            one.callback = _with_homes(one.callback)
    for sub in app.registered_groups:
        if sub.typer_instance is not None:
            _find_homes(sub.typer_instance)


def _with_homes(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call_verb(**given: Any) -> Any:
        at = {name: at_home(value) if isinstance(value, Path) else value for name, value in given.items()}
        return verb(**at)

    return call_verb


def _print_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _nothing() -> None:
    pass


def _option(option: Option) -> Any:
    return typer.Option(option.written, envvar=option.env, min=option.least, help=option.help)


JsonOption = Annotated[bool, _option(JSON)]
ChannelOption = Annotated[Path, _option(CHANNEL)]
TrustedKeyOption = Annotated[list[str] | None, _option(TRUSTED_KEY)]
SignKeyOption = Annotated[Path | None, _option(SIGN_KEY)]
ThreadsOption = Annotated[int | None, _option(THREADS)]
AnyChannelOption = Annotated[
    Path | None, typer.Option(CHANNEL.written, envvar=CHANNEL.env, help="The channel's directory.")
]
TokenOption = Annotated[
    str | None, typer.Option("--token", envvar="WEIGHTCAST_TOKEN", help="Bearer token of the daemon.")
]
