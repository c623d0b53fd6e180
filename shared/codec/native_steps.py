"""Rice codes read: values, positions, steps. The doors are explained in `plain`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.native_ordinals import HALF, excess, facts, ordinal, word_of
from weightcast.shared.codec.native_ordinals import MASK as EXPONENT_MASK
from weightcast.shared.codec.native_ordinals import SHIFT as EXPONENT_SHIFT
from weightcast.shared.codec.rice import ESCAPE, GREATEST, LONGEST, RUNS
from weightcast.shared.digest.lanes import MIX_A, MIX_B
from weightcast.shared.digest.native import (
    I64,
    U64,
    frozen,
    inlined,
    kernel,
    load64,
    on_stack,
    prefetch,
    trailing_zeros,
    unwritable,
)
from weightcast.shared.words import ByteArray, WordKind, Words

Array32 = NDArray[np.uint32]
Counts = NDArray[np.int64]

_NO_VALUE = 1 << 40
"""greater than any gap, step or run may be: readers refuse what comes of it without looking for it"""
_WHOLE_BITS = 57
"""bits that are there for certain after a load of 8 bytes from the byte that holds the first"""
_BLOCK = 512
"""changes from their old words to their sums at once: all that is kept of them lies in the nearest cache"""
_ROOM = _BLOCK + 8
_A0, _A1, _A2 = (U64(value) for value in MIX_A)
_B0, _B1, _B2 = (U64(value) for value in MIX_B)


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
def _take_values(data: Any, start: Any, stop: Any, k: Any, placing: Any, values: Any) -> Any:
    """Four codes of a load at once where they are whole and none is escaped. What lies behind the end of the
    stream may be taken for codes: the last check finds that. `placing`: all bits set where values are gaps
    and positions are wanted, else 0. Returns the least position that may follow, -1 for damage."""
    at, end, most, least = I64(start) << 3, I64(stop) << 3, U64(0), U64(0)
    mask, tail, i = (U64(1) << k) - U64(1), k + U64(1), U64(0)
    count = U64(values.size)
    while i < count:
        if at >= end:
            return I64(-1)
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
            value, at = _take(data, at, k)
            values[i] = least = least + U64(value)
            most |= U64(value)
            i += U64(1)
        least = (least + U64(1)) & placing
    return I64(least) if (at + 7) >> 3 == stop and most <= U64(GREATEST) else I64(-1)


def take_values(data: ByteArray, start: int, stop: int, k: int, values: Array32) -> bool:
    return bool(_take_values(frozen(data), start, stop, U64(k), U64(0), values) >= 0)


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


def take_gaps(
    data: ByteArray, start: int, stop: int, k: int, borders: Counts, shifts: Counts, index: Array32
) -> int:
    end = int(_take_values(frozen(data), start, stop, U64(k), ~U64(0), index))
    if end >= 0 and shifts.any():
        _spread(index, borders, shifts)
    return end


@inlined
def _rounds_a(x: Any) -> Any:
    x = (x ^ (x >> U64(32))) * _A1
    x = (x ^ (x >> U64(29))) * _A2
    return x ^ (x >> U64(32))


@inlined
def _rounds_b(x: Any) -> Any:
    x = (x ^ (x >> U64(31))) * _B1
    x = (x ^ (x >> U64(33))) * _B2
    return x ^ (x >> U64(30))


@kernel
def _add(before: Any, flips: Any, places: Any, number: Any, count: Any, sums: Any) -> None:
    """Of 8-byte words of the same place the last. `places[count]` is none."""
    a, b, c, d = U64(0), U64(0), U64(0), U64(0)
    for i in range(count):
        old, counts = before[i], U64(0) - U64(places[i] != places[U64(i) + U64(1)])
        product = U64(places[i] + number) * _A0
        a += _rounds_a(old ^ product) & counts
        c += _rounds_a((old ^ flips[i]) ^ product) & counts
    for i in range(count):
        old, counts = before[i], U64(0) - U64(places[i] != places[U64(i) + U64(1)])
        product = U64(places[i] + number) * _B0
        b += _rounds_b(old + product) & counts
        d += _rounds_b((old ^ flips[i]) + product) & counts
    sums[0] += a
    sums[1] += b
    sums[2] += c
    sums[3] += d


@kernel
def _opened(data: Any, streams: Any, book: Any) -> None:
    """`book`: int64[4, contexts]; the next bit of each context, its last, single units left in its run (-1:
    it has none), the bit before its first run ended at once or -1."""
    for c in range(streams.shape[0]):
        book[0, c], book[1, c], book[2, c], book[3, c] = streams[c, 3] << 3, streams[c, 4] << 3, -1, -1
        if streams[c, 0] == RUNS:
            book[2, c], book[0, c] = _take(data, book[0, c], U64(streams[c, 1]))
            if book[2, c] == 0:
                book[3, c] = book[0, c]


@kernel
def _lengths(
    data: Any,
    signs: Any,
    streams: Any,
    start: Any,
    exponents: Any,
    book: Any,
    steps: Any,
    old: Any,
    ahead: Any,
    shift: Any,
    like: Any,
) -> Any:
    """Steps of a block of changes from number `start` on. `exponents`: less the first context's. Asks for
    the old words of the changes `ahead`."""
    most, last = I64(streams.shape[0]) - 1, ahead.size - 1
    for j in range(exponents.size):
        c = U64(min(max(exponents[j], 0), most))
        length, run = I64(1), book[2, c]
        if run > 0:
            book[2, c] = run - 1
        elif book[0, c] >= book[1, c]:
            return False
        elif run < 0:
            value, book[0, c] = _take(data, book[0, c], U64(streams[c, 1]))
            length = value + 1
        else:
            value, behind = _take(data, book[0, c], U64(streams[c, 2]))
            length = value + 2
            if behind >= book[1, c]:
                return False
            book[2, c], book[0, c] = _take(data, behind, U64(streams[c, 1]))
        prefetch(old, I64(ahead[min(j, last)]) >> shift, like)
        i = start + U64(j)
        negative = I64((data[signs + (i >> U64(3))] >> (i & U64(7))) & U64(1))
        steps[j] = (length ^ -negative) + negative
    return True


@kernel
def _ended(streams: Any, book: Any) -> Any:
    for c in range(streams.shape[0]):
        unused = book[3, c] == book[0, c]
        if book[2, c] > 0 or (book[0, c] + 7) >> 3 != streams[c, 4] or unused:
            return False
    return True


@kernel
def _gathered(
    old: Any, index: Any, kind: Any, shift: Any, first: Any, wide: Any, words: Any, exponents: Any
) -> None:
    """Of each change its 8-byte word, its word, the word's exponent less `first`."""
    bits, in_word = U64(64 >> shift), (I64(1) << shift) - 1
    kept = ~U64(0) >> (U64(64) - bits)
    for j in range(index.size):
        position = I64(index[j])
        whole = load64(old, (position >> shift) << 3)
        word = I64((whole >> (U64(position & in_word) * bits)) & kept)
        wide[j], words[j] = whole, word
        exponents[j] = ((word >> kind[EXPONENT_SHIFT]) & kind[EXPONENT_MASK]) - first


@kernel
def _stepped(words: Any, steps: Any, kind: Any, before: Any, after: Any) -> Any:
    over = U64(0)
    for j in range(before.size):
        word, step = words[j], steps[j]
        moved = ordinal(word, kind) + step
        over |= excess(moved, abs(step), kind)
        new = word_of(moved, kind)
        before[j], after[j], words[j] = word, new, word ^ new
    return over


@kernel
def _summed(
    index: Any,
    number: Any,
    shift: Any,
    wide: Any,
    flips: Any,
    places: Any,
    lanes: Any,
    merged: Any,
    sums: Any,
) -> None:
    """`wide`: old bits of the 8-byte word that holds each change; `flips`: old ^ new word. The last change of
    such a word gathers what flips in it: without branches, as it cannot be foreseen which share one."""
    count, bits, in_word = index.size, U64(64 >> shift), (I64(1) << shift) - 1
    for j in range(count):
        position = I64(index[j])
        places[j] = position >> shift
        lanes[j] = U64(flips[j]) << (U64(position & in_word) * bits)
        merged[j] = lanes[j]
    places[count] = -1
    for behind in range(1, in_word + 1):
        shared = U64(0)
        for j in range(behind, count):
            other = U64(j) - U64(behind)
            same = U64(0) - U64(places[j] == places[other])
            merged[j] |= lanes[other] & same
            shared |= same
        if shared == U64(0):
            break
    _add(wide, merged, places, number, count, sums)


@kernel
def _take_steps(
    data: Any,
    signs: Any,
    streams: Any,
    book: Any,
    first: Any,
    old: Any,
    index: Any,
    kind: Any,
    shift: Any,
    ends: Any,
    numbers_of: Any,
    before: Any,
    after: Any,
    sums: Any,
    changed: Any,
) -> Any:
    wide, lanes, merged = on_stack(_ROOM, U64(0)), on_stack(_ROOM, U64(0)), on_stack(_ROOM, U64(0))
    words, steps, exponents = on_stack(_ROOM, I64(0)), on_stack(_ROOM, I64(0)), on_stack(_ROOM, I64(0))
    places = on_stack(_ROOM, I64(0))
    _opened(data, streams, book)
    over, start, span = U64(0), I64(0), 0
    while start < index.size:
        while I64(index[start]) >= ends[span]:
            span += 1
        stop = min(start + _BLOCK, index.size)
        if I64(index[stop - 1]) >= ends[span]:
            stop = start + 1
            while I64(index[stop]) < ends[span]:
                stop += 1
        while stop < index.size and index[stop] >> shift == index[stop - 1] >> shift:
            stop += 1
        here, ahead, count = index[start:stop], index[min(stop, index.size - 1) :], stop - start
        _gathered(old, here, kind, shift, first, wide, words, exponents)
        if not _lengths(
            data, signs, streams, U64(start), exponents[:count], book, steps, old, ahead, shift, wide
        ):
            return False
        over |= _stepped(words, steps, kind, before[start:stop], after[start:stop])
        _summed(here, numbers_of[span], shift, wide, words, places, lanes, merged, sums[span])
        changed[span] += count
        start = stop
    return _ended(streams, book) and over < U64(2 * kind[HALF])


def take_steps(
    data: ByteArray,
    signs: int,
    streams: Counts,
    first: int,
    old: Words,
    index: Array32,
    kind: WordKind,
    ends: Counts,
    numbers: Counts,
) -> tuple[Words, Words, NDArray[np.uint64], Counts] | None:
    before, after = np.empty(len(index), old.dtype), np.empty(len(index), old.dtype)
    sums, changed = np.zeros((len(ends), 4), np.uint64), np.zeros(len(ends), np.int64)
    shift = {1: 3, 2: 2, 4: 1}[old.itemsize]
    good = _take_steps(
        frozen(data),
        U64(signs),
        streams,
        np.empty((4, len(streams)), np.int64),
        first,
        frozen(old),
        unwritable(index),
        facts(kind),
        shift,
        ends,
        numbers,
        before,
        after,
        sums,
        changed,
    )
    return (before, after, sums, changed) if good else None
