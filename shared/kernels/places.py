"""Positions of changes in a range of words: as gaps between them, or as a bit per word."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, Words

Array32 = NDArray[np.uint32]
Counts = NDArray[np.int64]
Masks = NDArray[np.uint64]
"""bit j of number n stands for word 64 n + j"""
ESCAPED_GAP = 255
"""the byte for this distance and all greater ones"""
OUT_OF_ORDER = "changes out of order, or past the end"
GOOD, BAD_GAPS, BAD_PLACE, BAD_STEPS = range(4)
"""results of reading a `fast` payload: good, damaged gaps, a position past the last word, damaged steps"""

Taken = tuple[Words, Words, NDArray[np.uint64], Counts]
"""old words, new words, and the sums and counts that `touched` in the digest's kernels returns"""
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


def exchange_at(
    words: Words, index: NDArray[np.int64], before: Words, after: Words, *, again: bool
) -> int | None:
    """As `exchange_packed`, of listed words. Returns which of `index` fails first; on a mismatch
    nothing is written."""
    found = words[index]
    expected = found == before
    if again:
        expected |= found == after
    if expected.all():
        words[index] = after
        expected = words[index] == after
    return None if expected.all() else int(np.argmin(expected))


def unpack_gaps(first: int, gaps: ByteArray, escapes: Array32) -> NDArray[np.int64] | None:
    """The words of a record; None where they do not ascend, or escapes are missing or too many."""
    distances = _distances(gaps, gaps == ESCAPED_GAP, escapes)
    if distances is None or distances[0] or np.count_nonzero(distances) != len(distances) - 1:
        return None
    distances[0] = first
    return np.cumsum(distances)


def _distances(gaps: ByteArray, are_escaped: NDArray[np.bool_], escapes: Array32) -> Counts | None:
    """None where escapes are missing, too many or too small."""
    if np.count_nonzero(are_escaped) != len(escapes) or (escapes < ESCAPED_GAP).any():
        return None
    distances = gaps.astype(np.int64)
    distances[are_escaped] = escapes
    return distances


def unpack_many_gaps(
    firsts: Counts, counts: Counts, gaps: ByteArray, escaped: Counts, escapes: Array32
) -> NDArray[np.int64] | None:
    """As `unpack_gaps`, of consecutive records with `counts` gaps and `escaped` escapes each. None if
    one is wrong."""
    heads = np.cumsum(counts) - counts
    are_escaped = gaps == ESCAPED_GAP
    if not np.array_equal(np.add.reduceat(are_escaped, heads, dtype=np.int64), escaped):
        return None
    distances = _distances(gaps, are_escaped, escapes)
    if (
        distances is None
        or distances[heads].any()
        or np.count_nonzero(distances) != len(distances) - len(counts)
    ):
        return None
    reached: NDArray[np.int64] = np.cumsum(distances)
    reached -= np.repeat(reached[heads] - firsts, counts)
    return reached
