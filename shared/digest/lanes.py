"""Raw lanes: two sums over a tensor's 8-byte words. docs/FORMAT.md, Lanes."""

from __future__ import annotations

from dataclasses import dataclass

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Lanes:
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
