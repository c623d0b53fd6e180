"""Two locks of a local checkpoint, both flock on files that are never deleted.

`owner` is held by a writer for its life. `patch` is held exclusively while bytes change or an engine reads
them, shared by readers that need them to stand still.

A flock belongs to the open file, which a forked child has too: its holder unlocks it, and a child closes its
own descriptors at once, or it would hold the lock after its parent's death.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from weightcast.shared.base.errors import RetryLater, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.files.durable import named, read_file

_TRY_EVERY = 0.02
_TEXT_LIMIT = 4096
Wait = Callable[[float], None]


class FileLock:
    """One flock. Not reentrant; taken and released by the same object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._signed = False
        """the text is ours and shared: it must not speak for the next holder"""

    @property
    def held(self) -> bool:
        return self._fd is not None

    @property
    def in_place(self) -> bool:
        """Whether the lock is held on the file that others would lock too."""
        if self._fd is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def acquire(
        self, *, shared: bool = False, seconds: float = 0.0, text: str = "", wait: Wait = time.sleep
    ) -> None:
        """Raises RetryLater, naming the holder, when the lock is not free within `seconds`, and what `wait`
        raises, which is called between attempts."""
        fd = _open(self.path, shared)
        failpoint("lock.wanted", self.path)
        try:
            self._wait(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, seconds, wait)
            if text:
                _leave_text(fd, text)
            self._signed = shared and bool(text)
            failpoint("lock.taken", self.path)
        except BaseException:
            _unlock(fd)
            raise
        self._fd = fd
        _held.add(self)

    def _wait(self, fd: int, kind: int, seconds: float, wait: Wait) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                with named(self.path, "flock"):
                    return fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise RetryLater(
                        f"{self.path} is held by {holder(self.path) or 'another process'}",
                        remedy="wait for it, or stop that process",
                    ) from None
            wait(_TRY_EVERY)

    def release(self) -> None:
        if self._fd is not None:
            if self._signed:
                _leave_text(self._fd, "")
            _unlock(self._fd)
            self._fd = None
            _held.discard(self)
            failpoint("lock.released", self.path)

    def _leave_to_parent(self) -> None:
        """In a forked child, which holds nothing: closed, not unlocked."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @contextlib.contextmanager
    def holding(
        self, *, shared: bool = False, seconds: float = 0.0, wait: Wait = time.sleep
    ) -> Iterator[None]:
        self.acquire(shared=shared, seconds=seconds, wait=wait)
        try:
            yield
        finally:
            self.release()


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for lock in list(_held):
        lock._leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _unlock(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _open(path: Path, shared: bool) -> int:
    """Who may only read the checkpoint may hold it still all the same."""
    flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR, 0o644)
    except PermissionError:
        if not shared:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _leave_text(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)


def owner_text() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def holder(path: Path) -> str:
    """The text its last holder left; for messages only."""
    try:
        return read_file(path, _TEXT_LIMIT).decode(errors="replace")[:200].strip()
    except (OSError, WeightcastError):
        return ""
