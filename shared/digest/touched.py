"""Sums over the touched words of a chunk: what its changes do to the lanes of its tensors.

hash(new tensor) = hash(old tensor) - (old sums over its chunks) + (new sums over its chunks).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest.hash import implementation
from weightcast.shared.digest.lanes import ZERO, Lanes
from weightcast.shared.words import Chunk, Words


class ChangedWords(Protocol):
    """As `weightcast.shared.codec.changes.Changes`, which lives above this room."""

    @property
    def index(self) -> NDArray[np.uint32]: ...
    @property
    def new(self) -> Words: ...


class SpanSums(NamedTuple):
    """Of the piece of `tensor` in a chunk: sums over the 8-byte words with a changed word in them, numbered
    as in the tensor, before and after; `changed` counts words of the tensor's own width."""

    tensor: int
    old: Lanes
    new: Lanes
    changed: int


@dataclass(frozen=True)
class ChunkSums:
    old: Lanes = ZERO
    new: Lanes = ZERO
    changed: int = 0


def span_sums(chunk: Chunk, old: Words, changes: ChangedWords) -> list[SpanSums]:
    """One entry per span with changes, in the chunk's order. `old`: the chunk's old words with its zero
    padding, word[chunk.words], contiguous; only touched ones are read. Positions must lie inside spans."""
    if len(changes.index) == 0:
        return []
    ends, numbers = spans_in(chunk)
    if len(old) != chunk.words or changes.index[-1] >= ends[-1]:
        raise ValueError("old words or changes of another chunk")
    sums, changed = implementation().touched(old, changes.index, changes.new, ends, numbers)
    return named_sums(chunk, sums, changed)


def spans_in(chunk: Chunk) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per span its end in the chunk, and the number of the chunk's 8-byte word 0 in its tensor's count."""
    per_word = 8 // chunk.kind.width
    ends = [span.offset + span.words for span in chunk.spans]
    numbers = [(span.start - span.offset) // per_word + 1 for span in chunk.spans]
    return np.array(ends, np.int64), np.array(numbers, np.int64)


def named_sums(chunk: Chunk, sums: NDArray[np.uint64], changed: NDArray[np.int64]) -> list[SpanSums]:
    """`sums`: uint64[spans, 4], old a, b, new a, b; `changed`: int64[spans]. Spans without changes go."""
    return [_named(chunk, n, sums[n].tolist(), int(changed[n])) for n in np.flatnonzero(changed).tolist()]


def _named(chunk: Chunk, span: int, sums: list[int], changed: int) -> SpanSums:
    old_a, old_b, new_a, new_b = sums
    return SpanSums(chunk.spans[span].tensor, Lanes(old_a, old_b), Lanes(new_a, new_b), changed)


def total(sums: Iterable[SpanSums]) -> ChunkSums:
    """What a chunk's record in the index holds: the sums over all its spans."""
    whole = ChunkSums()
    for one in sums:
        whole = ChunkSums(whole.old.plus(one.old), whole.new.plus(one.new), whole.changed + one.changed)
    return whole
