"""Positions by class of the old exponent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import WordKind, Words
from weightcast.shared.kernels.compiler import I64, U64, frozen, inlined, kernel, unwritable
from weightcast.shared.kernels.constants import Array32, Counts
from weightcast.shared.kernels.vectors import (
    LOW,
    exponent,
    facts,
    on_stack,
    reaching64,
    set_bits,
    trailing_zeros,
    word_at,
)

CLASSES = 8
_ALL = (1 << 64) - 1


@inlined
def _masks(old, first, valid, low, least, like, masks):
    """For each class the words among 64 from `first` on. Classes nest, so each comparison closes one."""
    reached1 = reaching64(old, first, like, low, least[1]) & valid
    reached2 = reaching64(old, first, like, low, least[2]) & valid
    reached3 = reaching64(old, first, like, low, least[3]) & valid
    reached4 = reaching64(old, first, like, low, least[4]) & valid
    reached5 = reaching64(old, first, like, low, least[5]) & valid
    reached6 = reaching64(old, first, like, low, least[6]) & valid
    reached7 = reaching64(old, first, like, low, least[7]) & valid
    masks[0], masks[1], masks[2] = valid & ~reached1, reached1 & ~reached2, reached2 & ~reached3
    masks[3], masks[4], masks[5] = reached3 & ~reached4, reached4 & ~reached5, reached5 & ~reached6
    masks[6], masks[7] = reached6 & ~reached7, reached7


@inlined
def _valid(left):
    """The lanes of a block whose span has `left` words left."""
    return U64(_ALL) if left >= 64 else (U64(1) << U64(left)) - U64(1)


@kernel
def _tally_exponents(old, spans, every, kind, like, tallies):
    for n in range(spans.shape[0]):
        stop = spans[n, 0] + spans[n, 1]
        for first in range(spans[n, 0], stop, 64 * every):
            for i in range(first, min(first + 64, stop)):
                tallies[i & 3, exponent(word_at(old, i, like), kind)] += 1


def exponents_of_all(old: Words, spans: Counts, every: int, kind: WordKind) -> Counts:
    """How many words of the spans (int64[n, 2], offset and words) have each of 256 exponents; of their blocks
    of 64 words only one of `every` is looked at."""
    tallies = np.zeros((4, 256), np.int64)
    _tally_exponents(frozen(old), spans, every, facts(kind), np.empty(0, old.dtype), tallies)
    summed: Counts = tallies.sum(axis=0)
    return summed


@kernel
def _put_classes(old, spans, index, least, inverted, table, kind, like, book, gaps):
    """`book`: int64[2, 8], per class: where its next gap goes, where its space ends."""
    masks, base = on_stack(CLASSES, U64(0)), on_stack(CLASSES, I64(0))
    at, behind = book[0], on_stack(CLASSES, I64(0))
    for c in range(CLASSES):
        base[c] = behind[c] = I64(0)
    low, j, most = U64(kind[LOW]), I64(0), index.size
    for n in range(spans.shape[0]):
        stop = spans[n, 0] + spans[n, 1]
        for first in range(spans[n, 0], stop, 64):
            _masks(old, first, _valid(stop - first), low, least, like, masks)
            changed = U64(0)
            while j < most and I64(index[j]) < first + 64:
                lane = U64(I64(index[j]) - first)
                changed |= U64(1) << lane
                c = table[exponent(word_at(old, first + I64(lane), like), kind)]
                if inverted[c] == 0:
                    if at[c] >= book[1, c]:
                        return False
                    rank = base[c] + set_bits(masks[c] & ((U64(1) << lane) - U64(1)))
                    gaps[at[c]] = rank - behind[c]
                    at[c] += 1
                    behind[c] = rank + 1
                j += 1
            for c in range(CLASSES):
                if inverted[c] != 0:
                    still = masks[c] & ~changed
                    if at[c] + 64 > book[1, c] and at[c] + set_bits(still) > book[1, c]:
                        return False
                    while still != U64(0):
                        below = (still & (U64(0) - still)) - U64(1)
                        rank = base[c] + set_bits(masks[c] & below)
                        gaps[at[c]] = rank - behind[c]
                        at[c] += 1
                        behind[c] = rank + 1
                        still &= still - U64(1)
                base[c] += set_bits(masks[c])
    return True


def put_classes(
    old: Words,
    spans: Counts,
    index: Array32,
    least: NDArray[np.uint64],
    inverted: Counts,
    table: NDArray[np.uint8],
    kind: WordKind,
    room: Counts,
    gaps: Array32,
) -> Counts | None:
    """Per class of the words of the spans, ranks within the class of its events, as gaps: of changed words,
    of unchanged ones where `inverted`. `least` (8 long): the lowest word of each class without its sign;
    `table`: classes by exponent. `gaps` has `room[c]` for class c, class after class; None if
    that is too little. Returns how many there are of each."""
    ends = np.cumsum(room)
    book = np.stack([ends - room, ends])
    like = np.empty(0, old.dtype)
    done = _put_classes(
        frozen(old),
        spans,
        unwritable(index),
        least,
        inverted,
        unwritable(table),
        facts(kind),
        like,
        book,
        gaps,
    )
    counts: Counts = book[0] - (ends - room)
    return counts if done else None


_BYTE_SELECT = np.array(
    [([lane for lane in range(8) if byte >> lane & 1] + [0] * 8)[:8] for byte in range(256)], np.uint8
).reshape(-1)
"""the lane of the n-th one in a byte"""
_ONES, _TOPS = U64(0x0101010101010101), U64(0x8080808080808080)


@inlined
def _select(mask, rank, table):
    """The lane of one number `rank` in a mask that has as many (broadword select, Vigna 2008)."""
    sums = mask - ((mask >> U64(1)) & U64(0x5555555555555555))
    sums = (sums & U64(0x3333333333333333)) + ((sums >> U64(2)) & U64(0x3333333333333333))
    sums = ((sums + (sums >> U64(4))) & U64(0x0F0F0F0F0F0F0F0F)) * _ONES
    place = U64(set_bits((((U64(rank) * _ONES) | _TOPS) - sums) & _TOPS) << 3)
    within = U64(rank) - (((sums << U64(8)) >> place) & U64(255))
    return place + U64(table[I64((((mask >> place) & U64(255)) << U64(3)) | within)])


@kernel
def _take_classes(old, spans, least, inverted, kind, like, gaps, ends, select, index):
    """`gaps`: after each class an entry that is never reached. `index`: 64 spare entries."""
    masks, next_rank = on_stack(CLASSES, U64(0)), on_stack(CLASSES, I64(0))
    low, found, most = U64(kind[LOW]), I64(0), index.size - 64
    at = on_stack(CLASSES, I64(0))
    for c in range(CLASSES):
        at[c] = I64(0) if c == 0 else ends[c - 1] + 1
        next_rank[c] = I64(gaps[at[c]])
    for n in range(spans.shape[0]):
        stop = spans[n, 0] + spans[n, 1]
        for first in range(spans[n, 0], stop, 64):
            _masks(old, first, _valid(stop - first), low, least, like, masks)
            hit = I64(0)
            for c in range(CLASSES):
                next_rank[c] -= set_bits(masks[c])
                hit |= (next_rank[c] >> 63) & (1 << c)
            changed = U64(0)
            while hit != 0:
                c = I64(trailing_zeros(U64(hit)))
                hit &= hit - 1
                size = set_bits(masks[c])
                rank = next_rank[c] + size
                while rank < size:
                    changed |= U64(1) << _select(masks[c], rank, select)
                    at[c] += 1
                    rank += 1 + I64(gaps[at[c]])
                next_rank[c] = rank - size
            for c in range(CLASSES):
                changed ^= masks[c] & inverted[c]
            if found > most:
                return I64(-1)
            while changed != U64(0):
                index[found] = first + I64(trailing_zeros(changed))
                found += 1
                changed &= changed - U64(1)
    for c in range(CLASSES):
        if at[c] != ends[c]:
            return I64(-1)
    return found


def take_classes(
    old: Words,
    spans: Counts,
    least: NDArray[np.uint64],
    inverted: Counts,
    kind: WordKind,
    gaps: Array32,
    ends: Counts,
    index: Array32,
) -> int:
    """The positions that `put_classes` was given. `gaps`: class after class, an unused one behind each;
    `ends`: where those are. `index` has 64 spare entries. Returns the number of positions, -1 for too many or
    for events after the last word of a class."""
    flipped = np.where(inverted != 0, np.uint64(_ALL), np.uint64(0))
    like = np.empty(0, old.dtype)
    return int(
        _take_classes(
            frozen(old), spans, least, flipped, facts(kind), like, unwritable(gaps), ends, _BYTE_SELECT, index
        )
    )
