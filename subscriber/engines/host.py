"""Engines of a host: asked what they are, and noted in the local checkpoint's durable state.

Every method is called by the work thread; in a reload each engine has a thread of its own.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from weightcast.shared.base.choices import ReloadOrder
from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, Readers
from weightcast.shared.checkpoint.state.state import EngineState, LocalState, Mark, Phase, Step
from weightcast.shared.checkpoint.update.engine_patch import drop_engine_patches
from weightcast.shared.daemon.timing import Backoff
from weightcast.subscriber.engines.adapter import Adapter, AdapterLimits, LiveAdapter, guarded
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    EngineFacts,
    HeldWeights,
    Intact,
    ReloadOutcome,
    Suspect,
)
from weightcast.subscriber.engines.live import APART, WAITS, Live, Offer, side_by_side, start_of, write_patch
from weightcast.subscriber.engines.rules import (
    EngineResult,
    Observation,
    is_in_sync,
    is_taken,
    label_of,
    may_relabel,
    noted,
    states,
    weights_of,
    with_record,
)
from weightcast.subscriber.status import EngineCondition, EngineStatus

_RETRY_FIRST, _RETRY_MOST, _RETRY_FAILED = 1.0, 60.0, 600.0
_RETRY_UNSEEN = 30.0
"""the longest before the next try of an engine whose restarts cannot be seen"""
LOOK_JITTER = 0.2
PAUSED = "paused externally, not by this subscriber: requests block until it is resumed (vLLM: POST /resume)"
TAKEN_AT_ONCE = 3
"""times in a row that an engine is brought back at once from what somebody else loaded into it"""
_PEACE = 2 * _RETRY_FAILED
"""seconds without that after which the count begins anew"""
_UNSEEN = EngineFacts(reachable=False)


class Group(Protocol):
    """The other hosts of an engine group. Both raise EngineFailed."""

    def standing(self) -> Mapping[str, str]:
        """What each of them granted; only when all hold the version."""

    def stood(self, grants: Mapping[str, str]) -> None:
        """Whether they held it since."""


class Traffic(Protocol):
    """Requests that pass through this host to its engines."""

    def close(self, name: str, toward: int) -> None:
        """Before an engine is paused: no request is admitted to it any more, and those that must not see
        version `toward` have ended."""

    def open(self, name: str, version: int | None, process: str | None, looked_at: float) -> None:
        """`version`: what the engine serves as of the look that began at `looked_at`; None: nobody knows."""

    def name_adapters(
        self,
        adapters: Mapping[str, int | None],
        models: Collection[str] = (),
        retired: Collection[str] = (),
    ) -> None:
        """The version that each is to reach here; None: it is one of `retired`, or not followed here.
        `models`: what else requests may name, empty while that is not known."""

    def offer(self, name: str, adapter: str, versions: Collection[int]) -> None:
        """Those that the engine has loaded, in the process of the last `open`."""

    def withdraw(self, name: str) -> None:
        """No request for an adapter is admitted to the engine until adapters are offered again."""

    def uses(self, name: str, adapter: str, version: int) -> bool:
        """Whether a request under way was admitted to this version of an adapter."""


@dataclass(frozen=True)
class RetryPace:
    """How often and how long a doubtful engine is tried again. Times in seconds."""

    attempts: int = 3
    first: float = 0.5
    longest: float = 10.0
    total: float = 600.0
    """no attempt begins later than this after the pause"""
    rounds: int = 5
    """of failed reloads in a row until it counts as failed"""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    """uniform in [0, 1)"""

    def tries(self, began: float) -> Iterator[int]:
        """Yields 1, 2, ... and sleeps between them."""
        backoff = Backoff(self.first, self.longest)
        for number in range(1, self.attempts + 1):
            yield number
            delay = backoff.pause(number) * (0.5 + self.jitter())
            if number == self.attempts or self.clock() + delay - began > self.total:
                return
            self.sleep(delay)


class HostEngine:
    """An engine as the host uses it, around the adapter that speaks its dialect: all methods but `probe` and
    `reload` raise EngineFailed, and nothing else, whatever the adapter raises. Where the engine reads the
    files of a group of hosts, the group is asked before its reload and before it may resume.

    It remembers what it learned of the engine; a restart of this process forgets that.
    """

    def __init__(
        self,
        adapter: Adapter,
        group: Group | None = None,
        *,
        pace: RetryPace | None = None,
    ) -> None:
        """`pace`: of its reloads, but for a deadline of its own."""
        self.adapter, self.spec, self.name = adapter, adapter.spec, adapter.spec.name
        self.live = Live(adapter) if isinstance(adapter, LiveAdapter) else None
        self._loader: Adapter | Live = adapter if self.live is None else self.live
        pace = RetryPace() if pace is None else pace
        self.pace = pace if self.spec.deadline is None else replace(pace, total=self.spec.deadline)
        self.grouped = group is not None
        self._group = group
        self._grants: Mapping[str, str] = {}
        self._clock, self._jitter = self.pace.clock, self.pace.jitter
        self.before_pause: Callable[[], None] = lambda: None
        """raises EngineFailed where it may not be paused"""
        self.after_reload: Callable[[], None] = lambda: None
        """called after a reload from disk, while it is paused still; raises nothing"""
        self.facts = _UNSEEN
        """as of the last look"""
        self.limits = AdapterLimits()
        self.last: EngineResult | None = None
        """what its last reload by this process came to"""
        self.failures = 0
        """rounds of failed reloads in a row"""
        self._steady = False
        self._source: str | None = None
        """the directory that it named after our reload"""
        self._reason = ""
        self._next_try = 0.0
        self._silent_since: float | None = None
        self._taken = 0
        """times in a row that somebody else loaded other weights into the process that we had loaded"""
        self._taken_at = 0.0

    def probe(self) -> EngineFacts:
        try:
            with guarded(self.spec):
                return self.adapter.probe()
        except EngineFailed as failure:
            return EngineFacts(reachable=False, hindrance=failure.message)

    def require_fit(self) -> None:
        with guarded(self.spec):
            self.adapter.require_fit()

    def pause(self) -> None:
        self.before_pause()
        with guarded(self.spec):
            self._loader.pause()

    def load_draft(self) -> None:
        """In a pause of its own where it is not paused."""
        with guarded(self.spec):
            self.adapter.load_draft()

    def read_limits(self) -> None:
        with guarded(self.spec):
            self.limits = self.adapter.adapter_limits()

    def adapters(self) -> Mapping[str, str]:
        with guarded(self.spec):
            return self.adapter.adapters()

    def load_adapter(self, name: str, path: str) -> None:
        with guarded(self.spec):
            self.adapter.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Also where it has none of that name, whatever it answers."""
        try:
            with guarded(self.spec):
                self.adapter.unload_adapter(name)
        except EngineFailed:
            if name in self.adapters():
                raise

    def reload(self, label: str) -> ReloadOutcome:
        if self._group is not None:
            try:
                self._grants = self._group.standing()
            except EngineFailed as failure:
                return Intact(str(failure))
        try:
            with guarded(self.spec):
                outcome = self._loader.reload(self.spec.path, label)
        except EngineFailed as failure:
            return Suspect(failure.message)
        if isinstance(outcome, Done) and not outcome.resumed:
            self.after_reload()
        return outcome

    def read_back(self, label: str) -> Confirmation:
        with guarded(self.spec):
            confirmed = self._loader.read_back(label)
        if self._group is not None:
            self._group.stood(self._grants)
        return confirmed

    def resume(self) -> None:
        with guarded(self.spec):
            self.adapter.resume()

    def resume_if_it_names(self, weights: HeldWeights) -> bool:
        """At start, for an engine that a killed run may have left paused; whether it was resumed.
        `weights`: the local checkpoint's, whose files are known to be right. Whatever else the engine names,
        only a reload makes it known again."""
        facts = self.probe()
        if facts.label != label_of(weights.version) or not states(facts, weights):
            return False
        try:
            self.resume()
        except EngineFailed:
            return False
        return True

    def relabel(self, label: str) -> Confirmation:
        with guarded(self.spec):
            confirmed = self.adapter.relabel(label)
        self.facts = replace(self.facts, label=label, held=None)
        return confirmed

    @property
    def observation(self) -> Observation:
        return Observation(self.facts, self._steady, self._source)

    def serves(self, record: EngineState | None) -> int | None:
        """The version that it generates from, which may not be the local one yet; None where nobody knows."""
        if record is None or record.version is None or self.facts.paused:
            return None
        held = self.facts.held
        weights = HeldWeights(record.version, "" if held is None else held.root)
        return record.version if is_in_sync(record, self.observation, weights) else None

    @property
    def is_due(self) -> bool:
        """Whether it may be reloaded now: reachable, and not tried without success a moment ago."""
        return self.facts.reachable and self._next_try <= self._clock()

    @property
    def failed(self) -> bool:
        """Whether only somebody else can help: it took no reload for too long, or keeps silent."""
        silent = self._silent_since is not None and self._clock() - self._silent_since > self.pace.total
        return silent or self.facts.unfit or self.failures >= self.pace.rounds

    @property
    def reason(self) -> str:
        """Why it does not serve, for people."""
        if self._reason and self.facts.reachable and self.failures >= self.pace.rounds:
            unseen = self.last is None or self.last.process is None
            every = "15 to 30 s" if unseen else "5 to 10 min"
            return f"{self._reason}; retried every {every}"
        return self._reason or (PAUSED if self.facts.paused else "")

    def silence(self, facts: EngineFacts) -> str:
        """Why it counts as not reachable, and what to do about it."""
        remedy = f" ({facts.remedy})" if facts.remedy else ""
        return f"{facts.hindrance}{remedy}" if facts.hindrance else f"{self.spec.shown_url} does not answer"

    def status(self, record: EngineState | None, in_sync: bool) -> EngineStatus:
        """`in_sync`: it holds the local version. Then it serves unless somebody else paused it."""
        ready = in_sync and not self.facts.paused
        is_suspect = record is not None and record.mark is Mark.SUSPECT
        state: EngineCondition = "suspect" if is_suspect else "waiting"
        if in_sync:
            state = "serving" if ready else "paused"
        elif self.failed:
            state = "failed"
        elif not self.facts.reachable:
            state = "silent"
        phases = {} if self.last is None else self.last.phases
        return EngineStatus(
            name=self.name,
            kind=self.spec.kind,
            url=self.spec.shown_url,
            mark="unknown" if record is None else record.mark,
            version=None if record is None else record.version,
            confirmed_by="" if record is None else record.confirmed_by,
            process=self.facts.process if record is None else record.process,
            aligned=in_sync,
            reachable=self.facts.reachable,
            reason="" if ready else self.reason,
            ready=ready,
            state=state,
            failures=self.failures,
            seconds={phase: round(seconds, 6) for phase, seconds in phases.items()},
            pause_seconds=None if self.last is None else self.last.pause_seconds,
            via=self.spec.via,
            drafter=self.facts.drafter,
            live=None if self.live is None else self.live.facts,
        )

    def see(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._steady = self._steady and facts.reachable
        loaded = None if self.last is None else self.last.process
        another = None not in (facts.process, loaded) and facts.process != loaded
        if self.failures and (facts.absent or another):
            self.failures, self._next_try = 0, 0.0
        if self._taken and self.last is not None and facts.process not in (None, loaded):
            self._taken, self._next_try = 0, 0.0
        if facts.reachable or facts.absent:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = self._clock()
        if not facts.reachable:
            self._reason = self.silence(facts)
        elif self.failures == 0:
            self._reason = ""
            if self._taken >= TAKEN_AT_ONCE:
                self._reason = (
                    f"somebody else loaded other weights into it, {self._taken} times in a row: one engine "
                    "has one subscriber; it is reloaded again every few minutes"
                )

    def retry_at_once(self) -> None:
        self._next_try = 0.0

    def doubt(self, reason: str) -> None:
        self._reason = reason

    def prepare(self, state: LocalState, offer: Offer) -> bool:
        """Right before its reload. Returns whether somebody else loaded other weights into it since ours."""
        weights = weights_of(state.position)
        if self.live is not None:
            # its group is asked before it resumes whether all of them stood
            self.live.aim(weights, offer, watched=self.grouped)
        return is_taken(state.engines.get(self.name), self.observation, weights)

    def learn(self, result: EngineResult, taken: bool) -> None:
        """What a reload came to. `taken`: it was one because of somebody else's."""
        self.last, self._reason = result, result.reason
        self._steady = result.state == "served"
        if not self._steady:
            self.failures += 1
            self._next_try = self._clock() + self._delay(result.process)
            return
        self.facts = EngineFacts(
            True,
            label=None if result.confirmed_by == "status-only" else result.label,
            process=result.process,
            source=result.source,
            paused=result.paused,
            drafter=self.facts.drafter,
        )
        self._source = result.source
        self.failures, self._next_try = 0, 0.0
        if taken:
            # if it is taken again: two who bring an engine back at once would leave it paused
            now = self._clock()
            self._taken = 1 if now - self._taken_at > _PEACE else self._taken + 1
            self._taken_at = now
            if self._taken >= TAKEN_AT_ONCE:
                wait = Backoff(_RETRY_MOST, _RETRY_FAILED).pause(self._taken - TAKEN_AT_ONCE + 1)
                self._next_try = now + wait * (0.5 + 0.5 * self._jitter())

    def _delay(self, process: str | None) -> float:
        """A process that is known to have failed is left alone until another is seen; a process without
        identity may have been started anew at any time."""
        failed = self.failures >= self.pace.rounds
        longest = _RETRY_UNSEEN if process is None else _RETRY_FAILED if failed else _RETRY_MOST
        first = longest if failed else _RETRY_FIRST
        return Backoff(first, longest).pause(self.failures) * (0.5 + 0.5 * self._jitter())


class Engines:
    """All engines of a host. Used by the work thread.

    What an engine did is in the local state before a method returns or raises: after an error nothing that is
    held here is needed, and the next step goes by the state.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter] = (),
        *,
        pace: RetryPace | None = None,
        order: ReloadOrder = "together",
        look_seconds: float = 0.0,
        group: Group | None = None,
        group_patches: bool = False,
        stopping: Callable[[], bool] = lambda: False,
        traffic: Traffic | None = None,
    ) -> None:
        """`look_seconds`: between looks at engines that are all in sync.
        `group`: the other hosts whose files the engines read; `group_patches`: each stages patches for them.
        `stopping`: whether the process is to end: a rolling reload then stops after the current engine."""
        pace = RetryPace() if pace is None else pace
        self.engines = tuple(HostEngine(one, group, pace=pace) for one in adapters)
        self.order = order
        self.stopping = stopping
        self._clock, self._jitter = pace.clock, pace.jitter
        self._look_seconds, self._next_look = look_seconds, 0.0
        self._looked_at = 0.0
        self.traffic = traffic
        self._woken = threading.Event()
        self._group_patches = group_patches
        self.offers: dict[str, Offer] = {}
        """to engines that take patches, for the version that comes next"""

    def __getitem__(self, name: str) -> HostEngine:
        return next(engine for engine in self.engines if engine.name == name)

    @property
    def mapping(self) -> tuple[HostEngine, ...]:
        """Those that map the files: they are never patched under."""
        return tuple(engine for engine in self.engines if not engine.spec.copies_weights)

    @property
    def lives(self) -> Mapping[str, Live]:
        """Of engines that take patches, by name."""
        return {engine.name: engine.live for engine in self.engines if engine.live is not None}

    def close(self) -> None:
        for engine in self.engines:
            engine.adapter.close()

    def wake(self) -> None:
        """The next step looks at all engines and tries those that failed. Called by any thread."""
        self._woken.set()

    def look_if_due(self, state: LocalState | None) -> None:
        """Looks, unless all served the local version a moment ago."""
        if self._woken.is_set():
            self._woken.clear()
            self._next_look = 0.0
            for engine in self.engines:
                engine.retry_at_once()
        settled = state is not None and len(self.serving(state)) == len(self.engines)
        if not settled or self._clock() >= self._next_look:
            self.look()

    def look(self) -> None:
        jitter = 1 - LOOK_JITTER + 2 * LOOK_JITTER * self._jitter()
        self._looked_at = self._clock()
        self._next_look = self._looked_at + self._look_seconds * jitter
        self._look_at(self.engines)

    def admit(self, state: LocalState | None) -> None:
        """Lets requests through to engines whose record and last look say which version they serve."""
        if self.traffic is None:
            return
        for engine in self.engines:
            record = None if state is None else state.engines.get(engine.name)
            self.traffic.open(engine.name, engine.serves(record), engine.facts.process, self._looked_at)

    def _look_at(self, engines: Sequence[HostEngine]) -> None:
        for engine, facts in zip(engines, side_by_side(engines, HostEngine.probe), strict=True):
            before = self.engines[: self.engines.index(engine)]
            twins = [one.name for one in before if facts.unique and one.facts.process == facts.process]
            if twins:
                # one of them would resume it while the other loads it; nobody of its own is there
                hindrance = f"it is the engine {twins[0]}, given twice: remove one of them"
                facts = EngineFacts(reachable=False, absent=True, hindrance=hindrance)
            engine.see(facts)

    def in_sync(self, state: LocalState) -> frozenset[str]:
        """Names of the engines that hold the local checkpoint's bytes, as of the last look."""
        weights = weights_of(state.position)
        return frozenset(
            engine.name
            for engine in self.engines
            if is_in_sync(state.engines.get(engine.name), engine.observation, weights)
        )

    def serving(self, state: LocalState) -> frozenset[str]:
        """Those in sync that generate, as far as they tell."""
        return frozenset(name for name in self.in_sync(state) if not self[name].facts.paused)

    def status(self, state: LocalState | None) -> tuple[EngineStatus, ...]:
        """Of all engines, as of the last look."""
        in_sync = frozenset[str]() if state is None else self.in_sync(state)
        records = {} if state is None else state.engines
        return tuple(one.status(records.get(one.name), one.name in in_sync) for one in self.engines)

    def due(self, state: LocalState) -> tuple[HostEngine, ...]:
        in_sync = self.in_sync(state)
        return tuple(one for one in self.engines if one.is_due and one.name not in in_sync)

    def retry_at_once(self) -> None:
        """A new version: engines that did not take the old one are asked again without delay. A failed engine
        must not hold up the others with every version."""
        for engine in self.engines:
            if not engine.failed:
                engine.retry_at_once()

    def doubt(self, local: LocalCheckpoint, name: str, reason: str) -> None:
        """Its memory does not hold what it confirmed: only a reload makes it known again."""
        record = replace(noted(local.state.engines.get(name), Mark.SUSPECT), reason=reason)
        local.save(with_record(local.state, name, record))
        self[name].doubt(reason)

    def confirm(self, local: LocalCheckpoint, name: str) -> None:
        """All of its memory was read, and is the local version."""
        record = local.state.engines[name]
        if record.confirmed_by != "digest":
            local.save(with_record(local.state, name, replace(record, confirmed_by="digest")))

    def resume_noted(self, state: LocalState | None) -> None:
        """Lets engines go on that a killed run left paused with the weights they name. Their note stays: they
        are reloaded as soon as the local checkpoint is open."""
        if state is None or state.phase is not Phase.CLEAN:
            return
        for engine in self.engines:
            record = state.engines.get(engine.name)
            if record is not None and record.mark is Mark.PAUSING:
                engine.resume_if_it_names(weights_of(state.position))

    def resume_late(self, local: LocalCheckpoint) -> None:
        """Lets engines go on that hold the local version and are paused: by a pause of ours that was not
        answered and came about later, perhaps. Another one is nobody's business here."""
        paused = self.in_sync(local.state) - self.serving(local.state)
        for name in paused & local.state.unanswered:
            with contextlib.suppress(EngineFailed):
                self[name].resume()
                local.save(local.state.but(unanswered=local.state.unanswered - {name}))
                self._look_at([self[name]])

    def pause_mapping(self, note: Callable[[str], None]) -> None:
        """Pauses all engines that map the files. `note(name)` is durable before its engine is paused."""
        for engine in self.mapping:
            if not engine.probe().absent:
                note(engine.name)
                engine.pause()

    def relabel(self, local: LocalCheckpoint, before: int) -> None:
        """Tells engines that are known to hold version `before` that its bytes have a new number. A label
        would hide whatever else one holds: all others are reloaded."""
        self.look()
        position = local.state.position
        records = dict(local.state.engines)
        for engine in self.engines:
            record = records.get(engine.name)
            if record is None or record.mark is not Mark.SERVED or record.version != before:
                continue
            del records[engine.name]
            if may_relabel(record, engine.observation, HeldWeights(before, position.root)):
                with contextlib.suppress(EngineFailed):
                    confirmed = engine.relabel(label_of(position.version))
                    records[engine.name] = replace(record, version=position.version, confirmed_by=confirmed)
        local.save(local.state.but(engines=records))

    def offer(self, local: LocalCheckpoint, staged: Step, readers: Readers | None = None) -> None:
        """Has a patch made of what leads to the staged version, and checked by each engine that takes
        patches. Engines serve; nothing of the local checkpoint is written. The next reload uses what they
        answer."""
        lives, steps = self.lives, (*local.state.undo, staged)
        asked = [self[name] for name in lives]
        self._look_at(asked)
        # one long step of its own, a first compilation say, keeps an engine from answering a look
        self._look_at([one for one in asked if not (one.facts.reachable or one.facts.absent)])
        self.offers = {}
        starts: dict[str, tuple[int, int]] = {}
        for name, live in lives.items():
            record, grouped = local.state.engines.get(name), self[name].grouped and not self._group_patches
            start = start_of(self[name], record, steps, grouped=grouped)
            if isinstance(start, Offer):
                self.offers[name] = start
            elif live.waits():
                self.offers[name] = WAITS
            else:
                starts[name] = start
        if not starts:
            return
        common, _ = Counter(starts.values()).most_common(1)[0]
        self.offers |= {name: APART for name, its in starts.items() if its != common}
        fit = [name for name, its in starts.items() if its == common]
        version, first = common
        made = write_patch(local, steps[first:], version, readers)
        if isinstance(made, Offer):
            checked = [made] * len(fit)
        else:
            checked = side_by_side([lives[name] for name in fit], lambda live: live.check(made))
        failpoint("engine.checked")
        self.offers |= dict(zip(fit, checked, strict=True))

    def forget_offers(self, local: LocalCheckpoint) -> None:
        """After the reload that they were for."""
        if self.offers:
            self.offers = {}
            # what stays is dropped before the next one is made
            with contextlib.suppress(OSError, WeightcastError):
                drop_engine_patches(local.paths)
