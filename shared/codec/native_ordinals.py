"""Words as numbers in order, inside kernels. `WordKind` comes as a tuple of int64, from `facts`."""

from __future__ import annotations

from typing import Any

from weightcast.shared.base.elements import WordKind
from weightcast.shared.digest.native import I64, U64, inlined

SIGN, LOW, HALF, SHIFT, MASK, FLOATS = range(6)


def facts(kind: WordKind) -> tuple[int, int, int, int, int, int]:
    """Sign bit (0: integers), the bits that an ordinal keeps of its word, half of all words, shift and mask
    of the exponent, -1 for floats and 0 for integers."""
    half = 1 << (8 * kind.width - 1)
    low, floats = (half - 1, -1) if kind.sign_bit else (2 * half - 1, 0)
    return kind.sign_bit, low, half, kind.exponent_shift, kind.exponent_mask, floats


@inlined
def ordinal(word: Any, kind: Any) -> Any:
    value = I64(word)
    return (value & kind[LOW]) ^ -I64((value & kind[SIGN]) != 0)


@inlined
def step_between(old: Any, new: Any, kind: Any) -> Any:
    step = ordinal(new, kind) - ordinal(old, kind)
    return step if kind[SIGN] else ((step + kind[HALF]) & kind[LOW]) - kind[HALF]


@inlined
def word_of(ordinal_: Any, kind: Any) -> Any:
    """As int64; of integers modulo their width. Without branches, which keeps loops around it quick."""
    below = (ordinal_ >> 63) & kind[FLOATS]
    return ((ordinal_ ^ below) & kind[LOW]) | (below & kind[SIGN])


@inlined
def excess(ordinal_: Any, length: Any, kind: Any) -> Any:
    """Has bits from 2 * HALF on if a step of `length` (0: none) leads to no word. May be collected by or."""
    reached = (ordinal_ & kind[FLOATS]) | ((length - 1) & ~kind[FLOATS])
    return U64(reached + kind[HALF])


@inlined
def exponent(word: Any, kind: Any) -> Any:
    return (I64(word) >> kind[SHIFT]) & kind[MASK]
