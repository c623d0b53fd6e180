"""The settings of a daemon as options of its commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from weightcast.shared.cli.options import json_option, path
from weightcast.shared.cli.output import Output
from weightcast.shared.daemon.settings import (
    DaemonSettings,
    describe_settings,
    effective_settings,
    exact_size,
    load_settings,
    require_files,
    trace_settings,
    value_text,
)
from weightcast.shared.files.paths import printable

S = TypeVar("S", bound=DaemonSettings)


def settings_command(cls: type[S], help: str) -> Callable[[Callable[[S], None]], click.Command]:
    """Decorator: `body(settings)` becomes a command with one option for each setting of `cls` that is not a
    secret, and `--config FILE`. The options hand on text: `cls` judges all values together."""

    def command_of(body: Callable[[S], None]) -> click.Command:
        def run(config: Path | None, **flags: Any) -> None:
            settings = load_settings(cls, flags, config)
            require_files(settings)
            body(settings)

        return click.Command(None, callback=run, params=list(_options(cls)), help=help)

    return command_of


def show_settings_command(side: str, cls: type[DaemonSettings]) -> click.Command:
    """The command `config show SIDE`: takes the options of the daemon and prints its effective settings."""

    @json_option
    def show(config: Path | None, as_json: bool, **flags: Any) -> None:
        shown = effective_settings(*trace_settings(cls, flags, config))
        sizes = {doc.name for doc in describe_settings(cls) if doc.type == "size"}
        Output(json=as_json).result({"settings": shown}, lambda console: _show(console, shown, sizes))

    help = f"Effective settings of `weightcast {side} run` with these options."
    command = click.command(help=help)(show)
    command.params[:0] = _options(cls)
    return command


def _options(cls: type[DaemonSettings]) -> Iterator[click.Option]:
    yield click.Option(["--config"], type=path, metavar="FILE", help="TOML file with settings.")
    for doc in describe_settings(cls):
        text = f"{doc.help} [{doc.env}]" + (f" [default: {doc.default}]" if doc.default else "")
        if doc.type == "true|false":
            yield click.Option([f"{doc.flag}/--no-{doc.flag[2:]}"], default=None, help=text)
        elif doc.flag:
            metavar = doc.type if "|" in doc.type else doc.type.upper()
            yield click.Option([doc.flag], metavar=metavar, multiple=doc.type == "list", help=text)


def _show(console: Console, settings: Sequence[dict[str, Any]], sizes: Collection[str]) -> None:
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for one in settings:
        value = one["value"]
        text = exact_size(value) if one["name"] in sizes else value_text(value) or "-"
        table.add_row(one["name"], printable(text), printable(one["place"] or one["source"]))
    console.print(table)
