"""Changed elements, where codec and digest count words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.changes import Changes
from weightcast.shared.digest.step_sums import SpanSums
from weightcast.shared.words import DTYPES, Chunk, TensorTable


def changed_elements(table: TensorTable, chunk: Chunk, changes: Changes, sums: SpanSums) -> NDArray[np.int64]:
    """int64[n]: of each of the spans that `sums` names."""
    width = chunk.kind.width
    if chunk.dtype in DTYPES and DTYPES[chunk.dtype][0] == width:
        return sums.changed
    borders = np.searchsorted(changes.index, [span.offset for span in chunk.spans] + [chunk.words])
    counts = np.zeros(len(chunk.spans), np.int64)
    for n in np.flatnonzero(np.diff(borders)).tolist():
        spec = table[chunk.spans[n].tensor]
        words = changes.index[borders[n] : borders[n + 1]]
        per_element = max(1, spec.nbytes // max(1, spec.elements) // width)
        first = chunk.spans[n].start - chunk.spans[n].offset
        counts[n] = len(np.unique((words.astype(np.int64) + first) // per_element))
    return counts[counts > 0]
