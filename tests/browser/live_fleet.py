"""A real run: publisher and subscribers as processes, engine doubles over HTTP, weights that keep coming."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import doubles
import httpx
from daemonkit import Daemon, Places, base_tensors, changed, rename_in, write
from hosts import SGLang
from waiting import wait_until

COMMAND = (sys.executable, "-m", "weightcast.shared.cli.main")


@dataclass
class Rollout:
    """One host: a subscriber as a process, and its engine."""

    name: str
    local: Path
    url: str
    """of its engine"""
    engine: ExitStack
    """serves the engine until it is closed"""
    process: subprocess.Popen[bytes]

    def hold(self) -> None:
        """As a machine that hangs."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


class LiveFleet:
    """`with LiveFleet(directory) as fleet`: a publisher that is ready."""

    def __init__(self, root: Path, *flags: str) -> None:
        self.places = Places.made(root)
        self._stack = ExitStack()
        self._tensors = base_tensors()
        write(self.places.base, self._tensors)
        self._keeping = Keeping(self)
        self._flags = flags
        self.published = 0
        self.publisher: Daemon

    def __enter__(self) -> LiveFleet:
        self.publisher = Daemon.start(self.places, *self._flags)
        self._stack.callback(self._end_publisher)
        self._stack.callback(self._keeping.stop)
        self.publisher.ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stack.close()

    def restart_publisher(self, *flags: str) -> None:
        self.publisher = Daemon.start(self.places, *self._flags, *flags).ready()

    def _end_publisher(self) -> None:
        self.publisher.kill()

    @property
    def url(self) -> str:
        return str(self.publisher.client.base_url).rstrip("/")

    def publish(self, share: float = 0.02) -> int:
        """The next version, once it is there; `share` of its bytes are others."""
        self.published += 1
        self._tensors = changed(self._tensors, self.published, share)
        rename_in(self.places.watch / f"step_{self.published}", self._tensors)
        self.publisher.wait_for_version(self.published)
        return self.published

    def keep_publishing(self) -> Keeping:
        """`with fleet.keep_publishing()`: as a trainer does."""
        return self._keeping

    def join(self, name: str, *options: str) -> Rollout:
        """Another host, once its daemon runs."""
        local, engine = self.places.root / name, self._stack.enter_context(ExitStack())
        url = engine.enter_context(doubles.serve(SGLang()))
        rollout = Rollout(name, local, url, engine, self._start(name, local, url, options))
        self._stack.callback(rollout.end)
        return rollout

    def _start(self, name: str, local: Path, url: str, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
        port_file = self.places.root / f"{name}.port"
        with (self.places.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(*named(name), *COMMAND, "subscriber", "run", "--channel", str(self.places.channel)),
                    *("--base", str(self.places.base), "--local", str(local), "--engine", f"sglang={url}"),
                    *("--port", "0", "--port-file", str(port_file), "--threads", "1"),
                    *("--poll-seconds", "0.1", "--engine-check-seconds", "0.3", "--report-seconds", "1"),
                    *options,
                ],
                stderr=log,
                env={**os.environ, "WEIGHTCAST_TOKEN": ""},
            )
        wait_until(lambda: port_file.exists() or process.poll() is not None)
        assert process.poll() is None, (self.places.root / f"{name}.log").read_text()
        return process

    def fleet(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/fleet", trust_env=False, timeout=20).json()
        return found

    def host(self, rollout: Rollout) -> dict[str, Any] | None:
        """As the publisher's API shows it."""
        return next((each for each in self.fleet()["hosts"] if each["local"] == str(rollout.local)), None)


@dataclass
class Keeping:
    """Publishes about every second while it is entered."""

    fleet: LiveFleet
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __exit__(self, *of_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self.fleet.publish()


def named(name: str) -> tuple[str, ...]:
    """What begins a command that runs as on a machine of this name, where that is allowed here."""
    return ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name) if _may_name() else ()


@functools.cache
def _may_name() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "--uts", "hostname", "elsewhere"], check=False, capture_output=True, timeout=20
    )
    return tried.returncode == 0
