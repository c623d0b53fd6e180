"""The `fast` payload: decoding touches changed words only. docs/FORMAT.md, Encoding fast.

Little-endian throughout; Rice codes as in `bits_plain`.

    0  u8   k of the gaps, at most 31
    1  u8   contexts: 1, or 16 for a dtype with an exponent
    2  u8   first exponent: old words with this exponent or a lower one have context 0
    3  u8   0
    4  u32  bytes of the gaps
    8  8 bytes per context
         0  u8   coding: 0 nothing, 1 Rice, 2 runs
         1  u8   k (of runs: k of their lengths), at most 31
         2  u8   k of what ends a run, at most 31
         3  u8   0
         4  u32  bytes of its magnitudes
    .. gaps: Rice codes of unchanged words before each changed one, since the last; padding is not counted
    .. signs: a bit per change, least significant first, 1 where the step goes down; filled to a byte
    .. magnitudes |step| - 1, per context of the old word: exponent - first exponent, at least 0, at most 15
    .. 8 zero bytes, so that readers may load 8 bytes anywhere

A step is ordinal(new) - ordinal(old). The ordinal of a float is its bits if its sign bit is clear, else
-1 - (bits ^ sign bit); of an integer its bits, and the step is taken modulo 2**width into
[-2**(width-1), 2**(width-1)).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.bits import bits
from weightcast.shared.codec.bits_plain import SLACK, Array32
from weightcast.shared.codec.changes import Changes
from weightcast.shared.words import ByteArray, WordKind, Words

_HEAD = struct.Struct("<BBBBI")
_CONTEXT = struct.Struct("<BBBBI")
_NOTHING, _RICE, _RUNS = 0, 1, 2
_MOST_CONTEXTS = 16
_K_LIMIT = 31
_WORTH_CONTEXTS = 1024
"""changes from which 16 tables pay for themselves"""
_TOP_SHARE = 0.97
"""share of changes whose exponents the 16 contexts reach up to"""
_EVERY_EXPONENT = np.arange(256, dtype=np.uint8)
_GOLDEN_LOG = math.log((math.sqrt(5) - 1) / 2)


def rice_parameter(total: int, count: int) -> int:
    """The best k for `count` geometric values with sum `total` (Kiely 2004)."""
    if total <= 0 or count <= 0:
        return 0
    mean = total / count
    ratio = _GOLDEN_LOG / math.log(mean / (mean + 1))
    return min(_K_LIMIT, max(0, 1 + math.floor(math.log2(ratio))))


@dataclass(frozen=True)
class _Coded:
    """Magnitudes of one context."""

    coding: int
    k: int
    k_rest: int
    data: bytes

    @property
    def head(self) -> bytes:
        return _CONTEXT.pack(self.coding, self.k, self.k_rest, 0, len(self.data))


def encode(changes: Changes, words: int, kind: WordKind) -> bytes:
    """Positions of `changes` count without padding, out of `words`."""
    k_gaps = rice_parameter(words - len(changes), len(changes))
    gaps = bits().rice(_gaps(changes.index), k_gaps)
    magnitude, negative = bits().split(_wide(changes.old), _wide(changes.new), kind)
    signs = np.packbits(negative, bitorder="little").tobytes()
    first, count = _choose_contexts(changes.old, kind)
    context = _contexts(changes.old, kind, first, count)
    grouped = bits().group(magnitude, context) if count > 1 else magnitude
    coded = [_code(grouped[start:stop]) for start, stop in _borders(context, count)]
    head = _HEAD.pack(k_gaps, count, first, 0, len(gaps))
    heads, streams = (one.head for one in coded), (one.data for one in coded)
    return b"".join((head, *heads, gaps, signs, *streams, bytes(SLACK)))


def _wide(words: Words) -> Array32:
    return words.astype(np.uint32)


def _gaps(index: NDArray[np.uint32]) -> Array32:
    gaps = index.astype(np.uint32)
    gaps[1:] -= index[:-1] + np.uint32(1)
    return gaps


def _choose_contexts(old: Words, kind: WordKind) -> tuple[int, int]:
    """First exponent, number of contexts."""
    if not kind.exponent_mask or len(old) < _WORTH_CONTEXTS:
        return 0, 1
    reach = np.cumsum(bits().counts(bits().classify(old, kind, _EVERY_EXPONENT)))
    top = int(np.searchsorted(reach, _TOP_SHARE * reach[-1]))
    return max(0, top - _MOST_CONTEXTS + 1), _MOST_CONTEXTS


def _contexts(old: Words, kind: WordKind, first: int, count: int) -> ByteArray:
    if count == 1:
        return np.zeros(len(old), np.uint8)
    table = np.clip(np.arange(256) - first, 0, count - 1).astype(np.uint8)
    context: ByteArray = bits().classify(old, kind, table)
    return context


def _borders(context: ByteArray, count: int) -> Iterator[tuple[int, int]]:
    ends = np.cumsum(bits().counts(context)[:count]).tolist()
    return zip([0, *ends[:-1]], ends, strict=True)


def _code(values: Array32) -> _Coded:
    """Runs where less than a third of the steps is longer than one."""
    if len(values) == 0:
        return _Coded(_NOTHING, 0, 0, b"")
    total, longer = int(values.sum(dtype=np.uint64)), int(np.count_nonzero(values))
    if 3 * longer >= len(values):
        k = rice_parameter(total, len(values))
        return _Coded(_RICE, k, 0, bits().rice(values, k))
    k, k_rest = rice_parameter(len(values) - longer, longer + 1), rice_parameter(total - longer, longer)
    return _Coded(_RUNS, k, k_rest, bits().runs(values, k, k_rest))


@dataclass(frozen=True)
class _Stream:
    """Where the magnitudes of one context lie."""

    coding: int
    k: int
    k_rest: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Layout:
    """Where things lie in a payload, [start, stop), checked against its length."""

    k_gaps: int
    first: int
    gaps: tuple[int, int]
    signs: tuple[int, int]
    streams: tuple[_Stream, ...]


def positions(payload: ByteArray, changed: int, words: int) -> Array32:
    """Positions of `changed` words without padding, ascending, below `words`. Raises ValueError."""
    layout = _layout(payload, changed)
    index: Array32
    index, end = bits().ascend(bits().unrice(payload, *layout.gaps, layout.k_gaps, changed))
    if end > words:
        raise ValueError("a position lies behind the chunk's last word")
    return index


def steps(payload: ByteArray, old: Words, kind: WordKind) -> Words:
    """New words for the old words at the payload's positions. Raises ValueError."""
    layout = _layout(payload, len(old))
    contexts = len(layout.streams)
    context = _contexts(old, kind, layout.first, contexts)
    pairs = zip(layout.streams, _borders(context, contexts), strict=True)
    grouped = [_read(payload, stream, stop - start) for stream, (start, stop) in pairs]
    magnitude = bits().ungroup(np.concatenate(grouped), context) if contexts > 1 else grouped[0]
    signs = payload[slice(*layout.signs)]
    negative = np.unpackbits(signs, count=len(old), bitorder="little").view(np.bool_)
    new: Words = bits().join(_wide(old), magnitude, negative, kind).astype(old.dtype)
    return new


def _read(payload: ByteArray, stream: _Stream, count: int) -> Array32:
    if (stream.coding == _NOTHING) != (count == 0):
        raise ValueError("the magnitudes of a context are missing or too many")
    if stream.coding == _NOTHING:
        return np.zeros(0, np.uint32)
    if stream.coding == _RICE:
        values: Array32 = bits().unrice(payload, stream.start, stream.stop, stream.k, count)
    else:
        values = bits().unruns(payload, stream.start, stream.stop, stream.k, stream.k_rest, count)
    return values


def _layout(payload: ByteArray, changed: int) -> _Layout:
    if len(payload) < _HEAD.size + _CONTEXT.size + SLACK:
        raise ValueError("the payload is shorter than its header")
    k_gaps, contexts, first, zero, gap_bytes = _HEAD.unpack_from(payload.data)
    if contexts not in (1, _MOST_CONTEXTS) or k_gaps > _K_LIMIT or zero:
        raise ValueError("the payload's header is damaged")
    gaps = _HEAD.size + contexts * _CONTEXT.size
    signs = gaps + gap_bytes
    magnitudes = signs + (changed + 7) // 8
    if magnitudes > len(payload) - SLACK or changed > 8 * gap_bytes:
        raise ValueError("the payload is shorter than its header says")
    streams = tuple(_streams(payload, contexts, magnitudes))
    if streams[-1].stop + SLACK != len(payload) or payload[-SLACK:].any():
        raise ValueError("the payload has another length than its header says")
    return _Layout(k_gaps, first, (gaps, signs), (signs, magnitudes), streams)


def _streams(payload: ByteArray, contexts: int, start: int) -> Iterator[_Stream]:
    for number in range(contexts):
        coding, k, k_rest, zero, size = _CONTEXT.unpack_from(
            payload.data, _HEAD.size + number * _CONTEXT.size
        )
        if coding > _RUNS or max(k, k_rest) > _K_LIMIT or zero or (coding == _NOTHING) != (size == 0):
            raise ValueError("a context's header is damaged")
        if start + size > len(payload) - SLACK:
            raise ValueError("the payload is shorter than a context's header says")
        yield _Stream(coding, k, k_rest, start, start + size)
        start += size
