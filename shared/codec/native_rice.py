"""Rice codes: gaps, values, magnitudes and steps, written and read. The doors are explained in `plain`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.native_ordinals import HALF, excess, exponent, facts, ordinal, word_of
from weightcast.shared.codec.rice import ESCAPE, GREATEST, LONGEST, RICE, RUNS
from weightcast.shared.digest.native import (
    I64,
    U64,
    frozen,
    inlined,
    kernel,
    load64,
    prefetch,
    store64,
    trailing_zeros,
    unwritable,
    word_at,
)
from weightcast.shared.words import ByteArray, WordKind, Words

Array32 = NDArray[np.uint32]
Plan = NDArray[np.int64]

_AHEAD = 48
_NO_VALUE = 1 << 40
"""greater than any gap, step or run may be: readers refuse what comes of it without looking for it"""


@inlined
def _code(value: Any, k: Any) -> Any:
    """Bits and their number."""
    zeros = value >> k
    if zeros < U64(ESCAPE):
        return (U64(1) << zeros) | ((value & ((U64(1) << k) - U64(1))) << (zeros + U64(1))), zeros + U64(
            1
        ) + k
    return (U64(1) << U64(ESCAPE)) | (value << U64(ESCAPE + 1)), U64(LONGEST)


@inlined
def _put(out: Any, at: Any, bits: Any, used: Any, code: Any, length: Any) -> Any:
    """`bits` holds the `used` < 8 bits that do not fill a byte yet. 8 bytes from `at` on are written."""
    bits |= code << used
    store64(out, at, bits)
    used += length
    whole = used & ~U64(7)
    return at + I64(used >> U64(3)), bits >> whole, used & U64(7)


@kernel
def _put_gaps(index: Any, k: Any, out: Any, most: Any) -> Any:
    at, bits, used = I64(0), U64(0), U64(0)
    least = U64(0)
    for i in range(index.size):
        if at > most:
            return I64(-1)
        position = U64(index[i])
        code, length = _code(position - least, k)
        least = position + U64(1)
        at, bits, used = _put(out, at, bits, used, code, length)
    return at + I64((used + U64(7)) >> U64(3))


def put_gaps(index: Array32, k: int, out: ByteArray, most: int) -> int:
    return int(_put_gaps(unwritable(index), U64(k), out, most))


@kernel
def _put_values(values: Any, k: Any, out: Any, most: Any) -> Any:
    at, bits, used = I64(0), U64(0), U64(0)
    for i in range(values.size):
        if at > most:
            return I64(-1)
        code, length = _code(U64(values[i]), k)
        at, bits, used = _put(out, at, bits, used, code, length)
    return at + I64((used + U64(7)) >> U64(3))


def put_values(values: Array32, k: int, out: ByteArray, most: int) -> int:
    return int(_put_values(unwritable(values), U64(k), out, most))


@kernel
def _put_runs(values: Any, k_run: Any, k_rest: Any, out: Any, most: Any) -> Any:
    at, bits, used = I64(0), U64(0), U64(0)
    run = U64(0)
    for i in range(values.size):
        if values[i] == 0:
            run += U64(1)
        else:
            if at > most:
                return I64(-1)
            code, length = _code(run, k_run)
            at, bits, used = _put(out, at, bits, used, code, length)
            code, length = _code(U64(values[i]) - U64(1), k_rest)
            at, bits, used = _put(out, at, bits, used, code, length)
            run = U64(0)
    code, length = _code(run, k_run)
    at, bits, used = _put(out, at, bits, used, code, length)
    return at + I64((used + U64(7)) >> U64(3))


@kernel
def _put_magnitudes(grouped: Any, ends: Any, plan: Any, out: Any, most: Any, sizes: Any) -> Any:
    at, start = I64(0), I64(0)
    for context in range(ends.size):
        values, room = grouped[start : ends[context]], out[at:]
        size = I64(0)
        if plan[context, 0] == RICE:
            size = _put_values(values, U64(plan[context, 1]), room, most - at)
        elif plan[context, 0] == RUNS:
            size = _put_runs(values, U64(plan[context, 1]), U64(plan[context, 2]), room, most - at)
        if size < 0 or at + size > most:
            return I64(-1)
        sizes[context] = size
        at, start = at + size, ends[context]
    return at


def put_magnitudes(grouped: Array32, ends: Plan, plan: Plan, out: ByteArray, most: int) -> list[int] | None:
    sizes = np.zeros(len(ends), np.int64)
    done = _put_magnitudes(unwritable(grouped), ends, plan, out, most, sizes)
    return sizes.tolist() if done >= 0 else None


@inlined
def _take(data: Any, at: Any, k: Any) -> Any:
    """The value at bit `at`, and the bit behind its code. Where no code begins: a value over GREATEST."""
    bits = load64(data, at >> 3) >> U64(at & 7)
    zeros = trailing_zeros(bits)
    if zeros < U64(ESCAPE):
        low = (bits >> (zeros + U64(1))) & ((U64(1) << k) - U64(1))
        return I64((zeros << k) | low), at + I64(zeros + U64(1) + k)
    if zeros > U64(ESCAPE):
        return I64(_NO_VALUE), at + I64(LONGEST)
    return I64((bits >> U64(ESCAPE + 1)) & U64(GREATEST)), at + I64(LONGEST)


@kernel
def _take_gaps(data: Any, start: Any, stop: Any, k: Any, index: Any) -> Any:
    at, end, least = I64(start) << 3, I64(stop) << 3, I64(0)
    for i in range(index.size):
        if at >= end:
            return I64(-1)
        gap, at = _take(data, at, k)
        index[i] = least + gap
        least += gap + 1
    return least if (at + 7) >> 3 == stop else I64(-1)


def take_gaps(data: ByteArray, start: int, stop: int, k: int, index: Array32) -> int:
    return int(_take_gaps(frozen(data), start, stop, U64(k), index))


@kernel
def _take_values(data: Any, start: Any, stop: Any, k: Any, values: Any) -> Any:
    at, end, most = I64(start) << 3, I64(stop) << 3, I64(0)
    for i in range(values.size):
        if at >= end:
            return False
        value, at = _take(data, at, k)
        values[i] = value
        most |= value
    return (at + 7) >> 3 == stop and most <= GREATEST


def take_values(data: ByteArray, start: int, stop: int, k: int, values: Array32) -> bool:
    return bool(_take_values(frozen(data), start, stop, U64(k), values))


@kernel
def _take_steps(
    data: Any, signs: Any, streams: Any, first: Any, old: Any, index: Any, kind: Any, before: Any, after: Any
) -> Any:
    """`streams`: int64[contexts, 5], coding, k, k of what ends a run, start, stop. `run`: single units left
    in the run of a context, -1 where it has none. One loop, so that loads and codes overlap."""
    contexts, last = streams.shape[0], index.size - 1
    at, end, run = streams[:, 3] << 3, streams[:, 4] << 3, np.full(contexts, -1, np.int64)
    k, k_rest = streams[:, 1].astype(np.uint64), streams[:, 2].astype(np.uint64)
    for c in range(contexts):
        if streams[c, 0] == RUNS:
            run[c], at[c] = _take(data, at[c], k[c])
    opened, first_run = at.copy(), run.copy()
    over, bits = U64(0), U64(0)
    for i in range(index.size):
        if i & 63 == 0:
            bits = load64(signs, i >> 3)
        prefetch(old, I64(index[min(i + _AHEAD, last)]), before)
        word = word_at(old, I64(index[i]), before)
        c = min(max(exponent(word, kind) - first, 0), contexts - 1)
        length = I64(1)
        if run[c] > 0:
            run[c] -= 1
        elif at[c] >= end[c]:
            return False
        elif run[c] < 0:
            value, at[c] = _take(data, at[c], k[c])
            length = value + 1
        else:
            value, behind = _take(data, at[c], k_rest[c])
            length = value + 2
            if behind >= end[c]:
                return False
            run[c], at[c] = _take(data, behind, k[c])
        negative = I64(bits & U64(1))
        bits >>= U64(1)
        moved = ordinal(word, kind) + (length ^ -negative) + negative
        over |= excess(moved, length, kind)
        before[i] = word
        after[i] = word_of(moved, kind)
    for c in range(contexts):
        unused = streams[c, 0] == RUNS and at[c] == opened[c] and first_run[c] == 0
        if run[c] > 0 or (at[c] + 7) >> 3 != streams[c, 4] or unused:
            return False
    return over < U64(2 * kind[HALF])


def take_steps(
    data: ByteArray, signs: int, streams: Plan, first: int, old: Words, index: Array32, kind: WordKind
) -> tuple[Words, Words] | None:
    before, after = np.empty(len(index), old.dtype), np.empty(len(index), old.dtype)
    payload = frozen(data)
    good = _take_steps(
        payload, payload[signs:], streams, first, frozen(old), unwritable(index), facts(kind), before, after
    )
    return (before, after) if good else None
