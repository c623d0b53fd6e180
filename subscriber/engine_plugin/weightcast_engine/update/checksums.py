"""Raw lanes of 8-byte words by torch, on the device where they lie. docs/FORMAT.md, Lanes.

torch's integers are signed: products and sums wrap as the format's do, and a logical shift is an arithmetic
one under a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_A = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_B = (0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Of each lane: the multiplier of the word's number, then the two of the mix."""
PIECE = 1 << 18
"""8-byte words mixed at once; bounds the memory of the sums"""


class Lanes(NamedTuple):
    """Two 64-bit sums modulo 2^64, additive over disjoint sets of words."""

    a: int = 0
    b: int = 0

    def plus(self, other: Lanes) -> Lanes:
        return Lanes((self.a + other.a) & _MASK, (self.b + other.b) & _MASK)

    def minus(self, other: Lanes) -> Lanes:
        return Lanes((self.a - other.a) & _MASK, (self.b - other.b) & _MASK)

    def hex(self) -> str:
        return f"{self.a:016x}{self.b:016x}"

    @classmethod
    def from_hex(cls, text: str) -> Lanes:
        """`text`: 32 hex digits."""
        return cls(int(text[:16], 16), int(text[16:], 16))


def sums(words: Tensor, numbers: Tensor) -> Lanes:
    """int64[n] words and their numbers in the tensor, counted from 0."""
    found = Lanes()
    for start in range(0, words.numel(), PIECE):
        found = found.plus(_piece(words[start : start + PIECE], numbers[start : start + PIECE] + 1))
    return found


def _piece(words: Tensor, numbers: Tensor) -> Lanes:
    a = _mixed(words ^ (numbers * _signed(_A[0])), (32, 29, 32), _A)
    b = _mixed(words + numbers * _signed(_B[0]), (31, 33, 30), _B)
    both = torch.stack([a.sum(), b.sum()]).tolist()
    return Lanes(both[0] & _MASK, both[1] & _MASK)


def _signed(factor: int) -> int:
    return factor - (1 << 64) if factor >> 63 else factor


def _mixed(x: Tensor, shifts: tuple[int, int, int], factors: tuple[int, int, int]) -> Tensor:
    """In place."""
    x.bitwise_xor_(_shifted(x, shifts[0])).mul_(_signed(factors[1]))
    x.bitwise_xor_(_shifted(x, shifts[1])).mul_(_signed(factors[2]))
    return x.bitwise_xor_(_shifted(x, shifts[2]))


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
