"""Steps read, their words found, the sums over these words made.

A block of changes passes through one stage after the other, all that is kept of it in the nearest caches.
Subscripts are unsigned, which spares the question whether they count from the end and keeps loops in vectors.
"""

from __future__ import annotations

import numpy as np

from weightcast.shared.base.elements import ByteArray, WordKind, Words
from weightcast.shared.kernels.compiler import I64, SHIFTS, U64, frozen, kernel, unwritable
from weightcast.shared.kernels.constants import (
    EXPONENTS,
    GREATEST,
    NOTHING,
    RUNS,
    Array32,
    Counts,
    Table,
    Taken,
)
from weightcast.shared.kernels.mix import MARGIN, SUMS, add8, closed, empty, merge8
from weightcast.shared.kernels.parallel import scratch
from weightcast.shared.kernels.rice import plan_contexts, take, take_codes, write_gaps, write_magnitudes
from weightcast.shared.kernels.scan import split_all
from weightcast.shared.kernels.vectors import (
    HALF,
    excess,
    facts,
    load64,
    on_stack,
    ordinal,
    prefetch,
    word_of,
)
from weightcast.shared.kernels.vectors import MASK as EXPONENT_MASK
from weightcast.shared.kernels.vectors import SHIFT as EXPONENT_SHIFT

_CONTEXTS = 16
_ROW_BITS = 9
_ROWS = _CONTEXTS << _ROW_BITS
_BLOCK = (1 << _ROW_BITS) - 8
"""changes of a block: up to 7 more share the 8-byte word of its last"""
_SIGNS = 32
"""sign bits read at once"""
_SLICE = 64
"""changes that pass through the stages after reading together"""
_ROOM = (1 << _ROW_BITS) + _SIGNS + MARGIN


@kernel
def _opened(data, streams, book):
    """`book`: int64[3, contexts]; of each context the next bit, single units left in its run, changes."""
    for c in range(streams.shape[1]):
        book[0, c], book[1, c], book[2, c] = streams[3, c] << 3, 0, 0
        if streams[0, c] == RUNS:
            book[1, c], book[0, c] = take(data, book[0, c], U64(streams[1, c]))


@kernel
def _gathered(old, index, kind, shift, first_exponent, most, ahead, wide, contexts, order, ends):
    """Loads the 8-byte word of each change and groups the numbers of changes by context."""
    in_word, bits = (U64(1) << shift) - U64(1), U64(6) - shift
    power, mask = U64(kind[EXPONENT_SHIFT]), U64(kind[EXPONENT_MASK])
    count = U64(index.size)
    for first in range(U64(0), count, U64(_SLICE)):
        last = min(first + U64(_SLICE), count)
        for j in range(first, last):
            wide[j] = load64(old, I64((U64(index[j]) >> shift) << U64(3)))
        _asked(old, ahead, first, last, 1, shift, wide)
        for j in range(first, last):
            exponent = (wide[j] >> (((U64(index[j]) & in_word) << bits) + power)) & mask
            contexts[j] = min(max(exponent, first_exponent) - first_exponent, most)
        for j in range(first, last):
            slot = ends[contexts[j]]
            order[slot] = j
            ends[contexts[j]] = slot + U64(1)
        _asked(old, ahead, first, last, 3, shift, wide)


@kernel
def _asked(old, ahead, first, last, part, shift, like):
    """For the lines of every eighth of `ahead`, from number `part` on; `_summed` asks for 5 to 7."""
    for j in range(U64(first) + U64(part), U64(last), U64(8)):
        prefetch(old, I64(U64(ahead[j]) >> shift), like)


@kernel
def _placed(index, first, last, shift, wide, words, places):
    """Of changes [first, last) their words, and which 8-byte words hold them."""
    in_word, bits = (U64(1) << shift) - U64(1), U64(6) - shift
    kept = ~U64(0) >> (U64(64) - (U64(64) >> shift))
    for j in range(U64(first), U64(last)):
        position = U64(index[j])
        places[j + U64(MARGIN)] = position >> shift
        words[j] = I64((wide[j] >> ((position & in_word) << bits)) & kept)


@kernel
def _take_runs(data, at, end, k, k_rest, run, order, first, stop, steps):
    """Values for the changes order[first:stop], most of them 0. `run`: zeros left. Returns the
    next bit, -1 for damage, and the zeros left."""
    filled = first + run
    while filled < stop:
        if at >= end:
            return I64(-1), I64(0)
        value, at = take(data, at, k_rest)
        if value >= GREATEST or at >= end:
            return I64(-1), I64(0)
        steps[U64(order[U64(filled)])] = value + 1
        run, at = take(data, at, k)
        filled += run + 1
    return at, filled - stop


@kernel
def _take_rows(data, streams, order, ends, book, values, steps):
    """|step| - 1 of a block, context by context, which keeps branches predictable."""
    for c in range(streams.shape[1]):
        first, stop = I64(c << _ROW_BITS), I64(ends[c])
        if stop > first:
            end, k = streams[4, c] << 3, U64(streams[1, c])
            if streams[0, c] == RUNS:
                k_rest = U64(streams[2, c])
                book[0, c], book[1, c] = _take_runs(
                    data, book[0, c], end, k, k_rest, book[1, c], order, first, stop, steps
                )
            else:
                row = values[: stop - first]
                book[0, c], _ = take_codes(data, book[0, c], end, k, U64(0), row)
                for i in range(U64(row.size)):
                    steps[U64(order[U64(first) + i])] = row[i]
            if book[0, c] < 0:
                return False
            book[2, c] += stop - first
    return True


@kernel
def _ended(streams, book):
    for c in range(streams.shape[1]):
        missing = (book[2, c] == 0) != (streams[0, c] == NOTHING)
        if book[1, c] > 0 or (book[0, c] + 7) >> 3 != streams[4, c] or missing:
            return False
    return True


@kernel
def _signed(data, signs, start, first, last, steps):
    """|step| - 1 to steps, of changes [first, last) of the block that begins with number `start`, and of some
    after them."""
    for j in range(U64(first), U64(last), U64(_SIGNS)):
        i = start + j
        bits = load64(data, I64(signs + (i >> U64(3)))) >> (i & U64(7))
        for lane in range(U64(_SIGNS)):
            negative = I64((bits >> lane) & U64(1))
            steps[j + lane] = ((steps[j + lane] + 1) ^ -negative) + negative


@kernel
def _stepped(first, last, words, steps, kind, before, after):
    """Old and new words; afterwards `words` is their XOR."""
    over = U64(0)
    for j in range(U64(first), U64(last)):
        word, step = words[j], steps[j]
        moved = ordinal(word, kind) + step
        over |= excess(moved, abs(step), kind)
        new = word_of(moved, kind)
        before[j], after[j], words[j] = word, new, word ^ new
    return over


@kernel
def _flipped(index, first, last, shift, words, flips, merged):
    """XOR of each change within its 8-byte word. `words`: XOR of the elements."""
    in_word, bits = (U64(1) << shift) - U64(1), U64(6) - shift
    for j in range(U64(first), U64(last)):
        lanes = U64(words[j]) << ((U64(index[j]) & in_word) << bits)
        flips[j + U64(MARGIN)] = lanes
        merged[j] = lanes


@kernel
def _behind_reading(
    data,
    signs,
    start,
    old,
    index,
    ahead,
    kind,
    shift,
    wide,
    words,
    places,
    steps,
    before,
    after,
    flips,
    merged,
):
    """A block through the stages, a slice at a time. Returns as `_stepped`."""
    over = U64(0)
    for first in range(0, index.size, _SLICE):
        last = min(first + _SLICE, index.size)
        _asked(old, ahead, first, last, 0, shift, wide)
        _placed(index, first, last, shift, wide, words, places)
        _asked(old, ahead, first, last, 2, shift, wide)
        _signed(data, signs, U64(start), first, last, steps)
        _asked(old, ahead, first, last, 4, shift, wide)
        over |= _stepped(first, last, words, steps, kind, before, after)
        _flipped(index, first, last, shift, words, flips, merged)
    return over


@kernel
def _merged(count, shift, places, flips, merged):
    """The last change of an 8-byte word collects the XOR of all its changes."""
    for j in range(U64(9)):
        places[count + U64(MARGIN) + j] = ~U64(0)
    for behind in range(U64(1), U64(1) << shift):
        shared = U64(0)
        for j in range(U64(0), count, U64(8)):
            inside = (U64(1) << min(count - j, U64(8))) - U64(1)
            shared |= merge8(merged, flips, places, j, behind) & inside
        if shared == U64(0):
            break


@kernel
def _summed(old, ahead, shift, number, count, wide, merged, places, touched, sums):
    empty(touched)
    for j in range(U64(0), U64(count), U64(8)):
        for i in range(j + U64(5), min(j + U64(8), U64(count))):
            prefetch(old, I64(U64(ahead[i]) >> shift), wide)
        add8(wide, merged, places, j, U64(number), touched)
    a, b = closed(touched, 0)
    c, d = closed(touched, 2)
    sums[0] += a
    sums[1] += b
    sums[2] += c
    sums[3] += d


@kernel
def read_steps(
    data, signs, streams, book, first, old, index, kind, shift, ends, numbers_of, before, after, sums, changed
):
    wide, flips, merged = on_stack(_ROOM, U64(0)), on_stack(_ROOM, U64(0)), on_stack(_ROOM, U64(0))
    words, steps, places = on_stack(_ROOM, I64(0)), on_stack(_ROOM, I64(0)), on_stack(_ROOM, U64(0))
    order, values = on_stack(_ROWS, np.uint32(0)), on_stack(_ROOM, np.uint32(0))
    ends_of, contexts = on_stack(_CONTEXTS, U64(0)), on_stack(_ROOM, U64(0))
    most = U64(streams.shape[1] - 1)
    touched = on_stack(SUMS, U64(0))
    for j in range(U64(MARGIN)):
        places[j] = ~U64(0)
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
        while stop < index.size and U64(index[stop]) >> shift == U64(index[stop - 1]) >> shift:
            stop += 1
        here, count = index[start:stop], stop - start
        ahead = index[min(start + _BLOCK, index.size - count) :]
        for c in range(U64(_CONTEXTS)):
            ends_of[c] = c << U64(_ROW_BITS)
        for j in range(U64(count + _SIGNS)):
            steps[j] = 0
        _gathered(old, here, kind, shift, U64(first), most, ahead, wide, contexts, order, ends_of)
        if not _take_rows(data, streams, order, ends_of, book, values, steps):
            return False
        over |= _behind_reading(
            data, signs, start, old, here, ahead, kind, shift, wide, words, places, steps,
            before[start:stop], after[start:stop], flips, merged,
        )  # fmt: skip
        _merged(U64(count), shift, places, flips, merged)
        _summed(old, ahead, shift, numbers_of[span], count, wide, merged, places, touched, sums[span])
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
) -> Taken | None:
    """Of the words at `index`. `ends`, `numbers`: of each span, as `spans_in` has them. `signs`: where their
    bits begin. `streams`: int64[5, contexts], coding, k, k of what ends a run, start, stop. The context of a
    word is its exponent - `first`, within bounds."""
    before, after = (scratch().lend(f"steps {side}", old.dtype, len(index)) for side in ("before", "after"))
    taken = before, after, np.zeros((len(ends), 4), np.uint64), np.zeros(len(ends), np.int64)
    book, shift = np.empty((3, streams.shape[1]), np.int64), U64(SHIFTS[old.itemsize])
    good = read_steps(
        frozen(data), U64(signs), streams, book, first, frozen(old), unwritable(index), facts(kind), shift,
        ends, numbers, *taken,
    )  # fmt: skip
    return taken if good else None


@kernel
def _put_fast(
    near, before, after, kind, k, magnitude, exponents, signs, grouped, tallies, contexts, sizes, out, most
):
    """First exponent, bytes of the gaps, of all; -1 where those are more than `most`."""
    start = I64(write_gaps(near, k, out, most))
    behind = start + ((near.size + 7) >> 3)
    if start < 0 or behind > most:
        return I64(0), start, I64(-1)
    split_all(before, after, kind, magnitude, exponents, signs, tallies)
    for pair in range((near.size + 15) >> 4):
        place = start + 2 * pair
        out[place] = signs[pair] & 255
        out[place + 1] = signs[pair] >> 8
    first = I64(plan_contexts(tallies, contexts))
    size = I64(
        write_magnitudes(magnitude, exponents, first, contexts, grouped, out[behind:], most - behind, sizes)
    )
    return first, start, (behind + size if size >= 0 else I64(-1))


def put_fast(
    near: Array32,
    before: Words,
    after: Words,
    kind: WordKind,
    k: int,
    contexts: Table,
    out: ByteArray,
    most: int,
) -> tuple[int, Counts, int, int] | None:
    """What changes from `before` to `after` at `near`, positions without padding: gaps with parameter `k`,
    signs and magnitudes, one after the other. Fills `contexts` as `plan_contexts` does. Returns the first
    exponent, bytes per context, of the gaps, of all."""
    room, count = scratch(), len(near)
    sizes = np.zeros(len(contexts), np.int64)
    first, start, stop = _put_fast(
        unwritable(near),
        unwritable(before),
        unwritable(after),
        facts(kind),
        U64(k),
        room.take("magnitude", np.uint32, count),
        room.take("exponents", np.uint8, count),
        room.take("signs", np.uint16, count // 16 + 1),
        room.take("grouped", np.uint32, count),
        np.zeros((EXPONENTS, 3), np.int64),
        contexts,
        sizes,
        out,
        most,
    )
    return None if stop < 0 else (first, sizes, start, stop)
