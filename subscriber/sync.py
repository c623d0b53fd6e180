"""One step of a host: local checkpoint and engines towards the target. The loop is elsewhere.

Order of a version: fetch and stage while engines serve and no lock is held; then, under the patch lock,
patch, reload, record. After any error the next step starts from what lies on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.channel.pointer import Pointer
from weightcast.shared.channel.signing import Trust
from weightcast.shared.channel.store import Channel
from weightcast.shared.errors import NeedsReseed, Refused, RetryLater, WeightcastError, WrongRun
from weightcast.shared.failpoints import failpoint
from weightcast.shared.local.access import Readers, let_read
from weightcast.shared.local.follow import Follower, FollowOptions
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.local.patch import require_readable
from weightcast.shared.local.plan import Patch, Refuse, Relabel, Seed, Stay
from weightcast.shared.local.prepare import PreRead
from weightcast.shared.local.route import Route
from weightcast.shared.local.scrub import Scrub, ScrubStatus
from weightcast.shared.local.stage import Staged
from weightcast.shared.local.state import (
    Blocked,
    EngineState,
    LocalState,
    Mark,
    Phase,
    Position,
    read_state,
    write_state,
)
from weightcast.subscriber.aligned import (
    REASON_LIMIT,
    block,
    in_doubt,
    is_confirmed,
    needs_undo,
    retry_delay,
    rolls_back,
    unaligned,
)
from weightcast.subscriber.engine_verify import EngineVerify, EngineVerifyFacts
from weightcast.subscriber.engines.base import Engine
from weightcast.subscriber.engines.roster import EngineResult
from weightcast.subscriber.group import Order
from weightcast.subscriber.lead import Lead
from weightcast.subscriber.offers import Offer, write_patch
from weightcast.subscriber.reload import Engines
from weightcast.subscriber.status import Cause, MoveKind, State, UpdateStatus
from weightcast.subscriber.stopwatch import Stopwatch
from weightcast.subscriber.target import FOLLOW_LATEST, Target, resolve

_SHOW_EVERY_SECONDS = 0.25
MOST_UNDO_STEPS = 8
"""journals kept for engines that neither take nor refuse what lies here"""


@dataclass(frozen=True)
class SyncOptions:
    """`visible_seconds`: how long what the pointer implies may stay invisible."""

    channel: Path
    local: Path
    base: Path | None = None
    target: Target = FOLLOW_LATEST
    threads: int = 1
    visible_seconds: float = 120.0
    pre_read: PreRead | None = None
    fetch_ahead: bool = False
    """fetch the next version while one is patched and engines reload"""
    trust: Trust | None = None
    """whose versions are followed; None: anybody's"""
    readable_by: Readers | None = None
    """set by mode; None: as the umask has it"""
    group_patch: bool = False
    """a follower also stages patches for the group's engines"""
    group_follower: bool = False
    """the local checkpoint moves only towards `Sync.order`"""


def _no_bytes() -> dict[Cause, int]:
    return dict.fromkeys(get_args(Cause), 0)


@dataclass
class View:
    """What a step knows, for the status. Only the step writes it."""

    state: State = "starting"
    local: LocalState | None = None
    target_version: int | None = None
    progress_bytes: int = 0
    bytes_read: int = 0
    bytes_by_cause: dict[Cause, int] = field(default_factory=_no_bytes)
    degraded: tuple[str, ...] = ()
    not_ready: tuple[str, ...] = ("starting",)
    moves: list[UpdateStatus] = field(default_factory=list)
    """of the running step"""
    error: WeightcastError | None = None
    scrub: ScrubStatus | None = None
    engine_verify: dict[str, EngineVerifyFacts] = field(default_factory=dict)
    """by the engine's name"""


@dataclass(frozen=True)
class Outcome:
    """`version` lies on disk (None: not seeded); `moved`: this step changed it; `waiting`: why the host is
    not ready."""

    version: int | None
    target: int | None
    moved: bool
    waiting: tuple[str, ...]
    degraded: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return self.version is not None and not self.waiting


class Stopped(RetryLater):
    """The daemon ends; what was begun is continued by the next start."""


def _never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class Sync:
    """One host. Used by one thread; `show` is called whenever the view changed;
    `stop(seconds)` waits, or returns True as soon as the process is to end."""

    def __init__(
        self,
        options: SyncOptions,
        engines: Engines | None = None,
        lead: Lead | None = None,
        *,
        show: Callable[[Sync], None] = lambda sync: None,
        stop: Callable[[float], bool] = _never,
        advance: Callable[[int], None] = lambda nbytes: None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.engines = Engines() if engines is None else engines
        self.lead = Lead() if lead is None else lead
        self.lead.wait = self._wait
        self.order: Order | None = None
        """of a follower in an engine group: what its leader wants"""
        self.is_prepared = False
        """what the order wants is staged, lies here, or can be brought only when it is held"""
        self._kept: Staged | None = None
        """for the order, until it is held"""
        self.view = View()
        self._show = show
        self._stop = stop
        self._on_bytes = advance
        self.now = now
        self._clock = clock
        self._watch = Stopwatch()
        self._pointer_seen = False
        self._usable = False
        """the local checkpoint is a version of this run, although it may be closed after an error"""
        self._retry_at: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._shown = 0.0
        self._reads_all = False
        self._around: tuple[str, ...] = ()
        """damage that this step went around"""
        self.follower = Follower(
            options.channel,
            options.local,
            options.base,
            FollowOptions(
                options.threads,
                options.visible_seconds,
                options.pre_read,
                self._on_phase,
                self._wait,
                before_replay=self._pause_for_replay,
            ),
        )

    def close(self) -> None:
        self.follower.close()
        self.engines.close()
        self.lead.close()
        self.view.not_ready = ("stopped",)
        self._enter("stopped")

    def sync_once(self) -> Outcome:
        """Raises what keeps the local checkpoint from the target; what keeps an engine from it is part of the
        outcome."""
        self._watch = Stopwatch()
        self.view.moves, self.view.degraded, self.view.error = [], (), None
        self._around = ()
        try:
            self._step()
        except BaseException as error:
            self.follower.release()
            self._kept = None
            self.view.error = _known(error)
            if isinstance(error, Refused):
                self._degrade(error.message)
            if isinstance(error, OSError):
                raise self.view.error from error
            raise
        finally:
            self.view.not_ready = self._reasons_not_ready()
            self._enter("idle" if self.view.error is None else "waiting")
        return self.outcome()

    def rehash(self) -> Outcome:
        """A step that reads every byte of the local checkpoint before anything else, and repairs what is not
        the version's. Raises what `sync_once` raises."""
        self._reads_all = True
        return self.sync_once()

    def verify_some(self, scrub: Scrub) -> None:
        """Reads a little of the local checkpoint. A fault is repaired by a step at once: raises what
        `sync_once` raises."""
        local = self.follower.local
        if local is None:
            return
        try:
            scrub.turn(local)
        except NeedsReseed as error:
            self.follower.doubt(error)
            self._usable = False
            self.sync_once()
        except OSError as error:
            self.follower.release()
            self.view.error = _known(error)
            raise self.view.error from error
        finally:
            self.view.scrub = scrub.status
            self._tell()

    def verify_engines(self, verify: EngineVerify) -> dict[str, str]:
        """Has engines that are patched read a little of their memory. One that holds other words is in doubt,
        and reloaded by a step at once: raises what `sync_once` raises. Returns what was wrong, by name."""
        local = self.follower.local
        if local is None or not self.engines.lives:
            return {}
        aligned = self.engines.aligned(local.state)
        lives = {name: live for name, live in self.engines.lives.items() if name in aligned}
        faults = verify.turn(local, lives)
        for name, live in lives.items():
            if name in faults:
                self.engines.doubt(local, name, faults[name])
            elif verify.is_confirmed(name, live, local):
                self.engines.confirm(local, name)
        self.view.engine_verify = {name: facts for name in lives if (facts := verify.facts(name)) is not None}
        self._tell()
        if faults:
            self.sync_once()
        return faults

    def outcome(self) -> Outcome:
        """As of the last step."""
        local = self.follower.local
        return Outcome(
            version=None if local is None else local.state.position.version,
            target=self.view.target_version,
            moved=any(move.kind != "reload" for move in self.view.moves),
            waiting=self.view.not_ready,
            degraded=self.view.degraded,
        )

    @property
    def position(self) -> Position | None:
        """The version that lies here whole; None: none does."""
        local = self.follower.local
        return None if local is None or local.state.phase is not Phase.CLEAN else local.state.position

    def _reasons_not_ready(self) -> tuple[str, ...]:
        state = self._state()
        if state is None or not self._usable:
            error = self.view.error
            return ("the local checkpoint is not seeded" if error is None else error.message,)
        aligned = self.engines.aligned(state)
        names = [engine.spec.name for engine in self.engines.engines if engine.spec.name not in aligned]
        return tuple(self._reason_of(name) for name in names)

    def _reason_of(self, name: str) -> str:
        reason = self.engines.reason(name) or "not reloaded yet"
        return f"engine {name}{' failed' if self.engines.failed(name) else ''}: {reason}"

    def _state(self) -> LocalState | None:
        return self.follower.state if self.follower.local is None else self.follower.local.state

    def _step(self) -> None:
        self.follower.own()
        if self._reads_all:
            self._adopt()
        self.engines.look_if_due(self._state())
        failpoint("engine.looked")
        if self.follower.local is None and not self.lead.members:
            # an engine of a group is known again only by a reload: nobody saw what the other hosts did
            self._resume_noted()
        try:
            self._follow()
        except NeedsReseed:
            self._usable = False
            raise
        except Stopped:
            raise
        except (WeightcastError, OSError):
            # the channel's troubles are not the engines'
            self._align()
            raise
        self._align()
        if self.order is not None and self.order.phase == "hold":
            self._require_readable()

    def _require_readable(self) -> None:
        """Engines elsewhere are about to read what lies here."""
        local = self._local()
        with local.patching(wait=self._wait):
            require_readable(local)

    def _adopt(self) -> None:
        """A state that cannot be read is told by every other step."""
        channel = Channel.open(self.options.channel, self.options.trust)
        self._enter("hashing")
        if self.follower.adopt(channel, self._advance):
            self._degrade("the local state could not be read; all weights were read instead")

    def _resume_noted(self) -> None:
        state = read_state(self.follower.paths.state)
        if state is not None:
            self.engines.resume_noted(state)

    def _follow(self) -> None:
        self.follower.detours.run(self._go_one_way, self._go_around)

    def _go_around(self, damage: str) -> None:
        """What is damaged in the channel keeps a host only where no other way leads on."""
        self._around = (*self._around, damage)
        self._degrade(f"another way is taken: {damage}")
        self.follower.release()
        self._kept = None

    def _lies_as_ordered(self, order: Order) -> bool:
        """Then the channel need not be there."""
        if order.phase != "hold":
            return False
        if self.follower.local is None:
            self._load(None)
        self.view.target_version = order.version
        return self.position is not None and order.is_at(self.position)

    def _go_one_way(self) -> None:
        if self.order is not None and self._lies_as_ordered(self.order):
            return
        channel = self._open_and_load()
        self.is_prepared = False
        self._drop_kept()
        if self.options.group_follower and (self.order is None or self._goes_back(self.order)):
            return
        if self.lead.members and self._local_in_doubt():
            self._align()
        self._enter("planning")
        with self._watch.timed("plan"):
            route = self._route(channel)
        if self.order is not None and self.order.phase == "prepare" and self._usable:
            self._make_ready(channel, route)
        else:
            self._carry_out(channel, route)
        if self.order is not None and self.position is not None:
            self.is_prepared |= self.position.version == self.order.version

    def _local_in_doubt(self) -> bool:
        """Whether an engine may still be at a reload of the local version: other hosts hold it too, and are
        moved only after a reload that was seen to end."""
        local = self.follower.local
        return local is not None and bool(in_doubt(local.state.engines))

    def _goes_back(self, order: Order) -> bool:
        """Undoes what engines elsewhere in the group refused, if that is what the order wants."""
        local = self.follower.local
        if local is None or order.phase != "hold" or not local.state.undo:
            return False
        if not order.is_at(local.state.undo[0].base):
            return False
        before = local.state.position.version
        with local.patching(wait=self._wait):
            self._undo()
        self._moved("undo", before, 0)
        return True

    def _make_ready(self, channel: Channel, route: Route) -> None:
        """What can be done while engines serve: nothing of the local checkpoint is written."""
        match route.plan:
            case Patch() as plan:
                self._kept = self._prepare(channel, route, plan.legs[0])
                if self.options.group_patch:
                    self._stage_patch(self._kept)
                self.is_prepared = True
            case Seed() | Relabel():
                self.is_prepared = True
            case _:
                self._carry_out(channel, route)

    def _stage_patch(self, staged: Staged) -> None:
        """For the part of an engine that reads this host's files; without it the engine loads from disk."""
        local = self._local()
        steps = (*local.state.undo, staged.step)
        made = write_patch(local, steps, steps[0].base.version, self.options.readable_by)
        if isinstance(made, Offer):
            self._degrade(f"no patch for the group's engines: {made.reason}")

    def _drop_kept(self) -> None:
        """What was staged for an order that is no more."""
        kept, order, local = self._kept, self.order, self.follower.local
        if kept is None or local is None:
            return
        wanted = order is not None and order.version >= kept.step.target.version
        if not wanted or kept.step.base != local.state.position:
            local.paths.journal(kept.step.journal).unlink(missing_ok=True)
            self._kept = None

    def _open_and_load(self) -> Channel:
        """The local checkpoint is opened also when the channel cannot be."""
        if self.follower.local is None:
            self._enter("loading")
        try:
            channel = Channel.open(self.options.channel, self.options.trust)
            self.follower.require_mounted(channel)
        except (WeightcastError, OSError):
            self._load(None)
            raise
        self._load(channel)
        self._repair(channel)
        return channel

    def _load(self, channel: Channel | None) -> None:
        before, self._usable = self._usable, False
        try:
            self.follower.load(channel, self._advance)
        except OSError:
            # a disk that fails says nothing of what lies on it, nor of what engines took from it
            self._usable = before
            raise
        if self._reads_all:
            self._enter("hashing")
            self.follower.rehash(self._advance)
            self._reads_all = False
        self._usable = self.follower.local is not None
        self._let_read()

    def _let_read(self) -> None:
        if self.follower.local is not None and self.options.readable_by is not None:
            let_read(self.follower.local, self.options.readable_by)

    def _repair(self, channel: Channel) -> None:
        """Seeding is left for what cannot be repaired."""
        if not self.follower.repairable:
            return
        before = self._state()
        self._stand_back()
        self.view.not_ready = (f"repairing: {self.follower.trouble}",)
        self._enter("repairing")
        with self._watch.timed("repair"):
            repaired = self.follower.repair(channel, self._advance)
        if repaired is None:
            return
        self._usable = True
        self._watch.changes += repaired.words
        self._count_read("repair", repaired.nbytes)
        self._moved("repair", None if before is None else before.position.version, 0)

    def _route(self, channel: Channel) -> Route:
        pointer = self._pointer(channel)
        target = self.options.target
        if self.order is not None:
            _require_run(channel, self.order)
            target = Target(str(self.order.version), self.order.version)
        version = resolve(target, channel.directory, pointer)
        self.view.target_version = version
        self._unblock_due()
        return self.follower.route(channel, pointer, version, exact=target.exact)

    def _unblock_due(self) -> None:
        local, now = self.follower.local, self._clock()
        if local is None:
            return
        kept: list[Blocked] = []
        for one in local.state.blocked:
            if self._retry_at.setdefault(one.digest, now + retry_delay(one.attempts)) > now:
                kept.append(one)
            else:
                self._attempts[one.digest] = one.attempts
                del self._retry_at[one.digest]
        if len(kept) < len(local.state.blocked):
            local.save(local.state.but(blocked=tuple(kept)))

    def _pointer(self, channel: Channel) -> Pointer:
        """Before the first version the target is the base, so that a host is ready when that comes."""
        pointer = channel.pointer()
        if pointer is not None:
            self._pointer_seen = True
            return pointer
        if channel.foreign:
            raise RetryLater(
                f"{channel.directory} has neither channel.json nor a pointer",
                remedy="has the publisher started? is the channel mounted?",
            )
        state = self._state()
        if self._pointer_seen or (state is not None and state.position.version > 0):
            raise RetryLater(
                f"{channel.layout.latest} is gone", remedy="is the channel mounted? nothing is changed here"
            )
        return Pointer(0, None, channel.directory)

    def _carry_out(self, channel: Channel, route: Route) -> None:
        match route.plan:
            case Stay(reason):
                self._degrade(reason)
            case Relabel() as plan:
                self._relabel(channel, route, plan)
            case Seed() as plan:
                self._seed(channel, route, plan)
            case Patch() as plan:
                self._patch(channel, route, plan)
            case Refuse(reason, _, True):
                self._degrade(reason)
            case Refuse(reason, remedy, _):
                raise Refused(reason, remedy=remedy)

    def _degrade(self, reason: str) -> None:
        if reason and reason not in self.view.degraded:
            self.view.degraded = (*self.view.degraded, reason)

    def _relabel(self, channel: Channel, route: Route, plan: Relabel) -> None:
        local = self._local()
        before = local.state.position.version
        with local.patching(wait=self._wait):
            self.follower.relabel(channel, route, plan)
            self.engines.relabel(local, before)
        self._moved("relabel", before, 1)
        if plan.then.legs:
            self._patch(channel, route, plan.then)

    def _seed(self, channel: Channel, route: Route, plan: Seed) -> None:
        before = self._state()
        self._stand_back()
        self._usable, self.view.not_ready = False, (f"seeding: {plan.reason}",)
        self._enter("seeding")
        with self._watch.timed("seed"):
            self.follower.seed(channel, route, plan, self._advance)
        self._usable = True
        self._let_read()
        self._watch.bytes = self._local().table.nbytes
        if plan.version:
            self._count_read("anchor", self._watch.bytes)
        self._moved("seed", None if before is None else before.position.version, 1)
        if plan.then.legs:
            self._patch(channel, route, plan.then)

    def _stand_back(self) -> None:
        """Other bytes will lie here: nothing that engines confirmed holds any longer."""
        self.follower.release()
        state = self.follower.state
        if state is not None:
            self.follower.state = state.but(engines=unaligned(state.engines))
            self.engines.pause_mapping(self._note_pausing)

    def _pause_for_replay(self, local: LocalCheckpoint) -> None:
        """An engine that was resumed, or that started since, may serve from files that are written on now."""
        mapping = {engine.spec.name for engine in self.engines.mapping}
        engines = local.state.engines
        served = {name for name in mapping & set(engines) if engines[name].mark is Mark.SERVED}
        if served:
            local.save(local.state.but(engines={n: one for n, one in engines.items() if n not in served}))
        self.engines.pause_mapping(self._note_pausing)

    def _note_pausing(self, name: str) -> None:
        state, local = self._state(), self.follower.local
        if state is None or name in state.engines:
            return
        state = state.but(engines={**state.engines, name: EngineState(Mark.PAUSING)})
        if local is not None:
            local.save(state)
        else:
            write_state(self.follower.paths.state, state)
            self.follower.state = state

    def _patch(self, channel: Channel, route: Route, plan: Patch) -> None:
        before = self._local().state.position.version
        self.engines.retry_at_once()
        folded = sum(len(leg) for leg in plan.legs)
        for leg in plan.legs:
            with self.lead.gathering(leg[-1], self._local().state):
                staged = self._prepare(channel, route, leg)
                self._await_prepared()
                self._apply(staged, last=leg is plan.legs[-1], before=before, folded=folded)

    def _prepare(self, channel: Channel, route: Route, leg: Sequence[int]) -> Staged:
        kept, self._kept = self._kept, None
        if kept is not None:
            if kept.step.target.version == leg[-1]:
                return kept
            self._local().paths.journal(kept.step.journal).unlink(missing_ok=True)
        before = self.view.bytes_read
        try:
            staged = self.follower.prepare(route, leg, channel, self._advance_fetch)
        finally:
            self._divide(route, leg, self.view.bytes_read - before)
        self._watch.enter("")
        self._watch.changes += staged.changes
        return staged

    def _divide(self, route: Route, leg: Sequence[int], nbytes: int) -> None:
        """Among single steps and deltas from older versions, by the sizes that their indexes state."""
        if not nbytes:
            return
        sizes = {version: _size(route.delta(version)[0]) for version in leg}
        older = sum(size for version, size in sizes.items() if route.leads_from(version) != version - 1)
        skipped = nbytes * older // max(1, sum(sizes.values()))
        self.view.bytes_by_cause["skip"] += skipped
        self.view.bytes_by_cause["step"] += nbytes - skipped

    def _count_read(self, cause: Cause, nbytes: int) -> None:
        self.view.bytes_read += nbytes
        self.view.bytes_by_cause[cause] += nbytes

    def _apply(self, staged: Staged, *, last: bool, before: int = 0, folded: int = 0) -> None:
        """Engines that map the files are paused for every leg; the others are reloaded once, at the last."""
        if self.options.fetch_ahead or not last:
            target = self.options.target
            limit = self.view.target_version if target.exact else None
            self.follower.fetch_ahead(staged.step.target.version, limit)
        if last:
            self._offer(staged)
        self._watch.enter("lock")
        with self._local().patching(wait=self._wait):
            self._watch.enter("")
            self.engines.look()
            results = self._bring(staged.step.target.version, lambda: self._write(staged), last)
            if last:
                self._moved("patch", before, folded)
                self._settle(results)

    def _offer(self, staged: Staged) -> None:
        if self.engines.lives:
            self._enter("staging")
            with self._watch.timed("offer"):
                self.engines.offer(self._local(), staged.step, self.options.readable_by)

    def _bring(
        self, version: int, patch: Callable[[], None] | None, everyone: bool
    ) -> tuple[EngineResult, ...]:
        results = self.engines.reload(
            self._local(), version, patch=patch, only=None if everyone else (), report=self._tell_reload
        )
        self._watch.take(results)
        return results

    def _write(self, staged: Staged) -> None:
        self._hold(staged.step.target)
        self._enter("patching")
        with self._watch.timed("patch"):
            self.follower.patch(staged)
        self._enter("reloading")

    def _align(self) -> None:
        """Brings engines that do not hold the local version to it, and hosts of the group that strayed."""
        local = self.follower.local
        if local is None or local.state.phase is not Phase.CLEAN:
            return
        astray = self._astray(local)
        due = self.engines.due(local.state)
        if due or astray:
            with self.lead.gathering(local.state.position.version, local.state):
                self._hold(local.state.position)
                if due:
                    self._reload(local, due)
        elif self._confirmed():
            self.follower.forget_undo()

    def _astray(self, local: LocalCheckpoint) -> bool:
        """Whether a host of the group is elsewhere. Engines that map its files are then in doubt."""
        seen = self.lead.look(local.state.position)
        for trouble in seen.troubles:
            self._degrade(trouble)
        mapping = {engine.spec.name for engine in self.engines.mapping}
        if seen.astray and seen.differs and mapping & set(local.state.engines):
            kept = {name: one for name, one in local.state.engines.items() if name not in mapping}
            local.save(local.state.but(engines=kept))
        return seen.astray

    def _reload(self, local: LocalCheckpoint, due: Sequence[Engine]) -> None:
        self._enter("reloading")
        self._watch.enter("lock")
        with local.patching(wait=self._wait):
            self._watch.enter("")
            require_readable(local)
            version = local.state.position.version
            results = self.engines.reload(local, version, only=due, report=self._tell_reload)
            self._watch.take(results)
            self._moved("reload", version, 0)
            self._settle(results)

    def _settle(self, results: Sequence[EngineResult]) -> None:
        """After a reload, under its lock: is the way back taken, kept or dropped?"""
        local = self._local()
        position = local.state.position
        if self._confirmed():
            self._failures.clear()
            self.lead.serves()
            self.follower.forget_undo()
            self._unblock(position.digest)
            return
        if self.lead.hindered or self.options.group_follower:
            # no engine is at fault, or none is known here
            return
        failures = self._failures.get(position.digest, 0) + any(r.attempts > 0 for r in results)
        self._failures = {position.digest: failures}
        if local.state.undo and rolls_back(results, failures, self.engines.order):
            self._go_back(local, results)
        elif not needs_undo(results) or len(local.state.undo) > MOST_UNDO_STEPS:
            self.follower.forget_undo()

    def _confirmed(self) -> bool:
        """Whether an engine took the version that lies here; without engines nobody is asked. A follower's
        leader says so."""
        if self.options.group_follower:
            return len(self._local().state.undo) > MOST_UNDO_STEPS
        state = self._local().state
        names = [engine.spec.name for engine in self.engines.engines]
        return not names or is_confirmed(state.engines, names, state.position.version)

    def _unblock(self, digest: str) -> None:
        local = self._local()
        kept = tuple(one for one in local.state.blocked if one.digest != digest)
        if kept != local.state.blocked:
            local.save(local.state.but(blocked=kept))

    def _go_back(self, local: LocalCheckpoint, results: Sequence[EngineResult]) -> None:
        """To the version before the refused one."""
        refused = local.state.position
        reason = "; ".join(f"{result.name}: {result.reason}" for result in results if result.reason)
        attempts = self._attempts.pop(refused.digest, 0) + 1
        one = Blocked(refused.version, refused.digest, reason[:REASON_LIMIT], attempts)
        blocked = block(local.state.blocked, one)
        local.save(local.state.but(blocked=blocked, engines=unaligned(local.state.engines)))
        failpoint("refused.blocked")
        self._degrade(f"version {refused.version} was refused by the engines: {reason}")
        self.engines.retry_at_once()
        self._watch = Stopwatch()
        self._bring(local.state.undo[0].base.version, self._undo_everywhere, everyone=True)
        failpoint("refused.served")
        self._moved("undo", refused.version, 0)

    def _undo_everywhere(self) -> None:
        self._hold(self._local().state.undo[0].base)
        self._undo()

    def _await_prepared(self) -> None:
        if self.lead.members:
            self._enter("gathering")
        with self._watch.timed("group"):
            self.lead.await_prepared()

    def _hold(self, position: Position) -> None:
        if self.lead.members:
            self._enter("gathering")
        with self._watch.timed("group"):
            self.lead.hold(position)

    def _undo(self) -> None:
        self._enter("patching")
        with self._watch.timed("patch"):
            self.follower.undo()
        self._enter("reloading")

    def _local(self) -> LocalCheckpoint:
        if self.follower.local is None:
            raise RetryLater(f"{self.options.local} is not open", remedy="the next step opens it")
        return self.follower.local

    def _moved(self, kind: MoveKind, before: int | None, folded: int) -> None:
        watch, self._watch = self._watch, Stopwatch()
        move = UpdateStatus(
            kind=kind,
            from_version=before,
            version=self._local().state.position.version,
            folded=folded,
            bytes=watch.bytes,
            changes=watch.changes,
            seconds=watch.total(),
            pause_seconds=watch.pause_seconds,
            around=self._around,
            at=self.now(),
        )
        self.view.moves.append(move)
        self._tell()

    def _on_phase(self, phase: str) -> None:
        self._watch.enter(phase)
        self._enter("fetching" if phase == "fetch" else "staging")

    def _enter(self, state: State) -> None:
        self.view.state, self.view.progress_bytes = state, 0
        self._tell()

    def _wait(self, seconds: float) -> None:
        if self._stop(seconds):
            raise Stopped("the process ends", remedy="the next start continues")

    def _advance(self, nbytes: int) -> None:
        self._wait(0.0)
        self.view.progress_bytes += nbytes
        self._on_bytes(nbytes)
        if self._clock() - self._shown > _SHOW_EVERY_SECONDS:
            self._tell()

    def _advance_fetch(self, nbytes: int) -> None:
        self._watch.count(nbytes)
        self.view.bytes_read += nbytes
        self._advance(nbytes)

    def _tell_reload(self) -> None:
        """An engine in doubt is told at once: the others may take minutes."""
        state = self._state()
        if state is not None and any(one.mark is Mark.SUSPECT for one in state.engines.values()):
            self.view.not_ready = self._reasons_not_ready()
        self._tell()

    def _tell(self) -> None:
        self._shown = self._clock()
        self.view.local = self._state()
        self._show(self)


def _size(index: Index | ForeignIndex) -> int:
    """A foreign index states none: all its versions count alike."""
    return sum(file.size for file in index.files) if isinstance(index, Index) else 1


def _require_run(channel: Channel, order: Order) -> None:
    if channel.file is not None and channel.file.run_id != order.run_id:
        raise WrongRun(
            f"{channel.directory} is of run {channel.file.run_id}, the group's leader follows run "
            f"{order.run_id or 'of a foreign channel'}",
            remedy="give every host of a group the same channel",
        )


def _known(error: BaseException) -> WeightcastError:
    if isinstance(error, WeightcastError):
        return error
    if isinstance(error, OSError):
        return RetryLater(
            f"{error.filename or 'a file'}: {error.strerror or error}", remedy="nothing is lost"
        )
    return WeightcastError(f"{type(error).__name__}: {error}", remedy="see the log for the traceback")
