"""The contexts of magnitudes: which exponent begins them, how each is coded.

Plain loops over arrays of int64: what they are here for numpy's kernels, `native_rice` compiles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.rice import NOTHING, RICE, RUNS, rice_parameter

Table = NDArray[np.int64]

COUNT, TOTAL, LONGER, CODING, K, K_REST = range(6)
"""Columns of a context: its changes, the sum of |step| - 1, how many of those are not 0; coding, k (of runs:
k of their lengths), k of what ends a run."""
EXPONENTS = 256
_TOP_SHARE = 0.97
"""share of changes whose exponents the contexts reach up to"""


def plan_contexts(tallies: Table, contexts: Table) -> int:
    """From int64[256, 3], the first three columns by exponent, fills int64[n, 6], zeros. Returns the first
    exponent: changes with that or a lower one have context 0."""
    first = _first_exponent(tallies, len(contexts)) if len(contexts) > 1 else 0
    for exponent in range(EXPONENTS):
        context = min(max(exponent - first, 0), len(contexts) - 1)
        for column in range(3):
            contexts[context, column] += tallies[exponent, column]
    for context in range(len(contexts)):
        _plan(contexts[context])
    return first


def _first_exponent(tallies: Table, contexts: int) -> int:
    least, reached, top = _TOP_SHARE * tallies[:, COUNT].sum(), 0, -1
    while top < EXPONENTS - 1 and (top < 0 or reached < least):
        top += 1
        reached += tallies[top, COUNT]
    return max(0, top - contexts + 1)


def _plan(row: Table) -> None:
    """Runs where less than a third of the steps is longer than one."""
    count, total, longer = row[COUNT], row[TOTAL], row[LONGER]
    if count == 0:
        row[CODING] = NOTHING
    elif 3 * longer >= count:
        row[CODING], row[K] = RICE, rice_parameter(total, count)
    else:
        row[CODING], row[K] = RUNS, rice_parameter(count - longer, longer + 1)
        row[K_REST] = rice_parameter(total - longer, longer)
