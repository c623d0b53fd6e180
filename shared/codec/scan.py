"""A chunk's old and new words read together, once: what changes, and what the digest needs of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.changes import Changes
from weightcast.shared.codec.kernels import kernels
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
    for words in (old, new):
        if words.shape != (chunk.words,) or words.dtype != chunk.kind.numpy or chunk.words % BLOCK_WORDS:
            raise ValueError(
                f"{words.shape} words of {words.dtype} in a chunk of {chunk.words} {chunk.dtype}"
            )
    book = np.zeros((len(chunk.spans), 7), np.uint64)
    found = kernels().scanned(np.ascontiguousarray(old), np.ascontiguousarray(new), _places(chunk), book)
    rows: list[list[int]] = book.tolist()
    full = tuple(Lanes(row[0], row[1]) for row in rows)
    sums = tuple(
        SpanSums(span.tensor, Lanes(row[2], row[3]), Lanes(row[4], row[5]), row[6])
        for span, row in zip(chunk.spans, rows, strict=True)
        if row[6]
    )
    return Scan(Changes(*found), full, sums)


def _places(chunk: Chunk) -> NDArray[np.int64]:
    """Per span: offset, words, number of the chunk's 8-byte word 0 in the tensor's count."""
    per_word = 8 // chunk.kind.width
    rows = [(span.offset, span.words, (span.start - span.offset) // per_word + 1) for span in chunk.spans]
    return np.array(rows, np.int64).reshape(-1, 3)
