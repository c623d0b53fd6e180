"""Reading every byte of a local checkpoint: full hashes, and what they say."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, TensorSpec, TensorTable
from weightcast.shared.base.errors import NeedsReseed
from weightcast.shared.base.progress import Advance
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, WordsIn
from weightcast.shared.checkpoint.state.state import Position, unpack_lanes
from weightcast.shared.digest.checksums import Lanes, LanesArray, hash_bytes, hash_pieces
from weightcast.shared.digest.root import root
from weightcast.shared.files.hf_checkpoint import Place
from weightcast.shared.kernels.parallel import SMALL_RESULTS, ordered

_RUN = 16 << 20
"""bytes of a file that are hashed at a time, whose tensors they are; a multiple of 8"""


class Readable(Protocol):
    """A checkpoint's files. `places` in table order."""

    @property
    def places(self) -> Sequence[Place]: ...
    def bytes_at(self, place: Place) -> ByteArray: ...


class _Run(NamedTuple):
    """A stretch of a file, and the pieces of `tensors` in it: rows as `hash_pieces` takes them. No tensor
    has two."""

    place: Place
    tensors: NDArray[np.int64]
    pieces: NDArray[np.int64]


def hash_tensors(
    table: TensorTable,
    read: Readable,
    *,
    only: Iterable[int] | None = None,
    threads: int = 1,
    advance: Advance | None = None,
) -> LanesArray:
    """Raw lanes of every tensor, in table order, from all of its bytes. `only`: of these tensors, zero for
    all others."""
    lanes = np.zeros((len(table), 2), np.uint64)

    def work(run: _Run) -> tuple[_Run, LanesArray]:
        return run, hash_pieces(read.bytes_at(run.place), run.pieces)

    for run, found in ordered(
        work, _runs(read.places, range(len(table)) if only is None else only), threads, each=SMALL_RESULTS
    ):
        lanes[run.tensors] += found
        if advance is not None:
            advance(run.place.nbytes)
    return lanes


def hash_tensor(spec: TensorSpec, tensor: int, words_in: WordsIn) -> Lanes:
    """Raw lanes of one tensor, whose number is `tensor`."""
    lanes, step = Lanes(), _RUN // spec.kind.width
    for start in range(0, spec.words, step):
        words = words_in(tensor, start, min(start + step, spec.words))
        lanes = lanes.plus(hash_bytes(words.view(np.uint8), start * spec.kind.width // 8))
    return lanes


def _runs(places: Sequence[Place], numbers: Iterable[int]) -> Iterator[_Run]:
    """Every byte of the tensors once, each file from its begin on."""
    tensors_in: dict[Path, list[int]] = {}
    for tensor in numbers:
        tensors_in.setdefault(places[tensor].file, []).append(tensor)
    for file, tensors in tensors_in.items():
        rows = np.array([(places[tensor].offset, places[tensor].nbytes) for tensor in tensors], np.int64)
        # an empty tensor begins where another does, and ends before that
        order = np.lexsort((rows[:, 1], rows[:, 0]))
        begins = rows[order, 0]
        yield from _runs_in(file, np.array(tensors)[order], begins, begins + rows[order, 1])


def _runs_in(
    file: Path, tensors: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> Iterator[_Run]:
    """Begins and ends ascend. A tensor longer than a run has runs of its own."""
    at = 0
    while at < len(tensors):
        begin, stop = int(begins[at]), int(np.searchsorted(ends, begins[at] + _RUN, side="right"))
        if stop > at:
            those, end = slice(at, stop), int(ends[stop - 1])
            pieces = np.stack([begins[those] - begin, ends[those] - begin, np.zeros_like(tensors[those])], 1)
            yield _Run(Place(file, begin, end - begin), tensors[those], pieces)
            at = stop
            continue
        for start in range(begin, int(ends[at]), _RUN):
            nbytes = min(_RUN, int(ends[at]) - start)
            pieces = np.array([[0, nbytes, (start - begin) // 8]], np.int64)
            yield _Run(Place(file, start, nbytes), tensors[at : at + 1], pieces)
        at += 1


@dataclass(frozen=True)
class HashReport:
    """What a full hash found. `differing`: names of tensors whose bytes are not the recorded version's."""

    version: int
    root: str
    expected_root: str
    differing: tuple[str, ...]
    began: float = field(compare=False)
    """unix time"""
    lanes: LanesArray = field(repr=False, compare=False)
    """found"""

    @property
    def intact(self) -> bool:
        return not self.differing and self.root == self.expected_root


def full_hash(
    local: LocalCheckpoint, *, advance: Advance | None = None, expected: bytes | None = None
) -> HashReport:
    """Hashes all bytes and compares them with the recorded position (or with packed lanes `expected`)."""
    position, began = local.state.position, time.time()
    found = hash_tensors(local.table, local, threads=local.threads, advance=advance)
    names = differing(local.table, found, position.lanes if expected is None else expected)
    return HashReport(position.version, root(local.table, found), position.root, tuple(names), began, found)


def differing(
    table: TensorTable, found: LanesArray, expected: bytes, only: NDArray[np.int64] | None = None
) -> list[str]:
    """Names of the tensors, or of `only` these, whose lanes are not those `expected` (packed)."""
    differ = np.flatnonzero(_differ(found, expected))
    differ = differ if only is None else np.intersect1d(differ, only)
    return [table[number].name for number in differ.tolist()]


def _differ(found: LanesArray, expected: bytes) -> NDArray[np.bool_]:
    differ: NDArray[np.bool_] = (found != unpack_lanes(expected)).any(axis=1)
    return differ


def nearest(table: TensorTable, found: LanesArray, positions: Sequence[Position]) -> Position:
    """The position from which the fewest bytes of tensors differ; the first of equals."""
    return min(positions, key=lambda position: distance_from(table, found, position))


def distance_from(table: TensorTable, found: LanesArray, position: Position) -> int:
    """Bytes of the tensors whose lanes are not the position's."""
    return int(table.sizes[_differ(found, position.lanes)].sum())


class Differs(NeedsReseed):
    """The local checkpoint does not match its version: `tensors` differ from `position`. `whole`: all others
    were read and match."""

    def __init__(
        self, message: str, position: Position, tensors: Sequence[str], *, whole: bool = True
    ) -> None:
        super().__init__(
            message, remedy="run `weightcast sync`: it repairs from base and channel, or seeds again"
        )
        self.position = position
        self.tensors = tuple(tensors)
        self.whole = whole


class Damaged(Differs):
    """Found while engines were to load the bytes, before any of them did."""
