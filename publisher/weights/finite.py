"""Elements that become NaN or infinite: counted, and refused where the policy is not to publish them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.changes import Changes
from weightcast.shared.errors import Refused
from weightcast.shared.words import Chunk, TensorTable, Words, kind_of

NonFinite = Literal["refuse", "allow"]
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


def became_non_finite(chunk: Chunk, changes: Changes, new: Callable[[], Words]) -> Iterator[tuple[int, int]]:
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
        remedy='look at the training run; non_finite="allow" (--non-finite allow) publishes them',
    )


def _places(dtype: str, changes: Changes, new: Callable[[], Words]) -> NDArray[np.integer]:
    """Word indices in the chunk, ascending, one for each element."""
    if dtype not in _LONG:
        bad = non_finite(changes.new, dtype)
        if not bad.any():
            return changes.index[:0]
        return changes.index[bad & ~non_finite(changes.old, dtype)]
    width = np.dtype(_LONG[dtype]).itemsize
    elements = np.unique(changes.index // width)
    values = np.ascontiguousarray(new()).view(_LONG[dtype])[elements]
    places: NDArray[np.integer] = elements[~np.isfinite(values)] * width
    return places
