"""Entropy bounds of the two step encodings: what an ideal coder with the same knowledge would need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .steps import Case

_SHIFT, _MASK, _SIGN = 7, 0xFF, 0x8000


@dataclass(frozen=True)
class Bounds:
    """Bits per changed word. `fast` knows how many words change, `small` how many of each old exponent do;
    both know the old exponent of a changed word, and neither can predict a sign."""

    fast: float
    small: float


def bounds(case: Case) -> Bounds:
    changed = case.old != case.new
    exponents = ((case.old >> _SHIFT) & _MASK).astype(np.int64)
    count = int(changed.sum())
    lengths = np.abs(_ordinals(case.new[changed]) - _ordinals(case.old[changed]))
    magnitudes = sum(
        _entropy_sum(np.unique(lengths[exponents[changed] == e], return_counts=True)[1])
        for e in np.unique(exponents[changed])
    )
    whole = _positions(np.array([len(changed)]), np.array([count]))
    classed = _positions(
        np.bincount(exponents, minlength=256), np.bincount(exponents[changed], minlength=256)
    )
    return Bounds(1 + (whole + magnitudes) / count, 1 + (classed + magnitudes) / count)


def _ordinals(words: NDArray[np.uint16]) -> NDArray[np.int64]:
    wide = words.astype(np.int64)
    return np.where(wide & _SIGN, -1 - (wide ^ _SIGN), wide)


def _positions(words: NDArray[np.int64], changed: NDArray[np.int64]) -> float:
    """Bits that say which words of each group change."""
    return sum(
        _entropy_sum(np.array([hit, many - hit]))
        for many, hit in zip(words.tolist(), changed.tolist(), strict=True)
        if many
    )


def _entropy_sum(counts: NDArray[np.int64]) -> float:
    used = counts[counts > 0].astype(float)
    return float(-(used * np.log2(used / used.sum())).sum())
