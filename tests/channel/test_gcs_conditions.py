"""Conditional puts as Google Cloud Storage has them, with generations instead of tags, against a double.

No emulator answers the requests of the client; the service itself was never asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from weightcast.shared.channel.object_store import ObjectStore, open_object_store
from weightcast.shared.channel.store import AlreadyExists, Changed


class Bucket(BaseHTTPRequestHandler):
    """The objects of a server's buckets: bytes and generation."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, int]]
    generation = 1000

    def do_GET(self) -> None:
        data, generation = self.objects.get(self.path, (b"", 0))
        if not generation:
            self._answer(404)
        elif self.headers.get("If-None-Match") == f'"{generation}"':
            self._answer(304, generation)
        else:
            self._answer(200, generation, data)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        wanted = self.headers.get("x-goog-if-generation-match")
        now = self.objects.get(self.path, (b"", 0))[1]
        if wanted is not None and int(wanted) != now:
            self._answer(412)
            return
        type(self).generation += 1
        self.objects[self.path] = data, self.generation
        self._answer(200, self.generation)

    def do_DELETE(self) -> None:
        self._answer(204 if self.objects.pop(self.path, None) else 404)

    def _answer(self, status: int, generation: int = 0, data: bytes = b"") -> None:
        self.send_response(status)
        if generation:
            self.send_header("ETag", f'"{generation}"')
            self.send_header("x-goog-generation", str(generation))
            self.send_header("Last-Modified", formatdate(usegmt=True))
        if status != 304:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Bucket,), {"objects": {}}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    try:
        yield open_object_store("gs://bucket/run")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_put_names_the_generation_that_was_read(store: ObjectStore) -> None:
    store.create("latest", b"000001")
    with pytest.raises(AlreadyExists):
        store.create("latest", b"000002")
    store.replace("latest", b"000002", expected=b"000001")
    with pytest.raises(Changed):
        store.replace("latest", b"000009", expected=b"000001")
    with pytest.raises(Changed):
        store.replace(
            "latest", b"000003", expected=b"000002", allowed=lambda: store.replace("latest", b"000004")
        )
    assert store.read("latest", 10) == store.read("latest", 10) == b"000004"


def test_both_conditions_are_tried(store: ObjectStore) -> None:
    assert store.ignored() == ""
