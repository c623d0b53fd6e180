"""Rounding between floating-point dtypes in numpy, as torch rounds: to the nearest, ties to even."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import Chunk, TensorTable, Words, kind_of
from weightcast.shared.base.errors import Refused
from weightcast.shared.codec.changes import Changes

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
        if found == "BF16":
            single = (values.astype(np.uint32) << 16).view(np.float32)
        else:
            single = values.astype(np.float32, copy=False)
        if wanted == "BF16":
            return _to_bf16(single)
        if wanted == "F16":
            return _to_f16(single)
        return single.astype(STORED[wanted], copy=False)


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


_SHOWN = 5
_LONG = {"F64": "<f8", "C64": "<f4"}
"""dtypes whose words are single bytes"""


def non_finite(words: Words, dtype: str) -> NDArray[np.bool_]:
    """Per word of a dtype whose elements are words."""
    kind = kind_of(dtype)
    if dtype == "F8_E4M3":
        found = (words & 0x7F) == 0x7F  # no infinity, one NaN of each sign
    elif dtype == "F8_E8M0":
        found = words == 0xFF
    elif kind.exponent_mask:
        mask = words.dtype.type(kind.exponent_mask << kind.exponent_shift)
        found = (words & mask) == mask
    else:
        found = np.zeros(len(words), np.bool_)
    return np.asarray(found, np.bool_)


def became_non_finite(chunk: Chunk, changes: Changes, new: Words) -> Iterator[tuple[int, int]]:
    """(tensor, count) of elements that were finite, changed, and are not any more; of 8-byte elements, those
    that changed and are not. Safe in any thread."""
    places = _places(chunk.dtype, changes, new)
    if not len(places):
        return
    edges = np.searchsorted(places, [span.offset for span in chunk.spans] + [chunk.words])
    for span, low, high in zip(chunk.spans, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if high > low:
            yield span.tensor, high - low


def check_finite(table: TensorTable, found: Mapping[int, int]) -> None:
    """`found`: count by tensor. Raises Refused that names the tensors."""
    if not found:
        return
    some = [f"{table[tensor].name} ({count})" for tensor, count in sorted(found.items())[:_SHOWN]]
    more = ", ..." if len(found) > _SHOWN else ""
    raise Refused(
        f"elements became NaN or infinite: {', '.join(some)}{more}",
        remedy='check the training run; publish them with non_finite="allow" (--non-finite allow)',
    )


def _places(dtype: str, changes: Changes, new: Words) -> NDArray[np.integer]:
    """Word indices in the chunk, ascending, one for each element."""
    if dtype not in _LONG:
        bad = non_finite(changes.new, dtype)
        if not bad.any():
            return changes.index[:0]
        return changes.index[bad & ~non_finite(changes.old, dtype)]
    width = np.dtype(_LONG[dtype]).itemsize
    elements = np.unique(changes.index // width)
    values = np.ascontiguousarray(new).view(_LONG[dtype])[elements]
    places: NDArray[np.integer] = elements[~np.isfinite(values)] * width
    return places
