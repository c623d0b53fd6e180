"""Magnitudes |step| - 1 in contexts: large weights move by exactly one unit, small ones by more.

The context of a changed word is exponent - first exponent of its *old* word, at least 0 and at most 15. In a
context with under a third of longer steps, lengths of runs of single units are coded instead of each.
docs/FORMAT.md, Chunk blob.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, WordKind
from weightcast.shared.codec.changes import Changes
from weightcast.shared.kernels.constants import CODING, K_LIMIT, NOTHING, RUNS, SLACK, expected_bits
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import scratch


@dataclass(frozen=True)
class Steps:
    """Of each change: |step| - 1 and the exponent of the old word; `signs` has a bit each, least significant
    first, 1 for a step down. `tallies`: int64[256, 3], of each exponent its changes, the sum of |step| - 1,
    how many of those are not 0. In the thread's scratch: valid until it groups others."""

    magnitude: NDArray[np.uint32]
    exponents: ByteArray
    signs: ByteArray
    tallies: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.magnitude)

    @property
    def histogram(self) -> NDArray[np.int64]:
        """Changes per exponent."""
        return self.tallies[:, 0]


CONTEXT = np.dtype([("plan", np.uint8, 3), ("zero", np.uint8), ("size", "<u4")])
"""plan: coding, k (of runs: k of their lengths), k of what ends a run; bytes of the stream"""
MOST_CONTEXTS = 16
_WORTH_CONTEXTS = 1024
"""changes from which 16 contexts are worth their headers"""


@dataclass(frozen=True)
class GroupedMagnitudes:
    """The magnitudes of `steps` in contexts. `contexts`: int64[n, 6], columns as `contexts` names them."""

    steps: Steps
    first: int
    contexts: NDArray[np.int64]

    @property
    def expected_bits(self) -> float:
        return sum(_expected(*row[:CODING]) for row in self.contexts.tolist())

    def put(self, out: ByteArray, most: int) -> tuple[bytes, int] | None:
        """Heads of the contexts, and how many bytes of streams are in `out`; None if they exceed `most`."""
        steps = self.steps
        values = scratch().take("grouped", np.uint32, len(steps))
        sizes = kernels().put_magnitudes(
            steps.magnitude, steps.exponents, self.first, self.contexts, values, out, most
        )
        if sizes is None:
            return None
        return heads_of(self.contexts, sizes), int(sizes.sum())


def heads_of(contexts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
    """CONTEXT of each, with the bytes of its stream."""
    heads = np.zeros(len(sizes), CONTEXT)
    heads["plan"], heads["size"] = contexts[:, CODING:], sizes
    return heads.tobytes()


def grouped(changes: Changes, kind: WordKind) -> GroupedMagnitudes:
    count, room = len(changes), scratch()
    magnitude = room.take("magnitude", np.uint32, count)
    exponents = room.take("exponents", np.uint8, count)
    signs = room.take("signs", np.uint8, count // 8 + 2)
    tallies = kernels().split(changes.old, changes.new, kind, magnitude, exponents, signs)
    steps = Steps(magnitude, exponents, signs[: (count + 7) // 8], tallies)
    contexts = unplanned(count, kind)
    return GroupedMagnitudes(steps, kernels().plan_contexts(tallies, contexts), contexts)


def unplanned(changes: int, kind: WordKind) -> NDArray[np.int64]:
    """Zeros for `GroupedMagnitudes.contexts`."""
    many = kind.exponent_mask and changes >= _WORTH_CONTEXTS
    return np.zeros((MOST_CONTEXTS if many else 1, 6), np.int64)


def _expected(count: int, total: int, longer: int) -> float:
    if 3 * longer >= count:
        return expected_bits(total, count)
    return expected_bits(count - longer, longer + 1) + expected_bits(total - longer, longer)


def read_contexts(payload: ByteArray, at: int, count: int, start: int) -> NDArray[np.int64]:
    """int64[5, count]: coding, k, k of what ends a run, start and stop of the stream. Heads are at `at`,
    streams follow each other from `start` to the last SLACK bytes, which are zeros. Raises ValueError."""
    if count not in (1, MOST_CONTEXTS):
        raise ValueError("damaged header of the payload")
    if at + count * CONTEXT.itemsize > len(payload) - SLACK:
        raise ValueError("payload shorter than its header says")
    heads = np.frombuffer(payload, CONTEXT, count, at)
    plans, sizes = heads["plan"].astype(np.int64), heads["size"].astype(np.int64)
    lawful = (plans <= (RUNS, K_LIMIT, K_LIMIT)).all() and not heads["zero"].any()
    if not lawful or ((plans[:, 0] == NOTHING) != (sizes == 0)).any():
        raise ValueError("damaged header of a context")
    stops = start + np.cumsum(sizes)
    if stops[-1] + SLACK != len(payload) or payload[-SLACK:].any():
        raise ValueError("payload length differs from its header")
    return np.stack([*plans.T, stops - sizes, stops])
