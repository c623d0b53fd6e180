"""Reading every byte of a local checkpoint, at once or a little at a time, and what that says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, RetryLater
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.run_files import FileRecord
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, TensorFiles
from weightcast.shared.checkpoint.state.state import LANES_BYTES, Phase, Position, unpack_lanes
from weightcast.shared.digest.checksums import ZERO, Lanes, LanesArray, hash_bytes, hash_pieces, root
from weightcast.shared.files.durable import Piece
from weightcast.shared.files.hf_checkpoint import Place, Places
from weightcast.shared.kernels.parallel import SMALL_RESULTS, ordered

_RUN = 16 << 20
"""bytes of a file that are hashed at a time, whose tensors they are; a multiple of 8"""


class _Run(NamedTuple):
    """A stretch of a file, and the pieces of `tensors` in it: rows as `hash_pieces` takes them. No tensor
    has two."""

    place: Place
    tensors: NDArray[np.int64]
    pieces: NDArray[np.int64]

    @classmethod
    def of(cls, file: Path, rows: Sequence[tuple[int, int, int, int]]) -> _Run:
        """`rows`: begin and end in the file, begin in the tensor, tensor; ascending."""
        begins, ends, starts, tensors = np.array(rows, np.int64).T
        begin, end = int(begins[0]), int(ends.max())
        pieces = np.stack([begins - begin, ends - begin, starts // 8], 1)
        return cls(Place(file, begin, end - begin), tensors, pieces)


def hash_tensors(
    table: TensorTable,
    read: TensorFiles,
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


def _runs(places: Places | Sequence[Place], numbers: Iterable[int]) -> Iterator[_Run]:
    """Every byte of the tensors once, each file from its begin on."""
    pieces_in: dict[Path, list[tuple[int, int, int, int]]] = {}
    for tensor in numbers:
        file, offset, nbytes = places[tensor]
        pieces_in.setdefault(file, []).extend(
            (offset + start, offset + min(start + _RUN, nbytes), start, tensor)
            for start in range(0, nbytes, _RUN)
        )
    for file, pieces in pieces_in.items():
        pieces.sort()
        first = 0
        for number, (_, end, _, _) in enumerate(pieces):
            if end - pieces[first][0] > _RUN:
                yield _Run.of(file, pieces[first:number])
                first = number
        if pieces:
            yield _Run.of(file, pieces[first:])


@dataclass(frozen=True, eq=False)
class HashReport:
    """Every byte was read. `lanes`: found, to be compared with those of `position`; `began`: unix time."""

    table: TensorTable
    position: Position
    lanes: LanesArray
    began: float

    @cached_property
    def root(self) -> str:
        return root(self.table, self.lanes)

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """Names of tensors whose bytes are not the position's."""
        return tuple(differing(self.table, self.lanes, self.position.lanes))

    @property
    def intact(self) -> bool:
        return self.root == self.position.root

    def nearest(self, positions: Iterable[Position]) -> HashReport:
        """Against the position from which the fewest bytes of tensors differ; the newest of equals."""

        def distance(position: Position) -> tuple[int, int]:
            return self.table.sizes[_differ(self.lanes, position.lanes)].sum(), -position.version

        return replace(self, position=min(positions, key=distance))


def full_hash(
    local: LocalCheckpoint, position: Position | None = None, *, advance: Advance | None = None
) -> HashReport:
    """Reads all bytes. `position`: to compare them with; None: the recorded one."""
    began = time.time()
    found = hash_tensors(local.table, local, threads=local.threads, advance=advance)
    return HashReport(local.table, position or local.state.position, found, began)


def differing(
    table: TensorTable, found: LanesArray, expected: bytes, only: Sequence[int] | None = None
) -> list[str]:
    """Names of the tensors, or of `only` these, whose lanes are not those `expected` (packed)."""
    differ = np.flatnonzero(_differ(found, expected))
    differ = differ if only is None else np.intersect1d(differ, only)
    return [table[number].name for number in differ.tolist()]


def _differ(found: LanesArray, expected: bytes) -> NDArray[np.bool_]:
    differ: NDArray[np.bool_] = (found != unpack_lanes(expected)).any(axis=1)
    return differ


def proven(
    record: FileRecord | None, pieces: Iterable[Piece], place: Path | str = "", remedy: str = ""
) -> Iterator[Piece]:
    """The pieces of the file `place`; raises DamagedFile after the last one where they are not the record's
    bytes. None: any bytes."""
    hasher, size = blake3(), 0
    for piece in pieces:
        if record is not None:
            hasher.update(piece)
        size += len(piece)
        yield piece
    if record is not None and hasher.hexdigest() != record.blake3:
        raise DamagedFile(
            f"{place or record.name}: {size} bytes with BLAKE3 {hasher.hexdigest()[:16]}, "
            f"its index lists {record.blake3[:16]}",
            remedy=remedy,
        )


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


# -- in the background: a tensor is read in pieces, each under the shared patch lock, and compared at its end.
# A version or repair that changes it meanwhile makes its reading start over, without pauses the second time

_PIECE_BYTES = 8 << 20
_MOST_SECONDS = 10.0
"""of reading at the rate in one turn"""


class Credit:
    """Bytes that may be read: `rate` per second, saved up for some seconds at most. `left`: what its owner
    has not spent; below 0 after a piece larger than that. Used by one thread."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.left = 0.0
        self._rate, self._clock, self._earned = rate, clock, clock()

    def earn(self) -> None:
        """For the time since the last call."""
        now = self._clock()
        self.left = min(self.left + (now - self._earned) * self._rate, _MOST_SECONDS * self._rate)
        self._earned = now

    def spend(self, nbytes: float) -> None:
        self.left -= nbytes


@dataclass(frozen=True)
class ScrubStatus:
    """`done_bytes` of `total_bytes` were read in this pass; `full_pass`: unix time at which the last whole
    pass began, since when every byte was read; `last_fault`: what it found last."""

    rate: int
    done_bytes: int = 0
    total_bytes: int = 0
    passes: int = 0
    faults: int = 0
    full_pass: float | None = None
    last_fault: str = ""
    last_fault_at: float | None = None


@dataclass
class _Reading:
    """Of one tensor: `expected` are its lanes at the position where the reading began, `generation` the
    state's then; `hurried`: without pauses, as it was started over."""

    tensor: int
    expected: Lanes
    generation: int
    began: float
    word: int = 0
    found: Lanes = ZERO
    hurried: bool = False


class Scrub:
    """Used by the thread that owns the checkpoint. `rate`: bytes per second, at most; 0 reads nothing."""

    def __init__(
        self,
        rate: int,
        *,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.status = ScrubStatus(rate)
        self._rate, self._stop, self._now = rate, stop, now
        self._credit = Credit(rate, clock)
        self._reading: _Reading | None = None
        self._next = 0
        self._began = 0.0
        self._done = 0

    def turn(self, local: LocalCheckpoint) -> None:
        """Reads as much as the rate allows since the last turn. Raises Differs, naming the tensor, when one
        is not what the state says, and NeedsReseed when a file was replaced. Nothing is written but the
        state's `last_full_hash`, after a whole pass."""
        self._credit.earn()
        if self._rate == 0 or local.state.phase is not Phase.CLEAN:
            return
        local.check_files()
        try:
            while self._may_read() and not self._stop():
                # small tensors share one taking of the lock
                with local.reading(seconds=0.0):
                    before, goes_on = self._credit.left, True
                    while goes_on and self._may_read() and before - self._credit.left < _PIECE_BYTES:
                        goes_on = self._piece(local)
        except RetryLater:
            # somebody patches; the next turn goes on
            return
        finally:
            self.status = replace(self.status, done_bytes=self._done, total_bytes=local.table.nbytes)

    def fault(self, message: str) -> None:
        """Found here, or by who reads other files in the background."""
        faults = self.status.faults + 1
        self.status = replace(self.status, faults=faults, last_fault=message, last_fault_at=self._now())

    def _may_read(self) -> bool:
        return self._credit.left > 0 or (self._reading is not None and self._reading.hurried)

    def _piece(self, local: LocalCheckpoint) -> bool:
        """False at the end of a pass."""
        reading = self._current(local)
        if reading is None:
            self._next = 0
            self.status = replace(self.status, passes=self.status.passes + 1, full_pass=self._began)
            # a small checkpoint is read often: once per turn is enough
            self._credit.left = min(self._credit.left, 0.0)
            local.save(local.state.but(last_full_hash=self._began))
            return False
        spec = local.table[reading.tensor]
        stop = min(reading.word + _PIECE_BYTES // spec.kind.width, spec.words)
        words = local.words_in(reading.tensor, reading.word, stop)
        first = reading.word * spec.kind.width // 8
        reading.found = reading.found.plus(hash_bytes(words.view(np.uint8), first))
        nbytes = (stop - reading.word) * spec.kind.width
        reading.word = stop
        self._credit.spend(nbytes)
        self._done += nbytes
        if stop == spec.words:
            self._end_tensor(local, reading)
        return True

    def _current(self, local: LocalCheckpoint) -> _Reading | None:
        """What is read next; anew where a version changed the tensor meanwhile. None at the end of a pass."""
        if self._next == 0 and self._reading is None:
            self._began, self._done = self._now(), 0
        if self._next >= len(local.table):
            return None
        reading = self._reading
        if reading is None or reading.expected != _lanes_of(local.state.position, self._next):
            reading = self._begin(local)
        return reading

    def _begin(self, local: LocalCheckpoint) -> _Reading:
        """Or over again what was begun."""
        old = self._reading
        if old is not None:
            self._done -= old.word * local.table[old.tensor].kind.width
        self._reading = _Reading(
            self._next,
            _lanes_of(local.state.position, self._next),
            local.state.generation,
            local.proofs.clock(),
            hurried=old is not None,
        )
        return self._reading

    def _end_tensor(self, local: LocalCheckpoint, reading: _Reading) -> None:
        if reading.found != reading.expected and reading.generation != local.state.generation:
            # a piece that was read may have been repaired since
            self._begin(local)
            return
        self._reading, self._next = None, self._next + 1
        if reading.found == reading.expected:
            local.proofs.add(reading.tensor, reading.began)
            return
        name, position = local.table[reading.tensor].name, local.state.position
        message = f"{local.directory}: {name} is no longer that of version {position.version}"
        self.fault(message)
        raise Differs(message, position, (name,), whole=False)


def _lanes_of(position: Position, tensor: int) -> Lanes:
    (lanes,) = unpack_lanes(position.lanes[tensor * LANES_BYTES : (tensor + 1) * LANES_BYTES]).tolist()
    return Lanes._make(lanes)
