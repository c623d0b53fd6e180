"""The gate: a reverse proxy in front of a host's engines that knows which version makes an answer.

Everything it does not know is passed on unchanged, but for routes that change an engine. `Gate._answer` has
the order of a request: read, conditions, admit, send on, pass back, label.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvicorn
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from weightcast.shared.daemon.environment import port_of
from weightcast.shared.daemon.http import HEADER_LIMIT, browser_refusal
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.loop import CLOSE_SECONDS, listen, server_config
from weightcast.shared.daemon.metrics import counted
from weightcast.subscriber.gate import stitch
from weightcast.subscriber.gate.conditions import Asked, BadCondition, Conditions, with_members
from weightcast.subscriber.gate.exchange import (
    BODY_LIMIT,
    CLOSE,
    end_with_caller,
    headers_of,
    open_session,
    passed_back,
    passed_headers,
    read_body,
    say,
    url_at,
)
from weightcast.subscriber.gate.traffic import Call, NotAdmitted, Traffic
from weightcast.subscriber.status import GateStatus

REPLY_LIMIT = 64 << 20
"""bytes of an answer that is labelled in its body; a stream may be longer"""
_BLOCKED = (
    "update_", "pause", "resume", "continue_generation", "flush_cache", "release_memory_occupation",
    "sleep", "wake_up", "init_weight", "destroy_weight", "collective_rpc", "load_lora", "unload_lora",
    "v1/load_lora", "v1/unload_lora", "start_weight", "finish_weight", "weightcast", "reset_",
    "start_profile", "stop_profile", "set_internal_state", "save_",
)  # fmt: skip
"""beginnings of paths that change an engine, or its weights"""
MOST_CONNECTIONS = 4096
_CONNECT_AGAIN = 0.2
"""seconds"""
_ABORT_SECONDS = 4.0
"""for an engine to answer a request after it was asked to end it"""
log = get_log("gate")


@dataclass(frozen=True)
class Upstream:
    """An engine behind the gate. `key`: for its user routes, empty where it takes none."""

    kind: str
    url: str
    key: str
    trust: ssl.SSLContext


OUTCOMES = ("answered", "partial", "unmet", "not_ready", "too_many", "engine_failed", "left")
_REFUSED = {409: "unmet", 429: "too_many", 503: "not_ready"}


class Gate(Collector):
    """An ASGI application, and the server that runs it in a thread of its own. `run_id`: of the channel;
    `wake` has the engines looked at again."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        traffic: Traffic,
        *,
        token: str | None,
        run_id: Callable[[], str],
        wake: Callable[[], None],
    ) -> None:
        self.traffic = traffic
        self._upstreams, self._run_id, self._wake = upstreams, run_id, wake
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self._mislabeled = 0
        self._reported: dict[str, str] = {}
        """by engine, the last wrong label that was logged: every answer may have it"""
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port, self.url = 0, ""

    def start(self, host: str, port: int, url: str | None = None) -> None:
        """`url`: at which other machines reach it. Raises Refused if the address cannot be bound."""
        listener = listen(host, port)
        self.port = listener.getsockname()[1]
        self.url = f"http://{_reachable(host)}:{self.port}" if url is None else url.rstrip("/")
        self._server = uvicorn.Server(server_config(self, MOST_CONNECTIONS))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="gate", daemon=True
        )
        self._thread.start()
        log.info("gate is listening", host=host, port=self.port)

    def stop(self) -> None:
        """Answers on their way have some seconds to end."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(2 * CLOSE_SECONDS)

    def collect(self) -> Iterator[Metric]:
        """For the daemon's metrics."""
        yield counted(
            "gate_requests", "Requests to the gate, by what became of them.", "outcome", self.outcomes
        )
        help = "Answers whose engine names weights that it does not hold by the host's state."
        yield CounterMetricFamily("weightcast_gate_mislabeled", help, value=self._mislabeled)
        help = "Requests that the gate holds until an engine can take them."
        yield GaugeMetricFamily("weightcast_gate_waiting", help, value=self.traffic.waiting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            # of a caller who left
            with contextlib.suppress(asyncio.CancelledError):
                await self._route(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        watchers = [asyncio.create_task(self._watch(name)) for name in self._upstreams]
        for name, engine in self._upstreams.items():
            self._sessions[name] = open_session(engine.trust)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for watcher in watchers:
            watcher.cancel()
        for session in self._sessions.values():
            await session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch(self, name: str) -> None:
        """A connection that is never used ends with the engine's process. Without one, another process could
        take its place unseen."""
        engine = self._upstreams[name]
        parts = urlsplit(engine.url)
        trust = engine.trust if parts.scheme == "https" else None
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(parts.hostname, port_of(parts), ssl=trust)
                self.traffic.doubt(name, time.monotonic())
                self._wake()
                with contextlib.closing(writer), contextlib.suppress(OSError):
                    await reader.read(1)
                self.traffic.doubt(name, math.inf)
                self._wake()
            await asyncio.sleep(_CONNECT_AGAIN)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        path = scope["path"].lstrip("/")
        if not scope["raw_path"].startswith(b"/"):
            await say(send, 400, {"error": "the target must be a path"}, CLOSE)
        elif _head_size(scope) > HEADER_LIMIT:
            await say(send, 431, {"error": f"headers above {HEADER_LIMIT} bytes"}, CLOSE)
        elif path == "healthz":
            await say(send, 200, {"ok": True})
        elif self._expected is None and (page := browser_refusal(scope["method"], Headers(scope=scope))):
            await page(scope, receive, send)
        elif self._expected is not None and not hmac.compare_digest(
            headers.get("authorization", "").encode("latin-1"), self._expected
        ):
            await say(
                send, 401, {"error": "this gate requires a bearer token"}, {"www-authenticate": "Bearer"}
            )
        elif path == "readyz":
            served = self.traffic.served
            facts = {**self.status().by_name(), "target": self.traffic.target}
            await say(send, 200 if served is not None else 503, facts)
        elif path == "health":
            healthy = self.traffic.is_healthy
            await say(send, 200 if healthy else 503, {"ready": True} if healthy else _NOT_HEALTHY)
        elif path == "server_info" and self.traffic.served is None:
            await say(send, 200, stitch.server_info(self.traffic, self._run_id()))
        elif path == "wake" and scope["method"] == "POST":
            self._wake()
            await say(send, 200, stitch.server_info(self.traffic, self._run_id()))
        elif path in ("abort", "abort_request") and scope["method"] == "POST":
            await self._abort(receive, send, by_rid=path == "abort_request")
        elif path.startswith(_BLOCKED):
            error = f"/{path} changes an engine; its subscriber alone does that"
            await say(send, 403, {"error": error})
        else:
            await self._answer(scope, headers, receive, send)

    def status(self) -> GateStatus:
        traffic = self.traffic
        requests = {name: len(door.calls) for name, door in traffic.doors.items()}
        return GateStatus(
            port=self.port,
            url=self.url,
            version=traffic.served,
            requests=requests,
            waiting=traffic.waiting,
        )

    async def _abort(self, receive: Receive, send: Send, *, by_rid: bool) -> None:
        """`by_rid`: as SGLang is asked."""
        try:
            asked = json.loads(await read_body(receive) or b"{}")
            session, version = asked.get("session"), asked.get("version")
        except (ValueError, AttributeError):
            await say(send, 400, {"error": "send {}, or an object with session or version"})
            return

        def fits(call: Call) -> bool:
            if by_rid:
                return asked.get("abort_all") is True or asked.get("rid") in call.rids
            return session in (None, call.conditions.session) and version in (None, call.low)

        await say(send, 200, {"aborted": self.traffic.end(fits)})

    async def _answer(self, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            await say(send, 413, {"error": f"the body has more than {BODY_LIMIT} bytes"}, CLOSE)
            return
        try:
            asked = Asked.of(body, names=self.traffic.may_name_adapters)
            conditions = Conditions.of(headers, asked.member)
        except BadCondition as error:
            await say(send, 400, {"error": str(error)})
            return
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()

        def end(call: Call) -> None:
            loop.call_soon_threadsafe(self._end, call, task)

        rids = asked.rids or (f"weightcast-{secrets.token_hex(8)}",)
        call = Call(conditions, end, rids, named=asked.named)
        answer, outcome = _Answer(call, send), "left"
        if scope["path"] == "/server_info":
            answer.edit = lambda value: value.update(stitch.server_info(self.traffic, self._run_id(), 1))
        elif asked.is_stitch:
            answer.edit = lambda value: stitch.add_versions(value, call.low, call.high)
        gone = asyncio.create_task(end_with_caller(receive, task))
        try:
            await self.traffic.admit(call)
            async with await self._send_on(scope, headers, asked, call) as response:
                if not await self.traffic.is_same(call):
                    raise aiohttp.ClientError("another process answers there now")
                await answer.pass_back(response)
            outcome = "partial" if answer.ended_by else "answered"
            self._compare(call, answer.engine_label)
        except NotAdmitted as error:
            outcome = _REFUSED[error.status]
            await self._refuse(error, call, asked.is_stitch, send)
        except asyncio.CancelledError:
            if not call.ended_by:
                raise
            task.uncancel()
            outcome = "partial"
            await answer.end_partial(of_sglang=scope["path"] == "/generate")
        except (aiohttp.ClientError, OSError) as error:
            outcome = "engine_failed"
            await answer.fail(f"engine {call.engine} does not answer: {error or type(error).__name__}")
        finally:
            self.outcomes[outcome] += 1
            gone.cancel()
            self.traffic.leave(call)

    async def _refuse(self, error: NotAdmitted, call: Call, is_stitch: bool, send: Send) -> None:
        served, target = self.traffic.served, self.traffic.target
        facts: dict[str, object] = {"error": error.error, "asked": call.conditions.asked()}
        facts |= {"served": served, "target": target}
        if error.status == 409 and is_stitch:
            facts = stitch.not_ready(error.error, served, target)
        await say(send, error.status, facts, {"retry-after": "1"})

    def _compare(self, call: Call, label: str) -> None:
        """What an engine calls the weights of its answer, which is passed on as it is."""
        is_known = label.isdecimal() and call.low <= int(label) <= call.high
        if label and not is_known and self._upstreams[call.engine].kind == "sglang":
            self._mislabeled += 1
            if self._reported.get(call.engine) != label:
                self._reported[call.engine] = label
                log.warning(
                    "engine names other weights than it holds",
                    engine=call.engine, label=label, version=call.low, last_version=call.high,
                )  # fmt: skip

    def _end(self, call: Call, task: asyncio.Task[Any]) -> None:
        """SGLang answers with what it has; any other engine stops when nobody listens any more."""
        if not call.engine or self._upstreams[call.engine].kind != "sglang":
            task.cancel()
            return
        for rid in call.rids:
            self._ending.add(asking := asyncio.create_task(self._abort_request(call.engine, rid)))
            asking.add_done_callback(self._ending.discard)
        task.get_loop().call_later(_ABORT_SECONDS, task.cancel)

    async def _abort_request(self, name: str, rid: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(_ABORT_SECONDS),
                self._sessions[name].post(
                    self._upstreams[name].url + "/abort_request",
                    json={"rid": rid},
                    # the session adds none, and SGLang reads no other body
                    headers={"content-type": "application/json", **self._key_of(name)},
                ),
            ):
                pass

    def _key_of(self, name: str) -> dict[str, str]:
        key = self._upstreams[name].key
        return {"authorization": f"Bearer {key}"} if key else {}

    async def _send_on(
        self, scope: Scope, headers: Mapping[str, str], asked: Asked, call: Call
    ) -> aiohttp.ClientResponse:
        engine = self._upstreams[call.engine]
        added = {}
        if scope["method"] == "POST":
            salt = "extra_key" if engine.kind == "sglang" else "cache_salt"
            # vLLM refuses some characters in it
            of_adapter = f".{call.adapter}.{call.adapter_version}" if call.adapter else ""
            added = {salt: f"{self._run_id()}.{call.low}{of_adapter}"}
            if engine.kind == "sglang" and not asked.rids:
                added["rid"] = call.rids[0]
        given = asked.body_for(engine.kind, call.adapter_label) if call.adapter else asked.body
        body = with_members(given, added)
        ask = partial(
            self._sessions[call.engine].request,
            scope["method"],
            url_at(engine.url, scope),
            headers=passed_headers(headers) | self._key_of(call.engine),
            data=body or None,
            allow_redirects=False,
        )
        try:
            return await ask()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # an idle connection may be dropped by the engine at this moment
            if not await self.traffic.is_same(call):
                raise
        return await ask()


class _Answer:
    """What goes back to the caller."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call, self._send = call, send
        self._begun = self._is_stream = False
        self._last = bytearray()
        self.edit: Callable[[dict[str, Any]], None] | None = None
        """of a JSON object"""

    @property
    def ended_by(self) -> str:
        """Empty where it was whole first: SGLang gives each request its own reason."""
        reasons = _FINISHED.findall(self._last)
        return "" if reasons and b"abort" not in reasons else self._call.ended_by

    @property
    def engine_label(self) -> str:
        """By which its engine named its weights last."""
        found: list[bytes] = [b"", *_LABEL.findall(self._last)]
        return found[-1].decode("latin-1")

    async def pass_back(self, response: aiohttp.ClientResponse) -> None:
        kind = response.headers.get("content-type", "")
        self._is_stream = kind.startswith("text/event-stream")
        if kind.startswith("application/json"):
            await self._pass_whole(response)
            return
        await self._begin(response)
        async for piece in response.content.iter_any():
            if self._is_stream:
                self._last += piece
                if len(self._last) > 2 * _TAIL:
                    del self._last[:-_TAIL]
            await self._piece(piece)
        if self._is_stream:
            await self._piece(self._comment())
        await self._piece(b"", more=False)

    async def _pass_whole(self, response: aiohttp.ClientResponse) -> None:
        """With its label in the body."""
        async for piece in response.content.iter_any():
            self._last += piece
            if len(self._last) > REPLY_LIMIT:
                raise aiohttp.ClientError("the answer is too long")
        text = bytes(self._last)
        if response.status == 200 and text[-1:] == b"}" and text.lstrip()[:1] == b"{":
            if self.edit is not None:
                with contextlib.suppress(ValueError, RecursionError):
                    self.edit(value := json.loads(text))
                    text = json.dumps(value).encode()
            label = json.dumps(self._label()).encode()
            comma = b"" if text[:-1].rstrip()[-1:] == b"{" else b","
            text = text[:-1].rstrip() + comma + b'"weightcast":' + label + b"}"
        await self._begin(response, len(text))
        await self._piece(text, more=False)

    async def end_partial(self, *, of_sglang: bool) -> None:
        """The answer as far as it came; nothing came if it is not streamed."""
        if self._begun:
            if self._is_stream:
                await self._piece(b"\n\n" + self._comment(), more=False)
        elif of_sglang and self._call.ended_by == "abort" and not self._call.engine:
            # as SGLang answers a request that is aborted in its queue
            reason = {"type": "abort", "message": "aborted before an engine took it"}
            facts = {"id": self._call.rids[0], "finish_reason": reason, "completion_tokens": 0}
            await say(self._send, 200, {"text": "", "output_ids": [], "meta_info": facts})
        else:
            facts = {"error": f"ended by an {self._call.ended_by}; nothing was generated", **self._label()}
            await say(self._send, 503, {**facts, "retryable": True}, {"retry-after": "0"})

    async def fail(self, error: str) -> None:
        """An error of ours; an answer that has begun is cut, so that it cannot pass for a whole one."""
        if not self._begun:
            await say(self._send, 503, {"error": error, "retryable": True}, {"retry-after": "1"})
            return
        raise ConnectionError(error)

    def _label(self) -> dict[str, object]:
        partial = {"partial": True, "ended_by": self.ended_by} if self.ended_by else {}
        versions = {"version": self._call.low, "last_version": self._call.high} if self._call.engine else {}
        adapter = {"adapter": self._call.adapter_label} if versions and self._call.adapter else {}
        return {**versions, **adapter, **partial}

    def _comment(self) -> bytes:
        label = self._label()
        if self.ended_by:
            label["tokens"] = _tokens(bytes(self._last))
        return b": weightcast " + json.dumps(label).encode() + b"\n\n"

    async def _begin(self, response: aiohttp.ClientResponse, length: int | None = None) -> None:
        self._begun = True
        headers = passed_back(response)
        headers.append((b"weightcast-version", str(self._call.low).encode()))
        if self._call.adapter:
            headers.append((b"weightcast-adapter", self._call.adapter_label.encode()))
        if length is not None:
            headers.append((b"weightcast-last-version", str(self._call.high).encode()))
            headers.append((b"content-length", str(length).encode()))
        elif not self._is_stream and "content-length" in response.headers:
            headers.append((b"content-length", response.headers["content-length"].encode()))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _piece(self, piece: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})


def _head_size(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


_NOT_HEALTHY = {"ready": False, "reason": "no engine serves here"}
_TAIL = 64 << 10
_FINISHED = re.compile(rb'"finish_reason" ?: ?\{"type" ?: ?"(\w+)"')
_LABEL = re.compile(rb'"weight_version" ?: ?"([^"\\]{1,64})"')


def _reachable(host: str) -> str:
    """A name of this machine, where it listens on all its addresses."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"[{name}]" if ":" in name else name


def _tokens(tail: bytes) -> int | None:
    """As the last event that says so has it; None where none does."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {"):
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                event = json.loads(line[6:])
                for member in ("meta_info", "usage"):
                    count = (event.get(member) or {}).get("completion_tokens")
                    if isinstance(count, int):
                        return count
    return None
