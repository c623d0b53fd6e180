"""What servers in a row may read in two ways never gets past gate or gateway: raw bytes at their ports."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from gate_kit import Engine, Gateway, Host, gates_of
from hosts import Run, Site
from waiting import SECONDS

LINE = b"POST /v1/completions HTTP/1.1\r\n"
HOST = b"Host: 127.0.0.1\r\n"
START = LINE + HOST
BODY = b'{"prompt": "p"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SECOND = START + LENGTH + b"\r\n" + BODY
"""that must not be taken for a request of its own"""

LENGTHS = {
    "two lengths": START + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    "one length twice": START + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": START + b"Content-Length: 15, 15\r\n\r\n" + BODY,
    "length, then chunks": START + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks, then length": START + CHUNKED + b"X: y\r\nContent-Length: 3\r\n\r\n" + CHUNKS,
    "length zero and chunks": START + b"Content-Length: 0\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + SECOND,
    "chunks in HTTP/1.0": START.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
    **{
        f"length {value!r}": START + b"Content-Length: " + value + b"\r\n\r\n" + BODY + SECOND
        for value in (b"", b"+15", b"-1", b"0x0f", b"15 15", b"1_5", b"15;", b"15.0", b"9" * 30)
    },
}
ENCODINGS = {
    f"encoding {value!r}": START + b"Transfer-Encoding" + value + b"\r\n\r\n" + CHUNKS
    for value in (
        b": identity", b": chunked, identity", b": gzip, chunked", b": xchunked", b": chunked\x0b",
        b": \x0bchunked", b": chunked\r\nTransfer-Encoding: identity", b": chunked\r\n" + CHUNKED[:-2],
        b" : chunked", b"\t: chunked", b":\x00chunked", b": chu\r\n nked", b": \"chunked\"", b": chunked;q=1",
    )
}  # fmt: skip
DATA, LAST = b"\r\n" + BODY + b"\r\n", b"0\r\n\r\n"
CHUNK_SIZES = {
    f"chunk {piece!r}": START + CHUNKED + b"\r\n" + piece + SECOND
    for piece in (
        *(size + DATA + LAST for size in (b"0xf", b"+f", b"-1", b" f", b"", b"e", b"f_", b"\xef\xbc\x91")),
        b"f" * 21 + DATA, b"f\n" + DATA[2:] + LAST, b"f;x\n" + DATA[2:] + LAST,
        b"f\r\n" + BODY + b"XX" + LAST, b"f\r\n" + BODY + LAST, b"f\r\n" + BODY + b"\n" + LAST,
        b"f" + DATA + b"0\r\nX: a\r\n b\r\n\r\n", b"f" + DATA + b"0\r\nX: a\n\n", b"f" + DATA + b"0\n\n",
    )
}  # fmt: skip
HEADS = {
    "bare line feeds": SECOND.replace(b"\r\n", b"\n"),
    "one bare line feed": LINE + b"Host: h\n" + LENGTH + b"\r\n" + BODY,
    "a bare line feed in a value": START + b"X: a\nContent-Length: 0\r\n" + LENGTH + b"\r\n" + BODY,
    "a bare carriage return": START + b"X: a\rContent-Length: 0\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded line": START + b"X: a\r\n Content-Length: 0\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded length": START + b"Content-Length:\r\n 15\r\n\r\n" + BODY,
    "a folded first line": LINE + b" X: y\r\nHost: h\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in a value": START + b"X: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in a name": START + b"X\x00: a\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in the target": SECOND.replace(b"/v1/", b"/v1\x00/"),
    "a control character": START + b"X: a\x01b\r\n" + LENGTH + b"\r\n" + BODY,
    "a space in a name": START + b"X Y: a\r\n" + LENGTH + b"\r\n" + BODY,
    "a line without a colon": START + b"Content-Length 0\r\n" + LENGTH + b"\r\n" + BODY,
    "an empty name": START + b": a\r\n" + LENGTH + b"\r\n" + BODY,
    "no host": LINE + LENGTH + b"\r\n" + BODY,
    "two hosts": START + b"Host: other\r\n" + LENGTH + b"\r\n" + BODY,
    "a space before the method": b" " + SECOND,
    "a line before the method": b"\r\n" + SECOND,
    "two spaces": SECOND.replace(b" HTTP", b"  HTTP", 1),
    "another protocol": SECOND.replace(b"HTTP/1.1", b"HTTP/3.1", 1),
    "no protocol": b"POST /v1/completions\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a target with a host": SECOND.replace(b" /v1", b" http://127.0.0.1/v1", 1),
    "a target that ends in ours": SECOND.replace(b" /v1", b" @127.0.0.1:9/v1", 1),
    "a target with a port": SECOND.replace(b" /v1", b" 1/v1", 1),
    "a tunnel": b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n",
    "all of the server": b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n",
    "a long header": START + b"X: " + b"a" * (20 << 10) + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "many headers": START + b"".join(b"X%d: y\r\n" % n for n in range(3000)) + LENGTH + b"\r\n" + BODY,
    "a long target": SECOND.replace(b"/v1", b"/" + b"a" * (20 << 10) + b"/v1", 1),
    "a head without an end": START + b"X: " + b"a" * (100 << 10),
}
CASES = {**LENGTHS, **ENCODINGS, **CHUNK_SIZES, **HEADS}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Gateway]]:
    with ExitStack() as stack:
        site = Site(tmp_path_factory.mktemp("smuggling"), stack)
        host = Host(site, Run(site.root / "run", stack), Engine(site))
        host.publish()
        gateway = Gateway(site, *gates_of(host))
        gateway.wait_for(1)
        yield host, gateway


def answers(side: Host | Gateway, sent: bytes) -> bytes:
    """All that comes until the connection is closed."""
    url, said = side.client.base_url, b""
    peer = socket.create_connection((url.host, url.port), timeout=SECONDS)
    with peer, contextlib.suppress(ConnectionError):
        peer.sendall(sent)
        while piece := peer.recv(65536):
            said += piece
    return said


@pytest.mark.parametrize("case", CASES)
def test_what_can_be_read_in_two_ways_is_never_passed_on(sides: tuple[Host, Gateway], case: str) -> None:
    passed_on = len(sides[0].engines[0].get("/requests"))
    for side in sides:
        said = answers(side, CASES[case])
        # of a connection that is reset while much is still to be read, nothing may come
        assert said == b"" or said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")), said[:500]
        assert said.count(b"HTTP/1.1 ") <= 1
    assert len(sides[0].engines[0].get("/requests")) == passed_on


@pytest.mark.parametrize("sent", [SECOND, START + CHUNKED + b"\r\n" + CHUNKS], ids=["length", "chunks"])
def test_what_has_one_meaning_is_passed_on(sides: tuple[Host, Gateway], sent: bytes) -> None:
    passed_on = len(sides[0].engines[0].get("/requests"))
    twice = sent + sent.replace(HOST, HOST + b"Connection: close\r\n")
    for side in sides:
        assert answers(side, twice).count(b"HTTP/1.1 200 ") == 2
    assert len(sides[0].engines[0].get("/requests")) == passed_on + 4
