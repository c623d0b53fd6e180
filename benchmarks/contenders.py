"""Those that publish and sync, each through its real doors: daemons that hold their mappings, and commands.

weightcast's are `publisher run` (asked over HTTP), `subscriber run` (woken over HTTP), `publish` and `sync`;
the field's are `python -m benchmarks.field_path serve|publish|sync`. Daemons tell the seconds of a round
themselves; a command counts from its start to its end, interpreter and imports included.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from weightcast.shared.base.errors import WeightcastError

from .probe import anon_bytes, cpu_seconds, ended_children_cpu, highest_anon

_START_SECONDS = 600.0
_ROUND_SECONDS = 600.0
_POLL_SECONDS = (0.02, 0.5)
"""first and longest: daemons tell the seconds of a round themselves, and each question takes from the
processors that they are measured on"""
_WEIGHTCAST = (sys.executable, "-m", "weightcast.shared.cli.main")
_FIELD = (sys.executable, "-m", f"{__package__}.field_path")


class ContenderFailed(WeightcastError):
    """A process of a contender ended, refused or did not answer; the message has the end of its log."""


@dataclass(frozen=True)
class Done:
    """One publication or sync. `cpu`, `anon_bytes` and `pointer`: see `results.Work`; `changed`: elements, 0
    where the contender does not count them."""

    seconds: float
    phases: Mapping[str, float]
    cpu: float
    anon_bytes: int
    changed: int = 0
    pointer: float | None = None


@dataclass(frozen=True)
class Places:
    """Directories of one contender, and where its processes log."""

    root: Path
    base: Path

    @property
    def channel(self) -> Path:
        return self.root / "channel"

    @property
    def publisher(self) -> Path:
        return self.root / "publisher"

    @property
    def host(self) -> Path:
        return self.root / "host"

    @property
    def log(self) -> Path:
        return self.root / "log"

    def version(self, number: int) -> Path:
        return self.channel / f"weight_v{number:06d}"

    def version_bytes(self, number: int) -> int:
        """What a host one version behind reads: deltas from older versions lie in directories."""
        return sum(path.stat().st_size for path in self.version(number).iterdir() if path.is_file())

    def point(self, version: int) -> None:
        """Shows hosts this version as the newest; 0: none is published yet."""
        pointer = self.channel / "latest"
        if version == 0:
            pointer.unlink(missing_ok=True)
            return
        unfinished = self.channel / "latest.tmp"
        unfinished.write_text(f"{version:06d}")
        unfinished.rename(pointer)


class Contender(ABC):
    """One way to bring a version to a host. `publish` and `sync` need the daemon of their side started."""

    def __init__(self, name: str, places: Places, threads: int) -> None:
        self.name, self.places, self.threads = name, places, threads
        places.root.mkdir()

    @abstractmethod
    def start_publisher(self) -> None: ...

    @abstractmethod
    def publish(self, checkpoint: Path) -> Done: ...

    @abstractmethod
    def start_host(self) -> None: ...

    @abstractmethod
    def settle(self) -> None:
        """Returns when nothing is made beside the versions any more."""

    @abstractmethod
    def sync(self, version: int) -> Done:
        """To `version`, which the pointer names."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the daemons that run."""

    @abstractmethod
    def publish_command(self, checkpoint: Path) -> Sequence[str]: ...

    @abstractmethod
    def sync_command(self) -> Sequence[str]: ...

    def publish_once(self, checkpoint: Path) -> Done:
        return self._command(self.publish_command(checkpoint))

    def sync_once(self) -> Done:
        return self._command(self.sync_command())

    def _command(self, words: Sequence[str]) -> Done:
        cpu, began = ended_children_cpu(), time.perf_counter()
        process = spawn(words, self.places.log, stdout=subprocess.PIPE)
        with highest_anon(process.pid) as highest:
            text = process.communicate()[0]
        seconds = time.perf_counter() - began
        if process.returncode:
            raise ContenderFailed(f"{self.name}: {' '.join(words)}\n{tail(self.places.log)}")
        told = json.loads(text.splitlines()[-1])
        cpu = ended_children_cpu() - cpu
        return Done(seconds, {}, cpu, highest.nbytes, told.get("changed_elements", 0))


def contender(name: str, root: Path, base: Path, threads: int) -> Contender:
    """`name`: fast, small or field. Makes its directory below `root`."""
    kind = Field if name == "field" else Weightcast
    return kind(name, Places(root / name, base), threads)


class Weightcast(Contender):
    def __init__(self, name: str, places: Places, threads: int) -> None:
        super().__init__(name, places, threads)
        self._daemon: _Daemon | None = None

    def start_publisher(self) -> None:
        sides = ("--base", self.places.base, "--local", self.places.publisher)
        self._start("publisher", *sides, "--encoding", self.name)

    def start_host(self) -> None:
        self._start("subscriber", "--base", self.places.base, "--local", self.places.host)

    def _start(self, side: str, *flags: object) -> None:
        port_file = self.places.root / f"{side}.port"
        words = [*_WEIGHTCAST, side, "run", "--channel", self.places.channel, *flags]
        words += ["--threads", self.threads, "--port", 0, "--port-file", port_file]
        process = spawn(words, self.places.log)
        self._daemon = _Daemon(self.name, process, self.places.log)
        self._daemon.wait(port_file.exists, _START_SECONDS)
        self._daemon.connect(int(port_file.read_text()))

    @property
    def _running(self) -> _Daemon:
        if self._daemon is None:
            raise ContenderFailed(f"{self.name}: no daemon runs")
        return self._daemon

    def publish(self, checkpoint: Path) -> Done:
        daemon = self._running
        with _Watched(daemon.process.pid) as watched:
            job = daemon.post("/v1/publish", {"checkpoint": str(checkpoint)})
            ended = daemon.wait(lambda: self._ended(job["id"]), _ROUND_SECONDS)
            if ended["state"] != "done":
                raise ContenderFailed(f"{self.name}: {ended['error']}")
            report = ended["report"]
            phases = daemon.wait(lambda: self._followed(report["version"]), _ROUND_SECONDS)
        pointer = sum(report["seconds"].values())
        total = sum(phases.values())
        return Done(total, phases, watched.cpu, watched.anon_bytes, report["changed_elements"], pointer)

    def settle(self) -> None:
        if self._daemon is not None:
            daemon = self._daemon
            daemon.wait(lambda: not self._makes_more(daemon), _ROUND_SECONDS)

    def _makes_more(self, daemon: _Daemon) -> bool:
        return bool(daemon.get("/v1/status").get("upkeep", {}).get("busy"))

    def _followed(self, version: int) -> Any:
        """Seconds by phase, once the publisher's local checkpoint is at the version too."""
        last = self._running.get("/v1/status")["publications"][:1]
        there = last and last[0]["version"] == version and "patch" in last[0]["seconds"]
        return last[0]["seconds"] if there else None

    def _ended(self, job: str) -> Any:
        told = self._running.get(f"/v1/publications/{job}")
        return told if told["state"] in ("done", "failed") else None

    def sync(self, version: int) -> Done:
        daemon = self._running
        with _Watched(daemon.process.pid) as watched:
            daemon.post("/v1/wake", None)
            status = daemon.wait(lambda: self._at(version), _ROUND_SECONDS)
        phases = dict(status["updates"][-1]["seconds"])
        return Done(phases.pop("total"), phases, watched.cpu, watched.anon_bytes)

    def _at(self, version: int) -> Any:
        status = self._running.get("/v1/status")
        there = status["updates"] and status["updates"][-1]["version"] == version
        return status if there and status["local_version"] == version and status["ready"] else None

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None

    def publish_command(self, checkpoint: Path) -> Sequence[str]:
        places = self.places
        words = [*_WEIGHTCAST, "publish", checkpoint, "--channel", places.channel, "--base", places.base]
        words += ["--local", places.publisher, "--encoding", self.name, "--threads", self.threads, "--json"]
        return [str(word) for word in words]

    def sync_command(self) -> Sequence[str]:
        places = self.places
        words = [*_WEIGHTCAST, "sync", "--channel", places.channel, "--base", places.base]
        words += ["--local", places.host, "--threads", self.threads, "--json"]
        return [str(word) for word in words]


class Field(Contender):
    def __init__(self, name: str, places: Places, threads: int) -> None:
        super().__init__(name, places, threads)
        self._process: subprocess.Popen[str] | None = None

    def start_publisher(self) -> None:
        self._start("publisher", self.places.publisher)

    def start_host(self) -> None:
        self._start("host", self.places.host)

    def _start(self, side: str, local: Path) -> None:
        words = [*_FIELD, "serve", side, *self._flags(local)]
        self._process = spawn(words, self.places.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()

    def publish(self, checkpoint: Path) -> Done:
        return self._ask(str(checkpoint))

    def sync(self, version: int) -> Done:
        return self._ask("sync")

    def settle(self) -> None:
        pass

    def _ask(self, line: str) -> Done:
        process = self._running
        with _Watched(process.pid) as watched:
            print(line, file=_pipe(process.stdin), flush=True)
            told = self._answer()
        pointer = told["pointed"] or None
        return Done(told["seconds"], told["profile"], watched.cpu, watched.anon_bytes, pointer=pointer)

    def _answer(self) -> Any:
        line = _pipe(self._running.stdout).readline()
        if not line:
            raise ContenderFailed(f"{self.name}: its process ended\n{tail(self.places.log)}")
        return json.loads(line)

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ContenderFailed(f"{self.name}: no daemon runs")
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)
            self._process = None

    def publish_command(self, checkpoint: Path) -> Sequence[str]:
        return [*_FIELD, "publish", str(checkpoint), *self._flags(self.places.publisher)]

    def sync_command(self) -> Sequence[str]:
        return [*_FIELD, "sync", *self._flags(self.places.host)]

    def _flags(self, local: Path) -> list[str]:
        words = ["--channel", self.places.channel, "--local", local, "--base", self.places.base]
        return [str(word) for word in [*words, "--threads", self.threads]]


class _Watched:
    """CPU time and growth of a running process over a `with` block."""

    def __init__(self, process: int) -> None:
        self._process, self._highest = process, highest_anon(process)
        self.cpu, self.anon_bytes = 0.0, 0

    def __enter__(self) -> _Watched:
        self._cpu, self._idle = cpu_seconds(self._process), anon_bytes(self._process)
        self._seen = self._highest.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._highest.__exit__(None, None, None)
        with contextlib.suppress(FileNotFoundError):
            self.cpu = cpu_seconds(self._process) - self._cpu
        self.anon_bytes = max(0, self._seen.nbytes - self._idle)


class _Daemon:
    """A daemon of weightcast's and its HTTP side."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.process, self._log = name, process, log
        self._client = httpx.Client(trust_env=False, timeout=60)

    def connect(self, port: int) -> None:
        self._client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        self.wait(lambda: self._client.get("/readyz").status_code == 200, _START_SECONDS)

    def get(self, path: str) -> Any:
        return self._told(self._client.get(path))

    def post(self, path: str, body: object) -> Any:
        return self._told(self._client.post(path, json=body))

    def _told(self, answer: httpx.Response) -> Any:
        if answer.is_error:
            raise ContenderFailed(f"{self.name}: {answer.request.url} said {answer.text}")
        return answer.json() if answer.content else None

    def wait(self, condition: Callable[[], Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        pause, longest = _POLL_SECONDS
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ContenderFailed(f"{self.name}: ended or too slow\n{tail(self._log)}")
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return found

    def stop(self) -> None:
        self._client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def spawn(words: Sequence[object], log: Path, **pipes: int) -> subprocess.Popen[str]:
    """A process whose messages go to `log`, without settings of the caller's environment. Its modules are
    compiled once, as where it is installed, not by every command."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("WEIGHTCAST_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("ab") as stream:
        return subprocess.Popen(
            [str(word) for word in words],
            stdin=pipes.get("stdin", subprocess.DEVNULL),
            stdout=pipes.get("stdout", stream.fileno()),
            stderr=stream,
            text=True,
            env=environment,
        )


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ContenderFailed("a process without pipes")
    return stream
