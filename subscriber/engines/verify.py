"""The words in engines' memory, read by the engines themselves and compared with the lanes of the version.

A patch proves the words that it touches. All others are proved by reading: in the background, a
little at a time, and wholly after every so many versions. Tensors without lanes (packed,
quantised or derived ones) are counted, and never said to be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import EngineFailed
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Phase, Position, lanes_list
from weightcast.shared.checkpoint.verify.hashing import Credit
from weightcast.subscriber.engines.adapter import EngineLanes, guarded
from weightcast.subscriber.engines.live import Live
from weightcast.subscriber.status import EngineVerifyStatus

_PIECE_BYTES = 32 << 20
_PIECE_NAMES, _PIECE_NAME_BYTES = 256, 16 << 10
"""of one request"""
_TURN_SECONDS = 2.0
"""of a turn that reads all: a newer version waits no longer"""
_AGAIN_SECONDS = 60.0
"""until an engine that did not answer is asked again: versions wait for its answer meanwhile"""
REASON_LIMIT = 500


_Stamp = tuple[object, ...]
"""differs as soon as the engine came to what it holds in another way"""


def _stamp(name: str, live: Live, local: LocalCheckpoint) -> _Stamp:
    record = local.state.engines.get(name)
    process = None if record is None else record.process
    return local.state.position.digest, process, live.facts.patches, live.facts.reloads


class _Reading:
    """How far an engine's memory was read, and what came of that."""

    def __init__(self) -> None:
        self.facts = EngineVerifyStatus()
        self.next = 0
        """number of the tensor to read next"""
        self.hurried = False
        """all is read now, whatever the rate"""
        self._began = self._not_before = 0.0
        self._stamp: _Stamp = ()
        """when the pass began"""
        self._versions = 0
        """taken since the last whole pass"""
        self._seen: str | None = None

    def count(self, digest: str, every: int) -> None:
        """The version that is read; `every` so many the pass begins anew."""
        if self._seen not in (None, digest):
            self._versions += 1
        self._seen = digest
        if every and self._versions >= every:
            self.hurried, self._versions, self.next = True, 0, 0

    def may_read(self, now: float, began: float, credit: float) -> bool:
        if self.hurried and now >= self._not_before:
            return now - began < _TURN_SECONDS
        return now >= self._not_before and credit > 0

    def rest(self, now: float) -> None:
        """It did not answer."""
        self._not_before = now + _AGAIN_SECONDS

    def begin(self, stamp: _Stamp, total_bytes: int, now: float) -> None:
        self._began, self._stamp = now, stamp
        self.facts = self.facts.but(done_bytes=0, refused=0, total_bytes=total_bytes)

    def advance(self, stop: int, nbytes: int, refused: int) -> None:
        self.next = stop
        done = self.facts.done_bytes + nbytes
        self.facts = self.facts.but(done_bytes=done, refused=self.facts.refused + refused)

    def fault(self, text: str, now: float) -> None:
        self.next, self.hurried = 0, False
        faults = self.facts.faults + 1
        self.facts = self.facts.but(faults=faults, last_fault=text, last_fault_at=now)

    def end(self, stamp: _Stamp, version: int) -> None:
        self.next, self.hurried = 0, False
        whole = self._stamp == stamp and not self.facts.refused
        self.facts = self.facts.but(
            passes=self.facts.passes + 1,
            full_pass=self._began,
            version=version if whole else self.facts.version,
        )

    def confirms(self, stamp: _Stamp, version: int) -> bool:
        """Whether every tensor was read and found right since the engine came to this version."""
        return self.facts.version == version and self._stamp == stamp


class EngineVerify:
    """Used by the thread that owns the checkpoint. `rate`: bytes per second of all engines together, at most;
    0 reads nothing. `every`: all is read after so many versions; 0 never."""

    def __init__(
        self,
        rate: int,
        every: int = 0,
        *,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._every = every
        self._stop, self._clock, self._now = stop, clock, now
        self._credit = Credit(rate, clock)
        self._readings: dict[str, _Reading] = {}
        self._turns = 0

    def facts(self, name: str) -> EngineVerifyStatus | None:
        """None until it was first read."""
        known = self._readings.get(name)
        return None if known is None else known.facts

    def turn(self, local: LocalCheckpoint, engines: Mapping[str, Live]) -> dict[str, str]:
        """Reads as much as the rate allows, of engines that hold the local version. Returns what is wrong,
        by the engine's name. An engine that does not answer is left for the next turn."""
        began = self._clock()
        self._credit.earn()
        if local.state.phase is not Phase.CLEAN:
            return {}
        # another one first every time: the rate may be used up by it alone
        self._turns += 1
        first = self._turns % max(len(engines), 1)
        every = list(engines.items())
        faults: dict[str, str] = {}
        for name, live in every[first:] + every[:first]:
            reading = self._readings.setdefault(name, _Reading())
            reading.count(local.state.position.digest, self._every)
            fault = self._read(reading, live, local, _stamp(name, live, local), began)
            if fault:
                faults[name] = fault
        return faults

    def is_confirmed(self, name: str, live: Live, local: LocalCheckpoint) -> bool:
        """Whether every tensor was read and found right since the engine came to this version."""
        known, version = self._readings.get(name), local.state.position.version
        return known is not None and known.confirms(_stamp(name, live, local), version)

    def _read(
        self, reading: _Reading, live: Live, local: LocalCheckpoint, stamp: _Stamp, began: float
    ) -> str:
        table, position = local.table, local.state.position
        while reading.may_read(self._clock(), began, self._credit.left) and not self._stop():
            if reading.next == 0:
                reading.begin(stamp, table.nbytes, self._now())
            piece = next_piece(table, reading.next)
            try:
                found = read_lanes(live, table, piece)
            except EngineFailed:
                reading.rest(self._clock())
                break
            if found.changed or found.version != position.version:
                break
            nbytes = sum(table[number].nbytes for number in piece)
            self._credit.spend(nbytes)
            refused = sum(table[number].name in found.refused for number in piece)
            reading.advance(piece.stop, nbytes, refused)
            wrong = ", ".join(differing(table, position, piece, found))
            if wrong:
                text = f"in its memory {wrong[:REASON_LIMIT]} is not that of version {position.version}"
                reading.fault(text, self._now())
                return text
            if reading.next >= len(table):
                reading.end(stamp, position.version)
                # a small model is read often: once per turn is enough
                self._credit.spend(max(self._credit.left, 0.0))
        return ""


def next_piece(table: TensorTable, start: int) -> range:
    """Numbers of the next tensors to ask for at once, at least one."""
    stop, nbytes, name_bytes = start, 0, 0
    while stop < len(table) and stop - start < _PIECE_NAMES:
        spec = table[stop]
        nbytes, name_bytes = nbytes + spec.nbytes, name_bytes + len(spec.name.encode()) + 8
        if stop > start and (nbytes > _PIECE_BYTES or name_bytes > _PIECE_NAME_BYTES):
            break
        stop += 1
    return range(start, stop)


def read_lanes(live: Live, table: TensorTable, numbers: Sequence[int]) -> EngineLanes:
    """Raises EngineFailed."""
    with guarded(live.adapter.spec):
        return live.adapter.lanes([table[number].name for number in numbers])


def differing(
    table: TensorTable, position: Position, numbers: Sequence[int], found: EngineLanes
) -> tuple[str, ...]:
    """Names of those that are not the version's. What an engine neither has lanes of nor refuses differs."""
    lanes = lanes_list(position.lanes)
    names = ((table[number].name, lanes[number].hex()) for number in numbers)
    return tuple(
        name for name, wanted in names if found.lanes.get(name, "") != wanted and name not in found.refused
    )
