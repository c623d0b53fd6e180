"""One exchange of a proxy: a request is read whole, its answer is passed back piece by piece. Headers of one
hop, credentials and conditions stay on their side."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from weightcast.shared.daemon.http import gives
from weightcast.subscriber.gate.conditions import Abort, Asked, BadCondition, Conditions
from weightcast.subscriber.gate.traffic import NotAdmitted

BODY_LIMIT = 32 << 20
READ_BUFFER = 16 << 10
PIECE_LIMIT = 64 << 10
"""of an answer that is passed back as it comes"""
_SWITCH_SECONDS = 0.0005
_HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade", "content-length", "host", "expect",
))  # fmt: skip


def put_requests_first() -> None:
    """In a process whose other threads compute: they give way sooner, and what it has loaded is not
    searched for garbage while requests wait."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.freeze()


def open_session(trust: ssl.SSLContext) -> aiohttp.ClientSession:
    """For requests to another server, without a limit of time or connections, and without cookies."""
    return aiohttp.ClientSession(
        # servers drop what is idle after five seconds
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3, ssl=trust),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        auto_decompress=False,
        read_bufsize=READ_BUFFER,
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
    )


@dataclass(eq=False)
class Request:
    """`headers`: with names in lower case; of a name that comes again, all its values."""

    scope: Scope
    headers: Mapping[str, str]
    body: bytes
    asked: Asked
    conditions: Conditions
    began: float = field(default_factory=time.monotonic)
    aborted: bool = False
    """while it waited"""


async def read_request(scope: Scope, receive: Receive, send: Send, *, names: bool = False) -> Request | None:
    """None: it was refused. `names`: it may name an adapter."""
    body = await _read_body(receive)
    if body is None:
        await say(
            send, 413, {"error": f"the body exceeds the {BODY_LIMIT}-byte limit"}, {"connection": "close"}
        )
        return None
    headers = headers_of(scope)
    try:
        asked = Asked.of(body, names=names)
        return Request(scope, headers, body, asked, Conditions.of(headers, asked.member))
    except BadCondition as error:
        await say(send, 400, {"error": str(error)})
    return None


def not_json(request: Request) -> str:
    """What is wrong with a body that calls itself JSON; empty where nothing is."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        return ""
    try:
        json.loads(request.body)
    except (ValueError, RecursionError) as error:
        return f"the body is not JSON: {error}"
    return ""


def is_abort(scope: Scope) -> bool:
    """The second path is SGLang's."""
    return scope["method"] == "POST" and scope["path"] in ("/abort", "/abort_request")


async def read_abort(request: Request, token: str | None, send: Send) -> Abort | None:
    """None: it was refused. `token`: of those who may end requests of others; None: anybody may."""
    try:
        abort = Abort.of(request.body, by_rid=request.scope["path"] == "/abort_request")
    except BadCondition as error:
        await say(send, 400, {"error": str(error)})
        return None
    if abort.is_narrow or token is None or gives(request.headers, token):
        return abort
    await say(send, 403, {"error": "give a session or rid, or the token that ends requests of others too"})
    return None


def headers_of(scope: Scope) -> dict[str, str]:
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


async def _read_body(receive: Receive) -> bytes | None:
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


@asynccontextmanager
async def while_caller_listens(receive: Receive) -> AsyncIterator[asyncio.Task[Any]]:
    """Cancels the task that it gives when the caller has closed its connection."""
    task = asyncio.current_task()
    assert task is not None

    async def end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    gone = asyncio.create_task(end())
    try:
        yield task
    finally:
        gone.cancel()


async def send_on(
    session: aiohttp.ClientSession, base: str, request: Request, body: bytes, headers: Mapping[str, str]
) -> aiohttp.ClientResponse:
    """Asks the server at `base` what was asked here. `headers`: what it gets besides the caller's own."""
    return await session.request(
        request.scope["method"],
        _url_at(base, request.scope),
        headers={**_passed(request.headers), **headers},
        data=body or None,
        allow_redirects=False,
    )


def bearer(token: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _url_at(base: str, scope: Scope) -> URL:
    """Path and query of the request, unchanged, at another server: behind a slash, so that no text of theirs
    can become part of its name."""
    query = scope["query_string"].decode("ascii")
    target = "/" + scope["raw_path"].decode("ascii").removeprefix("/") + (f"?{query}" if query else "")
    return URL(base + target, encoded=True)


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
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
    listed = ",".join(response.headers.getall("connection", ())).lower().replace(",", " ").split()
    own = {"date", *_HOP_BY_HOP, *listed}
    return [
        (name, value) for name, value in response.raw_headers if name.lower().decode("latin-1") not in own
    ]


def length_of(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """As a header, where its sender gave one."""
    length = response.headers.get("content-length")
    return [] if length is None else [(b"content-length", length.encode())]


async def refuse(
    send: Send,
    error: NotAdmitted,
    conditions: Conditions,
    served: int | None,
    target: int,
    **more: object,
) -> None:
    facts = {"error": error.error, "asked": conditions.asked(), "served": served, "target": target, **more}
    await say(send, error.status, facts, {"retry-after": "1"})


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
