"""Tensors as sequences of words: dtypes, tensor table, chunk grid.

A *word* is the unit in which tensors are compared and encoded: an element of 1, 2 or 4 bytes. 8-byte
elements and dtypes not listed in `DTYPES` are handled as single bytes. Word counts and word indices, not
element counts, are what codec, digest and journal speak of; for all dtypes up to 4 bytes they are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.choices import MAIN as MAIN

Made = TypeVar("Made")
Words = NDArray[np.unsignedinteger]
"""1-D array of uint8, uint16 or uint32."""
ByteArray = NDArray[np.uint8]

BLOCK_WORDS = 64
"""Segments and spans begin at multiples of this, so that no two of them share an 8-byte word of a tensor."""
CHUNK_WORDS = 4 << 20
_KEPT_GRID = 64 << 30
"""bytes of a model whose grid is kept: a larger one takes much longer to read than to lay out"""


@dataclass(frozen=True)
class WordKind:
    """How a word of a dtype is read as a number: `sign_bit` 0 means an integer, no exponent."""

    width: int
    """bytes: 1, 2 or 4"""
    sign_bit: int = 0
    exponent_shift: int = 0
    exponent_mask: int = 0

    @cached_property
    def numpy(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(f"<u{self.width}")


BYTES = WordKind(1)

DTYPES: Mapping[str, tuple[int, WordKind]] = {
    # safetensors name: (bytes per element, how its words are read)
    "BOOL": (1, BYTES),
    "U8": (1, BYTES),
    "I8": (1, BYTES),
    "F8_E4M3": (1, WordKind(1, 0x80, 3, 0xF)),
    "F8_E5M2": (1, WordKind(1, 0x80, 2, 0x1F)),
    "F8_E8M0": (1, BYTES),
    "U16": (2, WordKind(2)),
    "I16": (2, WordKind(2)),
    "F16": (2, WordKind(2, 0x8000, 10, 0x1F)),
    "BF16": (2, WordKind(2, 0x8000, 7, 0xFF)),
    "U32": (4, WordKind(4)),
    "I32": (4, WordKind(4)),
    "F32": (4, WordKind(4, 0x80000000, 23, 0xFF)),
    "U64": (8, BYTES),
    "I64": (8, BYTES),
    "F64": (8, BYTES),
    "C64": (8, BYTES),
}


def kind_of(dtype: str) -> WordKind:
    return DTYPES[dtype][1] if dtype in DTYPES else BYTES


class TensorSpec(NamedTuple):
    name: str
    dtype: str
    """safetensors name, e.g. BF16"""
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> WordKind:
        return kind_of(self.dtype)

    @property
    def words(self) -> int:
        return self.nbytes // self.kind.width


@dataclass(frozen=True)
class TensorTable:
    """All tensors of a component of a run, sorted by the UTF-8 bytes of their names; a tensor's number is its
    position. Tables of different components are different, whatever their tensors: so are their roots."""

    specs: tuple[TensorSpec, ...]
    component: str = MAIN

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> TensorTable:
        return cls(tuple(sorted(specs, key=lambda spec: spec.name.encode())))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        return {spec.name: number for number, spec in enumerate(self.specs)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    def named(self, name: str) -> TensorSpec:
        return self.specs[self.numbers[name]]

    @cached_property
    def dtypes(self) -> frozenset[str]:
        return frozenset(spec.dtype for spec in self.specs)

    @cached_property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """int64[tensors]: bytes. Not to be written."""
        return np.array([spec.nbytes for spec in self.specs], np.int64)

    @cached_property
    def forms(self) -> NDArray[np.int64]:
        """int64[tensors, 2]: bytes of a word, and words. Not to be written."""
        return np.array([(spec.kind.width, spec.words) for spec in self.specs], np.int64).reshape(-1, 2)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64[tensors]: elements. Not to be written."""
        return np.array([spec.elements for spec in self.specs], np.int64)

    @cached_property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.specs)

    @cached_property
    def whole(self) -> Part:
        """All of it as one part."""
        return Part(0, tuple(Segment(number, 0, spec.words) for number, spec in enumerate(self.specs)))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The grid of all of it as one part."""
        return tuple(_chunks(self, self.whole, CHUNK_WORDS))

    def __hash__(self) -> int:
        """Tables are keys of what is remembered of them; there are few, and they are long."""
        return hash((len(self.specs), self.nbytes))

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __getitem__(self, number: int) -> TensorSpec:
        return self.specs[number]


def once_per_table(make: Callable[[TensorTable], Made]) -> Callable[[TensorTable], Made]:
    """Keeps what is made of a table with the table itself: comparing equal tables takes longer."""

    def made(table: TensorTable) -> Made:
        known = vars(table)
        if make.__qualname__ not in known:
            known[make.__qualname__] = make(table)
        return cast(Made, known[make.__qualname__])

    return made


class Segment(NamedTuple):
    """Words [start, stop) of tensor `tensor`; start is a multiple of BLOCK_WORDS."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """What one writer of a version owns: segments in table order, disjoint from all other parts'."""

    number: int
    segments: tuple[Segment, ...]


class Span(NamedTuple):
    """A tensor's piece in a chunk: words [start, stop) of `tensor`, at `offset` in the chunk."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def words(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """A piece of the grid: `words` counts the zero padding after each segment, spans do not."""

    part: int
    dtype: str
    number: int
    spans: tuple[Span, ...]
    words: int

    @property
    def key(self) -> ChunkKey:
        return ChunkKey(self.part, self.dtype, self.number)

    @property
    def kind(self) -> WordKind:
        return kind_of(self.dtype)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """int64[spans, 3], not to be written: offset, words, number of the chunk's 8-byte word 0 in the
        tensor's count."""
        per_word = 8 // self.kind.width
        rows = [(span.offset, span.words, (span.start - span.offset) // per_word + 1) for span in self.spans]
        return np.array(rows, np.int64).reshape(-1, 3)

    @cached_property
    def shifts(self) -> NDArray[np.int64]:
        """int64[spans], not to be written: words from a position in the chunk to that in the tensor."""
        return np.array([span.start - span.offset for span in self.spans], np.int64)

    @cached_property
    def is_full(self) -> bool:
        """No padding."""
        return 0 < self.words == sum(span.words for span in self.spans)

    @cached_property
    def tensors(self) -> NDArray[np.int64]:
        """int64[spans], not to be written."""
        return np.array([span.tensor for span in self.spans], np.int64)


class ChunkKey(NamedTuple):
    part: int
    dtype: str
    number: int


def padded(words: int) -> int:
    return -(-words // BLOCK_WORDS) * BLOCK_WORDS


def grid(table: TensorTable, part: Part, chunk_words: int = CHUNK_WORDS) -> Iterable[Chunk]:
    """The chunks of a part, the same for every version with the same parts, whatever changed.

    Its segments are grouped by dtype (names in ascending order). In a group the segments shorter than
    `chunk_words` come first: each padded to a multiple of BLOCK_WORDS, concatenated, cut every `chunk_words`.
    Each longer one follows in chunks of its own, so that these lie in one run of a file. Chunks without
    words do not exist."""
    if chunk_words == CHUNK_WORDS and part == table.whole and table.nbytes <= _KEPT_GRID:
        return table.chunks
    return _chunks(table, part, chunk_words)


def _chunks(table: TensorTable, part: Part, chunk_words: int) -> Iterator[Chunk]:
    groups: dict[str, list[Segment]] = {}
    for segment in part.segments:
        groups.setdefault(table[segment.tensor].dtype, []).append(segment)
    for dtype in sorted(groups):
        short = [one for one in groups[dtype] if one.stop - one.start < chunk_words]
        runs = [short, *([one] for one in groups[dtype] if one.stop - one.start >= chunk_words)]
        pieces = chain.from_iterable(_cut(run, chunk_words) for run in runs)
        for number, (spans, words) in enumerate(pieces):
            yield Chunk(part.number, dtype, number, spans, words)


def _cut(segments: Sequence[Segment], chunk_words: int) -> Iterator[tuple[tuple[Span, ...], int]]:
    """Spans and words of each chunk."""
    filled = 0
    spans: list[Span] = []
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            take = min(segment.stop - start, chunk_words - filled)
            spans.append(Span(segment.tensor, start, start + take, filled))
            start, filled = start + take, filled + padded(take)
            if filled == chunk_words:
                yield tuple(spans), filled
                filled, spans = 0, []
    if spans:
        yield tuple(spans), filled
