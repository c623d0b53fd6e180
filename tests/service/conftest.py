from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from waiting import wait_until

from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.logs import setup_logs
from weightcast.shared.daemon.loop import LoopStep, Stop, Wakeup, run_daemon
from weightcast.shared.daemon.settings import ServiceSettings
from weightcast.shared.daemon.status import LoopStatus, Readiness, Snapshot


@pytest.fixture(autouse=True)
def quiet() -> Iterator[io.StringIO]:
    """The log of the test."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    stream = io.StringIO()
    setup_logs("json", "info", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Status(BaseModel):
    version: int
    loop: LoopStatus


@dataclass
class Served:
    """A daemon in a thread, as a test sees it."""

    app: FastAPI
    wakeup: Wakeup
    stop: Stop
    loop: Snapshot[LoopStatus]
    readiness: list[Readiness]
    url: str = ""
    errors: list[Exception] = field(default_factory=list)
    thread: threading.Thread | None = None

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=20, verify=False)


Serve = Callable[..., Served]


def _nothing(stop: Stop) -> None:
    pass


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    running: list[Served] = []

    def start(
        step: LoopStep = _nothing,
        token: str | None = None,
        poll_seconds: float = 0.01,
        prepare: Callable[[FastAPI], None] = lambda app: None,
        **more: Any,
    ) -> Served:
        port_file = tmp_path / f"port{len(running)}"
        known = {"port": 0, "port_file": port_file, "poll_seconds": poll_seconds, "stop_seconds": 10}
        settings = ServiceSettings(**known | more)
        loop = Snapshot(LoopStatus())
        wakeup, readiness = Wakeup(), [Readiness(ready=True)]
        app = make_app(
            "test daemon",
            lambda: Status(version=7, loop=loop.get()),
            lambda: readiness[0],
            CollectorRegistry(),
            token,
            wakeup.set,
            Status,
        )
        prepare(app)
        served = Served(app, wakeup, Stop(), loop, readiness)

        def run() -> None:
            try:
                run_daemon(app, step, wakeup, settings, loop=loop, stop=served.stop)
            except Exception as error:
                served.errors.append(error)

        served.thread = threading.Thread(target=run)
        served.thread.start()
        running.append(served)
        wait_until(port_file.exists)
        served.url = f"http{'s' if settings.tls_cert else ''}://127.0.0.1:{int(port_file.read_text())}"
        return served

    yield start
    for served in running:
        served.stop.set()
        if served.thread is not None:
            served.thread.join(20)
