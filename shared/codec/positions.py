"""Where words change: as gaps between changes (`fast`), or as gaps within classes of words (`small`).

`fast`: a Rice code for the unchanged words before each changed one, written and read with the rest of a
payload (`sparse`). Decoding touches changed words only.

`small` uses what both sides know: old words of small exponents change more often. Words fall into up to 8
classes of adjacent old exponents; a gap counts the words of the same class in between. Where more than half
of a class changes, its unchanged words are coded instead. Decoding passes over all old words.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, WordKind, Words
from weightcast.shared.codec.changes import Counted, Index
from weightcast.shared.codec.magnitudes import Steps
from weightcast.shared.kernels.constants import GREATEST, K_LIMIT, expected_bits, rice_parameter
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import scratch

CLASS = struct.Struct("<BBBBII")
"""lowest exponent, k, 1 where unchanged words are coded, 0, codes, bytes of them"""
MOST_CLASSES = 8
_SAMPLE = 16
"""one of this many blocks is sampled to count words by exponent"""
_SAMPLED_WORDS = 1 << 16
"""words from which a sample is used"""
_HEAD_BITS = 8 * CLASS.size


def expected_gap_bits(changed: int, words: int) -> float:
    """Estimated bits of `fast` positions."""
    return expected_bits(words - changed, changed)


@dataclass(frozen=True)
class _Class:
    """Words from exponent `lowest` on. `words` is an estimate if exponents were sampled."""

    lowest: int
    words: float
    changed: int

    @property
    def inverted(self) -> bool:
        return 2 * self.changed > self.words

    @property
    def bits(self) -> float:
        return self.words * _entropy(self.changed / self.words) if self.words else 0.0

    def with_next(self, other: _Class) -> _Class:
        return _Class(self.lowest, self.words + other.words, self.changed + other.changed)


def _entropy(share: float) -> float:
    if not 0 < share < 1:
        return 0.0
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


@dataclass(frozen=True)
class Classes:
    """The classes of a chunk, ascending. `exact`: words were counted, not sampled."""

    each: tuple[_Class, ...]
    exact: bool


def classify(steps: Steps, old: Words, counted: Counted, kind: WordKind, *, exact: bool = False) -> Classes:
    """`old` with its padding."""
    every = 1 if exact or counted.words < _SAMPLED_WORDS else _SAMPLE
    words = kernels().exponents_of_all(old, counted.spans, every, kind) * (1.0 if every == 1 else every)
    pairs = zip(words.tolist(), steps.histogram.tolist(), strict=True)
    classes = [_Class(e, max(many, hit), hit) for e, (many, hit) in enumerate(pairs) if many or hit]
    return Classes(tuple(_merged(classes)), every == 1)


def _merged(classes: list[_Class]) -> list[_Class]:
    """Joins neighbours, the cheapest first, until there are few enough and each is worth its header."""
    pairs = [one.with_next(other) for one, other in pairwise(classes)]
    costs = [_cost(pair, *parts) for pair, parts in zip(pairs, pairwise(classes), strict=True)]
    while pairs:
        at = min(range(len(costs)), key=costs.__getitem__)
        if len(classes) <= MOST_CLASSES and costs[at] > _HEAD_BITS:
            break
        classes[at : at + 2] = [pairs[at]]
        del pairs[at], costs[at]
        for n in (at - 1, at):
            if 0 <= n < len(pairs):
                pairs[n] = classes[n].with_next(classes[n + 1])
                costs[n] = _cost(pairs[n], *classes[n : n + 2])
    return classes


def _cost(pair: _Class, one: _Class, other: _Class) -> float:
    """Bits lost by joining."""
    return pair.bits - one.bits - other.bits


def put_classes(
    classes: Classes, index: Index, old: Words, counted: Counted, kind: WordKind, out: ByteArray, most: int
) -> tuple[bytes, int] | None:
    """Heads of the classes, bytes written; None if those exceed `most`, or if a sample of exponents was
    misleading. `index`: positions with padding."""
    form = _Form.of([one.lowest for one in classes.each], [one.inverted for one in classes.each], kind)
    room = [_room(one, classes.exact) for one in classes.each] + [0] * (MOST_CLASSES - len(classes.each))
    gaps = scratch().take("gaps", np.uint32, sum(room))
    counts = kernels().put_classes(
        old, counted.spans, index, form.least, form.inverted, form.table, kind, np.array(room, np.int64), gaps
    )
    if counts is None:
        return None
    heads, at, start = [], 0, 0
    for one, count, reserved in zip(classes.each, counts.tolist(), room, strict=False):
        values = gaps[start : start + count]
        k = rice_parameter(int(values.sum(dtype=np.int64)), count)
        size = kernels().put_values(values, k, out[at:], most - at)
        if size < 0 or at + size > most:
            return None
        heads.append(CLASS.pack(one.lowest, k, one.inverted, 0, count, size))
        at, start = at + size, start + reserved
    return b"".join(heads), at


def _room(one: _Class, exact: bool) -> int:
    """Most codes that a class may have."""
    if not one.inverted:
        return one.changed
    unchanged = int(one.words) - one.changed
    return unchanged if exact else unchanged + unchanged // 4 + 4096


@dataclass(frozen=True)
class _Form:
    """Classes in the form that kernels take. `least`: the lowest word of each without its sign, uint64[8];
    `table`: class by exponent, uint8[256]."""

    least: NDArray[np.uint64]
    inverted: NDArray[np.int64]
    table: ByteArray

    @classmethod
    def of(cls, lowest: Sequence[int], inverted: Sequence[bool | int], kind: WordKind) -> _Form:
        least = np.full(MOST_CLASSES, kind.sign_bit, np.uint64)  # no word without its sign reaches that
        least[0] = 0
        least[1 : len(lowest)] = [exponent << kind.exponent_shift for exponent in lowest[1:]]
        flips = np.zeros(MOST_CLASSES, np.int64)
        flips[: len(inverted)] = inverted
        table = np.searchsorted(np.array(lowest[1:]), np.arange(256), side="right").astype(np.uint8)
        return cls(least, flips, table)


@dataclass(frozen=True)
class _Stream:
    lowest: int
    k: int
    inverted: int
    codes: int
    start: int
    stop: int


def take_classes(
    payload: ByteArray,
    at: int,
    count: int,
    start: int,
    stop: int,
    old: Words,
    counted: Counted,
    kind: WordKind,
    changed: int,
) -> Index:
    """`changed` positions with padding. `count` heads are at `at`, streams fill [start, stop). Raises
    ValueError."""
    streams = _streams(payload, at, count, start, stop, counted.words, kind)
    ends = np.empty(MOST_CLASSES, np.int64)
    gaps = scratch().take("gaps", np.uint32, sum(one.codes for one in streams) + MOST_CLASSES)
    place = 0
    for number in range(MOST_CLASSES):
        if number < count:
            one = streams[number]
            values = gaps[place : place + one.codes]
            if not kernels().take_values(payload, one.start, one.stop, one.k, values):
                raise ValueError("damaged stream of gaps")
            place += one.codes
        ends[number] = place
        gaps[place] = GREATEST
        place += 1
    form = _Form.of([one.lowest for one in streams], [one.inverted for one in streams], kind)
    index = np.empty(changed + 64, np.uint32)
    found = kernels().take_classes(
        old, counted.spans, form.least, form.inverted, kind, gaps[:place], ends, index
    )
    if found != changed:
        raise ValueError("number of changes differs from the header")
    return index[:changed]


def _streams(
    payload: ByteArray, at: int, count: int, start: int, stop: int, words: int, kind: WordKind
) -> list[_Stream]:
    streams: list[_Stream] = []
    for number in range(count):
        lowest, k, inverted, zero, codes, size = CLASS.unpack_from(payload.data, at + number * CLASS.size)
        if k > K_LIMIT or inverted > 1 or zero or lowest > kind.exponent_mask or codes > 8 * size:
            raise ValueError("damaged header of a class")
        streams.append(_Stream(lowest, k, inverted, codes, start, start + size))
        start += size
    ascending = all(one.lowest < other.lowest for one, other in pairwise(streams))
    if not ascending or start != stop or sum(one.codes for one in streams) > words:
        raise ValueError("headers of classes contradict each other")
    return streams
