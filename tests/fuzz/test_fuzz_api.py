"""Whatever comes over HTTP: an answer in our words, and nothing on disk changes that was not asked for."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h11
import pytest
from fuzz_api import ALLOWED, JSON, TOKEN, Api, Request, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz_parsers import EXAMPLES, QUICK, damaged, damaged_bytes

from weightcast.shared.daemon.http import HEADER_LIMIT
from weightcast.shared.daemon.loop import Stop, Wakeup, run_daemon
from weightcast.shared.daemon.settings import ServiceSettings

Listed = list[tuple[bytes, bytes]]
PATHS = st.sampled_from(
    [
        *("/v1/publish", "/v1/publications/ab", "/v1/wake", "/v1/status", "/metrics", "/healthz", "/readyz"),
        *("/docs", "/openapi.json", "/", "//", "/v1/publications/", "/v1/publications/../../latest"),
    ]
) | st.text(max_size=12).map("/v1/publications/{}".format)
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "\x00", "GET POST"])
NAMES = st.sampled_from(
    [
        *(b"content-type", b"content-length", b"transfer-encoding", b"host", b"origin", b"authorization"),
        *(b"idempotency-key", b"accept-encoding", b"expect", b"x-forwarded-for", b"content-encoding"),
    ]
)
HEADER_VALUES = st.sampled_from(
    [
        *(
            b"application/json",
            b"APPLICATION/JSON",
            b"application/json; charset=utf-16",
            b"gzip",
            b"-1",
            b"9" * 30,
            b"1e3",
        ),
        *(b"127.0.0.1", b"[::1", b"evil.example", b"Bearer ", b"Bearer \xff", b"null", b"http://[", b""),
        *("\u00b2".encode("latin-1"), b"x" * (17 << 10), b"application/x-www-form-urlencoded"),
    ]
) | st.binary(max_size=8)
HEADERS = st.lists(st.tuples(NAMES, HEADER_VALUES), max_size=3)


@pytest.fixture(scope="module")
def api() -> Api:
    return Api()


@pytest.fixture(scope="module")
def closed() -> Api:
    """With a token."""
    return Api(TOKEN)


def test_the_example_is_queued(api: Api) -> None:
    answer = api.try_body(api.example())
    assert answer.status == 202 and json.loads(answer.body)["step"] == 5


@pytest.mark.parametrize("twice", ['"step": 1, "step": 5', '"checkpoint": "/", "step": 5'])
def test_a_key_that_stands_twice_is_refused(api: Api, twice: str) -> None:
    answer = api.try_body(f'{{{twice}, "checkpoint": {json.dumps(str(api.checkpoint))}}}'.encode())
    assert answer.status == 422 and b"duplicate key" in answer.body


@pytest.mark.parametrize("query", [b"", b"\x80"])
def test_a_slash_too_many_is_another_path(api: Api, query: bytes) -> None:
    answer = api.check(api.publisher, Request("GET", "/v1/status/", query))
    assert answer.status == 404


@QUICK
@given(data=st.data())
def test_bodies(api: Api, data: st.DataObject) -> None:
    api.try_body(damaged(data, api.example()))


@QUICK
@given(method=METHODS, path=PATHS, query=st.binary(max_size=8), headers=HEADERS, body=st.binary(max_size=64))
@pytest.mark.parametrize("side", ["publisher", "subscriber"])
def test_requests(
    api: Api,
    side: str,
    method: str,
    path: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    app = api.publisher if side == "publisher" else api.subscriber
    api.check(app, Request(method, path, query, (*headers, *JSON), body))
    api.check(app, Request(method, path, query, headers, api.example()))


@QUICK
@given(path=PATHS, headers=HEADERS, body=st.binary(max_size=8))
@pytest.mark.parametrize("side", ["publisher", "subscriber"])
def test_nobody_comes_in_without_the_token(
    closed: Api, side: str, path: str, headers: Listed, body: bytes
) -> None:
    app = closed.publisher if side == "publisher" else closed.subscriber
    answer = closed.check(app, Request("POST", path, headers=(*headers, *JSON), body=body))
    assert answer.status in ({405, 413, 431} if path == "/healthz" else {401, 431})


# the bytes of a request, to a real server


@pytest.fixture(scope="module")
def port(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of the publisher's API."""
    file = tmp_path_factory.mktemp("api") / "port"
    stop = Stop()
    daemon_settings = ServiceSettings(port_file=file, poll_seconds=3600)
    run = threading.Thread(
        target=lambda: run_daemon(api.publisher, lambda _: None, Wakeup(), daemon_settings, stop=stop)
    )
    run.start()
    try:
        yield _read_port(file)
    finally:
        stop.set()
        run.join(20)


def _read_port(file: Path) -> int:
    pause, deadline = threading.Event(), time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline, "the daemon listens"
        pause.wait(0.01)
    return int(file.read_text())


def is_whole(data: bytes) -> bool:
    """Whether a server can answer at once: it has a whole request, or none that can become one."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_LIMIT)
    reader.receive_data(data)
    try:
        while isinstance(event := reader.next_event(), h11.Request | h11.Data):
            pass
    except h11.RemoteProtocolError:
        return True
    return isinstance(event, h11.EndOfMessage)


def send(port: int, data: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(data)
        # the end of what we say ends the connection, also before an answer
        answer = connection.recv(1 << 16) if is_whole(data) else b""
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


def request_bytes(body: bytes) -> bytes:
    lines = [
        "POST /v1/publish HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "", ""])
    return head.encode() + body


def test_a_request_in_bytes_is_answered(api: Api, port: int) -> None:
    api.forget()
    assert send(port, request_bytes(api.example())).startswith(b"HTTP/1.1 202 ")


@settings(QUICK, max_examples=max(30, EXAMPLES // 2))
@given(data=st.data())
def test_bytes_to_a_real_server(api: Api, port: int, data: st.DataObject) -> None:
    api.forget()
    before = tree(api.root)
    answer = send(port, data.draw(damaged_bytes(request_bytes(api.example()))))
    statuses = [int(line.split()[1]) for line in answer.splitlines() if line.startswith(b"HTTP/1.1 ")]
    assert not answer or set(statuses) <= ALLOWED, answer
    if 202 not in statuses:
        assert tree(api.root) == before
    assert send(port, b"GET /healthz HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n").startswith(b"HTTP/1.1 200 ")
