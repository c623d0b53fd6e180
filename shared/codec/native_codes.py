"""Rice codes read: values, positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.codec.rice import ESCAPE, GREATEST, LONGEST
from weightcast.shared.digest.native import I64, U64, frozen, inlined, kernel
from weightcast.shared.digest.native_ops import load64, trailing_zeros

Array32 = NDArray[np.uint32]

_NO_VALUE = 1 << 40
"""greater than any gap, step or run may be: readers refuse what comes of it without looking for it"""
_WHOLE_BITS = 57
"""bits that are there for certain after a load of 8 bytes from the byte that holds the first"""


@inlined
def take(data: Any, at: Any, k: Any) -> Any:
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
def take_codes(data: Any, at: Any, end: Any, k: Any, placing: Any, values: Any) -> Any:
    """As many values as `values` holds, from bit `at` on. Four codes of a load at once where they are whole
    and none is escaped. What lies behind `end` may be taken for codes: who knows where the stream must end
    finds that. `placing`: all bits set where values are gaps and positions are wanted, else 0. Returns the
    bit behind the last code, -1 for damage, and the least position that may follow."""
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
def _spread(index: Any, borders: Any, shifts: Any) -> None:
    """Positions get the padding before their spans, in place. `borders`: where spans begin with no padding
    counted, then one that no position reaches."""
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
def read_gaps(data: Any, start: Any, stop: Any, k: Any, borders: Any, shifts: Any, index: Any) -> Any:
    """As `plain.take_gaps`."""
    behind, least = take_codes(data, start << 3, stop << 3, k, ~U64(0), index)
    if behind < 0 or (behind + 7) >> 3 != stop:
        return I64(-1)
    if shifts.size > 1 or shifts[0] != 0:
        _spread(index, borders, shifts)
    return least
