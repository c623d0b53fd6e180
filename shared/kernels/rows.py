"""Objects of JSON with a row for each tensor of a table, as an index has two, without an object of Python
for each. Only what `write_index` writes is read here: keys in the table's order, nothing between tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.kernels.compiler import I64, U64, kernel, unwritable
from weightcast.shared.kernels.constants import Counts

_ROW = 40
"""bytes of a tensor's row behind its name, at least: from `["` on"""
_DIGITS = 18


@kernel
def _behind(text, at, pieces, bounds, number):
    """The place behind piece `number` of `pieces` in the text, -1 where that is not there."""
    start, size = bounds[number], bounds[number + 1] - bounds[number]
    if at + size > text.size:
        return I64(-1)
    for i in range(size):
        if text[at + i] != pieces[start + i]:
            return I64(-1)
    return at + size


@kernel
def _next_key(text, at, count, keys, bounds, number):
    """Which key from `number` on is in the text, behind a comma unless it is the first, and the place behind
    it; -1 for none."""
    if count:
        if text[at] != ord(","):
            return I64(-1), at
        at += 1
    while number + 1 < bounds.size:
        end = _behind(text, at, keys, bounds, number)
        if end >= 0:
            return number, end
        number += 1
    return I64(-1), at


@kernel
def _read_files(text, at, stop, keys, bounds, files, file_bounds, numbers, which):
    count, number, file = I64(0), I64(-1), I64(0)
    while at < stop:
        number, at = _next_key(text, at, count, keys, bounds, number + 1)
        if number < 0:
            return I64(-1)
        end, tried = _behind(text, at, files, file_bounds, file), I64(1)
        while end < 0:
            if tried == file_bounds.size - 1:
                return I64(-1)
            file, tried = (file + 1) % (file_bounds.size - 1), tried + 1
            end = _behind(text, at, files, file_bounds, file)
        numbers[count], which[count], at = number, file, end
        count += 1
    return count if at == stop else I64(-1)


@kernel
def _read_tensors(text, at, stop, keys, bounds, numbers, lanes, changed):
    count, number = I64(0), I64(-1)
    while at < stop:
        number, at = _next_key(text, at, count, keys, bounds, number + 1)
        if number < 0 or at + _ROW > text.size or text[at] != ord("[") or text[at + 1] != ord('"'):
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


class Texts:
    """Byte strings in one array."""

    def __init__(self, texts: list[bytes]) -> None:
        self.data: ByteArray = unwritable(np.frombuffer(b"".join(texts), np.uint8))
        self.bounds: Counts = unwritable(np.cumsum([0, *map(len, texts)], dtype=np.int64))


def read_files(data: bytes, begin: int, end: int, keys: Texts, files: Texts) -> tuple[Counts, Counts] | None:
    """Rows `key` `file`: numbers of both. None where they are written otherwise."""
    numbers, which = (np.empty(len(keys.bounds) - 1, np.int64) for _ in range(2))
    text, tables = np.frombuffer(data, np.uint8), (keys.data, keys.bounds, files.data, files.bounds)
    count = _read_files(text, begin, end, *tables, numbers, which)
    return None if count < 0 else (numbers[:count], which[:count])


def read_tensors(
    data: bytes, begin: int, end: int, keys: Texts
) -> tuple[Counts, NDArray[np.uint64], Counts] | None:
    """Rows `key` `["` 32 hex digits `",` number `]`: numbers of the keys, lanes and numbers. None where they
    are written otherwise."""
    numbers, changed = (np.empty(len(keys.bounds) - 1, np.int64) for _ in range(2))
    lanes = np.empty((len(numbers), 2), np.uint64)
    text = np.frombuffer(data, np.uint8)
    count = _read_tensors(text, begin, end, keys.data, keys.bounds, numbers, lanes, changed)
    return None if count < 0 else (numbers[:count], lanes[:count], changed[:count])
