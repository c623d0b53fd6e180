"""Journal records: pack positions; compare, write and read back words."""

from __future__ import annotations

import numpy as np

from weightcast.shared.base.elements import ByteArray, Words
from weightcast.shared.kernels.compiler import I64, U64, frozen, inlined, kernel, unwritable
from weightcast.shared.kernels.constants import (
    ESCAPED_GAP,
    OUT_OF_ORDER,
    Array32,
    Begin,
    Counts,
    Masks,
    at_once,
    check_masks,
)
from weightcast.shared.kernels.vectors import (
    differing64,
    differing_under64,
    exchange64,
    load64,
    moves_lanes,
    on_stack,
    prefetch,
    set_bits,
    set_word,
    trailing_zeros,
    word_at,
)

_BLOCK = 1 << 9
"""changes written before they are read back; also the prefetch distance"""


@kernel
def _pack_gaps(index, starts, gaps, escapes, counts):
    """Without branches: an escape is written for each gap, and written over unless it is one."""
    found = U64(0)
    for n in range(counts.size):
        first, last = found, U64(index[starts[n]])
        for i in range(starts[n], starts[n + 1]):
            gap = U64(index[i]) - last
            last += gap
            gaps[i] = min(gap, U64(ESCAPED_GAP))
            escapes[found] = gap
            found += U64(gap >= U64(ESCAPED_GAP))
        counts[n] = found - first
    return found


def pack_gaps(index: Array32, starts: Counts, gaps: ByteArray) -> tuple[Array32, Counts]:
    """Of records that begin at `starts` (the last is where all end): into `gaps` the distance of each change
    from the one before in its record, at most ESCAPED_GAP; returned are those from there on, and how many of
    them each record has."""
    escapes, counts = np.empty(len(index) + 1, np.uint32), np.empty(len(starts) - 1, np.int64)
    found = _pack_gaps(unwritable(index), starts, gaps, escapes, counts)
    return escapes[:found], counts


@kernel
def _distance(gaps, escapes, like):
    total, escaped, still = I64(0), I64(0), I64(0)
    for i in range(gaps.size):
        gap = I64(gaps[i])
        total += gap
        escaped += gap == ESCAPED_GAP
        still += gap == 0
    for i in range(escapes.size >> 2):
        value = I64(word_at(escapes, i, like))
        if value < ESCAPED_GAP:
            return I64(-1)
        total += value - ESCAPED_GAP
    if escaped != escapes.size >> 2 or gaps[0] != 0 or still != 1:
        return I64(-1)
    return total


@inlined
def _stride(gaps, escapes, i, used, like):
    gap = I64(gaps[i])
    if gap < ESCAPED_GAP:
        return gap, used
    return I64(word_at(escapes, used, like)), used + 1


@kernel
def _exchange(words, first, gaps, escapes, like, before, other, after, word):
    """`like`, `word`: arrays of the dtypes of escapes and words. While a block is exchanged, the next one's
    positions are computed and prefetched."""
    here, there = on_stack(_BLOCK, I64(0)), on_stack(_BLOCK, I64(0))
    position, used, ready = I64(first), I64(0), min(_BLOCK, gaps.size)
    for j in range(ready):
        gap, used = _stride(gaps, escapes, j, used, like)
        position += gap
        there[j] = position
        prefetch(words, position, word)
    for start in range(0, gaps.size, _BLOCK):
        here, there = there, here
        count, following = ready, min(_BLOCK, gaps.size - start - ready)
        for j in range(count):
            if j < following:
                gap, used = _stride(gaps, escapes, start + count + j, used, like)
                position += gap
                there[j] = position
                prefetch(words, position, word)
            found, new = word_at(words, here[j], word), word_at(after, start + j, word)
            if found != word_at(before, start + j, word) and found != word_at(other, start + j, word):
                return here[j]
            set_word(words, here[j], new)
        for j in range(count):
            if word_at(words, here[j], word) != word_at(after, start + j, word):
                return here[j]
        ready = following
    return I64(-1)


def exchange_packed(
    words: Words,
    first: int,
    gaps: ByteArray,
    escapes: Array32,
    before: Words,
    after: Words,
    *,
    again: bool,
    begin: Begin = at_once,
) -> int | None:
    """Writes `after` where `words` holds `before` (or, `again`, already `after`) and reads it back, from word
    `first` on at distances as `pack_gaps` makes them, one change at least. `begin` is called first, once the
    places are known to be good. Returns the first word at which that fails; some of those before it are
    written then. Raises ValueError, with nothing written, for places that do not ascend, or lie past the
    end."""
    steps, longer, like = unwritable(gaps), frozen(escapes), np.empty(0, np.uint32)
    distance = _distance(steps, longer, like)
    if distance < 0 or first + distance >= len(words):
        raise ValueError(OUT_OF_ORDER)
    begin(words[first : first + distance + 1], len(gaps))
    old, new = frozen(before), frozen(after)
    failed = _exchange(
        words.view(np.uint8),
        first,
        steps,
        longer,
        like,
        old,
        new if again else old,
        new,
        np.empty(0, words.dtype),
    )
    return None if failed < 0 else int(failed)


@kernel
def _masks_of(index, masks):
    group, bits = U64(0), U64(0)
    for i in range(index.size):
        place = U64(index[i])
        if place >> U64(6) != group:
            masks[group], bits = bits, U64(0)
            group = place >> U64(6)
        bits |= U64(1) << (place & U64(63))
    masks[group] = bits


def masks_of(index: Array32, words: int) -> Masks:
    """Bits of positions. `words`: a multiple of 64, more than the last position."""
    masks = np.zeros(words >> 6, np.uint64)
    _masks_of(unwritable(index), masks)
    return masks


_GROUPS = 8
"""of 64 words, written before they are read back"""


@inlined
def _whole(found, changes):
    """Whether 64 of the changes are left, and so 64 words from the next one's group on."""
    return moves_lanes() and found + 64 <= changes


@kernel
def _exchange_masked(words, first, masks, like, before, other, after, changes):
    """`like`: an array of the words' dtype; all others are bytes."""
    groups, found = masks.size >> 3, I64(0)
    for start in range(0, groups, _GROUPS):
        stop, begun = min(groups, start + _GROUPS), found
        for group in range(start, stop):
            mask, place = load64(masks, group << 3), first + (group << 6)
            if _whole(found, changes):
                if mask != U64(0):
                    wrong = exchange64(words, place, mask, before, other, after, found, like)
                    if wrong != U64(0):
                        return place + I64(trailing_zeros(wrong))
                    found += set_bits(mask)
                continue
            while mask != U64(0):
                word = place + I64(trailing_zeros(mask))
                here, new = word_at(words, word, like), word_at(after, found, like)
                if here != word_at(before, found, like) and here != word_at(other, found, like):
                    return word
                set_word(words, word, new)
                found += 1
                mask &= mask - U64(1)
        again = begun
        for group in range(start, stop):
            mask, place = load64(masks, group << 3), first + (group << 6)
            if _whole(again, changes):
                wrong = differing_under64(words, place, mask, after, again, like)
                if wrong != U64(0):
                    return place + I64(trailing_zeros(wrong))
                again += set_bits(mask)
                continue
            while mask != U64(0):
                word = place + I64(trailing_zeros(mask))
                if word_at(words, word, like) != word_at(after, again, like):
                    return word
                again += 1
                mask &= mask - U64(1)
    return I64(-1)


def exchange_masked(
    words: Words,
    first: int,
    length: int,
    masks: Masks,
    before: Words,
    after: Words,
    *,
    again: bool,
    begin: Begin = at_once,
) -> int | None:
    """As `exchange_packed`, of those of `length` words from `first` on, all of them there, whose bits are
    set. Raises ValueError, with nothing written, for bits of no words, or another number of them than `after`
    has words."""
    check_masks(length, masks, len(after))
    begin(words[first : first + length], len(after))
    old, new = frozen(before), frozen(after)
    failed = _exchange_masked(
        words.view(np.uint8),
        first,
        frozen(masks),
        np.empty(0, words.dtype),
        old,
        new if again else old,
        new,
        len(after),
    )
    return None if failed < 0 else int(failed)


_WORDS = 1 << 12
"""written before they are read back"""


@kernel
def _first_other(words, wanted, start, stop, like):
    """-1 for none."""
    whole = start + ((stop - start) & ~63)
    for first in range(start, whole, 64):
        mask = differing64(words, wanted, first, like)
        if mask != U64(0):
            return first + I64(trailing_zeros(mask))
    for i in range(whole, stop):
        if word_at(words, i, like) != word_at(wanted, i, like):
            return i
    return I64(-1)


@kernel
def _exchange_all(words, before, after, count, like):
    for start in range(0, count, _WORDS):
        stop = min(count, start + _WORDS)
        wrong = _first_other(words, before, start, stop, like)
        if wrong >= 0:
            return wrong
        for i in range(start, stop):
            set_word(words, i, word_at(after, i, like))
        wrong = _first_other(words, after, start, stop, like)
        if wrong >= 0:
            return wrong
    return I64(-1)


def exchange_all(words: Words, before: Words, after: Words) -> int | None:
    """As `exchange_packed`, of all words."""
    like = np.empty(0, words.dtype)
    failed = _exchange_all(words.view(np.uint8), frozen(before), frozen(after), len(words), like)
    return None if failed < 0 else int(failed)
