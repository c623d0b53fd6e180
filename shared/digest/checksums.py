"""Raw lanes: two sums over a tensor's 8-byte words. docs/FORMAT.md, Lanes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
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


def mix_a(word: int, number: int) -> int:
    x = word ^ (number * MIX_A[0] & _MASK)
    x = (x ^ x >> 32) * MIX_A[1] & _MASK
    x = (x ^ x >> 29) * MIX_A[2] & _MASK
    return x ^ x >> 32


def mix_b(word: int, number: int) -> int:
    x = (word + number * MIX_B[0]) & _MASK
    x = (x ^ x >> 31) * MIX_B[1] & _MASK
    x = (x ^ x >> 33) * MIX_B[2] & _MASK
    return x ^ x >> 30


def finalise(lanes: Lanes, nbytes: int) -> bytes:
    """16 bytes, a then b, each little-endian: the lanes of a whole tensor bound to its length in bytes."""
    number = 2 * nbytes + 1
    return mix_a(lanes.a, number).to_bytes(8, "little") + mix_b(lanes.b, number).to_bytes(8, "little")


def hash_bytes(data: ByteArray, first_word: int = 0) -> Lanes:
    """Raw lanes of contiguous bytes that begin at 8-byte word `first_word` of their tensor. A tail of less
    than 8 bytes counts as a word padded with zeros, so it must be the tensor's. Any alignment."""
    _check_contiguous(data)
    piece = np.array([[0, len(data), first_word]], np.int64)
    return Lanes(*kernels().hash_pieces(data, piece)[0].tolist())


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    """As `hash_bytes` of many pieces of `data`, in one call. `pieces`: int64[n, 3], of each its first byte,
    the byte behind its last, and which 8-byte word of its tensor it begins at."""
    _check_contiguous(data)
    if len(pieces) and not 0 <= pieces[:, 0].min() <= pieces[:, 1].max() <= len(data):
        raise ValueError("pieces of other bytes")
    lanes: LanesArray = kernels().hash_pieces(data, pieces)
    return lanes


def _check_contiguous(data: ByteArray) -> None:
    if data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("only contiguous bytes have lanes")
