"""The gate: a reverse proxy in front of a host's engines that knows which version makes an answer.

Everything it does not know is passed on unchanged, but for routes that change an engine. `Gate._answer` has
the order of a request: read, conditions, admit, send on, pass back, label.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvicorn
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from weightcast.shared.daemon.environment import port_of
from weightcast.shared.daemon.http import CLOSE_SECONDS, Guard
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.loop import listen, server_config
from weightcast.shared.daemon.metrics import counted
from weightcast.subscriber.gate import stitch
from weightcast.subscriber.gate.conditions import answers_of, with_members
from weightcast.subscriber.gate.exchange import (
    PIECE_LIMIT,
    Request,
    bearer,
    is_abort,
    length_of,
    not_json,
    open_session,
    passed_back,
    put_requests_first,
    read_abort,
    read_request,
    refuse,
    say,
    send_on,
    while_caller_listens,
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
_VERSIONS = 8
"""whose tokens are counted"""
_ABORT_SECONDS = 4.0
"""for an engine to answer a request after it was asked to end it"""
log = get_log("gate")


@dataclass(frozen=True)
class Upstream:
    """An engine behind the gate. `key`: for its user routes, empty where it takes none; `admin_key`: that of
    its other routes, which no answer may show."""

    kind: str
    url: str
    key: str
    trust: ssl.SSLContext
    admin_key: str = ""


OUTCOMES = ("answered", "partial", "unmet", "not_ready", "too_many", "engine_failed", "left")


class Gate(Collector):
    """An ASGI application, and the server that runs it in a thread of its own. `token`: of those who may end
    requests of others; `caller_token`: of other callers. `run_id`: of the channel; `wake` has the engines
    looked at again."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        traffic: Traffic,
        *,
        token: str | None,
        caller_token: str | None = None,
        run_id: Callable[[], str],
        wake: Callable[[], None],
    ) -> None:
        self.traffic = traffic
        self._upstreams, self._run_id, self._wake = upstreams, run_id, wake
        self._token = caller_token if token is None else token
        self._guard = Guard(self, self._token, beyond=self._accept, beyond_token=caller_token)
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self._tokens: dict[int, int] = {}
        """of answers, by the version that they were admitted at"""
        self._mislabeled = 0
        self._reported: dict[str, str] = {}
        """by engine, the last wrong label that was logged: every answer may have it"""
        self._failing = set[str]()
        """engines that did not answer the last request; logged"""
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port, self.url = 0, ""

    def start(self, host: str, port: int, url: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        """`url`: at which other machines reach it. Raises Refused if the address cannot be bound."""
        put_requests_first()
        listener = listen(host, port)
        self.port = listener.getsockname()[1]
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{_reachable(host)}:{self.port}" if url is None else url
        self._server = uvicorn.Server(server_config(self._guard, MOST_CONNECTIONS, tls))
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
        """The lifespan."""
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

    async def _accept(self, scope: Scope, receive: Receive, send: Send) -> None:
        # of a caller who left
        with contextlib.suppress(asyncio.CancelledError):
            await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].lstrip("/")
        if path == "healthz":
            await say(send, 200, {"ok": True})
        elif path in ("readyz", "v1/status"):
            ready = self.traffic.served is not None
            more = {"target": self.traffic.target, "adapters": self.traffic.offered}
            facts = {"role": "gate", "ready": ready, **self.status().by_name(), **more}
            await say(send, 200 if ready or path != "readyz" else 503, facts)
        elif path == "health":
            healthy = self.traffic.is_healthy
            await say(send, 200 if healthy else 503, {"ready": True} if healthy else _NOT_HEALTHY)
        elif path == "server_info" and self.traffic.served is None:
            await say(send, 200, stitch.server_info(self.traffic, self._run_id()))
        elif path == "wake" and scope["method"] == "POST":
            self._wake()
            await say(send, 200, stitch.server_info(self.traffic, self._run_id()))
        elif path.startswith(_BLOCKED):
            error = f"/{path} changes an engine; its subscriber alone does that"
            await say(send, 403, {"error": error})
        elif (
            request := await read_request(scope, receive, send, names=self.traffic.may_name_adapters)
        ) is None:
            pass
        elif is_abort(scope):
            if abort := await read_abort(request, self._token, send):
                ended = self.traffic.end(lambda call: abort.fits(call.conditions, call.rids, call.low))
                await say(send, 200, {"aborted": ended})
        else:
            await self._answer(request, receive, send)

    def status(self) -> GateStatus:
        traffic = self.traffic
        requests = {name: len(door.calls) for name, door in traffic.doors.items()}
        return GateStatus(
            port=self.port,
            url=self.url,
            version=traffic.served,
            requests=requests,
            waiting=traffic.waiting,
            outcomes=dict(self.outcomes),
            tokens={str(version): count for version, count in self._tokens.copy().items()},
        )

    async def _answer(self, request: Request, receive: Receive, send: Send) -> None:
        scope, asked = request.scope, request.asked
        rids = asked.rids or (f"weightcast-{secrets.token_hex(8)}",)
        call = Call(request.conditions, rids=rids, named=asked.named)
        answer, outcome = _Answer(call, request, send, partial(self.traffic.leave, call)), "left"
        if scope["path"] == "/server_info":
            answer.edit = lambda value: value.update(stitch.server_info(self.traffic, self._run_id()))
        elif asked.is_stitch:
            answer.edit = lambda value: stitch.add_versions(value, call.low, call.high)
        try:
            async with while_caller_listens(receive) as task:
                end = partial(self._end, call, answer, task)
                call.end = partial(task.get_loop().call_soon_threadsafe, end)
                try:
                    await self._through(request, call, answer)
                except asyncio.CancelledError:
                    if not call.ended_by:
                        raise
                    task.uncancel()
                    await answer.end_cut(of_sglang=scope["path"] == "/generate")
            self._failing.discard(call.engine)
            outcome = "partial" if answer.ended_by else "answered"
            self._count(call.low, answer.tokens or 0)
        except NotAdmitted as error:
            outcome = error.outcome
            await self._refuse(error, call, asked.is_stitch, send)
        except (aiohttp.ClientError, OSError) as error:
            outcome = "engine_failed"
            reason = f"engine {call.engine} does not answer: {error or type(error).__name__}"
            if call.engine not in self._failing:
                self._failing.add(call.engine)
                log.warning("engine did not answer a request", engine=call.engine, reason=reason)
            await answer.fail(reason)
        finally:
            self.outcomes[outcome] += 1
            self.traffic.leave(call)

    async def _through(self, request: Request, call: Call, answer: _Answer) -> None:
        await self.traffic.admit(call)
        if request.scope["method"] == "GET":
            # SGLang shows how it was started
            engine = self._upstreams[call.engine]
            answer.hidden = (engine.key, engine.admin_key)
        async with await self._send_on(request, call) as response:
            if not await self.traffic.is_same(call):
                raise aiohttp.ClientError("another process answers there now")
            await answer.pass_back(response)
        self._compare(call, answer.engine_label)

    async def _refuse(self, error: NotAdmitted, call: Call, is_stitch: bool, send: Send) -> None:
        served, target = self.traffic.served, self.traffic.target
        if error.status == 409 and is_stitch:
            await say(send, 409, stitch.not_ready(error.error, served, target), {"retry-after": "1"})
        else:
            adapter = {"name": call.adapter, **self.traffic.offered.get(call.adapter, {})}
            more = {"adapter": adapter} if call.adapter else {}
            await refuse(send, error, call.conditions, served, target, **more)

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

    def _count(self, version: int, tokens: int) -> None:
        self._tokens[version] = self._tokens.get(version, 0) + tokens
        if len(self._tokens) > _VERSIONS:
            del self._tokens[min(self._tokens)]

    def _end(self, call: Call, answer: _Answer, task: asyncio.Task[Any]) -> None:
        """SGLang answers with what it has; any other engine stops when nobody listens any more. What is
        complete there has time to come."""
        if call.engine and not self.traffic.has(call):
            return
        by_name = call.engine and self._upstreams[call.engine].kind == "sglang" and not self._hides(call)
        if not by_name and not answer.is_made:
            task.cancel()
            return
        for rid in call.rids if by_name else ():
            self._ending.add(asking := asyncio.create_task(self._abort_request(call.engine, rid)))
            asking.add_done_callback(self._ending.discard)
        task.get_loop().call_later(_ABORT_SECONDS, lambda: self.traffic.has(call) and task.cancel())

    def _hides(self, call: Call) -> bool:
        """Whether SGLang would end requests of others too: all whose name begins with this one."""
        others = [each for each in self.traffic.doors[call.engine].calls if not each.ended_by]
        return any(rid.startswith(call.rids) for each in others for rid in each.rids)

    async def _abort_request(self, name: str, rid: str) -> None:
        engine = self._upstreams[name]
        # the session adds no content type, and SGLang reads no other body
        headers = {"content-type": "application/json", **bearer(engine.key)}
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(_ABORT_SECONDS),
                self._sessions[name].post(f"{engine.url}/abort_request", json={"rid": rid}, headers=headers),
            ):
                pass

    async def _send_on(self, request: Request, call: Call) -> aiohttp.ClientResponse:
        engine = self._upstreams[call.engine]
        added = {}
        if request.scope["method"] == "POST":
            salt = "extra_key" if engine.kind == "sglang" else "cache_salt"
            # vLLM refuses some characters in it
            of_adapter = f".{call.adapter}.{call.adapter_version}" if call.adapter else ""
            added = {salt: f"{self._run_id()}.{call.low}{of_adapter}"}
            if engine.kind == "sglang" and not request.asked.rids:
                added["rid"] = call.rids[0]
        given = (
            request.asked.body_for(engine.kind, call.adapter_label) if call.adapter else request.asked.body
        )
        body, session = with_members(given, added), self._sessions[call.engine]
        ask = partial(send_on, session, engine.url, request, body, bearer(engine.key))
        try:
            return await ask()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # an idle connection may be dropped by the engine at this moment
            if not await self.traffic.is_same(call):
                raise
        return await ask()


class _Answer:
    """What goes back to the caller. `leave`: called when its engine has answered."""

    def __init__(self, call: Call, request: Request, send: Send, leave: Callable[[], None]) -> None:
        self._call, self._request, self._send, self._leave = call, request, send, leave
        self._has_head = self._begun = self._is_stream = self._is_read = False
        self._last, self._reasons = bytearray(), list[bytes]()
        self.edit: Callable[[dict[str, Any]], None] | None = None
        """of a JSON object"""
        self.hidden: tuple[str, ...] = ()
        """what the caller must not see"""

    @property
    def ended_by(self) -> str:
        """Empty where it was whole first."""
        return "" if not self._call.ended_by or self._is_whole else self._call.ended_by

    @property
    def _is_whole(self) -> bool:
        """An engine gives each answer its own reason to end. Half an event counts for nothing."""
        complete = len(self._last) if self._is_read else self._last.rfind(b"\n\n") + 1
        reasons = self._reasons + _FINISHED.findall(self._last, 0, complete)
        is_complete = self._is_read or (self._is_stream and len(reasons) >= answers_of(self._request.body))
        return is_complete and b"abort" not in reasons

    @property
    def is_made(self) -> bool:
        """Whether its engine has finished it, and only the rest of it is still to come."""
        return self._is_whole if self._is_stream else self._has_head

    @property
    def engine_label(self) -> str:
        """By which its engine named its weights last."""
        found: list[bytes] = [b"", *_LABEL.findall(self._last)]
        return found[-1].decode("latin-1")

    @property
    def tokens(self) -> int | None:
        """As its engine counts them: the events of a stream all that came before, the parts of a list their
        own. None where it does not."""
        counts = [int(count) for count in _COUNT.findall(self._last)]
        return sum(counts[-1:] if self._is_stream else counts) if counts else None

    async def pass_back(self, response: aiohttp.ClientResponse) -> None:
        kind = response.headers.get("content-type", "")
        self._has_head, self._is_stream = True, kind.startswith("text/event-stream")
        if kind.startswith("application/json"):
            await self._pass_whole(response)
            return
        await self._begin(response, [] if self._is_stream else length_of(response))
        async for piece in response.content.iter_chunked(PIECE_LIMIT):
            if self._is_stream:
                self._last += piece
                if len(self._last) > 2 * _TAIL:
                    self._reasons += _FINISHED.findall(self._last[:-_TAIL])
                    del self._last[:-_TAIL]
            await self._piece(piece)
        self._read()
        await self._piece(self._comment() if self._is_stream else b"", more=False)

    def _read(self) -> None:
        self._is_read = True
        self._leave()

    async def _pass_whole(self, response: aiohttp.ClientResponse) -> None:
        """With its label in the body."""
        async for piece in response.content.iter_any():
            self._last += piece
            if len(self._last) > REPLY_LIMIT:
                raise aiohttp.ClientError("the answer is too long")
        self._read()
        text = bytes(self._last)
        for secret in filter(None, self.hidden):
            text = text.replace(json.dumps(secret)[1:-1].encode(), b"...")
        if response.status == 200 and text[-1:] == b"}" and text.lstrip()[:1] == b"{":
            if self.edit is not None:
                with contextlib.suppress(ValueError, RecursionError):
                    self.edit(value := json.loads(text))
                    text = json.dumps(value).encode()
            label = json.dumps(self._label()).encode()
            comma = b"" if text[:-1].rstrip()[-1:] == b"{" else b","
            text = text[:-1].rstrip() + comma + b'"weightcast":' + label + b"}"
        last = (b"weightcast-last-version", str(self._call.high).encode())
        await self._begin(response, [last, (b"content-length", str(len(text)).encode())])
        await self._piece(text, more=False)

    async def end_cut(self, *, of_sglang: bool) -> None:
        """The answer as far as it came; nothing came if it is not streamed."""
        if self._begun:
            if self._is_stream:
                is_done = self.ended_by or self._last.endswith(_DONE)
                await self._piece((b"\n\n" if is_done else _DONE) + self._comment(), more=False)
        elif of_sglang and self._call.ended_by == "abort" and not self._call.engine:
            # as SGLang answers a request that is aborted in its queue
            reason = {"type": "abort", "message": "aborted before an engine took it"}
            facts = {"id": self._call.rids[0], "finish_reason": reason, "completion_tokens": 0}
            await say(self._send, 200, {"text": "", "output_ids": [], "meta_info": facts})
        else:
            facts = {"error": f"ended by an {self._call.ended_by}; nothing was generated", **self._label()}
            await say(self._send, 503, {**facts, "retryable": True}, {"retry-after": "0"})

    async def fail(self, error: str) -> None:
        """An error of ours; an answer that has begun is cut, so that it cannot pass for a whole one. A body
        that is not JSON is looked at here alone: parsing each would cost more than all else, and engines that
        break off over it are the only ones that do not refuse it themselves."""
        if not self._begun and (wrong := not_json(self._request)):
            await say(self._send, 400, {"error": wrong})
        elif not self._begun:
            await say(self._send, 503, {"error": error, "retryable": True}, {"retry-after": "1"})
        else:
            raise ConnectionError(error)

    def _label(self) -> dict[str, object]:
        partial = {"partial": True, "ended_by": self.ended_by} if self.ended_by else {}
        versions = {"version": self._call.low, "last_version": self._call.high} if self._call.engine else {}
        adapter = {"adapter": self._call.adapter_label} if versions and self._call.adapter else {}
        return {**versions, **adapter, **partial}

    def _comment(self) -> bytes:
        label = self._label()
        if self.ended_by:
            label["tokens"] = self.tokens
        return b": weightcast " + json.dumps(label).encode() + b"\n\n"

    async def _begin(self, response: aiohttp.ClientResponse, more: Iterable[tuple[bytes, bytes]]) -> None:
        self._begun = True
        labels = [(b"weightcast-version", str(self._call.low).encode())]
        if self._call.adapter:
            labels.append((b"weightcast-adapter", self._call.adapter_label.encode()))
        headers = [*passed_back(response), *labels, *more]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _piece(self, piece: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})


_NOT_HEALTHY = {"ready": False, "reason": "no engine serves here"}
_TAIL = 64 << 10
_DONE = b"data: [DONE]\n\n"
_FINISHED = re.compile(rb'"finish_reason" ?: ?(?:\{"type" ?: ?)?"(\w+)"')
"""as /generate has it, and as OpenAI's routes do"""
_COUNT = re.compile(rb'"completion_tokens" ?: ?(\d+)')
_LABEL = re.compile(rb'"weight_version" ?: ?"([^"\\]{1,64})"')


def _reachable(host: str) -> str:
    """A name of this machine, where it listens on all its addresses."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"[{name}]" if ":" in name else name
