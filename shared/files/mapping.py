"""Mapping files that another process may write, without SIGBUS.

Touching a page behind the end of a truncated file kills the process. A Linux read lease excludes that: while
we hold it, nobody else can open the file for writing or truncate it; who tries waits until the lease is given
back, at most /proc/sys/fs/lease-break-time seconds. Where no lease is to be had (another user's file, a
network file system, a writer that is already there) the file is read instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
import time
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.files.durable import named, open_regular, read_at

_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_MARGIN = 15.0
"""seconds: a view that is handed out is used for less"""


def _lease_seconds() -> float:
    """For how long after it was taken a lease surely protects; 0: not long enough to be of use."""
    try:
        return max(0.0, float(_BREAK_TIME.read_text()) - _MARGIN)
    except (OSError, ValueError):
        return 0.0


def is_open_elsewhere(path: Path) -> bool:
    """Whether anybody has the file open or mapped, this process included: a write lease is given only where
    nobody has. True also where no lease is to be had."""
    fd = open_regular(path)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(fd)  # the lease ends with it
    return False


class LeasedFile:
    """A regular file of somebody else's, open for reading. Views come from any thread."""

    def __init__(self, path: Path, *, follow_links: bool) -> None:
        self.path = path
        self._fd = open_regular(path, follow_links=follow_links)
        self._size = os.fstat(self._fd).st_size
        self._seconds = _lease_seconds()
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._taken = -self._seconds
        self._refused = self._seconds == 0 or self._size == 0

    def close(self) -> None:
        if self._map is not None:
            # a view that is still in use keeps the map
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def view(self, offset: int, nbytes: int) -> ByteArray:
        """Bytes [offset, offset + nbytes), not to be kept for longer than a few seconds. Raises RetryLater
        when the file has become shorter than that."""
        with self._lock:
            if not self._refused and time.monotonic() - self._taken > self._seconds:
                self._renew()
            mapped = None if self._refused else self._map
        if mapped is None or offset + nbytes > len(mapped):
            return self._read(offset, nbytes)
        return np.frombuffer(mapped, np.uint8, nbytes, offset)

    def _renew(self) -> None:
        self._taken = time.monotonic()
        try:
            if self._map is not None:
                fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            # a writer that waits for us sends a signal that nobody need handle
            fcntl.fcntl(self._fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self._refused = os.fstat(self._fd).st_size != self._size
            if self._map is None:
                self._map = mmap.mmap(self._fd, self._size, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            self._refused = True

    def _read(self, offset: int, nbytes: int) -> ByteArray:
        data = np.empty(nbytes, np.uint8)
        with named(self.path):
            got = read_at(self._fd, data.data, offset)
        if got < nbytes:
            raise RetryLater(
                f"{self.path} was cut short while it was read", remedy="stop whatever writes it, and retry"
            )
        return data


_DONTNEED = 4
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14; refused by older kernels, which does no harm"""
_LEAST = 1 << 18
"""bytes; below, faults cost no more than the call"""
_FEW = 8
"""pages that are tried first"""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(mapped: NDArray[Any]) -> None:
    """Makes the pages under a view of a writable mapping present at once. On tmpfs a fault per 4 KiB page
    costs more than decoding and patching its words. Pages become dirty: not for files that are written
    back. Without the GIL, so that threads do it side by side."""
    if mapped.nbytes >= _LEAST:
        address = mapped.ctypes.data
        begin = address & ~(mmap.PAGESIZE - 1)
        _madvise(begin, address + mapped.nbytes - begin, _POPULATE_WRITE)


def ready_to_write(mapped: NDArray[Any]) -> None:
    """As `populate`, for a view whose pages will nearly all be written. Pages of a file that were written
    back or only read are protected, and each would cost a fault of its own; those that are not mapped at all
    come back many at once. The first few tell whether this is so. Bytes stay as they are: for shared mappings
    only."""
    if mapped.nbytes >= _LEAST:
        address = mapped.ctypes.data
        begin = address & ~(mmap.PAGESIZE - 1)
        nbytes, faults = address + mapped.nbytes - begin, getrusage(RUSAGE_THREAD).ru_minflt
        failed = _madvise(begin, min(nbytes, _FEW * mmap.PAGESIZE), _POPULATE_WRITE)
        if failed or getrusage(RUSAGE_THREAD).ru_minflt > faults:
            _madvise(begin, nbytes, _DONTNEED)
        populate(mapped)


_UNSHARE_RANGE = 0x40
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def unshare_blocks(fd: int, size: int) -> None:
    """Gives the file blocks of its own (fallocate(2), FALLOC_FL_UNSHARE_RANGE; XFS). Where a file system
    cannot do that nothing happens. Raises OSError when the disk is full."""
    while size and _fallocate(fd, _UNSHARE_RANGE, 0, size) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _NOT_HERE:
            return
        raise OSError(code, os.strerror(code))
