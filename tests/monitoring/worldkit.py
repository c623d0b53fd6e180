"""A publisher, hosts with an engine each, and a Prometheus that scrapes them: all real but the engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from doubles import serve
from faultkit import Daemon, Place, until
from hosts import SGLang, Weights
from promkit import Prometheus

TOKEN = "correct-horse"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Host:
    daemon: Daemon
    engine: SGLang
    engine_stack: ExitStack
    local: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{int(self.daemon.port.read_text())}"

    @property
    def status(self) -> dict[str, Any]:
        return get(self.address, "/v1/status")

    def end_engine(self) -> None:
        """Nobody listens there any longer."""
        self.engine_stack.close()

    def serves(self, version: int) -> bool:
        status = self.status
        return (status["served_version"], status["ready"]) == (version, True)


def get(address: str, path: str) -> dict[str, Any]:
    answer = httpx.get(f"http://{address}{path}", headers=HEADERS, trust_env=False, timeout=5)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


@dataclass
class World:
    place: Place
    stack: ExitStack
    root: Path
    publisher: Daemon = field(init=False)
    hosts: dict[str, Host] = field(default_factory=dict)
    versions: list[Weights] = field(default_factory=lambda: [Weights.make()])
    token: str = TOKEN
    """empty: none is asked for"""

    def __post_init__(self) -> None:
        self.versions[0].write(self.base)
        self.inbox.mkdir()
        self.config = self.root / "token.toml"
        self.config.write_text(f'token = "{self.token}"\n' if self.token else "")

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    @property
    def inbox(self) -> Path:
        return self.root / "inbox"

    @property
    def common(self) -> tuple[object, ...]:
        return ("--channel", self.channel, "--base", self.base, "--config", self.config, "--threads", "1")

    @property
    def address(self) -> str:
        """Of the publisher."""
        return f"127.0.0.1:{int(self.publisher.port.read_text())}"

    def start_publisher(self, *more: object) -> None:
        self.publisher = self.place.daemon(
            *("publisher", "run", *self.common, "--local", self.root / "publisher", "--watch", self.inbox),
            *("--marker", "complete", "--every", "--existing", "--poll-seconds", "0.05", *more),
        )
        until(lambda: get(self.address, "/v1/status")["ready"], "the publisher is ready", 60)

    def start_host(self, name: str, *more: object, local: Path | None = None) -> Host:
        """`local`: as the daemon sees it."""
        engine, engine_stack = SGLang(), ExitStack()
        self.stack.callback(engine_stack.close)
        url = engine_stack.enter_context(serve(engine))
        local = self.root / name if local is None else local
        seen = self.place.namespace.inside(local)
        daemon = self.place.daemon(
            *("subscriber", "run", *self.common, "--local", local, "--poll-seconds", "0.1"),
            *("--engine", f"sglang={url},path={seen},name={name}", "--visible-deadline", "1", *more),
            machine=name,
        )
        until(daemon.port.exists, f"{name} listens", 60)
        self.hosts[name] = Host(daemon, engine, engine_stack, seen)
        return self.hosts[name]

    def start_prometheus(self, still_seconds: float = 3600.0) -> Prometheus:
        jobs = {
            "weightcast-publisher": [self.address],
            "weightcast-subscriber": [host.address for host in self.hosts.values()],
        }
        prometheus = Prometheus.start(self.root / "prometheus", jobs, TOKEN, still_seconds)
        self.stack.callback(prometheus.end)
        return prometheus

    def give(self) -> int:
        """Leaves a checkpoint for the publisher; the version that it becomes."""
        number = len(self.versions)
        weights = self.versions[-1].changed(number)
        unfinished = weights.write(self.root / f"unfinished-{number}")
        (unfinished / "complete").touch()
        unfinished.rename(self.inbox / f"step_{number}")
        self.versions.append(weights)
        return number

    @contextmanager
    def publishing(self, pause_seconds: float) -> Iterator[None]:
        """One version after the other, in a thread, while the block runs."""
        stop, pauses = threading.Event(), pause_seconds

        def keep() -> None:
            while not stop.wait(pauses):
                self.publish()

        with ThreadPoolExecutor(1) as pool:
            keeping = pool.submit(keep)
            try:
                yield
            finally:
                stop.set()
            keeping.result()

    def publish(self) -> int:
        number = self.give()
        until(lambda: get(self.address, "/v1/status")["version"] == number, f"version {number}", 60)
        return number

    def arrive(self, version: int, *names: str) -> None:
        for name in names or self.hosts:
            host = self.hosts[name]
            until(lambda host=host: host.serves(version), f"{name} at version {version}", 60)
