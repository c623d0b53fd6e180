"""One chunk's step between versions: positions, old and new words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import BLOCK_WORDS, Chunk, Words
from weightcast.shared.digest.checksums import SpanSums
from weightcast.shared.kernels.constants import places_under
from weightcast.shared.kernels.load import kernels

Index = NDArray[np.uint32]

_NO_POSITION = 1 << 62
_NO_SHIFT, _ONE_SPAN = np.zeros(1, np.int64), np.array([0, _NO_POSITION])


@dataclass(frozen=True)
class Counted:
    """The words of a chunk without padding. `spans`: int64[n, 2], offset and words of each span; `starts`:
    where they start without padding. `padded`: there is padding between or before the spans; otherwise
    positions are the same with and without."""

    spans: NDArray[np.int64]
    starts: NDArray[np.int64]
    words: int
    padded: bool

    @classmethod
    def of(cls, chunk: Chunk) -> Counted:
        if len(chunk.spans) == 1:
            (span,) = chunk.spans
            place = np.array([[span.offset, span.words]], np.int64)
            return cls(place, np.zeros(1, np.int64), span.words, span.offset > 0)
        spans = np.ascontiguousarray(chunk.places[:, :2])
        ends = np.cumsum(spans[:, 1])
        starts = ends - spans[:, 1]
        padded = bool((spans[:, 0] != starts).any())
        return cls(spans, starts, int(ends[-1]) if len(ends) else 0, padded)

    @property
    def shifts(self) -> NDArray[np.int64]:
        """Padding before each span; a single 0 if there is none."""
        return self.spans[:, 0] - self.starts if self.padded else _NO_SHIFT

    @property
    def borders(self) -> NDArray[np.int64]:
        """Start of each entry of `shifts` without padding, then a position that is never reached."""
        return np.append(self.starts, _NO_POSITION) if self.padded else _ONE_SPAN

    def without_padding(self, index: Index) -> Index:
        return index - self._shifts_of(index, self.spans[:, 0]) if self.padded else index

    def with_padding(self, index: Index) -> Index:
        return index + self._shifts_of(index, self.starts) if self.padded else index

    def _shifts_of(self, index: Index, firsts: NDArray[np.int64]) -> Index:
        """Padding before the span of each position."""
        borders = np.searchsorted(index, firsts.astype(np.uint32))
        return np.repeat(self.shifts.astype(np.uint32), np.diff(borders, append=len(index)))

    def pick(self, words: Words) -> Words:
        """The words of the spans, one after the other; a view if unpadded."""
        if not self.padded:
            return words[: self.words]
        return np.concatenate([words[offset : offset + count] for offset, count in self.spans.tolist()])

    def spread(self, words: Words, count: int) -> Words:
        """The reverse of `pick`: `count` words with zeros between the spans."""
        if not self.padded and len(words) == count:
            return words
        padded = np.zeros(count, words.dtype)
        for (offset, length), start in zip(self.spans.tolist(), self.starts.tolist(), strict=True):
            padded[offset : offset + length] = words[start : start + length]
        return padded


_LISTED_BITS = 8
"""of a list entry: the distance from the previous change"""


@dataclass(frozen=True)
class Changes:
    """`places`: uint32[k], strictly increasing positions in the chunk, or, if many words change,
    uint64[words / 64] with a bit set for each. `old` and `new`: word[k], different from
    each other at every position. `whole`: all words after the step, if they were at hand. `all_shown`:
    unchanged words are listed too."""

    places: NDArray[np.uint32] | NDArray[np.uint64]
    old: Words
    new: Words
    whole: Words | None = None
    all_shown: bool = False

    def __len__(self) -> int:
        return len(self.old)

    @cached_property
    def index(self) -> NDArray[np.uint32]:
        """Positions, listed."""
        places = self.places if self.masks is None else places_under(self.masks)
        return places.astype(np.uint32, copy=False)

    @property
    def masks(self) -> NDArray[np.uint64] | None:
        return self.places.astype(np.uint64, copy=False) if self.places.dtype == np.uint64 else None

    def apply(self, words: Words) -> None:
        """`words`: contiguous, of the dtype of those compared, holding the old words."""
        if self.whole is not None and len(self.whole) == len(words):
            np.copyto(words, self.whole)
        else:
            kernels().scatter(words, self.index, self.new)


def worth_masks(changed: int, words: int) -> bool:
    """Whether a bit per word takes at most the space of a list of changes."""
    return _LISTED_BITS * changed >= words


@lru_cache(maxsize=2)
def _numbers(count: int) -> NDArray[np.uint32]:
    numbers = np.arange(count, dtype=np.uint32)
    numbers.flags.writeable = False
    return numbers


def compare(old: Words, new: Words) -> Changes:
    """Changes between two 1-D arrays of equal length and dtype, by bits."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"{old.shape} words of {old.dtype} compared with {new.shape} of {new.dtype}")
    index = np.flatnonzero(old != new).astype(np.uint32)
    return Changes(index, old[index], new[index])


@dataclass(frozen=True)
class Scan:
    """`full`: uint64[spans, 2], lanes of all new words of each span, numbered as in the tensor."""

    changes: Changes
    full: NDArray[np.uint64]
    sums: SpanSums


def scan(chunk: Chunk, old: Words, new: Words) -> Scan:
    """`old`, `new`: word[chunk.words] with the zero padding. As `compare`, `hash_bytes` of each span's new
    words, and sums over touched ones, reading both once. Raises ValueError for words of another chunk."""
    both, book = _opened(chunk, old, new)
    found = kernels().scanned(*both, chunk.places, book)
    return Scan(Changes(*found), book[:, :2], _sums(chunk, book))


def changes_of(chunk: Chunk, old: Words, new: Words) -> tuple[Changes, SpanSums]:
    """As `scan`, without lanes of all words."""
    both, book = _opened(chunk, old, new)
    found = kernels().scanned(*both, chunk.places, book, whole=False)
    return Changes(*found), _sums(chunk, book)


def masked_changes(chunk: Chunk, old: Words, new: Words) -> tuple[Changes, SpanSums]:
    """As `changes_of`, with masks."""
    both, book = _opened(chunk, old, new)
    found = kernels().masked(*both, chunk.places, book)
    return Changes(*found), _sums(chunk, book)


def all_of(chunk: Chunk, old: Words, new: Words, counted: Counted) -> tuple[Changes, SpanSums]:
    """As `changes_of`, with every word as a change: cheaper than a list where few words stay."""
    both, book = _opened(chunk, old, new)
    kernels().sums_of_all(*both, chunk.places, book)
    index = counted.with_padding(_numbers(counted.words))
    found = Changes(index, counted.pick(old), counted.pick(new), new, all_shown=True)
    return found, _sums(chunk, book)


def _opened(chunk: Chunk, old: Words, new: Words) -> tuple[tuple[Words, Words], NDArray[np.uint64]]:
    """Both contiguous, and zeros for their sums."""
    for words in (old, new):
        if words.shape != (chunk.words,) or words.dtype != chunk.kind.numpy or chunk.words % BLOCK_WORDS:
            raise ValueError(
                f"{words.shape} words of {words.dtype} in a chunk of {chunk.words} {chunk.dtype}"
            )
    both = np.ascontiguousarray(old), np.ascontiguousarray(new)
    return both, np.zeros((len(chunk.spans), 7), np.uint64)


def _sums(chunk: Chunk, book: NDArray[np.uint64]) -> SpanSums:
    return SpanSums.of(chunk, book[:, 2:6], book[:, 6].astype(np.int64))
