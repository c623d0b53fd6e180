"""The settings of a daemon as options of its commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weightcast.shared.cli.options import json_option, option, path
from weightcast.shared.cli.output import Output
from weightcast.shared.daemon.logs import setup_logs
from weightcast.shared.daemon.settings import (
    DaemonSettings,
    ReportSettings,
    ServiceSettings,
    describe_settings,
    effective_settings,
    exact_size,
    load_settings,
    require_files,
    trace_settings,
    value_text,
)
from weightcast.shared.files.paths import printable

if TYPE_CHECKING:
    from rich.console import Console

S = TypeVar("S", bound=DaemonSettings)


def settings_command(cls: type[S], help: str, body: Callable[[S], None]) -> click.Command:
    """`body(settings)` as a command with one option for each setting of `cls` that is not a secret, and
    `--config FILE`. The options hand on text: `cls` judges all values together."""

    def run(config: Path | None, **flags: Any) -> None:
        settings = load_settings(cls, flags, config)
        require_files(settings)
        body(settings)

    return SettingsCommand(None, callback=run, params=[*options_of_settings(cls), _config()], help=help)


def daemon_command(side: str, package: str, help: str, *, shows: bool) -> click.Command:
    """The command `SIDE run`, or `config show SIDE`, with the same options. The package has the modules
    `settings` and `daemon`. Raises ImportError, AttributeError, OSError."""
    cls: type[DaemonSettings] = getattr(import_module(f"{package}.settings"), f"{side.capitalize()}Settings")
    if shows:
        return _show_command(cls, help)

    def run(settings: DaemonSettings) -> None:
        # the web framework costs a second of start-up that one-shots need not pay
        daemon = import_module(f"{package}.daemon")
        setup_logs(settings.log_format, settings.log_level)
        getattr(daemon, f"run_{side}")(settings)

    return settings_command(cls, help, run)


def _show_command(cls: type[DaemonSettings], help: str) -> click.Command:
    @option("--changed", is_flag=True, help="Leave out settings that have their default.")
    @json_option
    def show(config: Path | None, changed: bool, as_json: bool, **flags: Any) -> None:
        shown = effective_settings(*trace_settings(cls, flags, config))
        shown = [one for one in shown if not changed or one["source"] != "default"]
        sizes = {doc.name for doc in describe_settings(cls) if doc.type == "size"}
        Output(json=as_json).result({"settings": shown}, lambda console: _show(console, shown, sizes))

    command = click.command(cls=SettingsCommand, help=help)(show)
    command.params[:0] = [*options_of_settings(cls), _config()]
    return command


_COMMON = frozenset(ServiceSettings.model_fields) | frozenset(ReportSettings.model_fields)
"""what several daemons have: last in their help"""


class SettingsCommand(click.Command):
    """Its own settings first in its help, required ones before others; then those that all daemons have."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for title, common in ("Options", False), ("HTTP, TLS, log, keys and limits", True):
            shown = (param.get_help_record(ctx) for param in params if (param.name in _COMMON) is common)
            with formatter.section(title):
                formatter.write_dl(list(filter(None, shown)))


def options_of_settings(
    cls: type[DaemonSettings], names: Collection[str] | None = None
) -> Iterator[click.Option]:
    """`names`: of the settings; None: all."""
    found = [doc for doc in describe_settings(cls) if names is None or doc.name in names]
    for doc in sorted(found, key=lambda doc: (doc.name in _COMMON, not doc.required)):
        known = (doc.env, f"default: {doc.default}" if doc.default else "", "required" * doc.required)
        text = f"{doc.help} [{'; '.join(filter(None, known))}]"
        if doc.type == "true|false":
            yield click.Option([f"{doc.flag}/--no-{doc.flag[2:]}"], default=None, help=text)
        elif doc.flag:
            values = doc.type.split("|") if "|" in doc.type else []
            metavar = doc.type if values else "TEXT" if doc.type == "list" else doc.type.upper()
            yield click.Option(
                [doc.flag],
                metavar=metavar,
                multiple=doc.type == "list",
                help=text,
                shell_complete=lambda _, __, begun, values=values: [v for v in values if v.startswith(begun)],
            )


def _config() -> click.Option:
    return click.Option(["--config"], type=path, metavar="PATH", help="TOML file with settings.")


def _show(console: Console, settings: Sequence[dict[str, Any]], sizes: Collection[str]) -> None:
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for one in settings:
        value = one["value"]
        text = exact_size(value) if one["name"] in sizes else value_text(value) or "-"
        table.add_row(one["name"], printable(text), printable(one["place"] or one["source"]))
    console.print(table)
