"""Rounding between floating-point dtypes in numpy, as torch rounds: to the nearest, ties to even."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATS = ("F64", "F32", "F16", "BF16")
STORED: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""how an array of the dtype is stored; numpy has no bfloat16"""


def rounds(found: str, wanted: str) -> bool:
    """Whether one dtype becomes the other by rounding or widening."""
    return found != wanted and found in FLOATS and wanted in FLOATS


def rounded(values: NDArray[Any], found: str, wanted: str) -> NDArray[Any]:
    """`values` as `STORED` has `found`; the result likewise of `wanted`. F64 becomes 16 bits by way of F32,
    as in torch. NaN stays NaN: quiet, with its sign and the upper bits of its payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        if found == "F64" and wanted == "F32":
            return values.astype(np.float32)
        single = _widened(values) if found == "BF16" else values.astype(np.float32, copy=False)
        if wanted == "BF16":
            return _to_bf16(single)
        if wanted == "F16":
            return _to_f16(single)
        return single.astype(STORED[wanted], copy=False)


def _widened(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    up = bits >> 16
    up &= 1
    up += 0x7FFF
    up += bits
    up >>= 16
    words = up.astype(np.uint16)
    if (nan := np.isnan(values)).any():
        # a payload in the low half alone would round to infinity, or around
        words[nan] = bits[nan] >> 16 | 0x40
    return words


def _to_f16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    halves = values.astype(np.float16)
    if (nan := np.isnan(values)).any():
        bits = np.ascontiguousarray(values).view(np.uint32)[nan]
        halves[nan] = (bits >> 16 & 0x8000 | bits >> 13 & 0x1FF | 0x7E00).astype(np.uint16).view(np.float16)
    return halves
