"""Verbs of both sides: `status`, and those of the rooms below where this release has them."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console
from rich.table import Table

from weightcast.shared.errors import NotInTime, Refused, RetryLater
from weightcast.shared.service.output import JsonOption, Output, printable, time_text
from weightcast.shared.service.settings import is_token

STATUS_LIMIT = 16 << 20
_ROOMS = ("channel", "local", "keys")
_TIMES = ("at", "since", "created", "last_full_hash")

TokenOption = Annotated[
    str | None, typer.Option("--token", envvar="WEIGHTCAST_TOKEN", help="Bearer token of the daemon.")
]


def register(app: typer.Typer) -> None:
    app.command("status")(status)
    for room in _ROOMS:
        module = f"weightcast.shared.service.verbs_{room}"
        if find_spec(module) is not None:
            getattr(import_module(module), f"register_{room}")(app)


def status(
    url: Annotated[str, typer.Argument(help="Address of a daemon, e.g. 127.0.0.1:8341")],
    token: TokenOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds to wait for the answer.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Show what a publisher or subscriber daemon says of itself."""
    answer = fetch_status(url, token, timeout)
    Output(json=as_json).result(answer, lambda console: _show(console, answer))


def fetch_status(url: str, token: str | None, timeout_seconds: float) -> dict[str, Any]:
    """The status of the daemon at `url` (host:port or http[s]://…). Raises NotInTime if it does not answer,
    RetryLater if it is too busy, Refused if it wants another token or is no daemon."""
    address = _address(url)
    headers = {"Accept-Encoding": "identity"} | _authorization(token)
    try:
        # trust_env off: neither a proxy nor a .netrc comes between two machines of one cluster.
        with (
            httpx.Client(timeout=timeout_seconds, trust_env=False) as client,
            client.stream("GET", address, headers=headers) as response,
        ):
            body = _capped(response, address)
    except httpx.TransportError as error:
        raise NotInTime(
            f"no answer from {address}: {error or type(error).__name__}",
            remedy="check address and port, and that the daemon runs",
        ) from error
    return _judge(response.status_code, body, address)


def _authorization(token: str | None) -> dict[str, str]:
    if token is None or token == "":
        return {}
    if not is_token(token):
        raise typer.BadParameter("a token is printable ASCII without spaces")
    return {"Authorization": f"Bearer {token}"}


def _address(url: str) -> str:
    text = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parsed = httpx.URL(text)
        host = urlsplit(text).hostname
    except (httpx.InvalidURL, ValueError) as error:
        raise typer.BadParameter(f"{url} is no address: {error}") from error
    if parsed.scheme not in ("http", "https") or not host:
        raise typer.BadParameter(f"{url} is no http address")
    return f"{text}/v1/status"


def _capped(response: httpx.Response, address: str) -> bytes:
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > STATUS_LIMIT:
            raise Refused(
                f"the answer of {address} is larger than {STATUS_LIMIT} bytes", remedy="is it a daemon?"
            )
    return bytes(body)


def _judge(code: int, body: bytes, address: str) -> dict[str, Any]:
    if code in (401, 403):
        raise Refused(
            f"{address} refused the token", remedy="give its token with --token or WEIGHTCAST_TOKEN"
        )
    if code == 503:
        raise RetryLater(f"{address} is busy", remedy="try again")
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if code != 200 or not isinstance(answer, dict):
        raise Refused(
            f"{address} answered {code} without a status",
            remedy="check that a weightcast daemon listens there",
        )
    return answer


def _show(console: Console, answer: dict[str, Any]) -> None:
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
