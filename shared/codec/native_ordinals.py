"""Words as numbers in order, inside kernels. `WordKind` comes as a tuple of int64, from `facts`."""

from __future__ import annotations

from typing import Any

from weightcast.shared.digest.native import I64, inlined
from weightcast.shared.words import WordKind

SIGN, LOW, HALF, SHIFT, MASK = range(5)


def facts(kind: WordKind) -> tuple[int, int, int, int, int]:
    """Sign bit (0: integers), the bits below it, half of all words, shift and mask of the exponent."""
    half = 1 << (8 * kind.width - 1)
    low = half - 1 if kind.sign_bit else 2 * half - 1
    return kind.sign_bit, low, half, kind.exponent_shift, kind.exponent_mask


@inlined
def ordinal(word: Any, kind: Any) -> Any:
    value = I64(word)
    return (value & kind[LOW]) ^ -I64((value & kind[SIGN]) != 0)


@inlined
def step_between(old: Any, new: Any, kind: Any) -> Any:
    step = ordinal(new, kind) - ordinal(old, kind)
    return step if kind[SIGN] else ((step + kind[HALF]) & kind[LOW]) - kind[HALF]


@inlined
def stepped(old: Any, step: Any, kind: Any) -> Any:
    """The new word, as int64."""
    moved = ordinal(old, kind) + step
    below = moved >> 63
    return ((moved ^ below) | (below & kind[SIGN])) if kind[SIGN] else moved & kind[LOW]


@inlined
def in_range(old: Any, step: Any, kind: Any) -> Any:
    """Whether a step leads to a word of the kind."""
    moved = ordinal(old, kind) + step
    floats = (moved >= -kind[HALF]) & (moved < kind[HALF])
    return floats if kind[SIGN] else (step >= -kind[HALF]) & (step <= kind[HALF])


@inlined
def exponent(word: Any, kind: Any) -> Any:
    return (I64(word) >> kind[SHIFT]) & kind[MASK]
