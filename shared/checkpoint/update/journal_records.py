"""Records of a journal: what changes in a stretch of one tensor, listed, under a mask where much does, or all
of its words where few stay. docs/FORMAT.md, Journal."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from weightcast.shared.base.elements import Chunk, Words
from weightcast.shared.codec.changes import Changes, worth_masks
from weightcast.shared.kernels.load import kernels

Pieces = Sequence[bytes | memoryview]

HEAD = struct.Struct("<IIQIIQ")
"""tensor, word width, first word, changes, escapes or `WHOLE` or `MASKED` and a length, checksum"""
FACTS = struct.Struct("<IIQII")
"""a head without its checksum: xxh3-64 of the payload, xor that of these bytes"""
WHOLE = 1 << 31
MASKED = 3 << 30
_WORTH_MASKS = 1 << 12
"""words per span, on the average of a chunk, from which its changes stay under masks: short lists are
exchanged many at once"""
_FEW = 16
"""records whose buffers are written as they are; more are joined first"""


@dataclass(frozen=True)
class Record:
    """Changes of one tensor: `index` uint64[k], words in strictly increasing order; `old`, `new` word[k]."""

    tensor: int
    index: NDArray[np.uint64]
    old: Words
    new: Words


@dataclass(frozen=True)
class Packed:
    """Records as they lie in a journal. `buffers` follow each other; `changes`: of all records."""

    buffers: Pieces
    records: int
    changes: int


class PackedRecord(NamedTuple):
    """A record's head; its payload is at `offset` of the journal. `whole`: so many words are there, those
    that stay among them; `masked`: it tells by a bit each which of so many change; both 0: `changes` are
    listed. `checksum`: xxh3-64 of the payload, if the head is what was written."""

    tensor: int
    width: int
    first: int
    changes: int
    escapes: int
    whole: int
    masked: int
    checksum: int
    offset: int

    @property
    def listed(self) -> bool:
        return not self.whole and not self.masked

    @property
    def words(self) -> int:
        """Old ones, and as many new ones, at the payload's end."""
        return self.whole or self.changes

    @property
    def places(self) -> int:
        """Bytes before them, which say where they are."""
        if self.masked:
            return _mask_bytes(self.masked)
        return 0 if self.whole else self.changes + 4 * self.escapes

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.places + 2 * self.width * self.words


def _mask_bytes(words: int) -> int:
    return -(-words // 64) * 8


def pack_changes(chunk: Chunk, changes: Changes) -> Packed:
    """A record for each span with changes. Safe in any thread; `changes` must stay as they are until they are
    written."""
    long = chunk.words >= _WORTH_MASKS * len(chunk.spans)
    if long and worth_masks(len(changes), chunk.words):
        masks = changes.masks
        if masks is None:
            masks = kernels().masks_of(changes.index, chunk.words)
        return _pack_masked(chunk, masks, changes)
    index, borders = changes.index, [0, len(changes.index)]
    if len(chunk.spans) > 1:
        offsets = np.array([span.offset for span in chunk.spans], np.uint32)
        borders = [*np.searchsorted(index, offsets).tolist(), len(index)]
    spans = [span for span, (start, end) in zip(chunk.spans, pairwise(borders), strict=True) if end > start]
    bounds = sorted({0, *borders})
    heads = [
        (span.tensor, int(index[start]) + span.start - span.offset)
        for span, start in zip(spans, bounds, strict=False)
    ]
    return pack_lists(heads, index, bounds, changes.old, changes.new)


def _pack_masked(chunk: Chunk, masks: NDArray[np.uint64], changes: Changes) -> Packed:
    def pieces() -> Iterator[tuple[int, Pieces]]:
        found = 0
        for span in chunk.spans:
            bits = masks[span.offset >> 6 :][: _mask_bytes(span.words) >> 3]
            count = len(changes) if len(chunk.spans) == 1 else int(np.bitwise_count(bits).sum())
            here = slice(found, found + count)
            yield count, (_bytes_of(bits), _bytes_of(changes.old[here]), _bytes_of(changes.new[here]))
            found += count

    return _stretches(chunk, MASKED, pieces())


def pack_whole(chunk: Chunk, old: Words, new: Words, counts: Sequence[int] | None = None) -> Packed:
    """As `pack_changes`, for where few words stay. `old`, `new`: word[chunk.words], not to be changed until
    they are written. `counts`: changes of each span, where they are known."""
    heres = [slice(span.offset, span.offset + span.words) for span in chunk.spans]
    if counts is None:
        counts = [int(np.count_nonzero(old[here] != new[here])) for here in heres]
    pieces = [(_bytes_of(old[here]), _bytes_of(new[here])) for here in heres]
    return _stretches(chunk, WHOLE, zip(counts, pieces, strict=True))


def _stretches(chunk: Chunk, form: int, spans: Iterable[tuple[int, Pieces]]) -> Packed:
    """A record of all of each span with changes. `spans`: how many, and its payload."""
    buffers: list[bytes | memoryview] = []
    changes = records = 0
    for span, (count, payload) in zip(chunk.spans, spans, strict=True):
        if count:
            length = form | span.words
            buffers.append(_head(span.tensor, chunk.kind.width, span.start, count, length, payload))
            buffers.extend(payload)
            changes += count
            records += 1
    return _packed(buffers, records, changes)


def pack_lists(
    heads: Sequence[tuple[int, int]], index: NDArray[np.uint32], bounds: Sequence[int], old: Words, new: Words
) -> Packed:
    """`heads`: tensor and first word of each record, which has changes bounds[n] to bounds[n + 1]."""
    if not len(index):
        return Packed((), 0, 0)
    gaps = np.empty(len(index), np.uint8)
    escapes, counts = kernels().pack_gaps(index, np.array(bounds, np.int64), gaps)
    gap_bytes, escape_bytes, old_bytes, new_bytes = map(_bytes_of, (gaps, escapes, old, new))
    buffers: list[bytes | memoryview] = []
    width, escaped, few = new.itemsize, 0, len(heads) <= _FEW
    for (tensor, first), (start, end), count in zip(heads, pairwise(bounds), counts.tolist(), strict=True):
        payload = (
            gap_bytes[start:end],
            escape_bytes[4 * escaped : 4 * (escaped + count)],
            old_bytes[width * start : width * end],
            new_bytes[width * start : width * end],
        )
        pieces = payload if few else (b"".join(payload),)
        buffers.append(_head(tensor, width, first, end - start, count, pieces))
        buffers.extend(pieces)
        escaped += count
    return _packed(buffers, len(heads), len(index))


def _packed(buffers: Pieces, records: int, changes: int) -> Packed:
    return Packed(buffers if records <= _FEW else [b"".join(buffers)], records, changes)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _head(tensor: int, width: int, first: int, changes: int, more: int, payload: Pieces) -> bytes:
    facts = FACTS.pack(tensor, width, first, changes, more)
    checksum = _checksum(payload) ^ xxhash.xxh3_64_intdigest(facts)
    return facts + checksum.to_bytes(8, "little")


def _checksum(pieces: Pieces) -> int:
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest())
