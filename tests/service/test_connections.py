"""Whoever reaches the port may open connections, and says with them what they like."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from waiting import SECONDS, wait_until

from weightcast.shared.daemon import http

TOKEN = "not-a-real-secret"
Serve = Callable[..., Any]


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=SECONDS)


def said_until_closed(peer: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := peer.recv(65536):
            said += piece
    return said


@pytest.mark.parametrize(
    ("begun", "later"),
    [
        (b"", b""),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b""),
        (b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhalf", b""),
        (b"POST /v1/wake HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n", b"half"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"G"),
    ],
    ids=["nothing", "half a head", "half a body", "half a body after the refusal", "half a second head"],
)
def test_a_request_that_does_not_come_to_its_end_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, begun: bytes, later: bytes
) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    served = serve(token=TOKEN)
    with connected(served.url) as peer:
        peer.sendall(begun)
        if later:
            assert peer.recv(65536).startswith(b"HTTP/1.1 ")
            peer.sendall(later)
        said_until_closed(peer)


def test_a_request_that_is_here_has_all_the_time_that_its_answer_takes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(app: FastAPI) -> None:
        @app.get("/v1/idle")
        def handler() -> Response:
            # this request is here by now, however slow the machine
            monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
            # another connection has come and was given up meanwhile
            with connected(served.url) as other:
                assert said_until_closed(other) == b""
            return Response("here")

    served = serve(prepare=watch)
    with served.client() as client:
        assert client.get("/v1/idle").text == "here"


def test_probes_are_answered_among_more_idle_connections_than_there_may_be(serve: Serve) -> None:
    served = serve(token=TOKEN)
    with contextlib.ExitStack() as crowd:
        idle = [crowd.enter_context(connected(served.url)) for _ in range(http.MOST + 50)]
        with served.client() as client:
            assert [client.get("/healthz").status_code for _ in range(3)] == [200] * 3
        with served.client(TOKEN) as client:
            assert client.get("/v1/status").status_code == 200
        assert said_until_closed(idle[0]) == b"", "the oldest makes room"


def test_an_answer_that_nobody_reads_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "UNREAD_SECONDS", 0.2)
    ended: list[bool] = []

    async def pieces() -> AsyncIterator[bytes]:
        try:
            for _ in range(1024):
                yield b"x" * 65536
        finally:
            ended.append(True)

    def large(app: FastAPI) -> None:
        @app.get("/v1/large")
        async def handler() -> Response:
            return StreamingResponse(pieces())

    served = serve(prepare=large)
    with connected(served.url) as peer:
        peer.sendall(b"GET /v1/large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: ended)
