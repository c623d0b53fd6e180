"""Lanes by compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, Words
from weightcast.shared.digest.native import I64, SHIFTS, U64, frozen, inlined, kernel, unwritable
from weightcast.shared.digest.native_mix import (
    A0,
    B0,
    SUMS,
    closed,
    mix64,
    mixed_tail,
    opened,
    rounds_a,
    rounds_b,
)
from weightcast.shared.digest.native_ops import load64, on_stack, prefetch, prefetch64

_BATCH = 1024
"""8-byte words that are collected before they are mixed together: mixing many at once is what is quick"""
_AHEAD = 32
_AHEAD_BYTES = 2048


@kernel
def _hash(data: ByteArray, pieces: Any, lanes: Any) -> None:
    """`pieces`: rows of first byte, byte behind the last, first 8-byte word. `lanes`: uint64[n, 2]."""
    sums = on_stack(SUMS, U64(0))
    for row in range(pieces.shape[0]):
        start, stop, number = pieces[row, 0], pieces[row, 1], U64(pieces[row, 2] + 1)
        opened(sums, number)
        whole = (stop - start) & ~63
        for place in range(start, start + whole, 64):
            prefetch64(data, place + _AHEAD_BYTES, data)
            mix64(data, place, data, sums)
        a, b = closed(sums, 0)
        tail_a, tail_b = mixed_tail(data, start + whole, stop, number + U64(whole >> 3))
        lanes[row, 0], lanes[row, 1] = a + tail_a, b + tail_b


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> NDArray[np.uint64]:
    lanes = np.empty((len(pieces), 2), np.uint64)
    _hash(frozen(data), unwritable(np.ascontiguousarray(pieces)), lanes)
    return lanes


@inlined
def _add(words: Any, places: Any, count: Any, first: Any, sums: Any, span: Any, column: Any) -> None:
    a, b = U64(0), U64(0)
    for i in range(count):
        a += rounds_a(words[i] ^ ((places[i] + first) * A0))
    for i in range(count):
        b += rounds_b(words[i] + (places[i] + first) * B0)
    sums[span, column] += a
    sums[span, column + 1] += b


@kernel
def _touched(
    old: ByteArray, index: Any, new: Any, shift: int, ends: Any, numbers: Any, sums: Any, changed: Any
) -> None:
    """`shift`: log2 of the words per 8 bytes. `ends`, `numbers`: per span its end in the chunk and the number
    of the chunk's 8-byte word 0 in its tensor's count. `sums`: uint64[spans, 4], old a, b, new a, b."""
    before, after, places = on_stack(_BATCH, U64(0)), on_stack(_BATCH, U64(0)), on_stack(_BATCH, U64(0))
    bits, last = U64(64 >> shift), index.size - 1
    kept = ~(~U64(0) >> (U64(64) - bits))
    in_word = (I64(1) << shift) - 1
    i = 0
    for span in range(ends.size):
        begin, count, open_place = i, 0, I64(-1)
        while i < index.size and I64(index[i]) < ends[span]:
            prefetch(old, I64(index[min(i + _AHEAD, last)]) >> shift, places)
            place = I64(index[i]) >> shift
            if place != open_place:
                if count == _BATCH:
                    _add(before, places, count, U64(numbers[span]), sums, span, 0)
                    _add(after, places, count, U64(numbers[span]), sums, span, 2)
                    count = 0
                before[count] = after[count] = load64(old, place << 3)
                places[count] = U64(place)
                count, open_place = count + 1, place
            lane = U64(I64(index[i]) & in_word) * bits
            others = (kept << lane) | ~(~U64(0) << lane)
            after[count - 1] = (after[count - 1] & others) | (U64(new[i]) << lane)
            i += 1
        _add(before, places, count, U64(numbers[span]), sums, span, 0)
        _add(after, places, count, U64(numbers[span]), sums, span, 2)
        changed[span] = i - begin


def touched(
    old: Words, index: NDArray[np.uint32], new: Words, ends: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    sums = np.zeros((len(ends), 4), np.uint64)
    changed = np.zeros(len(ends), np.int64)
    shift = SHIFTS[old.itemsize]
    _touched(
        frozen(old), unwritable(index), unwritable(new.astype(np.uint32)), shift, ends, numbers, sums, changed
    )
    return sums, changed
