"""Lanes: two sums over a tensor's 8-byte words; the root: one digest over all tensors of a version.
docs/FORMAT.md, Lanes and Root.

hash(new tensor) = hash(old tensor) - (old sums over its chunks) + (new sums over its chunks).
Tensors are kept in arrays: there may be several 100,000.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weightcast.shared.base.elements import MAIN, ByteArray, Chunk, TensorTable
from weightcast.shared.kernels.constants import MIX_A, MIX_B
from weightcast.shared.kernels.load import kernels

_MASK = (1 << 64) - 1


class Lanes(NamedTuple):
    """Two 64-bit sums modulo 2^64; additive over disjoint sets of words of a tensor."""

    a: int = 0
    b: int = 0

    def plus(self, other: Lanes) -> Lanes:
        return Lanes((self.a + other.a) & _MASK, (self.b + other.b) & _MASK)

    def minus(self, other: Lanes) -> Lanes:
        return Lanes((self.a - other.a) & _MASK, (self.b - other.b) & _MASK)

    def hex(self) -> str:
        """32 hex digits: a, then b, each big-endian."""
        return f"{self.a:016x}{self.b:016x}"

    @classmethod
    def from_hex(cls, text: str) -> Lanes:
        """Raises ValueError unless `text` is 32 lowercase hex digits."""
        if len(text) != 32 or set(text) - set("0123456789abcdef"):
            raise ValueError(f"not lanes: {text[:40]!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))


ZERO = Lanes()

LanesArray = NDArray[np.uint64]
"""uint64[tensors, 2]: raw lanes, a and b"""


def hash_bytes(data: ByteArray, first_word: int = 0) -> Lanes:
    """Raw lanes of contiguous bytes that begin at 8-byte word `first_word` of their tensor. A tail of less
    than 8 bytes counts as a word padded with zeros, so it must be the tensor's. Any alignment."""
    piece = np.array([[0, len(data), first_word]], np.int64)
    return Lanes(*hash_pieces(data, piece)[0].tolist())


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    """As `hash_bytes`, for many pieces of `data`, in one call. `pieces`: int64[n, 3], of each its first byte,
    its end, and the number of its first 8-byte word in its tensor."""
    if data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("lanes need contiguous bytes")
    if len(pieces) and not 0 <= pieces[:, 0].min() <= pieces[:, 1].max() <= len(data):
        raise ValueError("pieces out of bounds")
    lanes: LanesArray = kernels().hash_pieces(data, pieces)
    return lanes


@dataclass(frozen=True)
class ChunkSums:
    old: Lanes = ZERO
    new: Lanes = ZERO
    changed: int = 0


@dataclass(frozen=True, eq=False)
class SpanSums:
    """Of the spans of a chunk that have changes, in the chunk's order: sums over the 8-byte words with a
    changed word in them, numbered as in the tensor, before and after. `tensors`: int64[n]; `lanes`:
    uint64[n, 4], old a, old b, new a, new b; `changed`: int64[n], words of the tensor's own width.
    Read-only."""

    tensors: NDArray[np.int64]
    lanes: NDArray[np.uint64]
    changed: NDArray[np.int64]

    @classmethod
    def of(cls, chunk: Chunk, lanes: NDArray[np.uint64], changed: NDArray[np.int64]) -> SpanSums:
        """`lanes`, `changed`: of all spans; those without changes are dropped."""
        kept = np.flatnonzero(changed)
        if len(kept) == len(changed):
            return cls(chunk.tensors, lanes, changed)
        return cls(chunk.tensors[kept], lanes[kept], changed[kept])

    def __len__(self) -> int:
        return len(self.tensors)

    def total(self) -> ChunkSums:
        """The sums of a chunk's record in the index."""
        old_a, old_b, new_a, new_b = self.lanes.sum(axis=0, dtype=np.uint64).tolist()
        return ChunkSums(Lanes(old_a, old_b), Lanes(new_a, new_b), int(self.changed.sum()))


def spans_in(chunk: Chunk) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per span its end in the chunk, and the number of the chunk's 8-byte word 0 in its tensor's count."""
    places = chunk.places
    return places[:, 0] + places[:, 1], places[:, 2].copy()


class StepSums:
    """`lanes`: uint64[tensors, 4], columns as in `SpanSums`; `words`: int64[tensors], changed ones."""

    def __init__(self, tensors: int) -> None:
        self.lanes = np.zeros((tensors, 4), np.uint64)
        self.words = np.zeros(tensors, np.int64)

    def add(self, sums: SpanSums) -> None:
        """One chunk's. A tensor may have several spans in it."""
        if len(sums) == 1:
            # most chunks; np.add.at takes longer than all the rest
            tensor = int(sums.tensors[0])
            self.lanes[tensor] += sums.lanes[0]
            self.words[tensor] += sums.changed[0]
            return
        np.add.at(self.lanes, sums.tensors, sums.lanes)
        np.add.at(self.words, sums.tensors, sums.changed)

    @property
    def changed(self) -> NDArray[np.int64]:
        """Numbers of the tensors with changes, ascending."""
        return np.flatnonzero(self.words)

    def after(self, lanes: LanesArray) -> LanesArray:
        """Lanes of every tensor, if they were `lanes` before."""
        return lanes - self.lanes[:, :2] + self.lanes[:, 2:]


CONTEXT = "weightcast root 1"

Array64 = NDArray[np.uint64]


def root(table: TensorTable, lanes: Sequence[Lanes] | LanesArray) -> str:
    """64 hex digits. `lanes`: raw lanes of each tensor, in the table's order."""
    if len(lanes) != len(table):
        raise ValueError(f"{len(lanes)} lanes for {len(table)} tensors")
    raw = np.array(lanes, np.uint64).reshape(-1, 2)
    # a tensor's lanes are bound to its length in bytes
    numbers = table.sizes.astype(np.uint64) * np.uint64(2) + np.uint64(1)
    final = np.stack([mix_a(raw[:, 0], numbers), mix_b(raw[:, 1], numbers)], 1).astype("<u8").tobytes()
    key = blake3(derive_key_context=CONTEXT)
    each = np.frombuffer(final, "V16").tolist()
    key.update(b"".join(chain.from_iterable(zip(_heads(table), each, strict=True))))
    return key.hexdigest()


@lru_cache(maxsize=2)
def _heads(table: TensorTable) -> tuple[bytes, ...]:
    """Of each tensor what comes before its lanes: the same in every version."""
    component = _text("" if table.component == MAIN else table.component)
    return tuple(component + _text(spec.name) + _form(spec.dtype, spec.shape) for spec in table)


def _text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data


@lru_cache(4096)
def _form(dtype: str, shape: tuple[int, ...]) -> bytes:
    code, rank = dtype.encode(), len(shape)
    return struct.pack(f"<B{len(code)}sB{rank}Q", len(code), code, rank, *shape)


def _rounds(x: Array64, shifts: tuple[int, int, int], factors: tuple[int, int, int]) -> Array64:
    x = (x ^ (x >> np.uint64(shifts[0]))) * np.uint64(factors[1])
    x = (x ^ (x >> np.uint64(shifts[1]))) * np.uint64(factors[2])
    return x ^ (x >> np.uint64(shifts[2]))


def mix_a(words: Array64, numbers: Array64) -> Array64:
    return _rounds(words ^ (numbers * np.uint64(MIX_A[0])), (32, 29, 32), MIX_A)


def mix_b(words: Array64, numbers: Array64) -> Array64:
    return _rounds(words + numbers * np.uint64(MIX_B[0]), (31, 33, 30), MIX_B)
