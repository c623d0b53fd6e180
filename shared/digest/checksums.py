"""Raw lanes: two sums over a tensor's 8-byte words. docs/FORMAT.md, Lanes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
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
    _check_contiguous(data)
    piece = np.array([[0, len(data), first_word]], np.int64)
    return Lanes(*kernels().hash_pieces(data, piece)[0].tolist())


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    """As `hash_bytes`, for many pieces of `data`, in one call. `pieces`: int64[n, 3], of each its first byte,
    its end, and the number of its first 8-byte word in its tensor."""
    _check_contiguous(data)
    if len(pieces) and not 0 <= pieces[:, 0].min() <= pieces[:, 1].max() <= len(data):
        raise ValueError("pieces out of bounds")
    lanes: LanesArray = kernels().hash_pieces(data, pieces)
    return lanes


def _check_contiguous(data: ByteArray) -> None:
    if data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("lanes need contiguous bytes")
