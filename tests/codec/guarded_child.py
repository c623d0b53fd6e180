"""Exchanges words under masks in arrays behind which no memory may be touched: who does is killed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from weightcast.shared.codec.kernels import kernels

_KEPT = []


def at_the_end(words: np.ndarray) -> np.ndarray:
    """A copy whose end is that of a page, the next one locked."""
    size = -(-words.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    _KEPT.append(pages)
    room = np.frombuffer(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(room.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = room[size - words.nbytes : size].view(words.dtype)
    copy[:] = words
    return copy


def main() -> None:
    for width in ("<u1", "<u2", "<u4"):
        for length in (1, 63, 64, 65, 200, 1000):
            for masks in (all_of(length), first_of(length)):
                count = int(np.bitwise_count(masks).sum())
                words, old, new = (
                    at_the_end(np.full(size, value, width))
                    for size, value in ((length, 3), (count, 3), (count, 4))
                )
                given = at_the_end(masks)
                assert kernels().exchange_masked(words, 0, length, given, old, new, again=False) is None
                assert int((words == 4).sum()) == count
    print("done")


def all_of(length: int) -> np.ndarray:
    masks = np.full((length + 63) // 64, ~np.uint64(0))
    if length & 63:
        masks[-1] = np.uint64((1 << (length & 63)) - 1)
    return masks


def first_of(length: int) -> np.ndarray:
    """One in each 64."""
    return np.ones((length + 63) // 64, np.uint64)


main()
