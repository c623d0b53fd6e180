"""Rice codes read and written: values, positions, magnitudes."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.kernels import constants
from weightcast.shared.kernels.compiler import I64, U64, frozen, inlined, kernel, rule
from weightcast.shared.kernels.constants import (
    CODING,
    COUNT,
    ESCAPE,
    EXPONENTS,
    GREATEST,
    K_REST,
    LONGEST,
    RICE,
    RUNS,
    Array32,
    Counts,
    K,
    Table,
)
from weightcast.shared.kernels.vectors import load64, on_stack, reaching64, store64, trailing_zeros

_NO_VALUE = 1 << 40
"""greater than any gap, step or run: every reader rejects the position or step that results"""
_WHOLE_BITS = 57
"""bits that are there for certain after a load of 8 bytes from the byte that holds the first"""


@inlined
def take(data, at, k):
    """The value at bit `at`, and the end of its code. Without a valid code: a value over GREATEST."""
    bits = load64(data, at >> 3) >> U64(at & 7)
    zeros = trailing_zeros(bits)
    if zeros < U64(ESCAPE):
        low = (bits >> (zeros + U64(1))) & ((U64(1) << k) - U64(1))
        return I64((zeros << k) | low), at + I64(zeros + U64(1) + k)
    if zeros > U64(ESCAPE):
        return I64(_NO_VALUE), at + I64(LONGEST)
    return I64((bits >> U64(ESCAPE + 1)) & U64(GREATEST)), at + I64(LONGEST)


@kernel
def take_codes(data, at, end, k, placing, values):
    """As many values as `values` holds, from bit `at` on. Four codes of a load at once where they are whole
    and none is escaped. Bits after `end` may be read as codes; the caller compares the end of the
    stream. `placing`: all bits set where values are gaps and positions are wanted, else 0. Returns the
    end of the last code, -1 for damage, and the least position that may follow."""
    most, least, count, i = U64(0), U64(0), U64(values.size), U64(0)
    mask, tail = (U64(1) << k) - U64(1), k + U64(1)
    while i < count:
        if at >= end:
            return I64(-1), I64(0)
        bits = load64(data, at >> 3) >> U64(at & 7)
        zeros0 = trailing_zeros(bits)
        bits1 = (bits >> tail) >> (zeros0 & U64(63))
        zeros1 = trailing_zeros(bits1)
        bits2 = (bits1 >> tail) >> (zeros1 & U64(63))
        zeros2 = trailing_zeros(bits2)
        bits3 = (bits2 >> tail) >> (zeros2 & U64(63))
        zeros3 = trailing_zeros(bits3)
        used = zeros0 + zeros1 + zeros2 + zeros3 + (tail << U64(2))
        longest = max(zeros0, zeros1, zeros2, zeros3)
        if used <= U64(_WHOLE_BITS) and longest < U64(ESCAPE) and i + U64(4) <= count:
            values[i] = least = least + ((zeros0 << k) | ((bits >> (zeros0 + U64(1))) & mask))
            least = (least + U64(1)) & placing
            values[i + U64(1)] = least = least + ((zeros1 << k) | ((bits1 >> (zeros1 + U64(1))) & mask))
            least = (least + U64(1)) & placing
            values[i + U64(2)] = least = least + ((zeros2 << k) | ((bits2 >> (zeros2 + U64(1))) & mask))
            least = (least + U64(1)) & placing
            values[i + U64(3)] = least = least + ((zeros3 << k) | ((bits3 >> (zeros3 + U64(1))) & mask))
            at, i = at + I64(used), i + U64(4)
        else:
            value, at = take(data, at, k)
            values[i] = least = least + U64(value)
            most |= U64(value)
            i += U64(1)
        least = (least + U64(1)) & placing
    return (at if most <= U64(GREATEST) else I64(-1)), I64(least)


def take_values(data: ByteArray, start: int, stop: int, k: int, values: Array32) -> bool:
    behind, _ = take_codes(frozen(data), start << 3, stop << 3, U64(k), U64(0), values)
    return bool(behind >= 0 and (behind + 7) >> 3 == stop)


@kernel
def _spread(index, borders, shifts):
    """Positions get the padding before their spans, in place. `borders`: where spans begin without padding,
    then a position that is never reached."""
    first = 0
    for span in range(shifts.size):
        low, high = first, index.size
        while low < high:
            middle = (low + high) >> 1
            if I64(index[middle]) < borders[span + 1]:
                low = middle + 1
            else:
                high = middle
        for i in range(U64(first), U64(low)):
            index[i] += shifts[span]
        first = low


@kernel
def read_gaps(data, start, stop, k, borders, shifts, index):
    """Positions from gaps, with padding added. Returns the position after the last one without padding, -1
    for damage."""
    behind, least = take_codes(data, start << 3, stop << 3, k, ~U64(0), index)
    if behind < 0 or (behind + 7) >> 3 != stop:
        return I64(-1)
    if shifts.size > 1 or shifts[0] != 0:
        _spread(index, borders, shifts)
    return least


def take_gaps(
    data: ByteArray, start: int, stop: int, k: int, borders: Counts, shifts: Counts, index: Array32
) -> int:
    """Positions, with padding, whose gaps fill bytes [start, stop). `shifts`: the padding before each span;
    `borders`: where those begin without padding, then a position that is never reached. Returns the position
    after the last one without padding, -1 for damage."""
    return int(read_gaps(frozen(data), start, stop, U64(k), borders, shifts, index))


_ALL = U64((1 << 64) - 1)


@inlined
def _code(value, k):
    """Bits and their number."""
    zeros = value >> k
    if zeros < U64(ESCAPE):
        low = value & ((U64(1) << k) - U64(1))
        return (low + low + U64(1)) << zeros, zeros + k + U64(1)
    return (value + value + U64(1)) << U64(ESCAPE), U64(LONGEST)


@inlined
def _put(out, at, bits, used, code, length):
    """`bits` holds the `used` < 8 bits that do not fill a byte yet. 8 bytes from `at` on are written."""
    bits |= code << used
    store64(out, at, bits)
    used += length
    whole = used & ~U64(7)
    return at + I64(used >> U64(3)), bits >> whole, used & U64(7)


@kernel
def write_gaps(index, k, out, most):
    """Bytes written, -1 if over `most`; slightly longer output may be reported as its size instead."""
    codes, lengths = on_stack(_BLOCK, U64(0)), on_stack(_BLOCK, U64(0))
    at, bits, used = I64(0), U64(0), U64(0)
    least, i, count = U64(0), U64(0), U64(index.size)
    while i < count:
        if at > most:
            return I64(-1)
        if i > U64(0) and i + U64(_BLOCK) <= count and _code_block(index, i, k, codes, lengths):
            at, bits, used = _put_block(codes, lengths, out, at, most, bits, used)
            i += U64(_BLOCK)
        else:
            code, length = _code(U64(index[i]) - least, k)
            at, bits, used = _put(out, at, bits, used, code, length)
            i += U64(1)
        least = U64(index[i - U64(1)]) + U64(1)
    return at + I64((used + U64(7)) >> U64(3))


_BLOCK = 32
"""codes computed in vectors before they are joined"""
_AT_ONCE = 56
"""bits that fit after an incomplete byte"""


@kernel
def _code_block(index, first, k, codes, lengths):
    """Of the gaps before _BLOCK positions from `first` on. False where one of them must be escaped."""
    most, mask = U64(0), (U64(1) << k) - U64(1)
    for j in range(U64(_BLOCK)):
        gap = U64(index[first + j]) - U64(index[first + j - U64(1)]) - U64(1)
        zeros, low = gap >> k, gap & mask
        codes[j], lengths[j] = (low + low + U64(1)) << (zeros & U64(63)), zeros + k + U64(1)
        most = max(most, zeros)
    return most < U64(ESCAPE)


@kernel
def _put_block(codes, lengths, out, at, most, bits, used):
    """Four at once where they are short: each put waits for the one before."""
    for j in range(U64(0), U64(_BLOCK), U64(4)):
        if at > most:
            break
        low, lows = codes[j] | (codes[j + U64(1)] << lengths[j]), lengths[j] + lengths[j + U64(1)]
        high = codes[j + U64(2)] | (codes[j + U64(3)] << lengths[j + U64(2)])
        length = lows + lengths[j + U64(2)] + lengths[j + U64(3)]
        if length <= U64(_AT_ONCE):
            at, bits, used = _put(out, at, bits, used, low | (high << lows), length)
        else:
            for each in range(j, j + U64(4)):
                if at > most:
                    break
                at, bits, used = _put(out, at, bits, used, codes[each], lengths[each])
    return at, bits, used


@kernel
def _put_values(values, k, out, most):
    at, bits, used = I64(0), U64(0), U64(0)
    for i in range(values.size):
        if at > most:
            return I64(-1)
        code, length = _code(U64(values[i]), k)
        at, bits, used = _put(out, at, bits, used, code, length)
    return at + I64((used + U64(7)) >> U64(3))


def put_values(values: Array32, k: int, out: ByteArray, most: int) -> int:
    return int(_put_values(values, U64(k), out, most))


@kernel
def _put_runs(values, k_run, k_rest, out, most):
    at, bits, used = I64(0), U64(0), U64(0)
    behind, whole = I64(0), values.size & ~63
    for first in range(0, values.size, 64):
        if first < whole:
            mask = reaching64(values, first, values, _ALL, U64(1))
        else:
            mask = U64(0)
            for i in range(whole, values.size):
                mask |= U64(values[i] != 0) << U64(i - whole)
        while mask != U64(0):
            if at > most:
                return I64(-1)
            i = first + I64(trailing_zeros(mask))
            mask &= mask - U64(1)
            code, length = _code(U64(i - behind), k_run)
            at, bits, used = _put(out, at, bits, used, code, length)
            code, length = _code(U64(values[i]) - U64(1), k_rest)
            at, bits, used = _put(out, at, bits, used, code, length)
            behind = i + 1
    code, length = _code(U64(values.size - behind), k_run)
    at, bits, used = _put(out, at, bits, used, code, length)
    return at + I64((used + U64(7)) >> U64(3))


@kernel
def _group(magnitude, exponents, first, contexts, grouped):
    """From both ends at once: a neighbour in the same context waits for the one before."""
    last = contexts.shape[0] - 1
    places = on_stack(EXPONENTS, U64(0))  # as subscripts, unsigned ones are quicker
    behind = on_stack(EXPONENTS, U64(0))
    end = U64(0)
    for context in range(last + 1):
        places[context] = end
        end += U64(contexts[context, COUNT])
        behind[context] = end
    table = on_stack(EXPONENTS, U64(0))
    for power in range(EXPONENTS):
        table[power] = min(max(power - first, 0), last)
    half = U64(magnitude.size >> 1)
    for i in range(half):
        context = table[exponents[i]]
        grouped[places[context]] = magnitude[i]
        places[context] += U64(1)
        j = U64(magnitude.size) - U64(1) - i
        context = table[exponents[j]]
        behind[context] -= U64(1)
        grouped[behind[context]] = magnitude[j]
    if magnitude.size & 1:
        grouped[places[table[exponents[half]]]] = magnitude[half]


@kernel
def write_magnitudes(magnitude, exponents, first, contexts, grouped, out, most, sizes):
    _group(magnitude, exponents, first, contexts, grouped)
    at, start = I64(0), I64(0)
    for context in range(contexts.shape[0]):
        row, stop = contexts[context], start + contexts[context, COUNT]
        values, room = grouped[start:stop], out[at:]
        size = I64(0)
        if row[CODING] == RICE:
            size = _put_values(values, U64(row[K]), room, most - at)
        elif row[CODING] == RUNS:
            size = _put_runs(values, U64(row[K]), U64(row[K_REST]), room, most - at)
        if size < 0 or at + size > most:
            return I64(-1)
        sizes[context] = size
        at, start = at + size, stop
    return at


def put_magnitudes(
    magnitude: Array32,
    exponents: ByteArray,
    first: int,
    contexts: Table,
    grouped: Array32,
    out: ByteArray,
    most: int,
) -> Table | None:
    """`magnitude` by ascending context (that of an exponent is its distance from `first`, within bounds), in
    their order within each, coded as `contexts` plans. `grouped`: room for them. Returns bytes per context.

    RUNS are for values that are mostly 0: the length of a run of zeros, then alternately the value - 1 that
    ends it and the length of the next; the last run has no such value."""
    sizes = np.zeros(len(contexts), np.int64)
    done = write_magnitudes(magnitude, exponents, first, contexts, grouped, out, most, sizes)
    return sizes if done >= 0 else None


for each in (constants.rice_parameter, constants._first_exponent, constants._plan):
    rule(each)

plan_contexts: Any = kernel(constants.plan_contexts)
