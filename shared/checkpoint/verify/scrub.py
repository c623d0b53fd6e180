"""Background verify: the bytes of a local checkpoint read again and again, a little at a time.

A tensor is read in pieces, each under the shared patch lock, and compared with the lanes of the position at
its end. A version or repair that changes it meanwhile makes its reading start over, without pauses the second
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weightcast.shared.base.errors import RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import LANES_BYTES, Phase, Position, unpack_lanes
from weightcast.shared.checkpoint.verify.hashing import Differs
from weightcast.shared.digest.checksums import ZERO, Lanes, hash_bytes

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
    state's then."""

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
                with local.reading(seconds=0.0):
                    self._pieces(local)
        except RetryLater:
            # somebody patches; the next turn goes on
            return
        finally:
            self._tell(local)

    def _may_read(self) -> bool:
        return self._credit.left > 0 or (self._reading is not None and self._reading.hurried)

    def _pieces(self, local: LocalCheckpoint) -> None:
        """Small tensors share one taking of the lock."""
        before = self._credit.left
        while self._may_read() and before - self._credit.left < _PIECE_BYTES:
            self._piece(local)
            if self._next == 0:
                return

    def _piece(self, local: LocalCheckpoint) -> None:
        reading = self._current(local)
        if reading is None:
            return self._end_pass(local)
        spec = local.table[reading.tensor]
        stop = min(reading.word + _PIECE_BYTES // spec.kind.width, spec.words)
        words = local.words_in(reading.tensor, reading.word, stop)
        first = reading.word * spec.kind.width // 8
        reading.found = reading.found.plus(hash_bytes(words.view(np.uint8), first))
        nbytes = (stop - reading.word) * spec.kind.width
        reading.word = stop
        self._credit.left -= nbytes
        self._done += nbytes
        if stop == spec.words:
            self._end_tensor(local, reading)

    def _current(self, local: LocalCheckpoint) -> _Reading | None:
        """What is read next; anew where a version changed the tensor meanwhile. None at the end of a pass."""
        if self._next == 0 and self._reading is None:
            self._began, self._done = self._now(), 0
        if self._next >= len(local.table):
            return None
        known = self._reading
        if known is None:
            self._reading = self._begun(local, hurried=False)
        elif known.expected != _lanes_of(local.state.position, self._next):
            self._start_over(local, known)
        return self._reading

    def _begun(self, local: LocalCheckpoint, *, hurried: bool) -> _Reading:
        expected = _lanes_of(local.state.position, self._next)
        return _Reading(self._next, expected, local.state.generation, local.proofs.clock(), hurried=hurried)

    def _start_over(self, local: LocalCheckpoint, known: _Reading) -> None:
        self._done -= known.word * local.table[known.tensor].kind.width
        self._reading = self._begun(local, hurried=True)

    def _end_tensor(self, local: LocalCheckpoint, reading: _Reading) -> None:
        if reading.found != reading.expected and reading.generation != local.state.generation:
            # a piece that was read may have been repaired since
            return self._start_over(local, reading)
        self._reading, self._next = None, self._next + 1
        if reading.found == reading.expected:
            return local.proofs.add(reading.tensor, reading.began)
        name, position = local.table[reading.tensor].name, local.state.position
        message = f"{local.directory}: {name} is no longer that of version {position.version}"
        faults = self.status.faults + 1
        self.status = replace(self.status, faults=faults, last_fault=message, last_fault_at=self._now())
        raise Differs(message, position, (name,), whole=False)

    def _end_pass(self, local: LocalCheckpoint) -> None:
        self._next = 0
        self.status = replace(self.status, passes=self.status.passes + 1, full_pass=self._began)
        # a small checkpoint is read often: once per turn is enough
        self._credit.left = min(self._credit.left, 0.0)
        local.save(local.state.but(last_full_hash=self._began))

    def _tell(self, local: LocalCheckpoint) -> None:
        self.status = replace(self.status, done_bytes=self._done, total_bytes=local.table.nbytes)


def _lanes_of(position: Position, tensor: int) -> Lanes:
    (lanes,) = unpack_lanes(position.lanes[tensor * LANES_BYTES : (tensor + 1) * LANES_BYTES]).tolist()
    return Lanes._make(lanes)
