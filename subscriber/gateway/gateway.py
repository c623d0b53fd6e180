"""The gateway: one URL in front of the gates of all hosts. `Gateway._answer` has the order of a request:
choose a host, send it there, pass its answer back unchanged, or choose again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from starlette.types import Receive, Scope, Send

from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.metrics import Metrics
from weightcast.shared.daemon.timing import jittered
from weightcast.subscriber.gate.conditions import MEMBER
from weightcast.subscriber.gate.exchange import (
    PIECE_LIMIT,
    Request,
    bearer,
    is_abort,
    length_of,
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
from weightcast.subscriber.gate.traffic import NotAdmitted
from weightcast.subscriber.gateway.hosts import Host, Hosts

LOOK_SECONDS = 5.0
"""for a gate to answer a look"""
_QUICK_SECONDS = 0.2
"""between two looks while a request waits"""
_AGAIN_SECONDS = 0.5
"""until hosts that refused a request are asked again"""
_LOOKS_PER_SECOND = 500
_MOST_FAILURES = 16
"""of engines that took one request, after which it is the request's fault"""
_FACTS_LIMIT = 1 << 20
_REFUSALS = (401, 409, 429, 503)
"""answers of a gate after which another one may take the request"""
_OUTCOMES = ("answered", "unmet", "too_many", "not_ready", "cut", "left")
_OF_THE_OLDEST = ("/model_info", "/get_model_info", "/weight_info", "/weight_version", "/get_weight_version")
"""routes that name a version of weights: all other hosts serve it or a later one"""
_LAGS = ("0", "1", "2", "more")


log = get_log("gateway")


class GatewayMetrics:
    def __init__(self, registry: Metrics) -> None:
        self.requests = registry.count(
            "gateway_requests", "Requests to the gateway, by what became of them.", {"outcome": _OUTCOMES}
        )
        self.retries = registry.count(
            "gateway_retries",
            "Requests that a gate did not take, by its answer; 503 also where it gave none.",
            {"answer": ("409", "429", "503")},
        )
        self.before = registry.duration(
            "gateway_before", "From a request's arrival until it was sent to the gate that answered it."
        )
        self.pieces = registry.count(
            "gateway_pieces",
            "Pieces of answers passed back, by versions behind the newest when the answer began.",
            {"lag": _LAGS},
        )
        self.waiting = registry.number("gateway_waiting", "Requests that wait for a host.")
        self.ready = registry.number("gateway_ready_hosts", "Hosts that take requests.")


class Gateway:
    """An ASGI application for what is not a route of the daemon, and the looks at the gates. `gate_token`:
    of the gates; `token`: of callers who may end requests of others; `most`: requests at a time, under way
    and waiting."""

    def __init__(
        self,
        gate_token: str | None,
        metrics: GatewayMetrics,
        trust: ssl.SSLContext,
        *,
        token: str | None,
        hold_seconds: float,
        most: int,
        look_every: float,
    ) -> None:
        self.hosts = Hosts()
        self._key, self._token = bearer(gate_token), token
        self._metrics, self._hold_seconds, self._most = metrics, hold_seconds, most
        self._look_every, self._trust = look_every, trust
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._requests: set[Request] = set()
        self.waiting = 0
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession
        self._loop: asyncio.AbstractEventLoop

    @asynccontextmanager
    async def live(self, app: object) -> AsyncIterator[None]:
        """As a lifespan."""
        put_requests_first()
        self._loop = asyncio.get_running_loop()
        async with open_session(self._trust) as self._session:
            yield
            for watcher in self._watchers.values():
                watcher.cancel()

    def follow(self, found: Mapping[str, str]) -> None:
        """From any thread: the hosts by the URL of their gate. A host that is not among them gets no more
        requests; those under way there go on."""
        self._loop.call_soon_threadsafe(self._follow, found)

    def _follow(self, found: Mapping[str, str]) -> None:
        known = self.hosts.by_url
        for url in known.keys() - found.keys():
            known.pop(url)
            self._watchers.pop(url).cancel()
        for url in found.keys() - known.keys():
            known[url] = Host(found[url], url)
            self._watchers[url] = asyncio.create_task(self._watch(known[url]))

    async def _watch(self, host: Host) -> None:
        while True:
            await self._look(host)
            slowest = len(self.hosts.by_url) / _LOOKS_PER_SECOND
            due = time.monotonic() + jittered(max(self._look_every, slowest))
            while time.monotonic() < max(due, host.out_until):
                await asyncio.sleep(max(_QUICK_SECONDS, slowest))
                if self.waiting and host.out_until < time.monotonic():
                    break

    async def _look(self, host: Host) -> None:
        before = self.hosts.changes
        try:
            async with (
                asyncio.timeout(LOOK_SECONDS),
                self._session.get(host.url + "/readyz", headers=self._key, allow_redirects=False) as response,
            ):
                facts = await _facts(response)
        except (aiohttp.ClientError, OSError) as error:
            self.hosts.failed(host, str(error) or type(error).__name__)
        else:
            if response.status == 401:
                self.hosts.refused(host, 401, facts)
            else:
                self.hosts.looked(host, facts)
        self._note(host)
        self._metrics.ready.set(len(self.hosts.ready))
        if self.hosts.changes != before:
            self._tell()

    def _note(self, host: Host) -> None:
        """Logs why a gate cannot be asked, once for each reason, and that it can be again."""
        problem = host.reason if host.failures else ""
        if problem and problem != host.logged:
            log.warning("gate not usable", host=host.name, url=host.url, reason=problem)
        elif host.logged and not problem:
            log.info("gate usable again", host=host.name, url=host.url)
        host.logged = problem

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # of a caller who left
        with contextlib.suppress(asyncio.CancelledError):
            await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await say(send, 200 if self.hosts.ready else 503, {"ready_hosts": len(self.hosts.ready)})
        elif (request := await read_request(scope, receive, send, names=bool(self.hosts.adapters))) is None:
            pass
        elif is_abort(scope):
            await self._abort(request, send)
        else:
            await self._take(request, receive, send)

    async def _take(self, request: Request, receive: Receive, send: Send) -> None:
        if not request.asked.is_stitch:
            # else the gate is asked in that dialect too, and answers in it
            request.body = request.asked.body
        if "session" in request.asked.member:
            # not as a header: it may be any text
            request.body = _with_session(request.body, request.conditions.session)
        outcome = "left"
        self._requests.add(request)
        try:
            async with while_caller_listens(receive):
                outcome = await self._answered(request, send)
        except ConnectionError:
            outcome = "cut"
            raise
        finally:
            self._requests.discard(request)
            self._metrics.requests.labels(outcome).inc()

    async def _answered(self, request: Request, send: Send) -> str:
        """Returns the outcome. Raises ConnectionError where the answer breaks off."""
        try:
            if len(self._requests) > self._most:
                raise NotAdmitted(429, f"{self._most} requests are under way and waiting here")
            await self._answer(request, send)
            return "answered"
        except NotAdmitted as error:
            more = {"ended_by": "abort", "retryable": True} if request.aborted else {}
            await refuse(send, error, request.conditions, self.hosts.served, self.hosts.target, **more)
            return error.outcome

    async def _answer(self, request: Request, send: Send) -> None:
        """Raises NotAdmitted where no gate took it, ConnectionError where one took it and broke off."""
        tried: set[Host] = set()
        refusals: list[NotAdmitted] = []
        has_guessed, failures, last = False, 0, ""
        while True:
            found = self._choose(request, tried)
            if isinstance(found, NotAdmitted) and found.status == 409 and not has_guessed:
                has_guessed, found = True, self.hosts.newest(self.hosts.adapter_of(request.asked.named))
            if isinstance(found, Host):
                tried.add(found)
                refusal = await self._attempt(request, found, send)
                if refusal is None:
                    return
                self._metrics.retries.labels(str(refusal.status)).inc()
                refusals.append(refusal)
                failures, last = failures + refusal.failed, refusal.error
                if failures >= _MOST_FAILURES:
                    raise NotAdmitted(503, f"{failures} engines in a row did not answer it; the last: {last}")
            else:
                if found.status == 503 and tried.issuperset(self.hosts.ready):
                    # what no host has is no host's trouble
                    unmet = [each for each in refusals if each.status == 409]
                    found = unmet[-1] if unmet and len(unmet) == len(refusals) else found
                if last and last not in found.error and found.status != 409:
                    found.error = f"{found.error}; the last answer: {last}"
                await self._wait(request, found)
                tried.clear()
                refusals.clear()
            if request.aborted:
                raise NotAdmitted(503, "ended by an abort; nothing was generated")

    def _choose(self, request: Request, tried: set[Host]) -> Host | NotAdmitted:
        if request.scope["path"] in _OF_THE_OLDEST:
            oldest = self.hosts.oldest()
            if oldest is not None and oldest not in tried:
                return oldest
        adapter = self.hosts.adapter_of(request.asked.named)
        return self.hosts.choose(request.conditions, tried, adapter)

    async def _wait(self, request: Request, refusal: NotAdmitted) -> None:
        """For a change. Raises `refusal` when the request's time is up."""
        waits = refusal.patience(request.conditions, self._hold_seconds)
        left = request.began + waits - time.monotonic()
        if left <= 0:
            raise refusal
        self.waiting += 1
        self._metrics.waiting.set(self.waiting)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, jittered(_AGAIN_SECONDS))):
                    await self._changed.wait()
        finally:
            self.waiting -= 1
            self._metrics.waiting.set(self.waiting)

    async def _attempt(self, request: Request, host: Host, send: Send) -> NotAdmitted | None:
        """None: its answer was passed back. Raises ConnectionError where that broke off."""
        begun = False
        before = time.monotonic() - request.began
        try:
            async with _call(host), await self._ask(request, host) as response:
                facts = await _facts(response) if response.status in _REFUSALS else None
                if facts is not None and facts.get("ended_by") != "abort":
                    return self.hosts.refused(host, response.status, facts)
                begun = True
                self._metrics.before.observe(before)
                if facts is not None:
                    await say(send, response.status, facts, {"retry-after": "1"})
                else:
                    await self._pass_back(request, host, response, send)
        except aiohttp.ClientConnectorError as error:
            return self.hosts.failed(host, str(error))
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{host.name} does not answer: {error or type(error).__name__}"
            if begun:
                raise ConnectionError(reason) from error
            return NotAdmitted(503, reason)
        return None

    async def _ask(self, request: Request, host: Host) -> aiohttp.ClientResponse:
        adapter, session = self.hosts.adapter_of(request.asked.named), "weightcast-session"
        headers = request.conditions.for_gate(self.hosts.target_of(adapter))
        if session in request.headers:
            headers[session] = request.headers[session]
        return await send_on(self._session, host.url, request, request.body, headers | self._key)

    async def _pass_back(
        self, request: Request, host: Host, response: aiohttp.ClientResponse, send: Send
    ) -> None:
        headers = [*passed_back(response), *length_of(response), (b"weightcast-host", host.name.encode())]
        session = request.conditions.session
        if session and not self.hosts.is_usual(host, session):
            headers.append((b"weightcast-session-moved", b"true"))
        pieces = self._metrics.pieces.labels(self._lag(response))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        async for piece in response.content.iter_chunked(PIECE_LIMIT):
            pieces.inc()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _lag(self, response: aiohttp.ClientResponse) -> str:
        version = response.headers.get("weightcast-version", "")
        lag = self.hosts.target - int(version) if version.isdecimal() else 0
        return _LAGS[min(max(lag, 0), len(_LAGS) - 1)]

    async def _abort(self, request: Request, send: Send) -> None:
        """At all gates, and of the requests that wait here."""
        abort = await read_abort(request, self._token, send)
        if abort is None:
            return
        for each in self._requests:
            each.aborted |= abort.fits(each.conditions, each.asked.rids, -1)
        self._tell()
        hosts = list(self.hosts.by_url.values())
        answers = await asyncio.gather(*(self._abort_at(host, request) for host in hosts))
        ended = sum(answer for answer in answers if answer is not None)
        unreached = [host.name for host, answer in zip(hosts, answers, strict=True) if answer is None]
        await say(send, 200, {"aborted": ended, "unreached": unreached})

    async def _abort_at(self, host: Host, request: Request) -> int | None:
        headers = {"content-type": "application/json", **self._key}
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(LOOK_SECONDS),
                await send_on(self._session, host.url, request, request.body, headers) as response,
            ):
                facts = await _facts(response)
                return int(facts.get("aborted") or 0) if response.status == 200 else None
        return None


@asynccontextmanager
async def _call(host: Host) -> AsyncIterator[None]:
    async with asyncio.timeout(None) as limit:
        host.calls.add(limit)
        try:
            yield
        finally:
            host.calls.discard(limit)


async def _facts(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Of a short JSON object; empty for anything else."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _FACTS_LIMIT:
            return {}
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(body)
        return found if isinstance(found, dict) else {}
    return {}


def _with_session(body: bytes, session: str) -> bytes:
    """`body`: a JSON object without the member of the conditions."""
    member = json.dumps({MEMBER: {"session": session}})[:-1].encode()
    return member + (b"" if body[1:].lstrip()[:1] == b"}" else b",") + body[1:]
