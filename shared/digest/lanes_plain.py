"""Lanes by numpy, for where numba is missing or cannot compile. The same doors as `lanes_native`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest.lanes import MIX_A, MIX_B, ZERO, Lanes, LanesArray
from weightcast.shared.words import ByteArray, Words

Array64 = NDArray[np.uint64]

BLOCK = 1 << 17
"""bytes hashed at once; a multiple of 8"""


def _rounds(x: Array64, shifts: tuple[int, int, int], factors: tuple[int, int, int]) -> Array64:
    x = (x ^ (x >> np.uint64(shifts[0]))) * np.uint64(factors[1])
    x = (x ^ (x >> np.uint64(shifts[1]))) * np.uint64(factors[2])
    return x ^ (x >> np.uint64(shifts[2]))


def mix_a(words: Array64, numbers: Array64) -> Array64:
    return _rounds(words ^ (numbers * np.uint64(MIX_A[0])), (32, 29, 32), MIX_A)


def mix_b(words: Array64, numbers: Array64) -> Array64:
    return _rounds(words + numbers * np.uint64(MIX_B[0]), (31, 33, 30), MIX_B)


def _block(data: ByteArray, first_number: int) -> Lanes:
    words = np.zeros(-(-len(data) // 8), "<u8")
    words.view(np.uint8)[: len(data)] = data
    numbers = np.arange(len(words), dtype=np.uint64) + np.uint64(first_number)
    return Lanes(int(mix_a(words, numbers).sum()), int(mix_b(words, numbers).sum()))


def hash_bytes(data: ByteArray, first_word: int) -> Lanes:
    lanes = ZERO
    for start in range(0, len(data), BLOCK):
        lanes = lanes.plus(_block(data[start : start + BLOCK], first_word + start // 8 + 1))
    return lanes


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    lanes = [hash_bytes(data[start:stop], first) for start, stop, first in pieces.tolist()]
    return np.array(lanes, np.uint64).reshape(-1, 2)


def touched(
    old: Words, index: NDArray[np.uint32], new: Words, ends: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[Array64, NDArray[np.int64]]:
    """Sums over the touched 8-byte words, uint64[spans, 4] (old a, b, new a, b), and changed words,
    int64[spans]. `index`: positions in the chunk, ascending. `ends`, `numbers`: per span its end in the chunk
    and the number of the chunk's 8-byte word 0 in its tensor's count."""
    per_word = 8 // old.itemsize
    place = index // per_word
    starts = np.flatnonzero(np.diff(place, prepend=np.int64(-1)))
    bits = (index % per_word).astype(np.uint64) * np.uint64(8 * old.itemsize)
    flips = (old[index] ^ new).astype(np.uint64) << bits
    before = old.view("<u8")[place[starts]]
    after: Array64 = np.bitwise_xor(before, np.bitwise_or.reduceat(flips, starts))
    span = np.searchsorted(ends, index[starts], side="right")
    counted = (place[starts] + numbers[span]).astype(np.uint64)
    sums = np.zeros((len(ends), 4), np.uint64)
    mixed = [mix(words, counted) for words in (before, after) for mix in (mix_a, mix_b)]
    firsts = np.flatnonzero(np.diff(span, prepend=-1))
    sums[span[firsts]] = np.stack([np.add.reduceat(lane, firsts) for lane in mixed], axis=1)
    every = np.searchsorted(ends, index, side="right")
    return sums, np.bincount(every, minlength=len(ends)).astype(np.int64)
