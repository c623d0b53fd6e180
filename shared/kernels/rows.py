"""Objects of JSON with a row for each tensor of a table, as an index has them, without an object of Python
for each. Only what is written here is read here: keys in the table's order, nothing between tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.kernels.compiler import I64, U64, inlined, kernel, unwritable
from weightcast.shared.kernels.constants import Counts

_ROW = 40
"""bytes of a tensor's row behind its name, at least: from `["` on"""
_DIGITS = 18


class Texts(NamedTuple):
    """One after the other: text n is from `bounds[n]` to `bounds[n + 1]`."""

    text: ByteArray
    bounds: Counts

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Texts:
        each = list(texts)
        bounds = np.cumsum([0, *map(len, each)], dtype=np.int64)
        return cls(np.frombuffer(b"".join(each), np.uint8), unwritable(bounds))

    def size(self, numbers: Counts) -> int:
        """Bytes of these texts."""
        return int(np.diff(self.bounds)[numbers].sum())


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


def read_tensors(
    data: bytes, begin: int, end: int, keys: Texts
) -> tuple[Counts, NDArray[np.uint64], Counts] | None:
    """Rows `key` `["` 32 hex digits `",` number `]`: numbers of the keys, lanes and numbers. None where they
    are written otherwise."""
    most = len(keys.bounds) - 1
    numbers, changed = (np.empty(most, np.int64) for _ in range(2))
    lanes = np.empty((most, 2), np.uint64)
    count = _read_tensors(np.frombuffer(data, np.uint8), begin, end, *keys, numbers, lanes, changed)
    return None if count < 0 else (numbers[:count], lanes[:count], changed[:count])


@kernel
def _read_files(text, at, stop, keys, bounds, numbers, files, ends, found):
    for n in range(numbers.size):
        if n:
            if at >= stop or text[at] != ord(","):
                return False
            at += 1
        start, size = bounds[numbers[n]], bounds[numbers[n] + 1] - bounds[numbers[n]]
        if at + size > stop or not _alike(text, at, keys, start, size):
            return False
        at += size
        file = found[n - 1] if n else I64(0)
        for _ in range(ends.size - 1):
            size = ends[file + 1] - ends[file]
            if at + size <= stop and _alike(text, at, files, ends[file], size):
                break
            file = (file + 1) % (ends.size - 1)
        else:
            return False
        found[n] = file
        at += size
    return at == stop


def read_files(
    data: bytes, begin: int, end: int, keys: Texts, numbers: Counts, files: Texts
) -> Counts | None:
    """Rows `key` `file` with the keys of these numbers: of each the number of its file. None where there are
    others."""
    found, text = np.empty(len(numbers), np.int64), np.frombuffer(data, np.uint8)
    return found if _read_files(text, begin, end, *keys, unwritable(numbers), *files, found) else None


@inlined
def _put(out, at, texts, start, stop):
    for i in range(stop - start):
        out[at + i] = texts[start + i]
    return at + stop - start


@inlined
def _begin_row(out, at, keys, bounds, numbers, n):
    out[at] = ord(",")
    return _put(out, at + (n > 0), keys, bounds[numbers[n]], bounds[numbers[n] + 1])


@kernel
def _write_files(keys, bounds, numbers, files, ends, which, out):
    at = I64(0)
    for n in range(numbers.size):
        at = _begin_row(out, at, keys, bounds, numbers, n)
        at = _put(out, at, files, ends[which[n]], ends[which[n] + 1])
    return at


def write_files(keys: Texts, numbers: Counts, files: Texts, which: Counts) -> memoryview:
    """As `read_files` reads them. `which`: of each key the number of its file."""
    out = np.empty(keys.size(numbers) + files.size(which) + len(which) + 1, np.uint8)
    return out[: _write_files(*keys, unwritable(numbers), *files, unwritable(which), out)].data


@kernel
def _write_tensors(keys, bounds, numbers, lanes, changed, tails, out):
    at, width = I64(0), tails.size // max(1, numbers.size)
    for n in range(numbers.size):
        at = _begin_row(out, at, keys, bounds, numbers, n)
        out[at], out[at + 1], out[at + 34], out[at + 35] = ord("["), ord('"'), ord('"'), ord(",")
        for i in range(32):
            digit = I64(lanes[n, i >> 4] >> U64(60 - 4 * (i & 15)) & U64(15))
            out[at + 2 + i] = digit + (48 if digit < 10 else 87)
        at += 36
        left, size = changed[n], I64(1)
        while left > 9:
            left, size = left // 10, size + 1
        left = changed[n]
        for i in range(size):
            out[at + size - 1 - i] = 48 + left % 10
            left //= 10
        at = _put(out, at + size, tails, n * width, (n + 1) * width)
    return at


def write_tensors(
    keys: Texts, numbers: Counts, lanes: NDArray[np.uint64], changed: Counts, tails: bytes
) -> memoryview:
    """Rows as `read_tensors` reads them. `tails`: how each ends behind its number, of equal lengths."""
    out = np.empty(keys.size(numbers) + len(numbers) * (_ROW + _DIGITS) + len(tails) + 1, np.uint8)
    rows = unwritable(numbers), unwritable(lanes), unwritable(changed), np.frombuffer(tails, np.uint8)
    return out[: _write_tensors(*keys, *rows, out)].data
