"""A chunk's old and new words read together, once: what changes, and what the digest needs of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import BLOCK_WORDS, Chunk, Words
from weightcast.shared.codec import changes
from weightcast.shared.codec.changes import Changes, Counted
from weightcast.shared.digest.load import kernels
from weightcast.shared.digest.step_sums import SpanSums


@dataclass(frozen=True)
class Scan:
    """`full`: uint64[spans, 2], lanes of all new words of each span, numbered as in the tensor; `sums`: as
    `span_sums`."""

    changes: Changes
    full: NDArray[np.uint64]
    sums: SpanSums


def scan(chunk: Chunk, old: Words, new: Words) -> Scan:
    """`old`, `new`: word[chunk.words] with the zero padding. As `compare`, `hash_bytes` of each span's new
    words and `span_sums`, at the price of reading both once. ValueError for words of another chunk."""
    found, book = _scanned(chunk, old, new, whole=True)
    return Scan(found, book[:, :2], _sums(chunk, book))


def changes_of(chunk: Chunk, old: Words, new: Words) -> tuple[Changes, SpanSums]:
    """As `scan`, without the lanes of all words."""
    found, book = _scanned(chunk, old, new, whole=False)
    return found, _sums(chunk, book)


def masked_changes(chunk: Chunk, old: Words, new: Words) -> tuple[Changes, SpanSums]:
    """As `changes_of`, under masks."""
    both, book = _opened(chunk, old, new)
    found = kernels().masked(*both, chunk.places, book)
    return Changes(*found), _sums(chunk, book)


def all_of(chunk: Chunk, old: Words, new: Words, counted: Counted) -> tuple[Changes, SpanSums]:
    """As `changes_of`, with every word as a change (`changes.all_of`)."""
    both, book = _opened(chunk, old, new)
    kernels().sums_of_all(*both, chunk.places, book)
    return changes.all_of(old, new, counted), _sums(chunk, book)


def _scanned(chunk: Chunk, old: Words, new: Words, *, whole: bool) -> tuple[Changes, NDArray[np.uint64]]:
    both, book = _opened(chunk, old, new)
    found = kernels().scanned(*both, chunk.places, book, whole=whole)
    return Changes(*found), book


def _opened(chunk: Chunk, old: Words, new: Words) -> tuple[tuple[Words, Words], NDArray[np.uint64]]:
    """Both as kernels want them, and their book with nothing in it."""
    for words in (old, new):
        if words.shape != (chunk.words,) or words.dtype != chunk.kind.numpy or chunk.words % BLOCK_WORDS:
            raise ValueError(
                f"{words.shape} words of {words.dtype} in a chunk of {chunk.words} {chunk.dtype}"
            )
    both = np.ascontiguousarray(old), np.ascontiguousarray(new)
    return both, np.zeros((len(chunk.spans), 7), np.uint64)


def _sums(chunk: Chunk, book: NDArray[np.uint64]) -> SpanSums:
    return SpanSums.of(chunk, book[:, 2:6], book[:, 6].astype(np.int64))
