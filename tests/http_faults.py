"""A reverse proxy that injects faults into plain HTTP, as object stores and caches have them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

import h11
import httpx

Kind = Literal["status", "delay", "cut", "lose", "repeat", "stale", "refuse"]
_BLOCK = 1 << 16
_NOT_FORWARDED = {b"connection", b"transfer-encoding", b"keep-alive", b"expect"}


@dataclass
class Fault:
    """`kind`: `status` answers `status` without forwarding; `delay` waits `seconds` first; `cut` ends the
    connection in the middle of the answer's body; `lose` forwards and never answers; `repeat` forwards twice;
    `stale` answers a GET with the oldest body of its path that this proxy saw; `refuse` ends the connection
    without forwarding. The first `skip` matches are let through; then `times` are hit."""

    kind: Kind
    method: str = ".*"
    path: str = ".*"
    times: int = 1
    skip: int = 0
    status: int = 503
    seconds: float = 0.0
    hits: int = field(default=0, init=False)

    def hit(self, method: str, path: str) -> bool:
        if self.times <= 0 or not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        self.hits += 1
        return True


class HttpFaults:
    """`requests`: all of them, as (method, path); `sent`: with their headers, lower case names; `answers`:
    statuses of those that were answered. Of `faults` the first that matches a request counts. `dropped`:
    headers, in lower case, that the server does not get."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.sent: list[tuple[str, str, dict[str, str]]] = []
        self.answers: list[int] = []
        self.dropped: frozenset[bytes] = frozenset()
        self.port = 0
        self._first: dict[str, tuple[int, list[tuple[bytes, bytes]], bytes]] = {}
        self._client = httpx.AsyncClient(timeout=60, trust_env=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, method: str, path: str) -> int:
        return sum(1 for one, at in self.requests if one == method and re.search(path, at))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            ended = (ConnectionError, h11.RemoteProtocolError, httpx.TransportError, asyncio.CancelledError)
            with contextlib.suppress(*ended):
                while await self._exchange(connection, reader, writer):
                    connection.start_next_cycle()
        finally:
            writer.transport.abort()

    async def _exchange(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection can take another request."""
        request, body = None, bytearray()
        async for event in _events(connection, reader):
            if isinstance(event, h11.Request):
                request = event
                if connection.they_are_waiting_for_100_continue:
                    writer.write(
                        connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
                    )
            elif isinstance(event, h11.Data):
                body += event.data
        if request is None:
            return False
        method, path = request.method.decode(), request.target.decode()
        self.requests.append((method, path))
        self.sent.append((method, path, {name.decode(): value.decode() for name, value in request.headers}))
        fault = next((one for one in self.faults if one.hit(method, path)), None)
        kind = fault.kind if fault else None
        if kind == "refuse":
            return False
        if fault and kind == "delay":
            await asyncio.sleep(fault.seconds)
        if fault and kind == "status":
            status, headers, data = fault.status, [(b"content-length", b"0")], b""
        elif kind == "stale" and path in self._first:
            status, headers, data = self._first[path]
        else:
            status, headers, data = await self._forward(request, bytes(body))
            if kind == "repeat":
                status, headers, data = await self._forward(request, bytes(body))
        if method == "GET" and status == 200:
            self._first.setdefault(path, (status, headers, data))
        if kind == "lose":
            return False
        self.answers.append(status)
        writer.write(connection.send(h11.Response(status_code=status, headers=headers)) or b"")
        if kind == "cut":
            writer.write(connection.send(h11.Data(data=data[: len(data) // 2])) or b"")
            await writer.drain()
            return False
        if method != "HEAD":
            writer.write(connection.send(h11.Data(data=data)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    async def _forward(
        self, request: h11.Request, body: bytes
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        left_out = _NOT_FORWARDED | self.dropped
        headers = [(name, value) for name, value in request.headers if name not in left_out]
        answer = await self._client.request(
            request.method.decode(), self.upstream + request.target.decode(), headers=headers, content=body
        )
        data = answer.content
        kept = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.lower() not in _NOT_FORWARDED | {b"content-encoding"}
        ]
        if not any(name == b"content-length" for name, _ in kept):
            kept.append((b"content-length", str(len(data)).encode()))
        return answer.status_code, kept, data

    async def close(self) -> None:
        await self._client.aclose()


async def _events(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[h11.Event]:
    """Of one request, up to its end."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_BLOCK))
            continue
        if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return
        assert isinstance(event, h11.Event)
        yield event
        if isinstance(event, h11.EndOfMessage):
            return


@contextlib.contextmanager
def http_faults(upstream: str) -> Iterator[HttpFaults]:
    """A proxy before `upstream` (scheme, host and port), on a free port of loopback."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    proxy = HttpFaults(upstream)

    async def start() -> asyncio.Server:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        return server

    async def stop() -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await proxy.close()

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
