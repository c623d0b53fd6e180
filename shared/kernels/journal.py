"""Journal records: pack and unpack; compare, write and read back words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, Words
from weightcast.shared.kernels.compiler import I64, U64, frozen, inlined, kernel, unwritable
from weightcast.shared.kernels.constants import (
    DAMAGED,
    ESCAPED_GAP,
    OUT_OF_ORDER,
    SLACK,
    Array32,
    Begin,
    Counts,
    Masks,
    at_once,
    check_masks,
)
from weightcast.shared.kernels.vectors import (
    differing_under64,
    exchange64,
    load64,
    moves_lanes,
    prefetch,
    set_bits,
    set_word,
    store64,
    trailing_zeros,
    word_at,
    xxh3,
)

_HEAD, _FACTS = 32, 24
"""bytes of a record's head, and of it without its checksum"""
_AHEAD = 48
"""changes between the prefetch of a cache line and its use"""


@kernel
def _pack_lists(heads, index, bounds, old, new, width, out):
    """Without branches: an escape is written for each gap, and written over unless it is one."""
    at = I64(0)
    for n in range(heads.shape[0]):
        start, count = bounds[n], bounds[n + 1] - bounds[n]
        places, last = at + _HEAD, U64(index[start])
        end = places + count
        for i in range(count):
            gap = U64(index[start + i]) - last
            last += gap
            out[places + i] = min(gap, U64(ESCAPED_GAP))
            store64(out, end, gap)
            end += 4 * I64(gap >= U64(ESCAPED_GAP))
        escapes, size = (end - places - count) >> 2, width * count
        for i in range(size):
            out[end + i] = old[width * start + i]
        for i in range(size):
            out[end + size + i] = new[width * start + i]
        store64(out, at, U64(heads[n, 0]) | U64(width) << U64(32))
        store64(out, at + 8, U64(heads[n, 1]))
        store64(out, at + 16, U64(count) | U64(escapes) << U64(32))
        end += 2 * size
        store64(out, at + 24, xxh3(out, places, end - places) ^ xxh3(out, at, _FACTS))
        at = end
    return at


def pack_lists(heads: Counts, index: Array32, bounds: Counts, old: Words, new: Words) -> ByteArray:
    """A journal's records of listed changes, each at its distance from the one before. `heads`: int64[n, 2],
    tensor and first word of each record, which has changes bounds[n] to bounds[n + 1]."""
    out = np.empty(len(heads) * _HEAD + len(index) * (5 + 2 * new.itemsize) + SLACK, np.uint8)
    places = unwritable(heads), unwritable(index), unwritable(bounds)
    size = _pack_lists(*places, frozen(old), frozen(new), new.itemsize, out)
    return out[:size]


@kernel
def _read_lists(block, forms, lists):
    at, count, low = I64(0), I64(0), U64(0xFFFFFFFF)
    while count < lists.shape[0] and at + _HEAD <= block.size:
        front, first, back = load64(block, at), load64(block, at + 8), load64(block, at + 16)
        tensor, width = I64(front & low), I64(front >> U64(32))
        changes, escapes = I64(back & low), I64(back >> U64(32))
        if tensor >= forms.shape[0] or width != forms[tensor, 0] or escapes > changes or escapes >= 1 << 31:
            break
        size, words = changes * (1 + 2 * width) + 4 * escapes, forms[tensor, 1]
        if not 0 < changes <= words or first >= U64(words) or at + _HEAD + size > block.size:
            break
        lists[count, 0], lists[count, 1], lists[count, 2] = tensor, I64(first), changes
        lists[count, 3], lists[count, 4], lists[count, 5] = escapes, at + _HEAD, size
        at += _HEAD + size
        count += 1
    return count


def read_lists(block: ByteArray, most: int, forms: Counts) -> Counts:
    """The records of listed changes that a piece of a journal begins with, up to `most`, as far as their
    heads fit the tensors' `forms` and all of them is there. int64[n, 6]: tensor, first word, changes,
    escapes, place and size of the payload."""
    lists = np.empty((min(most, len(block) // _HEAD), 6), np.int64)
    return lists[: _read_lists(frozen(block), unwritable(forms), lists)]


@kernel
def _unpack_lists(block, lists, homes, width, index, old, new):
    found = I64(0)
    for n in range(lists.shape[0]):
        position, count, escapes = lists[n, 1], lists[n, 2], lists[n, 3]
        at, longer = lists[n, 4], lists[n, 4] + count
        checksum = xxh3(block, at, lists[n, 5]) ^ xxh3(block, at - _HEAD, _FACTS)
        if checksum != load64(block, at - 8):
            return n, True
        after_escapes = longer + 4 * escapes
        for i in range(count):
            gap = I64(block[at + i])
            if (gap == 0) != (i == 0):
                return n, False
            if gap == ESCAPED_GAP:
                if longer == after_escapes:
                    return n, False
                gap = I64(load64(block, longer) & U64(0xFFFFFFFF))
                longer += 4
                if gap < ESCAPED_GAP:
                    return n, False
            position += gap
            index[found + i] = homes[n, 0] + position
        if longer != after_escapes or position >= homes[n, 1]:
            return n, False
        for i in range(width * count):
            old[width * found + i] = block[longer + i]
            new[width * found + i] = block[longer + width * count + i]
        found += count
    return I64(-1), False


def unpack_lists(
    block: ByteArray, lists: Counts, homes: Counts, kind: np.dtype[np.unsignedinteger]
) -> tuple[NDArray[np.int64], Words, Words]:
    """Places, old and new words of such records, each checked. `homes`: int64[n, 2], number of the tensor's
    first word and how many it has. Raises ValueError for a record that is damaged or out of order."""
    count = int(lists[:, 2].sum())
    index = np.empty(count, np.int64)
    old, new = (np.empty(count, kind) for _ in range(2))
    bare = old.view(np.uint8), new.view(np.uint8)
    tables = unwritable(lists), unwritable(homes)
    failed, damaged = _unpack_lists(frozen(block), *tables, kind.itemsize, index, *bare)
    if failed >= 0:
        raise ValueError(DAMAGED if damaged else OUT_OF_ORDER)
    return index, old, new


@kernel
def _exchange_at(words, index, before, other, after, like):
    asking = max(index.size - _AHEAD, 0)
    for i in range(index.size):
        if i < asking:
            prefetch(words, index[i + _AHEAD], like)
        found = word_at(words, index[i], like)
        if found != word_at(before, i, like) and found != word_at(other, i, like):
            return i
    for i in range(index.size):
        set_word(words, index[i], word_at(after, i, like))
    for i in range(index.size):
        if word_at(words, index[i], like) != word_at(after, i, like):
            return i
    return I64(-1)


def exchange_at(
    words: Words, index: NDArray[np.int64], before: Words, after: Words, *, again: bool
) -> int | None:
    """Writes `after` where `words` holds `before` (or, `again`, already `after`), at places that all are
    within `words`, and reads it back. Returns which of `index` fails first; where a word is unexpected
    nothing is written."""
    old, new, like = frozen(before), frozen(after), np.empty(0, words.dtype)
    failed = _exchange_at(words.view(np.uint8), unwritable(index), old, new if again else old, new, like)
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
    """As `exchange_at`, of those of `length` words from `first` on, all of them there, whose bits are set;
    returns the word, and some of those before it are written then. `begin` is called first, once the places
    are known to be good. Raises ValueError, with nothing written, for bits of no words, or for another number
    of them than `after` has words."""
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
