"""Constants and plans of codes that kernels and format share. Kernels compile these functions too.

A Rice code with parameter k of a value below 2**32, least significant bit first: value >> k zeros, a one,
the low k bits. From ESCAPE zeros on: ESCAPE zeros, a one, the value in 32 bits. No code is longer than 56
bits, so one 8-byte load at any bit holds it. Streams end at a byte border, filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import Words

MIX_A = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
MIX_B = (0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Per checksum lane: the multiplier of the word's number, then two of the mix."""

ESCAPE = 23
LONGEST = ESCAPE + 1 + 32
"""bits of an escaped code"""
SLACK = 8
"""bytes that must follow the last stream in its buffer"""
MARGIN = 32
"""bytes that a writer may touch past its limit"""
GREATEST = (1 << 32) - 1
K_LIMIT = 31

NOTHING, RICE, RUNS = range(3)
"""How the magnitudes of a context are coded."""

_GOLDEN_LOG = 0.48121182505960347
"""ln((1 + sqrt 5) / 2)"""


def rice_parameter(total: int, count: int) -> int:
    """The best k for `count` geometric values with sum `total` (Kiely 2004): the least with 2**k above
    _GOLDEN_LOG / ln(1 + 1 / mean), which is close to _GOLDEN_LOG (mean + 1/2)."""
    if total <= 0 or count <= 0:
        return 0
    bound, k = int(_GOLDEN_LOG * (total / count + 0.5)), 0
    while bound > 0 and k < K_LIMIT:
        bound >>= 1
        k += 1
    return k


def expected_bits(total: int, count: int) -> float:
    """About how many bits the codes of such values take."""
    k = rice_parameter(total, count)
    return count * (k + 1) + max(0.0, total / (1 << k) - (count / 2 if k else 0))


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


Array32 = NDArray[np.uint32]
Counts = NDArray[np.int64]
Masks = NDArray[np.uint64]
"""bit j of number n: word 64 n + j"""
ESCAPED_GAP = 255
"""the byte for this distance and all greater ones"""
OUT_OF_ORDER = "changes out of order, or past the end"
DAMAGED = "a wrong checksum"

Taken = tuple[Words, Words, NDArray[np.uint64], Counts]
"""old words, new words; of each span the lanes of touched 8-byte words, uint64[spans, 4], old a, old b, new
a, new b, and changed words"""
Begin = Callable[[Words, int], None]
"""called with a range of words and how many of them will be written"""


def places_under(masks: Masks) -> NDArray[np.int64]:
    """The words whose bits are set."""
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))


def at_once(words: Words, changes: int) -> None:
    """For words in memory, which need no preparation."""


def check_masks(words: int, masks: Masks, changes: int) -> None:
    """Raises ValueError unless the masks are for `words` words with `changes` bits set."""
    inside = words & 63
    beyond = inside and int(masks[-1]) >> inside
    if beyond or len(masks) != (words + 63) >> 6 or int(np.bitwise_count(masks).sum()) != changes:
        raise ValueError(OUT_OF_ORDER)
