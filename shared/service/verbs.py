"""Verbs of both sides: `status`, `wake`, and those of the rooms below where this release has them."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightcast.shared.files.paths import printable
from weightcast.shared.service.client import Daemon, parsed
from weightcast.shared.service.common_options import JsonOption
from weightcast.shared.service.output import Output, time_text
from weightcast.shared.service.status_text import summary

STATUS_PATH, WAKE_PATH = "/v1/status", "/v1/wake"
_ROOMS = ("channel", "local", "keys", "fleet")
_TIMES = ("at", "since", "created", "last_full_hash", "full_pass", "last_fault_at", "step_began")

TokenOption = Annotated[
    str | None, typer.Option("--token", envvar="WEIGHTCAST_TOKEN", help="Bearer token of the daemon.")
]


UrlArgument = Annotated[
    str,
    typer.Argument(
        help="Address of a daemon: 127.0.0.1:8341, http[s]://HOST:PORT, or a port of this machine."
    ),
]
TimeoutOption = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds to wait for the answer.")]


def register(app: typer.Typer) -> None:
    app.command("status")(status)
    app.command("wake")(wake)
    for room in _ROOMS:
        module = f"weightcast.shared.service.verbs_{room}"
        if find_spec(module) is not None:
            getattr(import_module(module), f"register_{room}")(app)


def status(
    url: UrlArgument,
    token: TokenOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every member of the answer.")
    ] = False,
    timeout: TimeoutOption = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Show whether a publisher or subscriber is ready, at which version, and if not why."""
    answer = fetch_status(url, token, timeout)
    show = _show_all if verbose else _show
    Output(json=as_json).result(answer, lambda console: show(console, answer))


def wake(
    url: UrlArgument,
    token: TokenOption = None,
    timeout: TimeoutOption = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Have a daemon look at once. A subscriber also retries the engines that failed."""
    with Daemon(url, token, timeout) as daemon:
        daemon.post_json(WAKE_PATH, b"")
        facts = {"url": daemon.url, "woken": True}
    Output(json=as_json).result(facts, lambda console: console.print(f"{facts['url']} looks now"))


def fetch_status(url: str, token: str | None, timeout_seconds: float) -> dict[str, Any]:
    """The status of the daemon at `url` (host:port or http[s]://…). Raises NotInTime if it does not answer,
    RetryLater if it is too busy, Refused if it wants another token or is no daemon."""
    with Daemon(url, token, timeout_seconds) as daemon:
        return parsed(daemon.get(STATUS_PATH), daemon.url)


def _show(console: Console, answer: dict[str, Any]) -> None:
    if "ready" not in answer:
        # not a status of ours: nothing is passed over
        _show_all(console, answer)
        return
    found = summary(answer)
    console.print(Text(printable(found.sentence), style="green" if found.well else "bold red"))
    if found.remedy:
        console.print(f"remedy: {printable(found.remedy)}")
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in found.rows:
        table.add_row(name, printable(value))
    console.print(table)


def _show_all(console: Console, answer: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _flat("", answer):
        table.add_row(name, value)
    console.print(table)


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    """Nested members as dotted names; an object in a list is one row, or a long history hides the rest."""
    if isinstance(value, dict) and value:
        return [
            row for name, each in value.items() for row in _flat(f"{prefix}.{name}" if prefix else name, each)
        ]
    if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        return [(printable(f"{prefix}[{number}]"), _inline(each)) for number, each in enumerate(value)]
    return [(printable(prefix), _member(prefix, value))]


def _inline(value: Any) -> str:
    return ", ".join(f"{name} {cell}".strip() for name, cell in _flat("", value))


def _member(name: str, value: Any) -> str:
    if isinstance(value, float) and name.rpartition(".")[2] in _TIMES:
        return time_text(value)
    return _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    if value is None or value == {}:
        return "-"
    return printable(value if isinstance(value, str) else json.dumps(value))
