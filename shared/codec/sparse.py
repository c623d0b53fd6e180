"""Payloads that hold changed words only: `fast` and `small`. docs/FORMAT.md, Chunk blob.

0  u8   `fast`: k of the gaps; `small`: classes, 1 to 8
1  u8   contexts: 1, or 16 for a dtype with an exponent
2  u8   first exponent: old words with this exponent or a lower one have context 0
3  u8   0
4  u32  bytes of the gaps
8  8 bytes per context, `CONTEXT`
.. `small`: 12 bytes per class, `CLASS`
.. gaps
.. signs: a bit per change, least significant first, 1 where the step goes down; filled to a byte
.. magnitudes, context after context
.. 8 zero bytes, so that readers may load 8 bytes anywhere

Magnitudes are |step| - 1: large weights move by exactly one unit, small ones by more. The context of a
changed word is exponent - first exponent of its *old* word, at least 0 and at most 15. In a context with
under a third of longer steps, lengths of runs of single units are coded instead of each.

Where words change: as gaps between changes (`fast`), or as gaps within classes of words (`small`).

`fast`: a Rice code for the unchanged words before each changed one. Decoding touches changed words only.

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

from weightcast.shared.base.elements import ByteArray, Chunk, WordKind, Words
from weightcast.shared.codec.changes import Changes, Counted, Index
from weightcast.shared.digest.checksums import SpanSums, spans_in
from weightcast.shared.kernels.constants import (
    CODING,
    GREATEST,
    K_LIMIT,
    MARGIN,
    NOTHING,
    RUNS,
    SLACK,
    expected_bits,
    rice_parameter,
)
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import scratch

CONTEXT = np.dtype([("plan", np.uint8, 3), ("zero", np.uint8), ("size", "<u4")])
"""plan: coding, k (of runs: k of their lengths), k of what ends a run; bytes of the stream"""
MOST_CONTEXTS = 16
_WORTH_CONTEXTS = 1024
"""changes from which 16 contexts are worth their headers"""


@dataclass(frozen=True)
class GroupedMagnitudes:
    """Of each change: |step| - 1 and the exponent of the old word; `signs` has a bit each, least significant
    first, 1 for a step down. `tallies`: int64[256, 3], of each exponent its changes, the sum of |step| - 1,
    how many of those are not 0. `contexts`: int64[n, 6], columns as `contexts` names them. In the thread's
    scratch: valid until it groups others."""

    magnitude: NDArray[np.uint32]
    exponents: ByteArray
    signs: ByteArray
    tallies: NDArray[np.int64]
    first: int
    contexts: NDArray[np.int64]

    @property
    def expected_bits(self) -> float:
        return sum(_expected(*row[:CODING]) for row in self.contexts.tolist())

    def put(self, out: ByteArray, most: int) -> tuple[bytes, int] | None:
        """Heads of the contexts, and how many bytes of streams are in `out`; None if they exceed `most`."""
        values = scratch().take("grouped", np.uint32, len(self.magnitude))
        sizes = kernels().put_magnitudes(
            self.magnitude, self.exponents, self.first, self.contexts, values, out, most
        )
        if sizes is None:
            return None
        return heads_of(self.contexts, sizes), int(sizes.sum())


def heads_of(contexts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    """CONTEXT of each, with the bytes of its stream."""
    heads = np.zeros(len(sizes), CONTEXT)
    heads["plan"], heads["size"] = contexts[:, CODING:], sizes
    return heads.tobytes()


def grouped(changes: Changes, kind: WordKind) -> GroupedMagnitudes:
    count, room = len(changes), scratch()
    magnitude = room.take("magnitude", np.uint32, count)
    exponents = room.take("exponents", np.uint8, count)
    signs = room.take("signs", np.uint8, count // 8 + 2)
    tallies = kernels().split(changes.old, changes.new, kind, magnitude, exponents, signs)
    contexts = unplanned(count, kind)
    first = kernels().plan_contexts(tallies, contexts)
    return GroupedMagnitudes(magnitude, exponents, signs[: (count + 7) // 8], tallies, first, contexts)


def unplanned(changes: int, kind: WordKind) -> NDArray[np.int64]:
    """Zeros for `GroupedMagnitudes.contexts`."""
    many = kind.exponent_mask and changes >= _WORTH_CONTEXTS
    return np.zeros((MOST_CONTEXTS if many else 1, 6), np.int64)


def _expected(count: int, total: int, longer: int) -> float:
    if 3 * longer >= count:
        return expected_bits(total, count)
    return expected_bits(count - longer, longer + 1) + expected_bits(total - longer, longer)


def read_contexts(payload: ByteArray, at: int, count: int, start: int) -> NDArray[np.int64]:
    """int64[5, count]: coding, k, k of what ends a run, start and stop of the stream. Heads are at `at`,
    streams follow each other from `start` to the last SLACK bytes, which are zeros. Raises ValueError."""
    if count not in (1, MOST_CONTEXTS):
        raise ValueError("damaged header of the payload")
    if at + count * CONTEXT.itemsize > len(payload) - SLACK:
        raise ValueError("payload shorter than its header says")
    heads = np.frombuffer(payload, CONTEXT, count, at)
    plans, sizes = heads["plan"].astype(np.int64), heads["size"].astype(np.int64)
    lawful = (plans <= (RUNS, K_LIMIT, K_LIMIT)).all() and not heads["zero"].any()
    if not lawful or ((plans[:, 0] == NOTHING) != (sizes == 0)).any():
        raise ValueError("damaged header of a context")
    stops = start + np.cumsum(sizes)
    if stops[-1] + SLACK != len(payload) or payload[-SLACK:].any():
        raise ValueError("payload length differs from its header")
    return np.stack([*plans.T, stops - sizes, stops])


CLASS = struct.Struct("<BBBBII")
"""lowest exponent, k, 1 where unchanged words are coded, 0, codes, bytes of them"""
MOST_CLASSES = 8
_SAMPLE = 16
"""one of this many blocks is sampled to count words by exponent"""
_SAMPLED_WORDS = 1 << 16
"""words from which a sample is used"""
_HEAD_BITS = 8 * CLASS.size


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


def classify(
    grouped: GroupedMagnitudes, old: Words, counted: Counted, kind: WordKind, *, exact: bool
) -> Classes:
    """`old` with its padding."""
    every = 1 if exact or counted.words < _SAMPLED_WORDS else _SAMPLE
    words = kernels().exponents_of_all(old, counted.spans, every, kind) * (1.0 if every == 1 else every)
    pairs = zip(words.tolist(), grouped.tallies[:, 0].tolist(), strict=True)
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


DecodedStep = tuple[Changes, SpanSums]
"""changes, and the sums per span that prove them"""

_HEAD = struct.Struct("<BBBBI")


def encode_fast(changes: Changes, counted: Counted, kind: WordKind, most: int) -> memoryview | None:
    """None if the streams would exceed `most` bytes. In the thread's scratch, valid until it
    encodes again."""
    contexts = unplanned(len(changes), kind)
    k = rice_parameter(counted.words - len(changes), len(changes))
    start = _HEAD.size + len(contexts) * CONTEXT.itemsize
    out = scratch().take("out", np.uint8, start + most + MARGIN)
    near = counted.without_padding(changes.index)
    done = kernels().put_fast(near, changes.old, changes.new, kind, k, contexts, out[start:], most)
    if done is None:
        return None
    first, sizes, gap_bytes, size = done
    stop = start + size + SLACK
    payload = out[:stop].data
    payload[: _HEAD.size] = _HEAD.pack(k, len(contexts), first, 0, gap_bytes)
    payload[_HEAD.size : start] = heads_of(contexts, sizes)
    payload[-SLACK:] = bytes(SLACK)
    return payload


def encode_small(
    index: Index,
    old: Words,
    counted: Counted,
    classes: Classes,
    grouped: GroupedMagnitudes,
    kind: WordKind,
    most: int,
) -> bytes | None:
    """`index`: positions with padding. None if the streams would exceed `most` bytes, or if the sample behind
    `classes` was misleading."""
    out = scratch().take("out", np.uint8, most + MARGIN)
    placed = put_classes(classes, index, old, counted, kind, out, most)
    if placed is None:
        return None
    class_heads, start = placed
    done = grouped.put(out[start:], most - start)
    if done is None:
        return None
    heads, size = done
    head = _HEAD.pack(len(classes.each), len(grouped.contexts), grouped.first, 0, start)
    gaps, magnitudes = out[:start].data, out[start : start + size].data
    return b"".join((head, heads, class_heads, gaps, grouped.signs.data, magnitudes, bytes(SLACK)))


@dataclass(frozen=True)
class _Layout:
    """Offsets in a payload. `gaps`: [start, stop); `streams`: as `read_contexts`."""

    first: int
    first_exponent: int
    classes_at: int
    gaps: tuple[int, int]
    streams: NDArray[np.int64]


def decode_fast(payload: ByteArray, old: Words, chunk: Chunk, counted: Counted, changed: int) -> DecodedStep:
    layout = _layout(payload, changed, small=False)
    start, stop = layout.gaps
    if layout.first > K_LIMIT or changed > 8 * (stop - start):
        raise ValueError("payload shorter than its header says")
    index = scratch().lend("positions", np.uint32, changed)
    end = kernels().take_gaps(payload, start, stop, layout.first, counted.borders, counted.shifts, index)
    if end < 0:
        raise ValueError("damaged stream of gaps")
    if end > counted.words:
        raise ValueError("position past the chunk's last word")
    return _decoded(payload, layout, old, chunk, index)


def decode_small(payload: ByteArray, old: Words, chunk: Chunk, counted: Counted, changed: int) -> DecodedStep:
    if not chunk.kind.exponent_mask:
        raise ValueError("classes for words without exponents")
    layout = _layout(payload, changed, small=True)
    place = (layout.classes_at, layout.first, *layout.gaps)
    index = take_classes(payload, *place, old, counted, chunk.kind, changed)
    return _decoded(payload, layout, old, chunk, index)


def _decoded(payload: ByteArray, layout: _Layout, old: Words, chunk: Chunk, index: Index) -> DecodedStep:
    streams, first = layout.streams, layout.first_exponent
    taken = kernels().take_steps(
        payload, layout.gaps[1], streams, first, old, index, chunk.kind, *spans_in(chunk)
    )
    if taken is None:
        raise ValueError("damaged stream of steps, or a step out of its word's range")
    before, after, sums, changed = taken
    return Changes(index, before, after), SpanSums.of(chunk, sums, changed)


def _layout(payload: ByteArray, changed: int, *, small: bool) -> _Layout:
    if len(payload) < _HEAD.size + CONTEXT.itemsize + SLACK:
        raise ValueError("payload shorter than its header")
    first, contexts, first_exponent, zero, gap_bytes = _HEAD.unpack_from(payload.data)
    if zero or (small and not 1 <= first <= MOST_CLASSES):
        raise ValueError("damaged header of the payload")
    classes_at = _HEAD.size + contexts * CONTEXT.itemsize
    gaps = classes_at + (first * CLASS.size if small else 0)
    signs = gaps + gap_bytes
    magnitudes = signs + (changed + 7) // 8
    if magnitudes > len(payload) - SLACK:
        raise ValueError("payload shorter than its header says")
    if changed % 8 and payload[magnitudes - 1] >> changed % 8:
        raise ValueError("signs are not padded with zeros")
    streams = read_contexts(payload, _HEAD.size, contexts, magnitudes)
    return _Layout(first, first_exponent, classes_at, (gaps, signs), streams)
