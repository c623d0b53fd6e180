"""The HTTP APIs of both daemons as an ASGI server would call them, and what may be said of any answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import SecretStr

from weightcast.publisher.daemon.daemon import publication_routes
from weightcast.publisher.daemon.sources.queue import Queue
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.metrics import new_registry
from weightcast.shared.daemon.status import LoopStatus, Readiness
from weightcast.subscriber.daemon.daemon import Subscriber
from weightcast.subscriber.daemon.settings import SubscriberSettings

TOKEN = "not-a-real-secret"
ALLOWED = {200, 202, 307, 400, 401, 403, 404, 405, 409, 413, 422, 429, 431, 503}
PROBES = ("/healthz", "/readyz")
Headers = Sequence[tuple[bytes, bytes]]
JSON: Headers = ((b"host", b"127.0.0.1"), (b"content-type", b"application/json"))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass(frozen=True)
class Request:
    method: str = "POST"
    path: str = "/v1/publish"
    query: bytes = b""
    headers: Headers = JSON
    body: bytes = b""


def ask(app: FastAPI, request: Request) -> Answer:
    """The answer; an exception that comes out of the application goes through."""
    sent: list[dict[str, Any]] = []
    pending = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return pending.pop() if pending else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode("utf-8", "surrogatepass"),
        "query_string": request.query,
        "root_path": "",
        "headers": [(b"content-length", b"%d" % len(request.body)), *request.headers],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
    }
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    start, *rest = sent
    body = b"".join(message.get("body", b"") for message in rest)
    return Answer(start["status"], dict(start["headers"]), body)


def tree(root: Path) -> str:
    """Of names and bytes."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        digest.update(f"{path.relative_to(root)}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


class Api:
    """A publisher's and a subscriber's application over a directory of their own. With `token` both ask for
    it."""

    def __init__(self, token: str | None = None) -> None:
        self._room = tempfile.TemporaryDirectory(prefix="fuzz-api-")
        self.root = Path(self._room.name)
        self.checkpoint = self.root / "watch" / "step_1"
        self.checkpoint.mkdir(parents=True)
        self.publisher = self._publisher(token)
        self.subscriber = self._subscriber(token)

    def _publisher(self, token: str | None) -> FastAPI:
        app = make_app(
            "publisher",
            LoopStatus,
            lambda: Readiness(ready=True),
            new_registry(),
            token,
            lambda: None,
            LoopStatus,
        )
        app.include_router(publication_routes(lambda: self._queue, lambda: None))
        self.forget()
        return app

    def _subscriber(self, token: str | None) -> FastAPI:
        settings = SubscriberSettings(
            channel=self.root / "channel",
            local=self.root / "local",
            token=None if token is None else SecretStr(token),
        )
        return Subscriber(settings).app()

    def forget(self) -> None:
        """The queue is empty again."""
        path = self.root / "publications.json"
        path.unlink(missing_ok=True)
        self._queue = Queue(path, (self.root / "watch",))

    def example(self) -> bytes:
        return json.dumps({"checkpoint": str(self.checkpoint), "step": 5, "key": "a-key"}).encode()

    def try_body(self, body: bytes) -> Answer:
        """Raises AssertionError when a publication is queued that nobody asked for in so many words, or
        anything else happens than an answer."""
        self.forget()
        return self.check(self.publisher, Request(body=body))

    def check(self, app: FastAPI, request: Request) -> Answer:
        before = tree(self.root)
        answer = ask(app, request)
        assert answer.status in ALLOWED, answer
        if answer.status == 202 and request.path == "/v1/publish":
            assert asked(request.body)["checkpoint"] == str(self.checkpoint)
        else:
            assert tree(self.root) == before, "nothing on disk changes"
        if answer.status >= 400 and request.method != "HEAD" and request.path not in PROBES:
            failure = json.loads(answer.body)
            assert set(failure) == {"error", "message", "remedy"}
        assert TOKEN.encode() not in answer.body and TOKEN.encode() not in b"".join(answer.headers.values())
        assert b"Traceback" not in answer.body and len(answer.body) < 1 << 20
        return answer


def asked(body: bytes) -> dict[str, Any]:
    """What a body says that has one meaning. Raises AssertionError."""
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    found = dict(pairs)
    assert len(found) == len(pairs), "a key stands twice"
    assert set(found) <= {"checkpoint", "step", "key"}
    assert found.get("step") is None or (type(found["step"]) is int and 0 <= found["step"] < 1 << 63)
    assert found.get("key") is None or (type(found["key"]) is str and 1 <= len(found["key"]) <= 255)
    return found
