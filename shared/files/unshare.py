"""Blocks that a file shares with a copy (a reflink): on a full disk a store to one through a mapping is a
signal and no error. Asked for beforehand, the lack of room is an error."""

from __future__ import annotations

import ctypes
import errno
import os

_UNSHARE_RANGE = 0x40
_NOT_HERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def unshare_blocks(fd: int, size: int) -> None:
    """Gives the file blocks of its own (fallocate(2), FALLOC_FL_UNSHARE_RANGE; XFS). Where a file system
    cannot do that nothing happens. Raises OSError when there is no room."""
    while size and _fallocate(fd, _UNSHARE_RANGE, 0, size) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _NOT_HERE:
            return
        raise OSError(code, os.strerror(code))
