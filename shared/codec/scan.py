"""A chunk's old and new words read together, once: what changes, and what the digest needs of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec import changes
from weightcast.shared.codec.changes import Changes
from weightcast.shared.codec.kernels import kernels
from weightcast.shared.codec.padding import Counted
from weightcast.shared.digest.lanes import Lanes
from weightcast.shared.digest.touched import SpanSums
from weightcast.shared.words import BLOCK_WORDS, Chunk, Words


@dataclass(frozen=True)
class Scan:
    """`full`: lanes of all new words of each span, numbered as in the tensor; `sums`: as `span_sums`, of the
    spans with changes."""

    changes: Changes
    full: tuple[Lanes, ...]
    sums: tuple[SpanSums, ...]


def scan(chunk: Chunk, old: Words, new: Words) -> Scan:
    """`old`, `new`: word[chunk.words] with the zero padding. As `compare`, `hash_bytes` of each span's new
    words and `span_sums`, at the price of reading both once. ValueError for words of another chunk."""
    found, rows = _scanned(chunk, old, new, whole=True)
    return Scan(found, tuple(Lanes(row[0], row[1]) for row in rows), _sums(chunk, rows))


def changes_of(chunk: Chunk, old: Words, new: Words) -> tuple[Changes, list[SpanSums]]:
    """As `scan`, without the lanes of all words."""
    found, rows = _scanned(chunk, old, new, whole=False)
    return found, list(_sums(chunk, rows))


def all_of(chunk: Chunk, old: Words, new: Words, counted: Counted) -> tuple[Changes, list[SpanSums]]:
    """As `changes_of`, with every word as a change (`changes.all_of`)."""
    both, book = _opened(chunk, old, new)
    kernels().sums_of_all(*both, _places(chunk), book)
    return changes.all_of(old, new, counted), list(_sums(chunk, book.tolist()))


def _scanned(chunk: Chunk, old: Words, new: Words, *, whole: bool) -> tuple[Changes, list[list[int]]]:
    both, book = _opened(chunk, old, new)
    found = kernels().scanned(*both, _places(chunk), book, whole=whole)
    return Changes(*found), book.tolist()


def _opened(chunk: Chunk, old: Words, new: Words) -> tuple[tuple[Words, Words], NDArray[np.uint64]]:
    """Both as kernels want them, and their book with nothing in it."""
    for words in (old, new):
        if words.shape != (chunk.words,) or words.dtype != chunk.kind.numpy or chunk.words % BLOCK_WORDS:
            raise ValueError(
                f"{words.shape} words of {words.dtype} in a chunk of {chunk.words} {chunk.dtype}"
            )
    both = np.ascontiguousarray(old), np.ascontiguousarray(new)
    return both, np.zeros((len(chunk.spans), 7), np.uint64)


def _sums(chunk: Chunk, rows: list[list[int]]) -> tuple[SpanSums, ...]:
    return tuple(
        SpanSums(span.tensor, Lanes(row[2], row[3]), Lanes(row[4], row[5]), row[6])
        for span, row in zip(chunk.spans, rows, strict=True)
        if row[6]
    )


def _places(chunk: Chunk) -> NDArray[np.int64]:
    """Per span: offset, words, number of the chunk's 8-byte word 0 in the tensor's count."""
    per_word = 8 // chunk.kind.width
    rows = [(span.offset, span.words, (span.start - span.offset) // per_word + 1) for span in chunk.spans]
    return np.array(rows, np.int64).reshape(-1, 3)
