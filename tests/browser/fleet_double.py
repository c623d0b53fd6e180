"""A publisher with a fleet that a test makes up: real page and gate over real HTTP, figures of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry

from weightcast.publisher.daemon.status import PublisherStatus
from weightcast.publisher.fleet.routes import PAGE_PATHS, page_routes
from weightcast.shared.daemon.fleet import Fleet, verdict
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.status import Readiness

JSON = dict[str, Any]
PHASES = ("plan", "fetch", "stage", "patch", "pause", "reload", "read_back", "resume")
NOBODY: JSON = {"bytes": None, "steps": [], "seconds": None, "without_base": None}
STANDINGS = ("ready", "behind", "stale", "lost", "failed", "stopped")
READY: JSON = {
    "ready": True,
    "reasons": [],
    "publishing": "",
    "queue": 0,
    "inbox": {"waiting": 0, "refused": 0},
    "held": "",
    "waiting": [],
    "notes": [],
    "last_refused": None,
    "refused_since_version": False,
}


def update(version: int, seconds: float = 1.0, outcome: str = "done") -> JSON:
    shares = (0.01, 0.34, 0.2, 0.12, 0.02, 0.25, 0.04, 0.02)
    return {
        "version": version,
        "kind": "patch",
        "began": 1_790_000_000.0 + version * 30,
        "seconds": {phase: seconds * share for phase, share in zip(PHASES, shares, strict=True)},
        "bytes": 4_200_000 + version * 1000,
        "outcome": outcome,
    }


def host(number: int, latest: int, **others: Any) -> JSON:
    """Ready at the newest version, unless `others` say else."""
    name = f"rollout-{number:03}"
    engine = {
        "name": "engine",
        "kind": "sglang",
        "state": "serving",
        "version": latest,
        "confirmed_by": "digest",
    }
    return {
        "key": f"{name}-{number:08x}",
        "host": name,
        "local": "/data/policy",
        "run_id": "4f2b9c1e7a55",
        "presence": "live",
        "heard_seconds_ago": 3.0,
        "standing": "ready",
        "state": "ready",
        "ready": True,
        "phase": "",
        "local_version": latest,
        "served_version": latest,
        "target": "latest",
        "target_version": latest,
        "lag": 0,
        "last_error": "",
        "remedy": "",
        "gate": "",
        "requests": {},
        "tokens": {},
        "adapters": [],
        "retries": 0,
        "bytes": {"step": 84_000_000, "skip": 0, "anchor": 0, "repair": 0},
        "engines": [engine],
        "software": "weightcast 0.1.0",
        "clock_offset_seconds": 0.02,
        "updates": [
            update(version, 0.8 + version % 7 / 9) for version in range(latest, max(latest - 8, 0), -1)
        ],
        **others,
    }


def fleet(hosts: list[JSON], latest: int, publisher: JSON = READY) -> JSON:
    made = _fleet(hosts, latest, publisher)
    return {**made, "verdict": verdict(Fleet.model_validate(made)).model_dump()}


def _fleet(hosts: list[JSON], latest: int, publisher: JSON) -> JSON:
    lags = [each["lag"] for each in hosts if each["standing"] not in ("lost", "stopped")]
    return {
        "now": time.time(),
        "channel": "/shared/run7",
        "bounds": {"stale_seconds": 60.0, "lost_seconds": 120.0},
        "run_id": "4f2b9c1e7a55",
        "latest": latest,
        "hosts": hosts,
        "counts": {word: sum(each["standing"] == word for each in hosts) for word in STANDINGS},
        "lag": [
            {"lag": lag, "hosts": lags.count(lag)} for lag in sorted({lag for lag in lags if lag is not None})
        ],
        "latest_age_seconds": 200.0,
        "time_source": "channel",
        "owner": {"name": "process 1 on trainer (epoch 1)", "state": "alive", "heard_seconds_ago": 3.0},
        "publisher": publisher,
        "rollback": {"to": 2, "ordered": 1.0e9, "done_as": latest} if publisher.get("held") else None,
    }


def versions(latest: int) -> JSON:
    rows = []
    for number in range(latest, 0, -1):
        density = 0.011 + 0.004 * (number * 7919 % 13) / 13
        nbytes = int(15.2e9 * density * 9.2 / 16)
        rows.append(
            {
                "version": number,
                "step": number * 4,
                "created": 1_790_000_000.0 + number * 30,
                "bytes": nbytes,
                "changed": int(7.6e9 * density),
                "elements": 7_600_000_000,
                "density": density,
                "ratio": 15.2e9 / nbytes,
                "publish_seconds": 11 + number * 31 % 17 / 4 if number > 3 else None,
                "served_seconds": 3 + number % 5 if number > latest - 20 else None,
                "pause_seconds": 0.3 + number % 7 / 20 if number > latest - 20 else None,
                "kept": number == 40,
                "tags": ["best"] if number == 40 else [],
                "anchor": number % 50 == 0,
                "skips": [number - 8] if number % 8 == 0 else [],
                "same_as": 60 if number == 70 else None,
            }
        )
    return {"versions": rows, "complete": True}


def lag_history(hosts: int, end: float, samples: int = 120, held: str = "rolled back to version 60") -> JSON:
    """Half-minutes up to `end`, one of them without a sample; a quarter of the hosts falls behind."""

    def sample(number: int) -> JSON:
        away = hosts // 4 if 40 <= number < 52 else 0
        behind = {"0": hosts - away, **({"2-3": away // 2, "4-15": away - away // 2} if away else {})}
        is_held = 70 <= number < 78
        at = end - 30.0 * (samples - 1 - number)
        return {"at": at, "behind": behind, "lost": 0, "held": held if is_held else ""}

    return {"samples": [sample(number) for number in range(samples) if number != 20]}


class Double:
    def __init__(self) -> None:
        self.hosts: list[JSON] = []
        self.fleet: JSON = fleet([], 0)
        self.versions: JSON = {"versions": [], "complete": True}
        self.lag: JSON = {"samples": []}
        self.catch_up: JSON = {"rows": [], "joiner": NOBODY}
        self.plan: JSON = {"horizon": 0, "remove": [], "keep": [], "why_not": "nothing is published"}
        self.url = ""
        self._changed = threading.Condition()
        self._number = 0
        self._ended = False

    def show(self, hosts: list[JSON], latest: int, **publisher: Any) -> None:
        """What every page that listens is told now."""
        with self._changed:
            self.hosts = hosts
            large = len(hosts) > 100
            shown = [{**each, "updates": []} for each in hosts] if large else hosts
            self.fleet = fleet(shown, latest, {**READY, **publisher})
            self._number += 1
            self._changed.notify_all()

    def host(self, key: str) -> JSON:
        return next(each for each in self.hosts if each["key"] == key)

    def forget(self, key: str) -> JSON:
        found = self.host(key)
        self.show([each for each in self.hosts if each["key"] != key], self.fleet["latest"])
        return found

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def events(self) -> Iterator[str]:
        seen = -1
        while True:
            with self._changed:
                if self._number == seen:
                    self._changed.wait(0.2)
                if self._ended:
                    return
                told, seen = (self._number != seen), self._number
                body = json.dumps(self.fleet)
            yield f"event: fleet\ndata: {body}\n\n" if told else ": here\n\n"


def _app(double: Double, token: str | None) -> FastAPI:
    app = make_app(
        "double",
        lambda: PublisherStatus(channel="", local="", encoding="fast"),
        lambda: Readiness(ready=True),
        CollectorRegistry(),
        token,
        lambda: None,
        PublisherStatus,
        open_paths=PAGE_PATHS,
    )
    app.include_router(page_routes())
    app.add_api_route("/v1/fleet", lambda: double.fleet)
    app.add_api_route("/v1/hosts/{key}", double.host)
    app.add_api_route("/v1/hosts/{key}", double.forget, methods=["DELETE"])
    app.add_api_route("/v1/versions", lambda: double.versions)
    app.add_api_route("/v1/lag-history", lambda: double.lag)
    app.add_api_route("/v1/catch-up", lambda: double.catch_up)
    app.add_api_route("/v1/prune-plan", lambda: double.plan)
    app.add_api_route(
        "/v1/events", lambda: StreamingResponse(double.events(), media_type="text/event-stream")
    )
    return app


@contextmanager
def serve(double: Double, token: str | None = None, port: int = 0) -> Iterator[Double]:
    """On a free port, or on the one that an earlier publisher had."""
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(_app(double, token), port=port, log_config=None, timeout_graceful_shutdown=1)
    server = Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    started.wait(20)
    double.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield double
    double.end()
    server.should_exit = True
    thread.join(20)
