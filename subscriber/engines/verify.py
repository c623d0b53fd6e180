"""The words in engines' memory, read by the engines themselves and compared with the lanes of the version.

A patch proves the words that it touches. All others are proved by reading: in the background, a
little at a time, and wholly after every so many versions. Tensors without lanes (packed,
quantised or derived ones) are counted, and never said to be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, EngineFailed, RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Phase, Position, lanes_list
from weightcast.shared.checkpoint.verify.scrub import Credit
from weightcast.shared.digest.checksums import Lanes
from weightcast.shared.digest.root import root
from weightcast.subscriber.engines.live import EngineLanes, Live
from weightcast.subscriber.engines.proxy import guarded

_PIECE_BYTES = 32 << 20
_PIECE_NAMES, _PIECE_NAME_BYTES = 256, 16 << 10
"""of one request"""
_TURN_SECONDS = 2.0
"""of a turn that reads all: a newer version waits no longer"""
_AGAIN_SECONDS = 60.0
"""until an engine that did not answer is asked again: versions wait for its answer meanwhile"""
_TIMES = 3
REASON_LIMIT = 500


@dataclass(frozen=True)
class EngineVerifyFacts:
    """Of one engine, since the start. `refused`: tensors without lanes in this pass; `version`:
    the last one at which every tensor was read and was right; `full_pass`: unix time at which the last whole
    pass began."""

    done_bytes: int = 0
    total_bytes: int = 0
    passes: int = 0
    faults: int = 0
    refused: int = 0
    full_pass: float | None = None
    version: int | None = None
    last_fault: str = ""
    last_fault_at: float | None = None


_Stamp = tuple[object, ...]
"""differs as soon as the engine came to what it holds in another way"""


def _stamp(name: str, live: Live, local: LocalCheckpoint) -> _Stamp:
    record, facts = local.state.engines.get(name), live.facts
    process = None if record is None else record.process
    return local.state.position.digest, process, facts.patches, facts.reloads


@dataclass
class _Reading:
    facts: EngineVerifyFacts = field(default_factory=EngineVerifyFacts)
    next: int = 0
    began: float = 0.0
    stamp: _Stamp = ()
    """when the pass began"""
    versions: int = 0
    """taken since the last whole pass"""
    seen: str | None = None
    hurried: bool = False
    not_before: float = 0.0


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

    def facts(self, name: str) -> EngineVerifyFacts | None:
        """None until it was first read."""
        known = self._readings.get(name)
        return None if known is None else known.facts

    def turn(self, local: LocalCheckpoint, engines: Mapping[str, Live]) -> dict[str, str]:
        """Reads as much as the rate allows, of engines that hold the local version. Returns what is wrong,
        by the engine's name. An engine that does not answer is left for the next turn."""
        began = self._clock()
        self._credit.earn()
        faults: dict[str, str] = {}
        for name, live in self._in_turn(engines) if local.state.phase is Phase.CLEAN else ():
            reading = self._readings.setdefault(name, _Reading())
            self._count(reading, local.state.position)
            fault = self._read(name, reading, live, local, began)
            if fault:
                faults[name] = fault
        return faults

    def _in_turn(self, engines: Mapping[str, Live]) -> Sequence[tuple[str, Live]]:
        """Another one first every time: the rate may be used up by it alone."""
        self._turns += 1
        first = self._turns % max(len(engines), 1)
        every = list(engines.items())
        return every[first:] + every[:first]

    def is_confirmed(self, name: str, live: Live, local: LocalCheckpoint) -> bool:
        """Whether every tensor was read and found right since the engine came to this version."""
        known = self._readings.get(name)
        if known is None or known.facts.version != local.state.position.version:
            return False
        return known.stamp == _stamp(name, live, local)

    def _count(self, reading: _Reading, position: Position) -> None:
        if reading.seen not in (None, position.digest):
            reading.versions += 1
        reading.seen = position.digest
        if self._every and reading.versions >= self._every:
            reading.hurried, reading.versions, reading.next = True, 0, 0

    def _read(self, name: str, reading: _Reading, live: Live, local: LocalCheckpoint, began: float) -> str:
        stamp = _stamp(name, live, local)
        while self._may_read(reading, began) and not self._stop():
            if reading.next == 0:
                reading.began, reading.stamp = self._now(), stamp
                reading.facts = replace(
                    reading.facts, done_bytes=0, refused=0, total_bytes=local.table.nbytes
                )
            piece = _piece(local.table, reading.next)
            try:
                with guarded(live.spec):
                    found = live.engine.lanes([local.table[number].name for number in piece])
            except EngineFailed:
                reading.not_before = self._clock() + _AGAIN_SECONDS
                break
            if found.changed or found.version != local.state.position.version:
                break
            fault = self._judge(reading, local, piece, found)
            if fault:
                return fault
            if reading.next >= len(local.table):
                self._end(reading, local.state.position, whole=reading.stamp == stamp)
        return ""

    def _may_read(self, reading: _Reading, began: float) -> bool:
        if self._clock() < reading.not_before:
            return False
        if reading.hurried:
            return self._clock() - began < _TURN_SECONDS
        return self._credit.left > 0

    def _judge(
        self, reading: _Reading, local: LocalCheckpoint, piece: Sequence[int], found: EngineLanes
    ) -> str:
        nbytes = sum(local.table[number].nbytes for number in piece)
        self._credit.left -= nbytes
        reading.next = piece[-1] + 1
        wrong = differing(local.table, local.state.position, piece, found)
        refused = reading.facts.refused + sum(local.table[number].name in found.refused for number in piece)
        reading.facts = replace(reading.facts, done_bytes=reading.facts.done_bytes + nbytes, refused=refused)
        if wrong:
            return self._fault(reading, wrong, local.state.position)
        return ""

    def _fault(self, reading: _Reading, wrong: Sequence[str], position: Position) -> str:
        text = f"in its memory {', '.join(wrong)[:REASON_LIMIT]} is not that of version {position.version}"
        reading.facts = replace(
            reading.facts, faults=reading.facts.faults + 1, last_fault=text, last_fault_at=self._now()
        )
        reading.next, reading.hurried = 0, False
        return text

    def _end(self, reading: _Reading, position: Position, whole: bool) -> None:
        facts = reading.facts
        whole = whole and not facts.refused
        reading.facts = replace(
            facts,
            passes=facts.passes + 1,
            full_pass=reading.began,
            version=position.version if whole else facts.version,
        )
        reading.next, reading.hurried = 0, False
        # a small model is read often: once per turn is enough
        self._credit.left = min(self._credit.left, 0.0)


def _piece(table: TensorTable, start: int) -> Sequence[int]:
    """Numbers of the next tensors, at least one."""
    stop, nbytes, name_bytes = start, 0, 0
    while stop < len(table) and stop - start < _PIECE_NAMES:
        spec = table[stop]
        nbytes, name_bytes = nbytes + spec.nbytes, name_bytes + len(spec.name.encode()) + 8
        if stop > start and (nbytes > _PIECE_BYTES or name_bytes > _PIECE_NAME_BYTES):
            break
        stop += 1
    return range(start, stop)


def differing(
    table: TensorTable, position: Position, numbers: Sequence[int], found: EngineLanes
) -> tuple[str, ...]:
    """Names of those that are not the version's. What an engine neither has lanes of nor refuses differs."""
    lanes = lanes_list(position.lanes)
    names = ((table[number].name, lanes[number].hex()) for number in numbers)
    return tuple(
        name for name, wanted in names if found.lanes.get(name, "") != wanted and name not in found.refused
    )


@dataclass(frozen=True)
class EngineReport:
    """`refused`: by name, why the engine has no lanes of it. `root`: over all tensors as they lie in its
    memory; None where some are refused or were not asked for."""

    version: int
    root: str | None
    tensors: int
    differing: tuple[str, ...]
    refused: Mapping[str, str]

    @property
    def intact(self) -> bool:
        return not self.differing


def verify_engine(
    live: Live,
    table: TensorTable,
    position: Callable[[], Position],
    names: Sequence[str] = (),
    advance: Callable[[int], None] | None = None,
) -> EngineReport:
    """Reads what the engine holds of the tensors `names` (none: all). `position`: where the local checkpoint
    is now; it begins anew when that moves meanwhile. Raises EngineFailed, RetryLater when the two do not come
    together, DamagedFile for a name that the checkpoint does not have."""
    unknown = [name for name in names if name not in table.numbers]
    if unknown:
        raise DamagedFile(f"{unknown[0]} is not a tensor of the checkpoint", remedy="see its index file")
    numbers = [table.numbers[name] for name in names] or list(range(len(table)))
    for _ in range(_TIMES):
        found = _whole(live, table, position(), numbers, advance)
        if found is not None:
            return found
    raise RetryLater(
        f"{live.spec.shown_url} does not hold the version of the local checkpoint, or both move on",
        remedy="wait until the host is ready, then try again",
    )


def _whole(
    live: Live,
    table: TensorTable,
    position: Position,
    numbers: Sequence[int],
    advance: Callable[[int], None] | None,
) -> EngineReport | None:
    lanes: dict[str, str] = {}
    refused: dict[str, str] = {}
    for piece in _pieces(table, numbers):
        with guarded(live.spec):
            found = live.engine.lanes([table[number].name for number in piece])
        if found.changed or found.version != position.version:
            return None
        lanes |= found.lanes
        refused |= found.refused
        if advance is not None:
            advance(sum(table[number].nbytes for number in piece))
    wrong = differing(table, position, numbers, EngineLanes(position.version, lanes, refused, False))
    return EngineReport(position.version, _root(table, lanes), len(numbers), wrong, refused)


def _pieces(table: TensorTable, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    chosen = TensorTable(tuple(table[number] for number in numbers))
    at = 0
    while at < len(numbers):
        piece = _piece(chosen, at)
        yield [numbers[n] for n in piece]
        at = piece[-1] + 1


def _root(table: TensorTable, lanes: Mapping[str, str]) -> str | None:
    try:
        return root(table, [Lanes.from_hex(lanes[spec.name]) for spec in table])
    except (KeyError, ValueError):
        return None
