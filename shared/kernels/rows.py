"""An object of JSON with a row for each tensor of a table, as an index has it, without an object of Python
for each. Only what `write_index` writes is read here: keys in the table's order, nothing between tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.kernels.compiler import I64, U64, inlined, kernel, unwritable
from weightcast.shared.kernels.constants import Counts

_ROW = 40
"""bytes of a tensor's row behind its name, at least: from `["` on"""
_DIGITS = 18


@inlined
def _alike(text, at, keys, start, size):
    same = I64(0)
    while same < size and text[at + same] == keys[start + same]:
        same += 1
    return same == size


@kernel
def _next_key(text, at, keys, bounds, number):
    """Which key from `number` on is in the text, and the place behind it; -1 for none."""
    while number + 1 < bounds.size:
        start, size = bounds[number], bounds[number + 1] - bounds[number]
        if at + size + _ROW <= text.size and _alike(text, at, keys, start, size):
            return number, at + size
        number += 1
    return I64(-1), at


@kernel
def _read_tensors(text, at, stop, keys, bounds, numbers, lanes, changed):
    count, number = I64(0), I64(-1)
    while at < stop:
        if count and text[at] != ord(","):
            return I64(-1)
        number, at = _next_key(text, at + (count > 0), keys, bounds, number + 1)
        if number < 0 or text[at] != ord("[") or text[at + 1] != ord('"'):
            return I64(-1)
        at += 2
        for lane in range(2):
            value = U64(0)
            for i in range(16 * lane, 16 * lane + 16):
                digit = I64(text[at + i])
                digit -= 48 if digit < 58 else 87
                if digit < 0 or digit > 15 or (digit > 9) != (text[at + i] > 96):
                    return I64(-1)
                value = value << U64(4) | U64(digit)
            lanes[count, lane] = value
        at += 32
        if text[at] != ord('"') or text[at + 1] != ord(","):
            return I64(-1)
        at += 2
        first, value = at, I64(0)
        while at + 1 < text.size and 48 <= text[at] <= 57 and at - first < _DIGITS:
            value = 10 * value + I64(text[at]) - 48
            at += 1
        if at == first or (text[first] == 48 and at > first + 1) or text[at] != ord("]"):
            return I64(-1)
        numbers[count], changed[count] = number, value
        at += 1
        count += 1
    return count if at == stop else I64(-1)


@lru_cache(maxsize=2)
def _joined(keys: tuple[bytes, ...]) -> tuple[ByteArray, Counts]:
    bounds = np.cumsum([0, *map(len, keys)], dtype=np.int64)
    return np.frombuffer(b"".join(keys), np.uint8), unwritable(bounds)


def read_tensors(
    data: bytes, begin: int, end: int, keys: tuple[bytes, ...]
) -> tuple[Counts, NDArray[np.uint64], Counts] | None:
    """Rows `key` `["` 32 hex digits `",` number `]`: numbers of the keys, lanes and numbers. None where they
    are written otherwise."""
    numbers, changed = (np.empty(len(keys), np.int64) for _ in range(2))
    lanes = np.empty((len(keys), 2), np.uint64)
    text = np.frombuffer(data, np.uint8)
    count = _read_tensors(text, begin, end, *_joined(keys), numbers, lanes, changed)
    return None if count < 0 else (numbers[:count], lanes[:count], changed[:count])
