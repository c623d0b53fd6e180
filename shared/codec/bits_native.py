"""Rice codes, steps and groups by compiled kernels. The same doors as `bits_plain`, which explains them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.bits_plain import ESCAPE, GREATEST, LONGEST, SLACK, Array32
from weightcast.shared.digest.native import (
    I64,
    U64,
    differing64,
    frozen,
    inlined,
    kernel,
    load64,
    store64,
    trailing_zeros,
    unwritable,
)
from weightcast.shared.words import ByteArray, WordKind, Words

_BYTES_PER_CODE = LONGEST // 8


@inlined
def _ordinal(word: Any, sign_bit: int) -> Any:
    value = I64(word)
    return -1 - (value ^ sign_bit) if value & sign_bit else value


@kernel
def _split(old: Any, new: Any, sign_bit: int, half: int, magnitude: Any, negative: Any) -> None:
    for i in range(old.size):
        step = _ordinal(new[i], sign_bit) - _ordinal(old[i], sign_bit)
        if sign_bit == 0:
            step = ((step + half) & (2 * half - 1)) - half
        magnitude[i] = abs(step) - 1
        negative[i] = step < 0


def split(old: Array32, new: Array32, kind: WordKind) -> tuple[Array32, NDArray[np.bool_]]:
    magnitude, negative = np.empty(len(old), np.uint32), np.empty(len(old), np.bool_)
    _split(unwritable(old), unwritable(new), kind.sign_bit, _half(kind), magnitude, negative)
    return magnitude, negative


def _half(kind: WordKind) -> int:
    return 1 << (8 * kind.width - 1)


@kernel
def _join(old: Any, magnitude: Any, negative: Any, sign_bit: int, half: int, new: Any) -> Any:
    good = True
    for i in range(old.size):
        step = I64(magnitude[i]) + 1
        moved = _ordinal(old[i], sign_bit) + (-step if negative[i] else step)
        if sign_bit == 0:
            good &= step <= half
            new[i] = moved & (2 * half - 1)
        else:
            good &= -half <= moved < half
            new[i] = (-1 - moved) | half if moved < 0 else moved
    return good


def join(old: Array32, magnitude: Array32, negative: NDArray[np.bool_], kind: WordKind) -> Array32:
    new = np.empty(len(old), np.uint32)
    if not _join(unwritable(old), magnitude, negative, kind.sign_bit, _half(kind), new):
        raise ValueError("a step leaves the range of its word")
    return new


@kernel
def _classify(old: Any, shift: int, mask: int, table: Any, context: Any) -> None:
    for i in range(old.size):
        context[i] = table[(I64(old[i]) >> shift) & mask]


def classify(old: Words, kind: WordKind, table: ByteArray) -> ByteArray:
    context = np.empty(len(old), np.uint8)
    _classify(
        unwritable(old.astype(np.uint32)), kind.exponent_shift, kind.exponent_mask, unwritable(table), context
    )
    return context


@kernel
def _counts(context: Any) -> Any:
    """Four tallies, so that equal neighbours do not wait for each other."""
    tallies = np.zeros((4, 256), np.int64)
    for i in range(context.size):
        tallies[i & 3, context[i]] += 1
    return tallies


def counts(context: ByteArray) -> NDArray[np.int64]:
    summed: NDArray[np.int64] = _counts(unwritable(context)).sum(axis=0)
    return summed


@kernel
def _ascend(gaps: Any, index: Any) -> Any:
    at = U64(0)
    for i in range(gaps.size):
        at += U64(gaps[i])
        index[i] = at
        at += U64(1)
    return at


def ascend(gaps: Array32) -> tuple[Array32, int]:
    index = np.empty(len(gaps), np.uint32)
    return index, int(_ascend(unwritable(gaps), index))


def _places(context: ByteArray) -> NDArray[np.int64]:
    """Where the first value of each context goes."""
    many = counts(context)
    return np.cumsum(many) - many


@kernel
def _group(values: Any, context: Any, places: Any, grouped: Any) -> None:
    for i in range(values.size):
        grouped[places[context[i]]] = values[i]
        places[context[i]] += 1


def group(values: Array32, context: ByteArray) -> Array32:
    grouped = np.empty_like(values)
    _group(unwritable(values), unwritable(context), _places(context), grouped)
    return grouped


@kernel
def _ungroup(grouped: Any, context: Any, places: Any, values: Any) -> None:
    for i in range(values.size):
        values[i] = grouped[places[context[i]]]
        places[context[i]] += 1


def ungroup(grouped: Array32, context: ByteArray) -> Array32:
    values = np.empty_like(grouped)
    _ungroup(unwritable(grouped), unwritable(context), _places(context), values)
    return values


@inlined
def _put(out: Any, at: Any, value: Any, k: int) -> Any:
    """Writes a code at bit `at` and zeros after it; returns the bit behind it."""
    zeros, low, length = value >> U64(k), value & ((U64(1) << U64(k)) - U64(1)), U64(k)
    if zeros >= U64(ESCAPE):
        zeros, low, length = U64(ESCAPE), value, U64(32)
    code = (U64(1) << zeros) | (low << (zeros + U64(1)))
    shift = U64(at & 7)
    before = U64(out[at >> 3]) & ((U64(1) << shift) - U64(1))
    store64(out, at >> 3, before | (code << shift))
    return at + I64(zeros + U64(1) + length)


@kernel
def _rice(values: Any, k: int, out: ByteArray) -> Any:
    at = I64(0)
    for i in range(values.size):
        at = _put(out, at, U64(values[i]), k)
    return at


def rice(values: Array32, k: int) -> bytes:
    out = np.empty(_BYTES_PER_CODE * len(values) + SLACK, np.uint8)
    return out[: (_rice(unwritable(values), k, out) + 7) >> 3].tobytes()


@kernel
def _runs(values: Any, k_run: int, k_rest: int, out: ByteArray) -> Any:
    at, run = I64(0), U64(0)
    for i in range(values.size):
        if values[i] == 0:
            run += U64(1)
        else:
            at = _put(out, at, run, k_run)
            at = _put(out, at, U64(values[i]) - U64(1), k_rest)
            run = U64(0)
    return _put(out, at, run, k_run)


def runs(values: Array32, k_run: int, k_rest: int) -> bytes:
    codes = 2 * np.count_nonzero(values) + 1
    out = np.empty(_BYTES_PER_CODE * codes + SLACK, np.uint8)
    return out[: (_runs(unwritable(values), k_run, k_rest, out) + 7) >> 3].tobytes()


@inlined
def _take(data: ByteArray, at: Any, k: int) -> Any:
    """The value at bit `at` and the bits of its code; 0 bits where no code begins."""
    bits = load64(data, at >> 3) >> U64(at & 7)
    zeros = trailing_zeros(bits)
    value = (zeros << U64(k)) | ((bits >> (zeros + U64(1))) & ((U64(1) << U64(k)) - U64(1)))
    length = I64(zeros) + 1 + k
    if zeros >= U64(ESCAPE):
        value = (bits >> U64(ESCAPE + 1)) & U64(GREATEST)
        length = LONGEST if zeros == U64(ESCAPE) else 0
    return value, length if value <= U64(GREATEST) else 0


@kernel
def _unrice(data: ByteArray, start: int, stop: int, k: int, values: Any) -> Any:
    at, end = I64(start) << 3, I64(stop) << 3
    for i in range(values.size):
        if at >= end:
            return False
        value, length = _take(data, at, k)
        if length == 0:
            return False
        values[i] = value
        at += length
    return (at + 7) >> 3 == stop


def unrice(data: ByteArray, start: int, stop: int, k: int, count: int) -> Array32:
    values = np.empty(count, np.uint32)
    if not _unrice(frozen(data), start, stop, k, values):
        raise ValueError("a stream of values is damaged")
    return values


@kernel
def _unruns(data: ByteArray, start: int, stop: int, k_run: int, k_rest: int, values: Any) -> Any:
    """`values` comes filled with zeros."""
    at, end = I64(start) << 3, I64(stop) << 3
    filled = I64(0)
    while at < end:
        run, length = _take(data, at, k_run)
        at, filled = at + length, filled + I64(run)
        if length == 0 or filled >= values.size:
            return length != 0 and filled == values.size and (at + 7) >> 3 == stop
        if at >= end:
            return False
        rest, length = _take(data, at, k_rest)
        if length == 0 or rest == U64(GREATEST):
            return False
        values[filled] = rest + U64(1)
        at, filled = at + length, filled + 1
    return False


def unruns(data: ByteArray, start: int, stop: int, k_run: int, k_rest: int, count: int) -> Array32:
    values = np.zeros(count, np.uint32)
    if not _unruns(frozen(data), start, stop, k_run, k_rest, values):
        raise ValueError("a stream of runs is damaged")
    return values


@kernel
def _compared(old: Any, new: Any, index: Any, before: Any, after: Any) -> Any:
    count = 0
    whole = old.size & ~63
    for first in range(0, whole, 64):
        mask = differing64(old, new, first)
        while mask != U64(0):
            i = first + I64(trailing_zeros(mask))
            index[count], before[count], after[count] = i, old[i], new[i]
            count += 1
            mask &= mask - U64(1)
    for i in range(whole, old.size):
        if old[i] != new[i]:
            index[count], before[count], after[count] = i, old[i], new[i]
            count += 1
    return count


def compared(old: Words, new: Words) -> tuple[Array32, Words, Words]:
    """The scratch is touched only as far as words differ."""
    index, before, after = np.empty(len(old), np.uint32), np.empty_like(old), np.empty_like(old)
    count = _compared(unwritable(old), unwritable(new), index, before, after)
    return index[:count].copy(), before[:count].copy(), after[:count].copy()


@kernel
def _gather(words: Any, index: Any, found: Any) -> None:
    for i in range(index.size):
        found[i] = words[index[i]]


def gather(words: Words, index: Array32) -> Words:
    found = np.empty(len(index), words.dtype)
    _gather(unwritable(words), unwritable(index), found)
    return found
