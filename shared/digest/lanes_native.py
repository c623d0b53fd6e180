"""Lanes by compiled kernels. The same doors as `lanes_plain`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest.lanes import MIX_A, MIX_B, Lanes
from weightcast.shared.digest.native import I64, U64, frozen, inlined, kernel, load64, unwritable
from weightcast.shared.words import ByteArray, Words

A0, A1, A2 = (U64(value) for value in MIX_A)
B0, B1, B2 = (U64(value) for value in MIX_B)


@inlined
def _mix_a(word: Any, number: Any) -> Any:
    x = word ^ (number * A0)
    x = (x ^ (x >> U64(32))) * A1
    x = (x ^ (x >> U64(29))) * A2
    return x ^ (x >> U64(32))


@inlined
def _mix_b(word: Any, number: Any) -> Any:
    x = word + number * B0
    x = (x ^ (x >> U64(31))) * B1
    x = (x ^ (x >> U64(33))) * B2
    return x ^ (x >> U64(30))


@kernel
def _hash(data: ByteArray, first: Any) -> Any:
    a, b = U64(0), U64(0)
    whole = data.size >> 3
    for i in range(whole):
        word, number = load64(data, i << 3), U64(i) + first
        a += _mix_a(word, number)
        b += _mix_b(word, number)
    if data.size & 7:
        tail = U64(0)
        for i in range(whole << 3, data.size):
            tail |= U64(data[i]) << U64((i & 7) << 3)
        a += _mix_a(tail, U64(whole) + first)
        b += _mix_b(tail, U64(whole) + first)
    return a, b


def hash_bytes(data: ByteArray, first_word: int) -> Lanes:
    a, b = _hash(frozen(data), np.uint64(first_word + 1))
    return Lanes(int(a), int(b))


@kernel
def _touched(
    old: ByteArray, index: Any, new: Any, shift: int, ends: Any, numbers: Any, sums: Any, changed: Any
) -> None:
    """`shift`: log2 of the words per 8 bytes. `ends`, `numbers`: per span its end in the chunk and the number
    of the chunk's 8-byte word 0 in its tensor's count. `sums`: uint64[spans, 4], old a, b, new a, b."""
    span, i = 0, 0
    width = 8 >> shift
    lane_mask = ~U64(0) >> U64(64 - 8 * width)
    while i < index.size:
        while I64(index[i]) >= ends[span]:
            span += 1
        place = I64(index[i]) >> shift
        before = load64(old, place << 3)
        after = before
        while i < index.size and (I64(index[i]) >> shift) == place:
            lane = U64((I64(index[i]) & ((1 << shift) - 1)) * 8 * width)
            after = (after & ~(lane_mask << lane)) | (U64(new[i]) << lane)
            changed[span] += 1
            i += 1
        number = U64(place + numbers[span])
        sums[span, 0] += _mix_a(before, number)
        sums[span, 1] += _mix_b(before, number)
        sums[span, 2] += _mix_a(after, number)
        sums[span, 3] += _mix_b(after, number)


def touched(
    old: Words, index: NDArray[np.uint32], new: Words, ends: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    sums = np.zeros((len(ends), 4), np.uint64)
    changed = np.zeros(len(ends), np.int64)
    shift = {1: 3, 2: 2, 4: 1}[old.itemsize]
    _touched(
        frozen(old), unwritable(index), unwritable(new.astype(np.uint32)), shift, ends, numbers, sums, changed
    )
    return sums, changed
