"""Publications over HTTP, without a publisher behind the queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemonkit import base_tensors, request_for, write
from prometheus_client import CollectorRegistry
from waiting import wait_until

from weightcast.publisher.daemon.daemon import publication_routes
from weightcast.publisher.daemon.sources.queue import QUEUE_LIMIT, Queue, check_checkpoint
from weightcast.publisher.publish.publish_job import Publication
from weightcast.shared.base.errors import Refused
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.loop import Stop, Wakeup, run_daemon
from weightcast.shared.daemon.settings import ServiceSettings
from weightcast.shared.daemon.status import LoopStatus, Readiness


class Api:
    """The routes on a real port; the queue comes when the test says so."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.queue: Queue | None = None
        self.woken = 0
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until((root / "port").exists)
        url = f"http://127.0.0.1:{int((root / 'port').read_text())}"
        self.client = httpx.Client(base_url=url, trust_env=False, timeout=20)

    def _run(self) -> None:
        app = make_app(
            "test",
            LoopStatus,
            lambda: Readiness(ready=True),
            CollectorRegistry(),
            None,
            lambda: None,
            LoopStatus,
        )
        app.include_router(publication_routes(lambda: self.queue, self._wake))
        settings = ServiceSettings(port_file=self.root / "port", poll_seconds=0.05)
        run_daemon(app, lambda stop: None, Wakeup(), settings, stop=self._stop)

    def _wake(self) -> None:
        self.woken += 1

    def open_queue(self) -> Queue:
        self.queue = Queue(self.root / "publications.json", (self.root / "watch",))
        return self.queue

    def close(self) -> None:
        self.client.close()
        self._stop.set()
        self._thread.join(20)

    def post(self, body: Any, **headers: str) -> httpx.Response:
        return self.client.post("/v1/publish", json=body, headers=headers)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    write(tmp_path / "watch" / "step_1", base_tensors())
    found = Api(tmp_path)
    yield found
    found.close()


def test_while_the_publisher_starts_it_asks_for_patience(api: Api) -> None:
    answer = api.post({"checkpoint": str(api.root / "watch" / "step_1")})
    assert answer.status_code == 503 and "starting" in answer.json()["message"]
    assert api.client.get("/v1/publications/00").status_code == 503


def test_the_queue_is_bounded_and_survives_a_restart(api: Api) -> None:
    api.open_queue()
    body = {"checkpoint": str(api.root / "watch" / "step_1"), "step": 1}
    answers = [api.post({**body, "key": str(n)}) for n in range(QUEUE_LIMIT + 1)]
    assert [answer.status_code for answer in answers] == [202] * QUEUE_LIMIT + [429]
    assert answers[-1].headers["retry-after"] and api.woken == QUEUE_LIMIT
    reopened = api.open_queue()
    assert [job.model_dump() for job in reopened.open()] == [answer.json() for answer in answers[:-1]]
    # A key that is known needs no room.
    assert api.post({**body, "key": "3"}).json() == answers[3].json()


def test_a_key_belongs_to_one_request(api: Api) -> None:
    api.open_queue()
    body = {"checkpoint": str(api.root / "watch" / "step_1"), "step": 1}
    first = api.post(body, **{"Idempotency-Key": "one"}).json()
    assert api.post({**body, "key": "one"}).json() == first
    other = api.post({**body, "step": 2, "key": "one"})
    assert other.status_code == 409 and "key" in other.json()["message"]
    assert "a new key" in other.json()["remedy"]
    assert api.post(body).json()["id"] != first["id"]
    assert api.client.get(f"/v1/publications/{first['id']}").json() == first
    unknown = api.client.get("/v1/publications/0000")
    assert unknown.status_code == 404 and "channel log" in unknown.json()["remedy"]
    nowhere = api.client.get("/v1/nowhere")
    assert nowhere.status_code == 404 and "/docs" in nowhere.json()["remedy"]
    torn = api.client.post("/v1/publish", content=b"{", headers={"Content-Type": "application/json"})
    assert torn.status_code == 422 and "one JSON object" in torn.json()["remedy"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"checkpoint": 3},
        {"checkpoint": ""},
        {"checkpoint": "x" * 5000},
        {"checkpoint": "/a", "step": -1},
        {"checkpoint": "/a", "step": True},
        {"checkpoint": "/a", "more": 1},
        {"checkpoint": "/a", "key": ""},
        [],
    ],
)
def test_requests_of_another_form(api: Api, body: Any) -> None:
    queue = api.open_queue()
    assert api.post(body).status_code == 422 and queue.open() == ()


def test_only_checkpoints_below_a_root(api: Api) -> None:
    queue, watch = api.open_queue(), api.root / "watch"
    outside = write(api.root / "outside", base_tensors())
    (watch / "link").symlink_to(outside)
    (watch / "loop").symlink_to(watch / "loop")
    (api.root / "watching").mkdir()
    for path in (
        str(outside),
        str(api.root / "watching"),
        str(watch / "link"),
        str(watch / "loop"),
        str(watch),
        f"{watch}/../outside",
        "watch/step_1",
        "/nowhere/at/all",
        "/etc/passwd",
        f"{watch}/step_1/config.json",
        f"{watch}/step\x01",
    ):
        refused = api.post({"checkpoint": path})
        assert (refused.status_code, refused.json()["error"]) == (422, "Refused"), path
    assert queue.open() == ()
    assert api.post({"checkpoint": f"{watch}/../watch/step_1"}).status_code == 202
    write(watch, base_tensors())
    assert api.post({"checkpoint": str(watch)}).status_code == 202


def test_without_roots_any_directory(tmp_path: Path) -> None:
    assert check_checkpoint(str(tmp_path), ()) == tmp_path.resolve()
    with pytest.raises(Refused):
        check_checkpoint(str(tmp_path / "nowhere"), ())


def test_ended_publications_are_forgotten_at_last(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "publications.json", remembered=3)
    first = queue.ask(request_for("/c", 1, "first"))
    queue.change(first, state="done", report=Publication(version=1))
    assert queue.get(first.id) is not None
    for number in range(3):
        queue.change(queue.ask(request_for("/c", number, None)), state="failed")
    assert queue.get(first.id) is None
    assert queue.ask(request_for("/c", 1, "first")).id != first.id
