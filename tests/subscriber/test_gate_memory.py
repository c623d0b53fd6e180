"""Clients that do not read, and clients that leave: what gate and gateway hold for them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from waiting import wait_until

from benchmarks.gate import Route, open_routes, request_of
from weightcast.subscriber.gate.exchange import PIECE_LIMIT, READ_BUFFER

READERS, LEAVERS = 50, 2000
PIECE = PIECE_LIMIT
READ_AHEAD = 2 * READ_BUFFER + (256 << 10)
"""that aiohttp reads of an answer before its reader wants it, and what asyncio reads at once"""
WRITE_BEHIND = (64 << 10) + PIECE
"""that asyncio takes before it makes the writer wait (its high-water mark), and a piece above"""
LAST_EVENTS = 2 * (64 << 10) + PIECE
"""that the gate keeps of a stream, for its label"""
PER_REQUEST = READ_AHEAD + PIECE + WRITE_BEHIND + LAST_EVENTS + (256 << 10)
"""with the piece that is on its way, and Python's own objects"""


@pytest.fixture
def routes() -> Iterator[dict[str, Route]]:
    with open_routes("gateway") as routes:
        yield {route.name: route for route in routes}


def resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def files(route: Route) -> list[int]:
    return [len(list(Path(f"/proc/{process}/fd").iterdir())) for process in route.processes]


def complete(port: int) -> int:
    url = f"http://127.0.0.1:{port}/v1/completions"
    return httpx.post(url, json={"prompt": "p"}, trust_env=False, timeout=60).status_code


def test_readers_that_stop_hold_a_bounded_memory_and_nobody_back(routes: dict[str, Route]) -> None:
    route = routes["gateway + gate"]
    # what a first request loads
    assert complete(route.port) == 200
    before = [resident(process) for process in route.processes]
    request, seen = request_of(route.port, 10**6, size=PIECE), [-1.0, -2.0]
    with ExitStack() as stack:
        for _ in range(READERS):
            reader = stack.enter_context(socket.create_connection(("127.0.0.1", route.port)))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(request)

        def is_still() -> bool:
            seen.append(route.cpu_seconds())
            return seen[-1] - seen[-2] <= 0.02

        wait_until(is_still, every=1.0)
        grown = [resident(process) - size for process, size in zip(route.processes, before, strict=True)]
        print(f"grown by {grown}, bound {READERS * PER_REQUEST}")
        assert max(grown) < READERS * PER_REQUEST, grown
        assert [complete(route.port) for _ in range(20)] == [200] * 20
        for process in route.processes:
            assert resident(process) < max(before) + READERS * PER_REQUEST


def test_callers_that_leave_in_the_middle_leave_no_descriptor_behind(routes: dict[str, Route]) -> None:
    route = routes["gateway + gate"]
    assert complete(route.port) == 200
    before, request = files(route), request_of(route.port, 10**6, every=0.01)

    async def leave(at_once: asyncio.Semaphore) -> None:
        async with at_once:
            reader, writer = await asyncio.open_connection("127.0.0.1", route.port)
            writer.write(request)
            await reader.readuntil(b"data: ")
            writer.transport.abort()

    async def all_leave() -> None:
        at_once = asyncio.Semaphore(20)
        await asyncio.gather(*(leave(at_once) for _ in range(LEAVERS)))

    asyncio.run(all_leave())
    # connections that are kept open for the next request end after some seconds
    wait_until(lambda: all(now <= was for now, was in zip(files(route), before, strict=True)))
    assert complete(route.port) == 200
