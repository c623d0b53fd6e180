"""Patches of the weights in an engine's memory, with the reload from disk behind them.

A patch is tried once, and only if the engine has checked it before: in one order with its pause where the
engine takes that, else in a pause of ours. Whatever else comes of it than a success that is said, the engine
loads the checkpoint from disk: at once where nothing was changed, and as a suspect, paused, where nobody
knows.

Offers: one patch file per version, made from the journals and checked by each engine while it serves. An
engine that cannot take it loads the checkpoint from disk, and its offer says why.

A patch proves the words that it touches. All others are proved by reading: engines read the words in their
memory themselves, in the background, a little at a time, and wholly after every so many versions; they are
compared with the lanes of the version. Tensors without lanes (packed, quantised or derived ones) are counted,
and never said to be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, Readers, grant_read_within
from weightcast.shared.checkpoint.state.state import EngineState, Mark, Phase, Position, Step, lanes_list
from weightcast.shared.checkpoint.update.engine_patch import (
    EnginePatch,
    drop_engine_patches,
    write_engine_patch,
)
from weightcast.shared.checkpoint.verify.hashing import Credit
from weightcast.shared.files.disk_errors import disk_text
from weightcast.subscriber.engines.adapter import EngineLanes, LiveAdapter, guarded
from weightcast.subscriber.engines.base import Confirmation, Done, HeldWeights, Intact, ReloadOutcome, Suspect
from weightcast.subscriber.engines.rules import is_in_sync
from weightcast.subscriber.status import EngineVerifyStatus, LiveStatus

if TYPE_CHECKING:
    from weightcast.subscriber.engines.host import HostEngine

Why = Literal[
    "unknown", "group", "journal", "unpatchable", "patch", "refused", "rolled-back", "in-doubt", "waiting",
    "align",
]  # fmt: skip
"""Why an engine loads from disk: what it holds is not known; it is one of a group; the steps from what it
holds are not at hand; it cannot be patched at all; no patch was made; it refused the patch while it served;
it took nothing of it, or took it back, in the pause; nobody knows what it took; after such failures; no
version came, but the engine is brought to the local one, or back."""
MOST_WAITED = 63
"""versions loaded from disk after failures in the pause"""
E = TypeVar("E")
T = TypeVar("T")


@dataclass(frozen=True)
class Offer:
    """How an engine comes to a version: by `patch`, which it checked; None: from disk, because of `why`."""

    patch: EnginePatch | None = None
    why: Why = "align"
    reason: str = "loaded the local version, as after a start"


class Live:
    """How an engine that takes patches is paused and brought to a version, and how that went."""

    def __init__(self, adapter: LiveAdapter) -> None:
        self.adapter = adapter
        self.facts = LiveStatus()
        self._aim: HeldWeights | None = None
        """what it holds after the next reload; None: it did not take our word for that"""
        self._untried: EnginePatch | None = None
        self._pauses_itself = False
        """with the patch that is untried"""
        self._why: Why = "align"
        self._failures = self._wait = 0

    def waits(self) -> bool:
        """Whether this version is to be loaded from disk, since patches failed in the pause before. Called
        once per version."""
        waits = self._wait > 0
        self._wait -= waits
        return waits

    def check(self, patch: EnginePatch) -> Offer:
        """Has the engine check it while it serves."""
        try:
            with guarded(self.adapter.spec):
                self.adapter.check(patch)
        except EngineFailed as refusal:
            return Offer(None, "refused", refusal.message)
        return Offer(patch)

    def aim(self, held: HeldWeights, offer: Offer, *, watched: bool) -> None:
        """Before every reload: towards the local checkpoint's version; a patch that leads elsewhere is none.
        `watched`: others are asked while the engine is paused, so that only the caller may resume it."""
        patch = offer.patch
        if patch is not None and HeldWeights(patch.version, patch.root) != held:
            offer, patch = Offer(), None
        self._aim, self._untried, self._why = held, patch, offer.why
        self._pauses_itself = patch is not None and not watched and self.adapter.pauses_itself
        self.facts = self.facts.but(reason=offer.reason)

    def pause(self) -> None:
        """Left to the patch where it pauses the engine itself."""
        if not self._pauses_itself:
            self.adapter.pause()

    def reload(self, path: str, label: str) -> ReloadOutcome:
        patch, self._untried = self._untried, None
        if patch is not None:
            outcome = self.adapter.apply(patch, label, pausing=self._pauses_itself)
            failpoint("engine.applied")
            if isinstance(outcome, Done):
                self._pauses_itself, self._why, self._failures = False, "align", 0
                patches = self.facts.patches + 1
                self.facts = self.facts.but(way="live", patches=patches, reason="")
                return outcome
            self._why = "in-doubt" if isinstance(outcome, Suspect) else "rolled-back"
            self.facts = self.facts.but(reason=outcome.reason)
            self._failures += 1
            self._wait = min(2 ** min(self._failures - 1, 30) - 1, MOST_WAITED)
            if isinstance(outcome, Suspect):
                return outcome
        if self._pauses_itself:
            try:
                self.adapter.pause()
            except EngineFailed as failure:
                return Intact(str(failure), unpaused=failure)
            self._pauses_itself = False
        outcome = self.adapter.reload(path, label)
        if isinstance(outcome, Done):
            because = {**self.facts.because, self._why: self.facts.because.get(self._why, 0) + 1}
            self.facts = self.facts.but(way="reload", because=because, reloads=self.facts.reloads + 1)
            self._hold(label)
        return outcome

    def _hold(self, label: str) -> None:
        """What was loaded is known here also when the engine does not take it: then it is not patched
        next."""
        if self._aim is not None:
            try:
                self.adapter.hold(self._aim, label)
            except EngineFailed as failure:
                self._aim = None
                self.facts = self.facts.but(reason=str(failure))

    def read_back(self, label: str) -> Confirmation:
        return self.adapter.confirm(self._aim, label)


def start_of(
    engine: HostEngine, record: EngineState | None, steps: Sequence[Step], *, grouped: bool
) -> tuple[int, int] | Offer:
    """The version that the engine holds, and the first of `steps` from there, else why it loads from disk.
    No IO."""
    facts = engine.facts
    if grouped:
        return Offer(None, "group", "its other hosts stage no patches: --group-patch is not set")
    if facts.unpatchable:
        return Offer(None, "unpatchable", facts.unpatchable)
    served = None if record is None or record.mark is not Mark.SERVED else record.version
    held = facts.held
    # what it holds is found among the steps by its root
    if (
        served is None
        or held is None
        or not is_in_sync(record, engine.observation, HeldWeights(served, held.root))
    ):
        return Offer(None, "unknown", "it was started, or its weights were changed, since the last version")
    for number, step in enumerate(steps):
        if held.root == step.base.root:
            return held.version, number
    return Offer(
        None, "journal", f"no journals lead from what it holds to version {steps[-1].target.version}"
    )


WAITS = Offer(None, "waiting", "patches failed in the pause before; some versions are loaded from disk")
APART = Offer(None, "journal", "other engines hold another version, and a patch has one base")


def write_patch(
    local: LocalCheckpoint, steps: Sequence[Step], base_version: int, readers: Readers | None
) -> EnginePatch | Offer:
    """In the place of older ones. Raises nothing for what a journal or the disk does."""
    try:
        drop_engine_patches(local.paths)
        made = write_engine_patch(local, steps, base_version)
        if readers is not None:
            grant_read_within(local.paths.engine, readers)
    except WeightcastError as error:
        return Offer(None, "patch", error.message)
    except OSError as error:
        return Offer(None, "patch", disk_text(error, local.paths.room))
    failpoint("engine.staged")
    return made


def side_by_side(engines: Sequence[E], work: Callable[[E], T]) -> list[T]:
    """In threads, so that an interrupt of the caller waits for engines that are paused."""
    if not engines:
        return []
    with ThreadPoolExecutor(len(engines), thread_name_prefix="engine") as pool:
        return list(pool.map(work, engines))


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


@dataclass
class _Reading:
    """How far an engine's memory was read, and what came of that."""

    facts: EngineVerifyStatus = field(default_factory=EngineVerifyStatus)
    next: int = 0
    """number of the tensor to read next"""
    hurried: bool = False
    """all is read now, whatever the rate"""
    not_before: float = 0.0
    began: float = 0.0
    stamp: _Stamp = ()
    """when the pass began"""
    seen: str | None = None
    """digest of the version that was read last"""
    versions: int = 0
    """taken since the last whole pass"""


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
            reading, digest = self._readings.setdefault(name, _Reading()), local.state.position.digest
            reading.versions += reading.seen not in (None, digest)
            reading.seen = digest
            if self._every and reading.versions >= self._every:
                reading.hurried, reading.versions, reading.next = True, 0, 0
            fault = self._read(reading, live, local, _stamp(name, live, local), began)
            live.facts = live.facts.but(verify=reading.facts)
            if fault:
                faults[name] = fault
        return faults

    def is_confirmed(self, name: str, live: Live, local: LocalCheckpoint) -> bool:
        """Whether every tensor was read and found right since the engine came to this version."""
        known, version = self._readings.get(name), local.state.position.version
        return known is not None and (known.facts.version, known.stamp) == (
            version,
            _stamp(name, live, local),
        )

    def _may_read(self, reading: _Reading, began: float) -> bool:
        now = self._clock()
        left = now - began < _TURN_SECONDS if reading.hurried else self._credit.left > 0
        return left and now >= reading.not_before and not self._stop()

    def _read(
        self, reading: _Reading, live: Live, local: LocalCheckpoint, stamp: _Stamp, began: float
    ) -> str:
        table, position = local.table, local.state.position
        while self._may_read(reading, began):
            if reading.next == 0:
                reading.began, reading.stamp = self._now(), stamp
                reading.facts = reading.facts.but(done_bytes=0, refused=0, total_bytes=table.nbytes)
            piece = next_piece(table, reading.next)
            try:
                found = read_lanes(live, table, piece)
            except EngineFailed:
                reading.not_before = self._clock() + _AGAIN_SECONDS
                break
            if found.changed or found.version != position.version:
                break
            nbytes = sum(table[number].nbytes for number in piece)
            self._credit.spend(nbytes)
            facts, reading.next = reading.facts, piece.stop
            refused = facts.refused + sum(table[number].name in found.refused for number in piece)
            facts = facts.but(done_bytes=facts.done_bytes + nbytes, refused=refused)
            wrong = ", ".join(differing(table, position, piece, found))
            if wrong:
                text = f"in its memory {wrong[:REASON_LIMIT]} is not that of version {position.version}"
                reading.next, reading.hurried = 0, False
                faults = facts.faults + 1
                reading.facts = facts.but(faults=faults, last_fault=text, last_fault_at=self._now())
                return text
            if reading.next >= len(table):
                reading.next, reading.hurried = 0, False
                whole = reading.stamp == stamp and not refused
                version = position.version if whole else facts.version
                facts = facts.but(passes=facts.passes + 1, full_pass=reading.began, version=version)
                # a small model is read often: once per turn is enough
                self._credit.spend(max(self._credit.left, 0.0))
            reading.facts = facts
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
