"""The HTTP side of a daemon. Routes of its own are added with `app.include_router`; handlers that block are
plain functions, which FastAPI runs in threads."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import resource
import socket
import ssl
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import h11
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from h11._receivebuffer import ReceiveBuffer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, TypeAdapter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from weightcast.shared.base.errors import DamagedFile, RetryLater, WeightcastError
from weightcast.shared.daemon.environment import address_of
from weightcast.shared.daemon.status import Facts, Failure, Readiness
from weightcast.shared.files.strict_json import parse_object

BODY_LIMIT = 1 << 20
HEADER_LIMIT = 16 << 10
"""bytes of a request before its body; the server bounds what has come without an end in the same way"""
DISCARD_LIMIT = 16 << 20
"""A body up to here is read to its end before it is refused: an answer to a peer that still sends is lost
in the reset of its connection."""
OPEN_PATH = "/healthz"
_ONE_OBJECT = "send one JSON object, each key once: see /docs"
_NO_ROUTE = "see /docs for the routes and their parameters"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_CLOSE = {"Connection": "close"}


class StrictRoute(APIRoute):
    """For routers whose routes take JSON: a body with one meaning, or 422, whatever its header calls it. The
    framework would take the last of two equal keys, and has its own idea of which types are JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            body = await request.body()
            try:
                if body:
                    parse_object(body, "the body")
            except DamagedFile as error:
                raise DamagedFile(error.message, remedy=_ONE_OBJECT) from error
            return await handle(request)

        return strictly


def make_app(
    title: str,
    status: Callable[[], BaseModel | Facts],
    ready: Callable[[], Readiness],
    metrics: CollectorRegistry,
    token: str | None,
    wake: Callable[[], None],
    status_model: type[BaseModel | Facts],
    open_paths: Collection[str] = (),
    path_tokens: Mapping[str, str] | None = None,
    beyond: ASGIApp | None = None,
    beyond_token: str | None = None,
) -> FastAPI:
    """`/healthz`, `/readyz`, `/v1/status`, `/v1/wake`, `/metrics`, `/docs`, `/openapi.json`. With a token
    everything but `/healthz` asks for it, and reading `open_paths`; a path of `path_tokens` takes its own
    token too, which opens nothing else. `status_model` is what OpenAPI shows of the status. `beyond` takes
    the paths that are not routes here, with bodies of any length, for `beyond_token` too.
    `app.state.dead`, a function set by `run_daemon`, gives the reason for an unhealthy answer ("" when all is
    well)."""
    bearer = [Depends(HTTPBearer(auto_error=False))] if token is not None else []
    app = FastAPI(
        title=title,
        version="1",
        dependencies=bearer,
        docs_url=None,
        redoc_url=None,
        # a redirect would not be our answer, and fails on a query that is not UTF-8
        redirect_slashes=False,
        responses={"default": {"model": Failure, "description": "Refused, or failed"}},
    )
    app.state.dead = lambda: ""
    app.state.stopping = lambda: False
    as_json = TypeAdapter[Any](status_model).dump_json
    _add_probes(app, ready, metrics)
    _add_error_answers(app)

    @app.get("/docs", include_in_schema=False)
    def show_docs() -> Response:
        text = "\n".join(docs_text(app.openapi()))
        return PlainTextResponse(text, headers={"X-Content-Type-Options": "nosniff"})

    @app.get("/v1/status", responses={200: {"model": status_model}})
    def show_status() -> Response:
        """What the daemon is doing, and what it did last."""
        return Response(as_json(status()), media_type="application/json")

    @app.post("/v1/wake", status_code=202)
    def wake_loop() -> Response:
        """The loop polls now instead of at its next interval."""
        wake()
        return Response(status_code=202)

    app.add_middleware(
        Guard,
        token=token,
        open_paths=frozenset(open_paths),
        path_tokens=dict(path_tokens or {}),
        beyond=beyond,
        beyond_token=beyond_token,
        own_paths=frozenset(getattr(route, "path", "") for route in app.routes),
    )
    return app


def _add_probes(app: FastAPI, ready: Callable[[], Readiness], metrics: CollectorRegistry) -> None:
    @app.get("/healthz", tags=["probes"], responses={503: {"model": Readiness}})
    def healthz() -> Response:
        """200 while the daemon can do its work, 503 when only a restart helps."""
        return _readiness(app.state.dead())

    @app.get("/readyz", tags=["probes"], responses={200: {"model": Readiness}, 503: {"model": Readiness}})
    def readyz() -> Response:
        """200 when the daemon is ready, 503 with reasons when it is not."""
        reason = "stopping" if app.state.stopping() else app.state.dead()
        return _readiness(reason, None if reason else ready())

    @app.get("/metrics", tags=["probes"])
    def show_metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _readiness(reason: str, found: Readiness | None = None) -> Response:
    """`reason`: why it is not ready, whatever was found."""
    shown = found or Readiness(ready=not reason, reasons=(reason,) if reason else ())
    return JSONResponse(shown.by_name(), status_code=200 if shown.ready else 503)


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(WeightcastError)
    def expected(request: Request, error: WeightcastError) -> Response:
        headers = {"Retry-After": "1"} if isinstance(error, RetryLater) else None
        return _failure(error.http_status, error.message, error.remedy, headers, type(error).__name__)

    @app.exception_handler(HTTPException)
    def by_framework(request: Request, error: HTTPException) -> Response:
        remedy = getattr(error, "remedy", "") or f"this is a {app.title}; {_NO_ROUTE}"
        return _failure(error.status_code, str(error.detail), remedy, error.headers)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        # Places and messages only: the values may be anything, a secret too.
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        is_json = request.headers.get("content-type", "").lower().startswith("application/json")
        remedy = "see /docs" if is_json or request.method != "POST" else "send Content-Type: application/json"
        return _failure(422, "; ".join(problems), remedy, error="InvalidRequest")


class Answer(HTTPException):
    """An error of a route, with what to do about it."""

    def __init__(self, status: int, message: str, remedy: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.remedy = remedy


def _failure(status: int, message: str, remedy: str, headers: Any = None, error: str = "") -> JSONResponse:
    """`error`: empty: the status in words."""
    kind = error or HTTPStatus(status).phrase.replace(" ", "")
    body = Failure(error=kind, message=message, remedy=remedy).by_name()
    return JSONResponse(body, status_code=status, headers=headers)


class Guard:
    """Before any route: token, origin, size of the body. A pure ASGI middleware, since it must also see
    requests that no route takes. See `make_app`."""

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        open_paths: frozenset[str] = frozenset(),
        path_tokens: Mapping[str, str] = MappingProxyType({}),
        beyond: ASGIApp | None = None,
        beyond_token: str | None = None,
        own_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app, self._beyond, self._own_paths = app, beyond, own_paths
        self._open_paths = open_paths
        self._token, self._beyond_token, self._path_tokens = token, beyond_token, path_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refusal, body = self._refusal(scope, headers), None
        if refusal is None and self._beyond is not None and scope["path"] not in self._own_paths:
            await self._beyond(scope, receive, send)
            return
        if refusal is None:
            body = await _read_body(headers, receive)
        if body is not None:
            await self._app(scope, _replay(body, receive), send)
            return
        too_long = f"the body exceeds the {BODY_LIMIT}-byte limit"
        answer = refusal or _failure(413, too_long, "send less: see /docs", _CLOSE)
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if not scope["raw_path"].startswith(b"/"):
            return _failure(400, "the target must be a path", "send only a path", _CLOSE)
        target = len(scope["raw_path"]) + len(scope["query_string"])
        if target + sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_LIMIT:
            too_long = f"headers above {HEADER_LIMIT} bytes"
            return _failure(431, too_long, "send shorter headers, or a shorter query", _CLOSE)
        if scope["path"] == OPEN_PATH:
            return None
        if self._token is None:
            return _browser_refusal(scope["method"], headers)
        if scope["path"] in self._open_paths and scope["method"] in _SAFE_METHODS:
            return None
        narrow = self._path_tokens.get(scope["path"])
        if narrow is None and scope["path"] not in self._own_paths:
            narrow = self._beyond_token
        if gives(headers, self._token) or gives(headers, narrow):
            return None
        needed, remedy = "this daemon requires a bearer token", "send the header Authorization: Bearer TOKEN"
        return _failure(401, needed, remedy, {"WWW-Authenticate": "Bearer"})


def gives(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a request has the token; never where there is none."""
    # The scheme's name is case-insensitive (RFC 9110, 11.1), the token is not.
    scheme, _, given = headers.get("authorization", "").partition(" ")
    said = f"{scheme.title()} {given.strip()}".encode()
    return token is not None and hmac.compare_digest(said, f"Bearer {token}".encode())


def _browser_refusal(method: str, headers: Headers) -> Response | None:
    """Without a token the API is open to this machine's users, but not to web pages that their browsers
    show: those come with a foreign Origin, or (a rebound name) with a Host that is not an address."""
    host = headers.get("host", "")
    if not _is_plain_host(host):
        return _failure(403, f"unexpected Host {host[:100]!r}", "use an address, or set a token")
    origin = headers.get("origin")
    if method not in _SAFE_METHODS and origin is not None and origin.partition("://")[2] != host:
        return _failure(403, "cross-site request", "set a token")
    return None


@lru_cache(256)
def _is_plain_host(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name in (None, "localhost") or address_of(str(name)) is not None


async def _read_body(headers: Headers, receive: Receive) -> bytes | None:
    """The whole body, or None when it is longer than BODY_LIMIT, whatever its length header says."""
    announced = headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced[:20]) > DISCARD_LIMIT:
        return None
    body, size = bytearray(), 0
    while size <= DISCARD_LIMIT:
        message = await receive()
        if message["type"] == "http.disconnect":
            # The body is incomplete, and nobody reads the answer.
            return None
        piece = message.get("body", b"")
        size += len(piece)
        if size <= BODY_LIMIT:
            body += piece
        if not message.get("more_body", False):
            return bytes(body) if size <= BODY_LIMIT else None
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


Schema = Mapping[str, Any]


def docs_text(openapi: Schema) -> Iterator[str]:
    """The lines of an OpenAPI 3.1 document for people: its routes, then its schemas with their members."""
    yield f"{openapi['info']['title']}; for programs: /openapi.json"
    for path, methods in sorted(openapi["paths"].items()):
        for method, route in methods.items():
            yield f"\n{method.upper()} {path}"
            yield f"    {' '.join((route.get('description') or route['summary']).split())}"
            for each in route.get("parameters", ()):
                yield f"    takes {each['name']} ({each['in']}): {_kind(each['schema'])}"
            for kind in _bodies(route.get("requestBody", {})):
                yield f"    takes {kind}"
            for status, answer in sorted(route["responses"].items()):
                yield " ".join(["    else" if status == "default" else f"    {status}", *_bodies(answer)])
    for name, schema in sorted(openapi.get("components", {}).get("schemas", {}).items()):
        yield f"\n{name}: {' '.join(schema.get('description', '').split())}".rstrip(": ")
        for member, each in schema.get("properties", {}).items():
            about = " ".join(each.get("description", "").split())
            yield f"    {member} ({_kind(each)}){': ' if about else ''}{about}"


def _bodies(holder: Schema) -> list[str]:
    """Of a request or an answer: a schema for each media type that says one."""
    found = (_kind(each.get("schema", {})) for each in holder.get("content", {}).values())
    return list(filter(None, found))


def _kind(schema: Schema) -> str:
    """A type in words: `list of Host`, `integer or null`, `delta or anchor`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    inner = schema.get("items") or schema.get("additionalProperties")
    if isinstance(inner, Mapping):
        return f"{'list of' if schema['type'] == 'array' else 'by name:'} {_kind(inner)}"
    return str(schema.get("type", ""))


MOST = 256
BACKLOG = 128
"""that wait to be accepted; so many may be accepted at once"""
REQUEST_SECONDS = 20.0
"""until a request is here with its body; counted from the connection's first moment or the answer before"""
UNREAD_SECONDS = 60.0
"""that a peer may leave an answer unread"""
CLOSE_SECONDS = 3
"""for answers on their way when the process ends, and for a peer to end TLS"""


def most_connections() -> int:
    """A quarter of the files that this process may open: with those that are accepted at once, and those
    that are being closed, half are left for its work."""
    return min(MOST, _open_files() // 4)


def backlog() -> int:
    return max(1, min(BACKLOG, _open_files() // 16))


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST * 16 if soft == resource.RLIM_INFINITY else soft


def prepare(listener: socket.socket) -> None:
    """Its connections send at once, which asyncio arranges only for sockets that it makes itself, and end
    when their peer does not take what was sent."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_SECONDS * 1000))


_AMBIGUOUS = re.compile(
    rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
    rb"|\ncontent-length:[^\n]*,|\A[^\n]* http/(?!1\.[01]\r)"
)
"""in a head or trailer in lower case: what HTTP tolerates, and servers in a row may read in different ways"""


def _is_ambiguous(head: bytes) -> bool:
    lengths, codings = head.count(b"\ncontent-length:"), head.count(b"\ntransfer-encoding:")
    is_old = b" http/1.0\r" in head.partition(b"\n")[0]
    return lengths + codings > 1 or (is_old and codings > 0) or _AMBIGUOUS.search(head) is not None


class _StrictBuffer(ReceiveBuffer):
    """h11's own tolerates bare line feeds, folded lines, and a length next to chunks."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = bytes(self._data)
        lines = super().maybe_extract_lines()
        if lines and _is_ambiguous(before[: len(before) - len(self._data)].lower()):
            raise h11.RemoteProtocolError("ambiguous head")
        return lines


class Connection(H11Protocol):
    """A request that can be read in two ways is refused, and one that does not arrive in time closes it. When
    there are too many, the one waiting longest makes room for the newest: a health check gets through a crowd
    of idle ones. When all have a request under way, the newest is answered with 503 (uvicorn's
    `limit_concurrency`). With `tls` all this holds from the first byte of the handshake."""

    _deadline: asyncio.TimerHandle | None = None
    """None: the request is here, and is being answered"""
    _handshake: asyncio.Task[None] | None = None
    _early = b""
    """came with the end of the handshake"""

    def __init__(self, *given: Any, tls: ssl.SSLContext | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self._tls = tls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn._receive_buffer = _StrictBuffer()
        self._await_request()
        if self._tls is not None:
            # nothing that came unencrypted counts as part of what follows
            transport.pause_reading()
            self._handshake = self.loop.create_task(self._encrypt(self._tls))
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            waiting = {
                other._deadline.when(): other
                for other in self.connections
                if isinstance(other, Connection) and other._deadline is not None and other is not self
            }
            if waiting:
                waiting[min(waiting)]._close()

    async def _encrypt(self, tls: ssl.SSLContext) -> None:
        secure = None
        with contextlib.suppress(OSError):
            secure = await self.loop.start_tls(
                self.transport, self, tls, server_side=True, ssl_shutdown_timeout=CLOSE_SECONDS
            )
        self._handshake = None
        if secure is None or secure.is_closing():
            self.connection_lost(None)
            return
        super().connection_made(secure)
        if self._early:
            self.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        if self._handshake is None:
            super().data_received(data)
        else:
            self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._await_request()
        else:
            self._stop_waiting()

    def _await_request(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()
