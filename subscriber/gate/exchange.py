"""One exchange of a proxy: a request is read whole, its answer is passed back piece by piece. Headers of one
hop, credentials and conditions stay on their side."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

BODY_LIMIT = 32 << 20
CLOSE = {"connection": "close"}
_HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade", "content-length", "host", "expect",
))  # fmt: skip


def open_session(trust: ssl.SSLContext) -> aiohttp.ClientSession:
    """For requests to another server, without a limit of time or connections, and without cookies."""
    return aiohttp.ClientSession(
        # servers drop what is idle after five seconds
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3, ssl=trust),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
    )


def headers_of(scope: Scope) -> dict[str, str]:
    """With names in lower case; of a name that comes again, all its values."""
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


async def read_body(receive: Receive) -> bytes | None:
    """None where it is longer than BODY_LIMIT."""
    pieces, size = [], 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > BODY_LIMIT:
            return None
        if not message.get("more_body", False):
            return b"".join(pieces)


async def end_with_caller(receive: Receive, task: asyncio.Task[Any]) -> None:
    """Cancels `task` when the caller has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def url_at(base: str, scope: Scope) -> URL:
    """Path and query of the request, unchanged, at another server: behind a slash, so that no text of theirs
    can become part of its name."""
    query = scope["query_string"].decode("ascii")
    target = "/" + scope["raw_path"].decode("ascii").removeprefix("/") + (f"?{query}" if query else "")
    return URL(base + target, encoded=True)


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """What the other server gets of a request's headers."""
    listed = headers.get("connection", "").lower().replace(",", " ").split()
    own = {"authorization", *_HOP_BY_HOP, *listed}
    passed = {
        name: value
        for name, value in headers.items()
        if name not in own and not name.startswith("weightcast-")
    }
    return passed | {"accept-encoding": "identity"}


def passed_back(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """What the caller gets of an answer's headers. The length of its body is not among them, nor its date,
    which each server sets."""
    own = _HOP_BY_HOP | {"date"}
    return [
        (name, value) for name, value in response.raw_headers if name.lower().decode("latin-1") not in own
    ]


async def say(
    send: Send, status: int, facts: Mapping[str, object], headers: Mapping[str, str] | None = None
) -> None:
    body = json.dumps(facts).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
