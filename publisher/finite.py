"""Elements that become NaN or infinite: counted where the policy is not to publish them."""

from __future__ import annotations

from collections.abc import Callable
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


class FiniteCheck:
    """Counts elements of one part that were finite, changed, and are not any more. Of 8-byte elements, those
    that changed and are not."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._found: dict[int, int] = {}

    def look(self, chunk: Chunk, changes: Changes, new: Callable[[], Words]) -> None:
        places = _places(chunk.dtype, changes, new)
        if not len(places):
            return
        edges = np.searchsorted(places, [span.offset for span in chunk.spans] + [chunk.words])
        for span, low, high in zip(chunk.spans, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if high > low:
                self._found[span.tensor] = self._found.get(span.tensor, 0) + high - low

    def check(self) -> None:
        """Raises Refused that names the tensors."""
        if self._found:
            some = [f"{self._table[t].name} ({count})" for t, count in sorted(self._found.items())[:_SHOWN]]
            more = ", ..." if len(self._found) > _SHOWN else ""
            raise Refused(
                f"elements became NaN or infinite: {', '.join(some)}{more}",
                remedy='look at the training run; non_finite="allow" (--non-finite allow) publishes them',
            )


def _places(dtype: str, changes: Changes, new: Callable[[], Words]) -> NDArray[np.integer]:
    """Word indices in the chunk, ascending, one for each element."""
    if dtype not in _LONG:
        bad = non_finite(changes.new, dtype) & ~non_finite(changes.old, dtype)
        return changes.index[bad]
    width = np.dtype(_LONG[dtype]).itemsize
    elements = np.unique(changes.index // width)
    values = np.ascontiguousarray(new()).view(_LONG[dtype])[elements]
    places: NDArray[np.integer] = elements[~np.isfinite(values)] * width
    return places
