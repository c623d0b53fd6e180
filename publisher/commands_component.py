"""Commands `channel component add`, `retire` and `log`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import Component, add_component, read_components, retire_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.cli.options import channel_option, json_option, option, path, sign_key_option
from weightcast.shared.cli.output import Output, or_dash, time_text
from weightcast.shared.files.paths import ChannelAddress

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.publisher.publish.commit import Signer

name_argument = click.argument("name", help="adapter/NAME or draft.")


@click.command
@name_argument
@channel_option
@option("--like", type=path, required=True, help="Directory of an adapter or draft with the same tensors.")
@sign_key_option
@json_option
def add(name: str, channel: ChannelAddress, like: Path, sign_key: Path | None, as_json: bool) -> None:
    """Add an adapter or draft model to a run by its tensors. Its first publication does this too."""
    from weightcast.publisher.components import init_component, tensors_in

    opened, signer = _opened(channel, sign_key)
    init_component(opened, name, partial(tensors_in, like, name), signer.key)
    _say(add_component(opened, name), as_json)


@click.command
@name_argument
@channel_option
@sign_key_option
@json_option
def retire(name: str, channel: ChannelAddress, sign_key: Path | None, as_json: bool) -> None:
    """End an adapter or draft model: nothing more is published, and hosts unload adapters. Versions stay."""
    opened, signer = _opened(channel, sign_key)
    _say(retire_component(opened, name, signer.key), as_json)


def _opened(channel: ChannelAddress, sign_key: Path | None) -> tuple[Channel, Signer]:
    from weightcast.publisher.publish.commit import Signer

    store, signer = open_store(channel), Signer.load(sign_key)
    signer.check_owner(store)
    return Channel.open(store), signer


def _say(component: Component, as_json: bool) -> None:
    text = f"{component.name} is {component.state}"
    Output(json=as_json).result(vars(component), lambda console: console.print(text))


@click.command
@channel_option
@json_option
def log(channel: ChannelAddress, as_json: bool) -> None:
    """List adapters and draft model of a run with their newest versions."""
    from weightcast.publisher.components import facts_of

    opened = Channel.open(open_store(channel))
    rows = [facts_of(opened, each) for each in read_components(opened)]
    facts = {"channel": str(channel), "components": rows}
    Output(json=as_json).result(facts, lambda console: _table(console, rows))


def _table(console: Console, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("component", "state", "version", "trained on", "step", "bytes", "full", "added"):
        table.add_column(title, justify="left" if title in ("component", "state") else "right")
    for row in rows:
        table.add_row(
            row["name"],
            row["state"],
            str(row["version"]),
            or_dash(row["main_version"]),
            or_dash(row["step"]),
            or_dash(row["bytes"], "{:,}"),
            f"{row['full_bytes']:,}",
            time_text(row["added"]),
        )
    console.print(table)
