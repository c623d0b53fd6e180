"""Two locks of a local checkpoint, both flock on files that are never deleted.

`owner` is held by a writer for its life. `patch` is held exclusively while bytes change or an engine reads
them, shared by readers that need them to stand still.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from weightcast.shared.errors import RetryLater, WeightcastError
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.durable import read_file

_TRY_EVERY = 0.02
_TEXT_LIMIT = 4096


class FileLock:
    """One flock. Not reentrant; taken and released by the same object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

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

    def acquire(self, *, shared: bool = False, seconds: float = 0.0, text: str = "") -> None:
        """Raises RetryLater, naming the holder, when the lock is not free within `seconds`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path, flags, 0o644)
        failpoint("lock.wanted", self.path)
        try:
            self._wait(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, seconds)
            if text:
                os.ftruncate(fd, 0)
                os.pwrite(fd, text.encode(), 0)
            failpoint("lock.taken", self.path)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _wait(self, fd: int, kind: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise RetryLater(
                        f"{self.path} is held by {holder(self.path) or 'another process'}",
                        remedy="wait for it, or stop that process",
                    ) from None
            time.sleep(_TRY_EVERY)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            failpoint("lock.released", self.path)

    @contextlib.contextmanager
    def holding(self, *, shared: bool = False, seconds: float = 0.0) -> Iterator[None]:
        self.acquire(shared=shared, seconds=seconds)
        try:
            yield
        finally:
            self.release()


def owner_text() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def holder(path: Path) -> str:
    """The text its last holder left; for messages only."""
    try:
        return read_file(path, _TEXT_LIMIT).decode(errors="replace")[:200].strip()
    except (OSError, WeightcastError):
        return ""
