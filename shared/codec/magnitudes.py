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
from weightcast.shared.codec.rice import K_LIMIT, NOTHING, RICE, RUNS, SLACK, expected_bits, rice_parameters
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
    """Magnitudes by context, in the thread's scratch. `ends`: where each context ends; `tallies`: int64[n, 3],
    of each its changes, the sum of their magnitudes, how many are not 0; `plan`: int64[n, 3], coding, k, k of
    what ends a run."""

    first: int
    values: NDArray[np.uint32]
    ends: NDArray[np.int64]
    tallies: NDArray[np.int64]
    plan: NDArray[np.int64]

    @property
    def expected_bits(self) -> float:
        return sum(_expected(*tally) for tally in self.tallies.tolist())

    def put(self, out: ByteArray, most: int) -> tuple[bytes, int] | None:
        """Heads of the contexts, and how many bytes of streams are in `out`; None if they are over `most`."""
        sizes = kernels().put_magnitudes(self.values, self.ends, self.plan, out, most)
        if sizes is None:
            return None
        heads = np.zeros(len(self.plan), _HEAD)
        heads["plan"], heads["size"] = self.plan, sizes
        return heads.tobytes(), int(sizes.sum())


_HEAD = np.dtype([("plan", np.uint8, 3), ("zero", np.uint8), ("size", "<u4")])
"""as CONTEXT"""


def grouped(steps: Steps, kind: WordKind) -> Grouped:
    first, count = _choose_contexts(steps, kind)
    tallies = np.add.reduceat(steps.tallies, _first_exponents(first, count))
    ends = tallies[:, 0].cumsum()
    values = scratch().take("grouped", np.uint32, len(steps))
    kernels().group(steps.magnitude, steps.exponents, _contexts_by_exponent(first, count), ends, values)
    return Grouped(first, values, ends, tallies, _planned(tallies))


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


@cache
def _first_exponents(first: int, count: int) -> NDArray[np.int64]:
    """The lowest exponent of each context."""
    return np.append(0, np.arange(first + 1, first + count))


def _planned(tallies: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs where less than a third of the steps is longer than one."""
    count, total, longer = tallies.T
    runs = 3 * longer < count
    plan = np.empty_like(tallies)
    plan[:, 0] = np.where(runs, RUNS, np.where(count > 0, RICE, NOTHING))
    plan[:, 1] = rice_parameters(np.where(runs, count - longer, total), np.where(runs, longer + 1, count))
    plan[:, 2] = rice_parameters(total - longer, np.where(runs, longer, 0))
    return plan


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
