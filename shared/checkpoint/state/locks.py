"""Locks of a local checkpoint: flocks on files that are never deleted.

A writer holds `owner` for its life. `patch` is held exclusively while bytes change or an engine reads them,
and shared by readers that need unchanging bytes. `filelock` waits, unlocks, and drops a lock from a forked
child, which would otherwise keep it after its parent's death.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from filelock import Timeout, UnixFileLock

from weightcast.shared.base.errors import RetryLater, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.files.durable import named, read_file

ENGINE_STARTER = "run-engine"
"""of a holder's text"""

_TRY_EVERY = 0.02
_TEXT_LIMIT = 4096
Wait = Callable[[float], None]


class _SharedLock(UnixFileLock):
    """Needs no more than read access to an existing file."""

    def _acquire(self) -> None:
        fd = _open(self._lock_path)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._context.lock_file_fd = fd
        except BlockingIOError:
            os.close(fd)
        except BaseException:
            self._context.lock_file_fd = None
            os.close(fd)
            raise


def _open(path: str) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_CREAT | os.O_RDWR, 0o644)
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)


class EngineLoads(RetryLater):
    """The patch lock is held until an engine, started by `run-engine`, has read its weights."""


class FileLock:
    """One flock. Not reentrant. Any thread may release it; a forked child does not hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: UnixFileLock | None = None
        self._fd = -1
        """of the lock file while the lock is held; it belongs to `_lock`"""
        self._clears_text = False
        """a shared holder's text must not remain for the next holder"""

    @property
    def held(self) -> bool:
        return self._lock is not None and self._lock.is_locked

    @property
    def in_place(self) -> bool:
        """Whether the lock is held on the file that others would lock too."""
        try:
            return self.held and os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def acquire(
        self, *, shared: bool = False, seconds: float = 0.0, text: str = "", wait: Wait = time.sleep
    ) -> None:
        """Leaves `text` in the file for messages. `wait` is called between attempts and may raise.

        Raises RetryLater, naming the holder, when the lock is not free within `seconds`; OSError where the
        file system has no locks."""
        if self.held:
            raise self.refusal()
        os.stat(self.path.parent)  # filelock would create a missing directory

        def paused() -> bool:
            wait(_TRY_EVERY)
            return False

        lock = (_SharedLock if shared else UnixFileLock)(
            self.path,
            mode=0o644,
            thread_local=False,
            fallback_to_soft=False,
            on_acquired=partial(self._taken, text),
        )
        failpoint("lock.wanted", self.path)
        try:
            with named(self.path, "flock"):
                lock.acquire(seconds, 0.0, blocking=seconds > 0, cancel_check=paused)
        except Timeout:
            raise self.refusal() from None
        self._lock, self._clears_text = lock, shared and bool(text)

    def _taken(self, text: str, fd: int) -> None:
        self._fd = fd
        if text:
            _write_text(fd, text)
        failpoint("lock.taken", self.path)

    def duplicate(self) -> int:
        """A descriptor that holds the lock too, also in a forked child."""
        return os.dup(self._fd)

    def refusal(self) -> RetryLater:
        """Why it cannot be taken now."""
        if holder(self.path).startswith(ENGINE_STARTER):
            text = f"an engine is loading the local checkpoint ({holder(self.path)})"
            return EngineLoads(text, remedy="wait: versions come once it has loaded")
        return RetryLater(
            f"{self.path} is held by {holder(self.path) or 'another process'}",
            remedy="wait for it, or stop that process",
        )

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None and lock.is_locked:
            if self._clears_text:
                _write_text(self._fd, "")
            with contextlib.suppress(OSError):
                lock.release()
            failpoint("lock.released", self.path)

    @contextlib.contextmanager
    def holding(
        self, *, shared: bool = False, seconds: float = 0.0, wait: Wait = time.sleep
    ) -> Iterator[None]:
        self.acquire(shared=shared, seconds=seconds, wait=wait)
        try:
            yield
        finally:
            self.release()


def _write_text(fd: int, text: str) -> None:
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
