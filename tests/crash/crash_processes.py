"""Processes that are killed: forked from this one, which has imported and compiled everything already.

A forked process watches its failpoints. What it does there is an order in memory shared with its parent, so
that a daemon is armed while it runs. Keep this process free of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import random
import re
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weightcast.shared.base import failpoints
from weightcast.shared.base.errors import WeightcastError

Action = Literal["kill", "stop", "term", "error"]
_SIZE = 1 << 16
_ORDER, _FIRED, _COUNTS = 8, 4096, 4104
_SLOTS, _SLOT = 8192, 28 << 10
"""two places for the counts, written by turns"""
_PR_SET_PDEATHSIG = 1
CRASHED = 70
"""exit status after an error that is neither weightcast's nor a disk's"""
CRASH = re.compile(r"(step|reporting|channel) crashed|work thread died")
"""what a daemon logs that goes on after such an error"""

KINDS = {
    "latest": "pointer",
    "model.safetensors.index.json.sig": "signature",
    "state.json": "state",
    "base.json": "base",
    "channel.json": "channel",
    "open.json": "attempt",
    "closed.json": "end of attempt",
    "inbox.json": "inbox",
    "publications.json": "queue",
    "owner": "owner",
    "patch": "patch",
    "publishers": "claims",
    "hosts": "reports",
    ".weightcast": "room",
    "anchor": "anchor",
    "publisher": "local",
    "host": "local",
    "rank1-local": "local",
    "components.json": "registry",
}
OF_ADAPTERS = frozenset(("components", "adapters"))
"""directories of the channel, a publisher and a host"""
_ADAPTER = re.compile(r"(default|extra-\d+)(-v\d+)?(\.tmp)?")
_INBOX = re.compile(r"inbox-adapter-.+\.json")
OF_A_DISK = re.compile(r"^(file|directory|shard|journal|fetch|seed|patch|undo|anchor|skip|version|part)\.")
UNINTERESTING = re.compile(r"\.port$|^world-")
"""names of what holds no state: the file that tells a port, and where it lies"""


def kind_of(where: Path) -> str:
    """What a file or directory is, so that rows of the table do not name versions and hosts."""
    mark = "adapter " if OF_ADAPTERS.intersection(where.parts) else ""
    return f"{mark}{_kind_of(where)}"


def _kind_of(where: Path) -> str:
    name, parent = where.name, where.parent.name
    if _INBOX.fullmatch(name):
        return "adapter inbox"
    if found := _ADAPTER.fullmatch(name):
        return "exported" if found[2] else "local"
    if name == "model.safetensors.index.json":
        kind = _kind_of(where.parent)
        return "index" if kind == "version" else f"{kind} index"
    if parent in ("publishers", "hosts"):
        return "claim" if parent == "publishers" else "report"
    if name.startswith("from_v"):
        return "skip"
    if name.startswith("full-"):
        return "full weights"
    if name.startswith(".weightcast-tmp-probe-"):
        return "probe"
    if name.startswith("anchor."):
        return "anchor"
    if name.startswith("weight_v") or name == "whole":
        return "version"
    if parent.endswith(".parts"):
        return "attempt"
    if name.endswith(".patch"):
        return "engine patch"
    if name.endswith(".safetensors"):
        return "shard"
    if name.startswith("part-"):
        return "failure" if name.endswith("failed.json") else "draft"
    return KINDS.get(name, name)


def key_of(name: str, where: Path | None) -> str:
    """The row of a failpoint: small files, directories and locks are told apart by what they are."""
    if where is not None and name.startswith(("file.", "directory.", "lock.", "object.")):
        return f"{name} {kind_of(where)}"
    return f"{name} adapter" if where is not None and OF_ADAPTERS.intersection(where.parts) else name


@dataclass(frozen=True)
class Order:
    """At the `nth` passage of a row from now on. `key` empty: never. `then`: an error is followed by a kill
    so many failpoints later, 0: by none. `lasting`: so many more failpoints that touch a disk fail too."""

    key: str = ""
    nth: int = 1
    action: Action = "kill"
    errno: int = errno.EIO
    then: int = 0
    lasting: int = 0


class Wire:
    """Memory shared with one child: the order, whether it was carried out, and how often rows were passed."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._number = 0

    def close(self) -> None:
        self._memory.close()

    def order(self, order: Order) -> None:
        text = json.dumps(order.__dict__).encode()
        self._memory[_ORDER : _ORDER + len(text)] = text
        self._memory[_FIRED : _FIRED + 4] = bytes(4)
        self._number += 1
        self._memory[:_ORDER] = struct.pack("<II", self._number, len(text))

    def ordered(self, known: int) -> tuple[int, Order | None]:
        """The order's number, and the order if that is not the `known` one."""
        number, length = struct.unpack("<II", self._memory[:_ORDER])
        if number == known:
            return number, None
        return number, Order(**json.loads(self._memory[_ORDER : _ORDER + length]))

    def fire(self) -> None:
        self._memory[_FIRED : _FIRED + 4] = struct.pack("<I", 1)

    @property
    def fired(self) -> bool:
        return self._memory[_FIRED : _FIRED + 4] != bytes(4)

    def count(self, counts: dict[str, int]) -> None:
        text = json.dumps(counts).encode()
        last, _ = struct.unpack("<II", self._memory[_COUNTS : _COUNTS + 8])
        at = _SLOTS + (1 - last) * _SLOT
        self._memory[at : at + len(text)] = text
        self._memory[_COUNTS : _COUNTS + 8] = struct.pack("<II", 1 - last, len(text))

    @property
    def counts(self) -> dict[str, int]:
        """Rows that the child passed since its start."""
        while True:
            slot, length = struct.unpack("<II", self._memory[_COUNTS : _COUNTS + 8])
            at = _SLOTS + slot * _SLOT
            # a child that lives may have come round to this slot meanwhile
            with contextlib.suppress(ValueError):
                found: dict[str, int] = json.loads(self._memory[at : at + length] or b"{}")
                return found


class Trap:
    """In the child: called at every failpoint, by any thread."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._known, self._order, self._left = 0, Order(), 0
        self._then = 0
        """failpoints until the kill that follows an error; 0: none does"""
        self._failing = 0
        """failpoints of a disk that fail yet, after the one that was asked for"""
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, where: Path | None) -> None:
        if where is not None and UNINTERESTING.search(where.name):
            return
        key = key_of(name, where)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1
            self._wire.count(self._counts)
            due = self._is_due(key)
        if due:
            self._act()

    def _is_due(self, key: str) -> bool:
        self._known, order = self._wire.ordered(self._known)
        if order is not None:
            self._order, self._left, self._then, self._failing = order, order.nth, 0, 0
        if self._then:
            self._then -= 1
            if not self._then:
                os.kill(os.getpid(), signal.SIGKILL)
        if key == self._order.key:
            self._left -= 1
            if self._left == 0:
                return True
        if self._failing and OF_A_DISK.search(key):
            self._failing -= 1
            return True
        return False

    def _act(self) -> None:
        if self._order.action == "error":
            self._go_on_failing()
        self._wire.fire()
        match self._order.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "error":
                raise OSError(self._order.errno, os.strerror(self._order.errno))

    def _go_on_failing(self) -> None:
        """Before anybody who sees that it fired can take the order back."""
        if not self._wire.fired:
            self._then, self._failing = self._order.then, self._order.lasting


@dataclass(eq=False)
class Child:
    pid: int
    wire: Wire
    log: Path
    status: int | None = field(default=None)
    """of waitpid, once it ended"""
    log_began: int = 0
    """bytes of the log that are of others before it"""

    @property
    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    @property
    def stopped(self) -> bool:
        """Every thread of it."""
        states = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return states[0] in "Tt"

    @property
    def killed(self) -> bool:
        return self.ended and self.status is not None and os.WIFSIGNALED(self.status)

    @property
    def exit_code(self) -> int | None:
        if not self.ended or self.status is None or not os.WIFEXITED(self.status):
            return None
        return os.WEXITSTATUS(self.status)

    def signal(self, number: signal.Signals) -> None:
        if not self.ended:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)

    def words(self) -> str:
        """The end of what it wrote to its log, and how it ended."""
        text = self._text()[-3000:]
        return text if self.exit_code in (None, 0) else f"{text}\nexit code {self.exit_code}"

    def _text(self) -> str:
        return self.log.read_bytes()[self.log_began :].decode(errors="replace") if self.log.exists() else ""

    def crashes(self) -> list[str]:
        """What it was not prepared for."""
        text = self._text()
        found = CRASH.search(text)
        if found is None and self.exit_code != CRASHED:
            return []
        return [f"crashed: {text[found.start() :][:3000] if found else text[-3000:]}"]


def fork(role: Callable[[], object], log: Path, order: Order | None = None) -> Child:
    """Runs `role` in a child: exit status 0, that of its error, or CRASHED with a traceback in the log."""
    wire = Wire()
    wire.order(Order() if order is None else order)
    before = log.stat().st_size if log.exists() else 0
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, wire, log, log_began=before)
    code = 1
    try:
        _become(log)
        failpoints.watch(Trap(wire))
        role()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except (WeightcastError, OSError) as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    except BaseException:
        traceback.print_exc()
        code = CRASHED
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become(log: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    random.seed()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


patience = 1.0
"""what every wait is multiplied by: more on a machine with other work"""


class NotReached(Exception):
    """What a process was to do did not happen in time."""


def wait_for(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds * patience
    while not _holds(condition):
        if time.monotonic() > deadline:
            raise NotReached(f"not within {seconds * patience:g} s: {what}")
        time.sleep(0.015)


def _holds(condition: Callable[[], object]) -> bool:
    """What is looked at may be written just then."""
    try:
        return bool(condition())
    except (FileNotFoundError, ValueError):
        return False
