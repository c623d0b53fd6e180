"""Mounts and daemons in namespaces of their own, told to by a line; looks at them from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from waiting import SECONDS, wait_until

KEEPER = Path(__file__).with_name("keeper.py")
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
Rule = dict[str, Any]


def fill(mount: Path) -> Path:
    """Nothing is left on it. Others may write there too: nobody knows before how much there is room for."""
    filler = mount / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    return filler


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """What is looked at may not be there yet, or be written just then."""
    return wait_until(condition, seconds, what, passing=(OSError, ValueError, httpx.HTTPError))


class Namespace:
    """Where file systems are mounted without anybody else seeing them. Where a machine does not allow that,
    the tests fail: nothing else shows what these faults do."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*UNSHARE, sys.executable, str(KEEPER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = self._out.readline()
        assert line, "user and mount namespaces are needed here (unshare --user --map-root-user --mount)"
        self.pid = json.loads(line)["pid"]

    @property
    def _out(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout

    def tell(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}, default=str) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._out.readline())
        assert "problem" not in answer, answer["problem"]
        return answer

    def sh(self, *command: object) -> None:
        done = self.tell("sh", command=[str(each) for each in command])
        assert done["code"] == 0, (command, done["text"])

    def read_only(self, mount: Path) -> None:
        """A bind mount can become read-only when nobody has a file there open for writing."""
        command = ["mount", "-o", "remount,bind,ro", str(mount)]
        until(lambda: self.tell("sh", command=command)["code"] == 0, f"{mount} is read-only")

    def inside(self, path: Path) -> Path:
        """A path as it is seen there."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._out.close()


@dataclass
class Faulty:
    """A directory shown at `mount`, and what goes wrong with it."""

    namespace: Namespace
    mount: Path
    pid: int
    _rules: Path

    def rules(self, *rules: Rule) -> None:
        """From now on, until told otherwise."""
        new = self._rules.with_suffix(".new")
        new.write_text(json.dumps(rules, default=str))
        new.rename(self._rules)

    def end(self) -> None:
        """Its server dies: everything below it is an error."""
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: self.namespace.tell("ended", pid=self.pid)["status"] is not None, "the server ended")


@dataclass
class Daemon:
    namespace: Namespace
    arguments: tuple[str, ...]
    root: Path
    machine: str = ""
    """its name; empty: this machine's"""
    pid: int = 0
    log: Path = field(init=False)
    port: Path = field(init=False)

    def __post_init__(self) -> None:
        name = f"{self.arguments[0]}-{time.monotonic_ns()}"
        self.log, self.port = self.root / f"{name}.log", self.root / f"{name}.port"

    def start(self, order: dict[str, Any] | None = None) -> Daemon:
        self.port.unlink(missing_ok=True)
        arguments = [*self.arguments, "--port", "0", "--port-file", str(self.port)]
        told = self.namespace.tell(
            "command", log=self.log, arguments=arguments, order=order, machine=self.machine
        )
        self.pid = told["pid"]
        return self

    def get(self, path: str) -> httpx.Response:
        url = f"http://127.0.0.1:{int(self.port.read_text())}{path}"
        return httpx.get(url, trust_env=False, timeout=5)

    def wake(self) -> None:
        """The pause after a failure is cut short."""
        port = int(self.port.read_text())
        httpx.post(f"http://127.0.0.1:{port}/v1/wake", trust_env=False, timeout=5)

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/v1/status").json()
        return status

    def told(self, *words: str) -> bool:
        """Whether the running status says so."""
        error = self.status["last_error"]
        return error is not None and any(word in error["message"] for word in words)

    @property
    def ended(self) -> int | None:
        status: int | None = self.namespace.tell("ended", pid=self.pid)["status"]
        return status

    def signal(self, number: signal.Signals) -> None:
        if self.ended is None:
            os.kill(self.pid, number)

    def term(self, seconds: float = 30.0) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 30.0) -> int:
        until(lambda: self.ended is not None, f"ended: {self.words()}", seconds)
        assert self.ended is not None
        return self.ended

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def words(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""


class Place:
    """A test's directory, mounts and daemons; all of it ends with the test."""

    def __init__(self, namespace: Namespace, root: Path, stack: ExitStack) -> None:
        self.namespace, self.root, self._stack = namespace, root, stack

    def faulty(self, source: Path, mount: Path) -> Faulty:
        mount.mkdir(exist_ok=True)
        rules = self.root / f"{mount.name}.rules"
        rules.write_text("[]")
        pid = self.namespace.tell(
            "fuse", source=source, mount=mount, rules=rules, log=self.root / f"{mount.name}.fuse"
        )["pid"]
        self._stack.callback(self._unmount, mount)
        self._stack.callback(os.kill, pid, signal.SIGKILL)
        return Faulty(self.namespace, mount, pid, rules)

    def tmpfs(self, mount: Path, mebibytes: int) -> Path:
        """The same, seen from outside."""
        mount.mkdir(exist_ok=True)
        self.namespace.sh("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", mount)
        self._stack.callback(self._unmount, mount)
        return self.namespace.inside(mount)

    def bind(self, source: Path, mount: Path) -> None:
        mount.mkdir(exist_ok=True)
        self.namespace.sh("mount", "--bind", source, mount)
        self._stack.callback(self._unmount, mount)

    def _unmount(self, mount: Path) -> None:
        self.namespace.tell("sh", command=["umount", "-l", str(mount)])

    def daemon(self, *arguments: object, order: dict[str, Any] | None = None, machine: str = "") -> Daemon:
        daemon = Daemon(self.namespace, tuple(map(str, arguments)), self.root, machine).start(order)
        self._stack.callback(daemon.kill)
        return daemon

    def verb(self, *arguments: object, seconds: float = 30.0) -> tuple[int, str]:
        """Exit status and what was written, of a command that ends."""
        log = self.root / f"verb-{time.monotonic_ns()}.log"
        pid = self.namespace.tell("command", log=log, arguments=[str(each) for each in arguments])["pid"]

        def ended() -> bool:
            return self.namespace.tell("ended", pid=pid)["status"] is not None

        try:
            until(ended, f"{arguments} ended", seconds)
        finally:
            if not ended():
                os.kill(pid, signal.SIGKILL)
        status: int = self.namespace.tell("ended", pid=pid)["status"]
        return status, log.read_text()
