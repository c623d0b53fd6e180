"""Rice codes: what they are, and which parameter suits.

A Rice code with parameter k of a value below 2**32, least significant bit first: value >> k zeros, a one,
the low k bits. From ESCAPE zeros on: ESCAPE zeros, a one, the value in 32 bits. No code is longer than 56
bits, so one 8-byte load at any bit holds it whole. Streams end at a byte border, filled with zeros.
"""

from __future__ import annotations

ESCAPE = 23
LONGEST = ESCAPE + 1 + 32
"""bits of an escaped code"""
SLACK = 8
"""bytes that must follow the last stream in its buffer"""
MARGIN = 32
"""bytes a writer may touch behind the most it was allowed"""
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
