"""Who writes what of a version that several ranks hold: rules without IO, the same result on every rank.

Each rank says which boxes of which tensors it holds. A box that several ranks hold has one of them answer for
it. What a rank writes are segments, contiguous and beginning at multiples of 64 words; what it holds outside
of them it sends, as changes, to the ranks that write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from weightcast.publisher.weights.shard_spec import Box, runs_of
from weightcast.shared.base.elements import Part, Segment, TensorSpec, TensorTable, padded
from weightcast.shared.base.errors import Refused
from weightcast.shared.checkpoint.verify.seed import listing

LEAST_WORDS = 1 << 20
"""No tensor is cut into segments shorter than this on average: it bounds the rows in an index."""

Holds = Mapping[int, Box]
"""What one rank holds: tensor number to box."""


@dataclass(frozen=True)
class ShardAssignment:
    """`parts`: per rank what it writes. `answers`: per rank the boxes whose words come from it. `doubles`:
    per tensor the groups of ranks that hold the same box."""

    parts: tuple[Part, ...]
    answers: tuple[Mapping[int, Box], ...]
    doubles: Mapping[int, tuple[tuple[int, ...], ...]]

    def doubled(self, rank: int) -> frozenset[int]:
        """Tensors of which the rank holds what another one holds too."""
        return frozenset(
            tensor for tensor, groups in self.doubles.items() if any(rank in ranks for ranks in groups)
        )


def assign_shards(
    table: TensorTable,
    holds: Sequence[Holds],
    frozen: frozenset[int],
    *,
    whole: bool,
) -> ShardAssignment:
    """`holds`: by rank. `frozen` tensors may be held by nobody. `whole`: each tensor is written by one rank.
    Raises Refused that lists tensors that are not held completely, and boxes that overlap."""
    draft = _Draft(len(holds), whole)
    problems: list[str] = []
    for tensor, held in enumerate(_by_tensor(table, holds)):
        spec = table[tensor]
        problem = _uncovered(spec, held, draft.known)
        if not held and (tensor in frozen or not spec.elements):
            continue
        if problem:
            problems.append(f"{spec.name} {problem}")
        elif not problems:
            draft.take(tensor, spec, held)
    if problems:
        raise Refused(
            f"the ranks' tensors do not cover the model: {listing(problems)}",
            remedy="give each element on one rank, or the same piece on several",
        )
    return draft.done()


_Held = dict[Box, list[int]]
"""boxes of a tensor and the ranks that hold each"""


def _by_tensor(table: TensorTable, holds: Sequence[Holds]) -> list[_Held]:
    found: list[_Held] = [{} for _ in table]
    for rank, boxes in enumerate(holds):
        for tensor, box in boxes.items():
            if box.elements:
                found[tensor].setdefault(box, []).append(rank)
    return found


def _uncovered(
    spec: TensorSpec, held: _Held, known: dict[tuple[tuple[int, ...], frozenset[Box]], str]
) -> str:
    """Why the boxes are not the tensor; empty when they are. Layers are alike: `known` remembers."""
    if not held:
        return "came from no rank"
    key = (spec.shape, frozenset(held))
    if key not in known or known[key]:
        known[key] = _overlap(held) or _incomplete(spec, held)
    return known[key]


def _overlap(held: _Held) -> str:
    boxes = sorted(held)
    low = np.array([box.offsets for box in boxes], np.int64)
    high = low + np.array([box.sizes for box in boxes], np.int64)
    for number in range(len(boxes)):
        meets = ((low[number + 1 :] < high[number]) & (low[number] < high[number + 1 :])).all(axis=1)
        if meets.any():
            one, other = boxes[number], boxes[number + 1 + int(np.argmax(meets))]
            return f"is held in overlapping pieces by rank {held[one][0]} and rank {held[other][0]}"
    return ""


def _incomplete(spec: TensorSpec, held: _Held) -> str:
    elements = sum(box.elements for box in held)
    if elements == spec.elements:
        return ""
    ranks = sorted(rank for ranks in held.values() for rank in ranks)
    named = ", ".join(map(str, ranks[:8]))
    return f"came only with {elements} of {spec.elements} elements, from ranks {named}"


@dataclass
class _Draft:
    """`load`: words that each rank reads or writes so far; the least loaded is given the next choice."""

    ranks: int
    whole: bool
    known: dict[tuple[tuple[int, ...], frozenset[Box]], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.load = [0] * self.ranks
        self.segments: list[list[Segment]] = [[] for _ in range(self.ranks)]
        self.answers: list[dict[int, Box]] = [{} for _ in range(self.ranks)]
        self.doubles: dict[int, tuple[tuple[int, ...], ...]] = {}

    def take(self, tensor: int, spec: TensorSpec, held: _Held) -> None:
        answering = [(box, self._least(ranks)) for box, ranks in sorted(held.items())]
        for box, rank in answering:
            self.answers[rank][tensor] = box
            self.load[rank] += spec.words * box.elements // spec.elements
        doubles = tuple(tuple(ranks) for ranks in held.values() if len(ranks) > 1)
        if doubles:
            self.doubles[tensor] = doubles
        if len(answering) == 1:
            self._write(tensor, 0, spec.words, answering[0][1])
        elif not self._follow_pieces(tensor, spec, answering):
            self._cut_evenly(tensor, spec, [rank for _, rank in answering])

    def _least(self, ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (self.load[rank], rank))

    def _write(self, tensor: int, start: int, stop: int, rank: int) -> None:
        if start < stop:
            self.segments[rank].append(Segment(tensor, start, stop))

    def _follow_pieces(self, tensor: int, spec: TensorSpec, answering: Sequence[tuple[Box, int]]) -> bool:
        """Where each piece is one stretch: its rank writes it, but for the words before its first border."""
        if self.whole or spec.words // len(answering) < LEAST_WORDS:
            return False
        starts: dict[int, int] = {}
        for box, rank in answering:
            runs = runs_of(box, spec)
            if len(runs) > 1 or runs[0].count > 1:
                return False
            starts[runs[0].first] = rank
        ordered = sorted(starts)
        borders = [min(padded(start), spec.words) for start in ordered] + [spec.words]
        for start, low, high in zip(ordered, borders[:-1], borders[1:], strict=True):
            self._write(tensor, low, high, starts[start])
        return True

    def _cut_evenly(self, tensor: int, spec: TensorSpec, ranks: Sequence[int]) -> None:
        """Scattered or small pieces: contiguous segments, each to the least loaded of those that hold
        some."""
        count = 1 if self.whole else max(1, min(len(ranks), spec.words // LEAST_WORDS))
        borders = [min(padded(spec.words * n // count), spec.words) for n in range(count + 1)]
        for low, high in pairwise(borders):
            rank = self._least(ranks)
            self.load[rank] += high - low
            self._write(tensor, low, high, rank)

    def done(self) -> ShardAssignment:
        parts = tuple(
            Part(rank, tuple(sorted(one, key=lambda s: (s.tensor, s.start))))
            for rank, one in enumerate(self.segments)
        )
        return ShardAssignment(parts, tuple(self.answers), self.doubles)
