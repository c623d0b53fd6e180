"""Advice to the kernel about pages of files."""

from __future__ import annotations

import ctypes
import mmap
import resource
from typing import Any

from numpy.typing import NDArray

_DONTNEED = 4
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14; refused by older kernels, which does no harm"""
_LEAST = 1 << 18
"""bytes; below, faults cost no more than the call"""
_FEW = 8
"""pages that are tried first"""

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of sync_file_range(2)"""
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def begin_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Pages of a file that is still being written go to the disk meanwhile: the fsync at its end has less to
    wait for. Where the system cannot, the fsync writes all."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, _WRITE)


def populate(mapped: NDArray[Any]) -> None:
    """Makes the pages under a view of a writable mapping present at once. On tmpfs a fault per 4 KiB page
    costs more than decoding and patching what lies in it. Pages become dirty: not for files that are written
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
        nbytes, before = address + mapped.nbytes - begin, _faults()
        if _madvise(begin, min(nbytes, _FEW * mmap.PAGESIZE), _POPULATE_WRITE) or _faults() > before:
            _madvise(begin, nbytes, _DONTNEED)
        populate(mapped)


def _faults() -> int:
    """Of this thread, until now."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
