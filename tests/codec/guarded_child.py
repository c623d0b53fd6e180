"""Kernels for much that changes, on arrays behind which no memory may be touched: who does is killed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from weightcast.shared.base.elements import WordKind, kind_of
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import Scratch

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


def lent_at_the_end(self: Scratch, name: str, dtype: np.dtype, count: int) -> np.ndarray:
    """In place of a thread's scratch: what kernels write lies at the end of its memory too."""
    return at_the_end(np.zeros(count, dtype))


def main() -> None:
    Scratch.lend = Scratch.take = lent_at_the_end
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
    for dtype in ("U8", "F8_E4M3", "I16", "BF16", "F32"):
        for length in (1, 63, 64, 65, 200, 4097):
            all_words(kind_of(dtype), length)
    print("done")


def all_words(kind: WordKind, length: int) -> None:
    """Every second one changes, some by more than a step byte says where words are longer."""
    plain = np.arange(length).astype(kind.numpy)
    changed = plain ^ (plain & 1)
    changed[3::14] ^= 1 << (8 * kind.width - 2)
    old, new = map(at_the_end, (plain, changed))
    steps = at_the_end(np.zeros(length, np.uint8))
    longer = kernels().step_bytes(old, new, kind, steps)
    kept = at_the_end(new[kernels().escapes(steps, longer)])
    assert np.array_equal(kernels().add_steps(old, steps, kept, kind), new)
    index = at_the_end(np.flatnonzero(old != new).astype(np.uint32))
    if len(index):
        room = -(-length // 64) * 64
        masks = kernels().masks_of(index, room)
        both = (at_the_end(np.pad(each, (0, room - length))) for each in (old, new))
        found, before, after = kernels().masked(
            *both, np.array([[0, length, 1]]), np.zeros((1, 7), np.uint64)
        )
        assert np.array_equal(found, masks)
        assert np.array_equal(before, old[index]) and np.array_equal(after, new[index])


def all_of(length: int) -> np.ndarray:
    masks = np.full((length + 63) // 64, ~np.uint64(0))
    if length & 63:
        masks[-1] = np.uint64((1 << (length & 63)) - 1)
    return masks


def first_of(length: int) -> np.ndarray:
    """One in each 64."""
    return np.ones((length + 63) // 64, np.uint64)


main()
