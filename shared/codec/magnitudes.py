"""Magnitudes |step| - 1 in contexts: large weights move by exactly one unit, small ones by more.

The context of a changed word is exponent - first exponent of its *old* word, at least 0 and at most 15. In a
context with under a third of longer steps, lengths of runs of single units are coded instead of each.
docs/FORMAT.md, Chunk blob.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.codec.kernels import kernels
from weightcast.shared.codec.rice import K_LIMIT, NOTHING, RICE, RUNS, SLACK, expected_bits, rice_parameter
from weightcast.shared.codec.scratch import scratch
from weightcast.shared.codec.steps import Steps
from weightcast.shared.words import ByteArray, WordKind

CONTEXT = struct.Struct("<BBBBI")
"""coding, k (of runs: k of their lengths), k of what ends a run, 0, bytes of the stream"""
MOST_CONTEXTS = 16
_WORTH_CONTEXTS = 1024
"""changes from which 16 tables pay for themselves"""
_TOP_SHARE = 0.97
"""share of changes whose exponents the 16 contexts reach up to"""


@dataclass(frozen=True)
class Grouped:
    """Magnitudes by context, in the thread's scratch. `ends`: where each context ends; `tallies`: of each
    its changes, the sum of their magnitudes, how many are not 0; `plan`: coding, k, k of what ends a run."""

    first: int
    values: NDArray[np.uint32]
    ends: NDArray[np.int64]
    tallies: list[tuple[int, int, int]]
    plan: list[tuple[int, int, int]]

    @property
    def expected_bits(self) -> float:
        return sum(_expected(*tally) for tally in self.tallies)

    def put(self, out: ByteArray, most: int) -> tuple[bytes, int] | None:
        """Heads of the contexts, and how many bytes of streams are in `out`; None if they are over `most`."""
        plan = np.array(self.plan, np.int64)
        sizes = kernels().put_magnitudes(self.values, self.ends, plan, out, most)
        if sizes is None:
            return None
        rows = zip(self.plan, sizes, strict=True)
        heads = b"".join(CONTEXT.pack(coding, k, k_rest, 0, size) for (coding, k, k_rest), size in rows)
        return heads, sum(sizes)


def grouped(steps: Steps, kind: WordKind) -> Grouped:
    first, count = _choose_contexts(steps, kind)
    table = _contexts_by_exponent(first, count)
    ends = np.cumsum(np.bincount(table, steps.histogram, count)).astype(np.int64)
    values = scratch().take("grouped", np.uint32, len(steps))
    sums = kernels().group(steps.magnitude, steps.exponents, table, ends, values)
    sizes = np.diff(ends, prepend=0).tolist()
    tallies = [(size, total, longer) for size, (total, longer) in zip(sizes, sums.tolist(), strict=True)]
    return Grouped(first, values, ends, tallies, [_plan(*tally) for tally in tallies])


def _choose_contexts(steps: Steps, kind: WordKind) -> tuple[int, int]:
    """First exponent, number of contexts."""
    if not kind.exponent_mask or len(steps) < _WORTH_CONTEXTS:
        return 0, 1
    reach = np.cumsum(steps.histogram)
    top = int(np.searchsorted(reach, _TOP_SHARE * reach[-1]))
    return max(0, top - MOST_CONTEXTS + 1), MOST_CONTEXTS


@cache
def _contexts_by_exponent(first: int, count: int) -> ByteArray:
    return np.clip(np.arange(256) - first, 0, count - 1).astype(np.uint8)


def _plan(count: int, total: int, longer: int) -> tuple[int, int, int]:
    """Runs where less than a third of the steps is longer than one."""
    if count == 0:
        return NOTHING, 0, 0
    if 3 * longer >= count:
        return RICE, rice_parameter(total, count), 0
    return RUNS, rice_parameter(count - longer, longer + 1), rice_parameter(total - longer, longer)


def _expected(count: int, total: int, longer: int) -> float:
    if 3 * longer >= count:
        return expected_bits(total, count)
    return expected_bits(count - longer, longer + 1) + expected_bits(total - longer, longer)


def read_contexts(payload: ByteArray, at: int, count: int, start: int) -> NDArray[np.int64]:
    """int64[count, 5]: coding, k, k of what ends a run, start and stop of the stream. Heads lie at `at`,
    streams follow each other from `start` to the last SLACK bytes, which are zeros. Raises ValueError."""
    if count not in (1, MOST_CONTEXTS):
        raise ValueError("the payload's header is damaged")
    if at + count * CONTEXT.size > len(payload) - SLACK:
        raise ValueError("the payload is shorter than its header says")
    streams = list(_contexts(payload, at, count, start))
    if streams[-1][4] + SLACK != len(payload) or payload[-SLACK:].any():
        raise ValueError("the payload has another length than its header says")
    return np.array(streams, np.int64)


def _contexts(
    payload: ByteArray, at: int, count: int, start: int
) -> Iterator[tuple[int, int, int, int, int]]:
    most = len(payload) - SLACK
    for coding, k, k_rest, zero, size in CONTEXT.iter_unpack(payload[at : at + count * CONTEXT.size].data):
        if coding > RUNS or k > K_LIMIT or k_rest > K_LIMIT or zero or (coding == NOTHING) != (size == 0):
            raise ValueError("a context's header is damaged")
        if start + size > most:
            raise ValueError("the payload is shorter than a context's header says")
        yield coding, k, k_rest, start, start + size
        start += size
