"""Rice codes, steps and groups by numpy, for where numba is missing. The same doors as `bits_native`.

A Rice code with parameter k of a value below 2**32, least significant bit first: value >> k zeros, a one,
the low k bits. From ESCAPE zeros on: ESCAPE zeros, a one, the value in 32 bits. No code is longer than 56
bits, so one 8-byte load at any bit holds it whole. Streams end at a byte border, filled with zeros.

Damaged streams raise ValueError.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.words import ByteArray, WordKind, Words

Array32 = NDArray[np.uint32]

ESCAPE = 23
LONGEST = ESCAPE + 1 + 32
"""bits of an escaped code"""
SLACK = 8
"""bytes that must follow the last stream in its buffer"""
GREATEST = (1 << 32) - 1


def split(old: Array32, new: Array32, kind: WordKind) -> tuple[Array32, NDArray[np.bool_]]:
    """Steps from `old` to `new` as |step| - 1 and step < 0."""
    steps = _ordinals(new, kind) - _ordinals(old, kind)
    if not kind.sign_bit:
        half = 1 << (8 * kind.width - 1)
        steps = (steps + half) % (2 * half) - half
    return (np.abs(steps) - 1).astype(np.uint32), steps < 0


def join(old: Array32, magnitude: Array32, negative: NDArray[np.bool_], kind: WordKind) -> Array32:
    """New words. Raises ValueError for a step that leaves the words of the kind."""
    half = 1 << (8 * kind.width - 1)
    steps = magnitude.astype(np.int64) + 1
    if not kind.sign_bit and (steps > half).any():
        raise ValueError("a step is longer than its word")
    moved = _ordinals(old, kind) + np.where(negative, -steps, steps)
    if not kind.sign_bit:
        return (moved % (2 * half)).astype(np.uint32)
    if ((moved < -half) | (moved >= half)).any():
        raise ValueError("a step leaves the range of its word")
    return np.where(moved < 0, (-1 - moved) | half, moved).astype(np.uint32)


def _ordinals(words: Array32, kind: WordKind) -> NDArray[np.int64]:
    wide = words.astype(np.int64)
    return np.where(wide & kind.sign_bit, -1 - (wide ^ kind.sign_bit), wide)


def classify(old: Words, kind: WordKind, table: ByteArray) -> ByteArray:
    """`table` (256 long) of the exponents."""
    context: ByteArray = table[(old >> kind.exponent_shift) & kind.exponent_mask]
    return context


def counts(context: ByteArray) -> NDArray[np.int64]:
    """How often each of 256 values occurs."""
    return np.bincount(context, minlength=256).astype(np.int64)


def ascend(gaps: Array32) -> tuple[Array32, int]:
    """Positions after gaps, modulo 2**32, and where the next one could be at the earliest, exactly."""
    ends = np.cumsum(gaps, dtype=np.uint64) + np.arange(1, len(gaps) + 1, dtype=np.uint64)
    return (ends - np.uint64(1)).astype(np.uint32), int(ends[-1]) if len(ends) else 0


def gather(words: Words, index: Array32) -> Words:
    return words[index]


def compared(old: Words, new: Words) -> tuple[Array32, Words, Words]:
    """Positions where two arrays differ, and the words there."""
    index = np.flatnonzero(old != new).astype(np.uint32)
    return index, old[index], new[index]


def group(values: Array32, context: ByteArray) -> Array32:
    """`values` by ascending context, in their order within each."""
    return values[np.argsort(context, kind="stable")]


def ungroup(grouped: Array32, context: ByteArray) -> Array32:
    values = np.empty_like(grouped)
    values[np.argsort(context, kind="stable")] = grouped
    return values


def rice(values: Array32, k: int) -> bytes:
    return _coded(values, np.full(len(values), k, np.uint64))


def _coded(values: Array32, k: NDArray[np.uint64]) -> bytes:
    """`values` with a parameter of its own for each."""
    wide, one = values.astype(np.uint64), np.uint64(1)
    zeros = wide >> k
    escaped = zeros >= ESCAPE
    zeros[escaped] = ESCAPE
    low = np.where(escaped, wide, wide & ((one << k) - one))
    codes = (one << zeros) | (low << (zeros + one))
    return _packed(codes, np.where(escaped, LONGEST, (zeros + one + k).astype(np.int64)))


def _packed(codes: NDArray[np.uint64], lengths: NDArray[np.int64]) -> bytes:
    ends = np.cumsum(lengths)
    bits = int(ends[-1]) if len(ends) else 0
    places = ends - lengths
    word, shift = places >> 6, (places & 63).astype(np.uint64)
    packed = np.zeros((bits >> 6) + 2, "<u8")
    np.bitwise_or.at(packed, word, codes << shift)
    np.bitwise_or.at(packed, word + 1, (codes >> np.uint64(1)) >> (np.uint64(63) - shift))
    return packed.tobytes()[: (bits + 7) >> 3]


def unrice(data: ByteArray, start: int, stop: int, k: int, count: int) -> Array32:
    """The `count` values whose codes fill bytes [start, stop) of `data`; SLACK bytes follow them."""
    stream = _Stream(data, start, stop)
    values = np.empty(count, np.uint32)
    for i in range(count):
        values[i] = stream.take(k)
    stream.finish()
    return values


def runs(values: Array32, k_run: int, k_rest: int) -> bytes:
    """For values that are mostly 0: the length of a run of zeros, then alternately the value - 1 that ends it
    and the length of the next; the last run has no such value."""
    ends = np.flatnonzero(values)
    lengths = np.diff(ends, prepend=-1, append=len(values)) - 1
    alternating = np.zeros(2 * len(ends) + 1, np.uint32)
    alternating[0::2] = lengths
    alternating[1::2] = values[ends] - np.uint32(1)
    k = np.full(len(alternating), k_run, np.uint64)
    k[1::2] = k_rest
    return _coded(alternating, k)


def unruns(data: ByteArray, start: int, stop: int, k_run: int, k_rest: int, count: int) -> Array32:
    stream = _Stream(data, start, stop)
    values = np.zeros(count, np.uint32)
    filled = stream.take(k_run)
    while filled < count:
        rest = stream.take(k_rest)
        if rest == GREATEST:
            raise ValueError("a magnitude is too great")
        values[filled] = rest + 1
        filled += 1 + stream.take(k_run)
    if filled > count:
        raise ValueError("a run is longer than what it counts")
    stream.finish()
    return values


class _Stream:
    """Rice codes from bytes [start, stop), one after the other."""

    def __init__(self, data: ByteArray, start: int, stop: int) -> None:
        self._data = data[: stop + SLACK].tobytes()
        self._at, self._stop = 8 * start, stop

    def take(self, k: int) -> int:
        at = self._at
        if at >= 8 * self._stop:
            raise ValueError("a stream ends early")
        bits = int.from_bytes(self._data[at >> 3 : (at >> 3) + 8], "little") >> (at & 7)
        zeros = (bits & -bits).bit_length() - 1
        if not 0 <= zeros <= ESCAPE:
            raise ValueError("a stream holds no code where one must begin")
        if zeros == ESCAPE:
            self._at = at + LONGEST
            return bits >> (ESCAPE + 1) & GREATEST
        self._at = at + zeros + 1 + k
        value = zeros << k | bits >> (zeros + 1) & ((1 << k) - 1)
        if value > GREATEST:
            raise ValueError("a value is too great")
        return value

    def finish(self) -> None:
        if (self._at + 7) >> 3 != self._stop:
            raise ValueError("a stream is longer than its values")
