"""Payloads that hold changed words only: `fast` and `small`. docs/FORMAT.md, Chunk blob.

0  u8   `fast`: k of the gaps; `small`: classes, 1 to 8
1  u8   contexts: 1, or 16 for a dtype with an exponent
2  u8   first exponent: old words with this exponent or a lower one have context 0
3  u8   0
4  u32  bytes of the gaps
8  8 bytes per context, `magnitudes.CONTEXT`
.. `small`: 12 bytes per class, `positions.CLASS`
.. gaps
.. signs: a bit per change, least significant first, 1 where the step goes down; filled to a byte
.. magnitudes, context after context
.. 8 zero bytes, so that readers may load 8 bytes anywhere
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, Chunk, WordKind, Words
from weightcast.shared.codec import positions
from weightcast.shared.codec.changes import Changes, Counted, Index
from weightcast.shared.codec.magnitudes import CONTEXT, GroupedMagnitudes, heads_of, read_contexts, unplanned
from weightcast.shared.digest.checksums import SpanSums, spans_in
from weightcast.shared.kernels.constants import K_LIMIT, MARGIN, SLACK, rice_parameter
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import scratch

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
    classes: positions.Classes,
    grouped: GroupedMagnitudes,
    kind: WordKind,
    most: int,
) -> bytes | None:
    """`index`: positions with padding. None if the streams would exceed `most` bytes, or if the sample behind
    `classes` was misleading."""
    out = scratch().take("out", np.uint8, most + MARGIN)
    placed = positions.put_classes(classes, index, old, counted, kind, out, most)
    if placed is None:
        return None
    class_heads, start = placed
    done = grouped.put(out[start:], most - start)
    if done is None:
        return None
    heads, size = done
    head = _HEAD.pack(len(classes.each), len(grouped.contexts), grouped.first, 0, start)
    gaps, magnitudes = out[:start].data, out[start : start + size].data
    return b"".join((head, heads, class_heads, gaps, grouped.steps.signs.data, magnitudes, bytes(SLACK)))


@dataclass(frozen=True)
class _Layout:
    """Offsets in a payload. `gaps`: [start, stop); `streams`: as `magnitudes.read_contexts`."""

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
    index = positions.take_classes(payload, *place, old, counted, chunk.kind, changed)
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
    if zero or (small and not 1 <= first <= positions.MOST_CLASSES):
        raise ValueError("damaged header of the payload")
    classes_at = _HEAD.size + contexts * CONTEXT.itemsize
    gaps = classes_at + (first * positions.CLASS.size if small else 0)
    signs = gaps + gap_bytes
    magnitudes = signs + (changed + 7) // 8
    if magnitudes > len(payload) - SLACK:
        raise ValueError("payload shorter than its header says")
    if changed % 8 and payload[magnitudes - 1] >> changed % 8:
        raise ValueError("signs are not padded with zeros")
    streams = read_contexts(payload, _HEAD.size, contexts, magnitudes)
    return _Layout(first, first_exponent, classes_at, (gaps, signs), streams)
