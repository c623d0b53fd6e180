"""Engines of a host: looked at, reloaded in parallel, and noted in the local checkpoint's durable state.

Every method is called by the work thread. Threads of its own live only as long as a call.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from weightcast.shared.base.errors import EngineFailed, NeedsReseed, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, Readers
from weightcast.shared.checkpoint.state.state import EngineState, LocalState, Mark, Phase, Step
from weightcast.shared.checkpoint.update.engine_patch import drop_engine_patches
from weightcast.shared.daemon.backoff import Backoff
from weightcast.subscriber.engines.base import Engine, EngineFacts, HeldWeights
from weightcast.subscriber.engines.live import Candidate, Live, Offer, live_of, make_offers
from weightcast.subscriber.engines.proxy import EngineProxy, Group
from weightcast.subscriber.engines.reload_one import (
    EngineReload,
    ReloadMark,
    RetryPace,
    abandon_all,
    pace_of,
    pause_together,
    resume_if_it_names,
    silence,
)
from weightcast.subscriber.engines.rules import (
    EngineResult,
    Observation,
    ReloadOrder,
    after,
    goes_on,
    in_doubt,
    is_another,
    is_in_sync,
    is_taken,
    label_of,
    may_relabel,
    noted,
    reload_order,
    weights_of,
)

_RETRY_FIRST, _RETRY_MOST, _RETRY_FAILED = 1.0, 60.0, 600.0
_RETRY_UNSEEN = 30.0
"""the longest before the next try of an engine whose restarts cannot be seen"""
LOOK_JITTER = 0.2
PAUSED = (
    "it is paused, and not by this subscriber: requests wait until whoever paused it resumes it "
    "(vLLM: POST /resume)"
)
TAKEN_AT_ONCE = 3
"""times in a row that an engine is brought back at once from what somebody else loaded into it"""
_PEACE = 2 * _RETRY_FAILED
"""seconds without that after which the count begins anew"""
FAILED_AFTER = 5
"""rounds of failed reloads in a row until an engine counts as failed"""
E = TypeVar("E")
T = TypeVar("T")
UNSEEN = EngineFacts(reachable=False)


@dataclass
class _Known:
    """What this process remembers of an engine; a restart forgets it."""

    facts: EngineFacts = UNSEEN
    steady: bool = False
    source: str | None = None
    """the directory that it named after our reload"""
    reason: str = ""
    failures: int = 0
    """rounds of failed reloads in a row"""
    next_try: float = 0.0
    process: str | None = None
    """identity of the process that failed"""
    silent_since: float | None = None
    last: EngineResult | None = None
    taken: int = 0
    """times in a row that somebody else loaded other weights into the process that we had loaded"""
    taken_at: float = 0.0

    def observation(self) -> Observation:
        return Observation(self.facts, self.steady, self.source)

    def is_another(self, facts: EngineFacts) -> bool:
        """Whether the process that failed is gone."""
        return facts.absent or (None not in (facts.process, self.process) and facts.process != self.process)


class Engines:
    """All engines of a host. Used by the work thread; in a reload each engine has a thread of its own.

    What an engine did is in the local state before a method returns or raises: after an error nothing that is
    held here is needed, and the next step goes by the state.
    """

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        pace: RetryPace | None = None,
        clock: Callable[[], float] = time.monotonic,
        order: ReloadOrder = "together",
        failed_after: int = FAILED_AFTER,
        look_seconds: float = 0.0,
        jitter: Callable[[], float] = random.random,
        group: Group | None = None,
        group_patches: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`look_seconds`: between looks at engines that are all in sync. `jitter`: uniform in [0, 1).
        `group`: the other hosts whose files the engines read; `group_patches`: each stages patches for them.
        `stopping`: whether the process is to end: a rolling reload then stops after the current engine."""
        self.engines = tuple(EngineProxy(engine, group) for engine in engines)
        self.order = order
        self.pace = RetryPace() if pace is None else pace
        self._clock = clock
        self._failed_after = failed_after
        self._look_seconds = look_seconds
        self._jitter = jitter
        self._next_look = 0.0
        self._woken = threading.Event()
        self._group_patches = group_patches
        self.stopping = stopping
        specs = [engine.spec for engine in self.engines]
        self._deadlines = {spec.name: pace_of(spec, self.pace).total for spec in specs}
        self._known = {engine.spec.name: _Known() for engine in self.engines}
        self._offers: dict[str, Offer] = {}
        """to engines that take patches, for the version that comes next"""

    @property
    def mapping(self) -> tuple[EngineProxy, ...]:
        """Those that map the files: they are never patched under."""
        return tuple(engine for engine in self.engines if not engine.copies_weights)

    @property
    def mapping_present(self) -> tuple[EngineProxy, ...]:
        """Those of them whose process was there at the last look."""
        return tuple(engine for engine in self.mapping if not self._known[engine.spec.name].facts.absent)

    @property
    def troubled(self) -> frozenset[str]:
        """Names of the engines whose last reload failed."""
        return frozenset(name for name, known in self._known.items() if known.failures)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def facts(self, name: str) -> EngineFacts:
        return self._known[name].facts

    def reason(self, name: str) -> str:
        known = self._known[name]
        if known.reason and known.facts.reachable and known.failures >= self._failed_after:
            every = "15 to 30 s" if known.process is None else "5 to 10 min"
            return f"{known.reason}; retried every {every}, and at once by `weightcast wake URL`"
        return known.reason or (PAUSED if known.facts.paused else "")

    def deadline(self, name: str) -> float:
        """Seconds that a reload of the engine may take."""
        return self._deadlines[name]

    def last(self, name: str) -> EngineResult | None:
        """What the last alignment of this process came to."""
        return self._known[name].last

    def failures(self, name: str) -> int:
        return self._known[name].failures

    def failed(self, name: str) -> bool:
        """Whether only somebody else can help: it took no reload for too long, or keeps silent."""
        known = self._known[name]
        silent = known.silent_since is not None and self._clock() - known.silent_since > self.deadline(name)
        return silent or known.facts.unfit or known.failures >= self._failed_after

    def wake(self) -> None:
        """The next step looks at all engines and tries those that failed. Called by any thread."""
        self._woken.set()

    def look_if_due(self, state: LocalState | None) -> None:
        """Looks, unless all served the local version a moment ago."""
        if self._woken.is_set():
            self._woken.clear()
            self._next_look = 0.0
            for known in self._known.values():
                known.next_try = 0.0
        settled = state is not None and len(self.serving(state)) == len(self.engines)
        if not settled or self._clock() >= self._next_look:
            self.look()

    def look(self) -> None:
        """Asks every engine what it is."""
        jitter = 1 - LOOK_JITTER + 2 * LOOK_JITTER * self._jitter()
        self._next_look = self._clock() + self._look_seconds * jitter
        for engine, facts in zip(self.engines, self.each(self.engines, lambda e: e.probe()), strict=True):
            self._see(engine, facts)

    def _see(self, engine: EngineProxy, facts: EngineFacts) -> None:
        known = self._known[engine.spec.name]
        duplicate = self._duplicate_of(engine, facts)
        if duplicate is not None:
            # one of them would resume it while the other loads it; nobody of its own is there
            hindrance = f"it is the engine {duplicate}, given twice: remove one of them"
            facts = EngineFacts(reachable=False, absent=True, hindrance=hindrance)
        known.facts = facts
        known.steady = known.steady and facts.reachable
        if known.failures and known.is_another(facts):
            known.failures, known.next_try = 0, 0.0
        if known.taken and known.last is not None and facts.process not in (None, known.last.process):
            known.taken, known.next_try = 0, 0.0
        if facts.reachable or facts.absent:
            known.silent_since = None
        elif known.silent_since is None:
            known.silent_since = self._clock()
        if not facts.reachable:
            known.reason = silence(engine, facts)
        elif known.failures == 0:
            known.reason = _contested(known.taken) if known.taken >= TAKEN_AT_ONCE else ""

    def _duplicate_of(self, engine: EngineProxy, facts: EngineFacts) -> str | None:
        """The name of the first option that leads to the same process."""
        for one in self.engines[: self.engines.index(engine)]:
            if facts.unique and self._known[one.spec.name].facts.process == facts.process:
                return one.spec.name
        return None

    def in_sync(self, state: LocalState) -> frozenset[str]:
        """Names of the engines that hold the local checkpoint's bytes, as of the last look."""
        return frozenset(
            name
            for name, known in self._known.items()
            if is_in_sync(state.engines.get(name), known.observation(), weights_of(state.position))
        )

    def serving(self, state: LocalState) -> frozenset[str]:
        """Those in sync that generate, as far as they tell."""
        return frozenset(name for name in self.in_sync(state) if not self._known[name].facts.paused)

    def due(self, state: LocalState) -> tuple[EngineProxy, ...]:
        """Engines to reload now: reachable, not in sync, and not tried without success a moment ago."""
        in_sync = self.in_sync(state)
        return tuple(engine for engine in self._ready() if engine.spec.name not in in_sync)

    def _ready(self) -> tuple[EngineProxy, ...]:
        now = self._clock()
        known = self._known
        return tuple(
            engine
            for engine in self.engines
            if known[engine.spec.name].facts.reachable and known[engine.spec.name].next_try <= now
        )

    def retry_at_once(self) -> None:
        """A new version: engines that did not take the old one are asked again without delay. A failed engine
        must not hold up the others with every version."""
        for name, known in self._known.items():
            if not self.failed(name):
                known.next_try = 0.0

    def doubt(self, local: LocalCheckpoint, name: str, reason: str) -> None:
        """Its memory does not hold what it confirmed: only a reload makes it known again."""
        known = local.state.engines.get(name)
        record = replace(noted(known, Mark.SUSPECT), reason=reason)
        local.save(local.state.but(engines={**local.state.engines, name: record}))
        self._known[name].reason = reason

    def confirm(self, local: LocalCheckpoint, name: str) -> None:
        """All of its memory was read, and is the local version."""
        record = local.state.engines[name]
        if record.confirmed_by != "digest":
            record = replace(record, confirmed_by="digest")
            local.save(local.state.but(engines={**local.state.engines, name: record}))

    def resume_noted(self, state: LocalState) -> None:
        """Lets engines go on that a killed run left paused with the weights they name. Their note stays: they
        are reloaded as soon as the local checkpoint is open."""
        if state.phase is not Phase.CLEAN:
            return
        for engine in self.engines:
            record = state.engines.get(engine.spec.name)
            if record is not None and record.mark is Mark.PAUSING:
                resume_if_it_names(engine, weights_of(state.position))

    def resume_late(self, local: LocalCheckpoint) -> None:
        """Lets engines go on that hold the local version and are paused: by a pause of ours that was not
        answered and came about later, perhaps. Another one is nobody's business here."""
        paused = self.in_sync(local.state) - self.serving(local.state)
        for engine in self.engines:
            name = engine.spec.name
            if name not in paused & local.state.unanswered:
                continue
            with contextlib.suppress(EngineFailed):
                engine.resume()
                local.save(local.state.but(unanswered=local.state.unanswered - {name}))
                self._see(engine, engine.probe())

    def pause_mapping(self, note: Callable[[str], None]) -> None:
        """Pauses all engines that map the files. `note(name)` is durable before its engine is paused."""
        for engine in self.mapping:
            if not engine.probe().absent:
                note(engine.spec.name)
                engine.pause()

    def relabel(self, local: LocalCheckpoint, before: int) -> None:
        """Tells engines that are known to hold version `before` that its bytes have a new number. A label
        would hide whatever else one holds: all others are reloaded."""
        self.look()
        position = local.state.position
        records = dict(local.state.engines)
        for engine in self.engines:
            name = engine.spec.name
            record, known = records.get(name), self._known[name]
            if record is None or record.mark is not Mark.SERVED or record.version != before:
                continue
            del records[name]
            if not may_relabel(record, known.observation(), HeldWeights(before, position.root)):
                continue
            label = label_of(position.version)
            with contextlib.suppress(EngineFailed):
                confirmed = engine.relabel(label)
                known.facts = replace(known.facts, label=label, held=None)
                records[name] = replace(record, version=position.version, confirmed_by=confirmed)
        local.save(local.state.but(engines=records))

    @property
    def lives(self) -> Mapping[str, Live]:
        """Engines that take patches, by name."""
        found = ((engine.spec.name, live_of(engine.adapter)) for engine in self.engines)
        return {name: live for name, live in found if live is not None}

    def offer(self, local: LocalCheckpoint, staged: Step, readers: Readers | None = None) -> None:
        """Has a patch made of what leads to the staged version, and checked by each engine that takes
        patches. Engines serve; nothing of the local checkpoint is written. The next reload uses what they
        answer."""
        lives = self.lives
        engines = [engine for engine in self.engines if engine.spec.name in lives]
        for engine, facts in zip(engines, self.each(engines, lambda e: e.probe()), strict=True):
            self._see(engine, facts)
        candidates = [self._candidate(engine, lives[engine.spec.name], local) for engine in engines]
        if candidates:
            steps = (*local.state.undo, staged)
            self._offers = make_offers(local, steps, candidates, self.each, readers)

    def _candidate(self, engine: EngineProxy, live: Live, local: LocalCheckpoint) -> Candidate:
        name = engine.spec.name
        grouped = engine.grouped and not self._group_patches
        return Candidate(name, live, local.state.engines.get(name), self._known[name].observation(), grouped)

    @contextlib.contextmanager
    def reloading(
        self,
        local: LocalCheckpoint,
        version: int,
        *,
        only: Sequence[EngineProxy] | None = None,
        report: Callable[[], None] = lambda: None,
    ) -> Iterator[Reload]:
        """A reload of the engines to `version`, under the patch lock, in the order that the block gives it.
        `only`: these engines, else all that are ready; those that map the files are always among them where
        the block pauses them. `report` is called after every engine. An error in the block resumes engines
        that are paused still, if no word of the files was written; else they stay paused, in doubt."""
        reload = Reload(self, local, version, list(self._ready() if only is None else only), report)
        try:
            yield reload
        except BaseException as error:
            reload.abandon(error)
            raise
        finally:
            if self._offers:
                self._offers = {}
                # what stays is dropped before the next one is made
                with contextlib.suppress(OSError, WeightcastError):
                    drop_engine_patches(local.paths)

    def prepare(self, engine: EngineProxy, state: LocalState) -> bool:
        """Right before its reload. Returns whether somebody else loaded other weights into it since ours."""
        name, live = engine.spec.name, live_of(engine.adapter)
        if live is not None:
            aim = self._offers.get(name, Offer()).aim(state.position)
            # its group is asked before it resumes whether all of them stood
            live.aim(replace(aim, watched=engine.grouped))
        return is_taken(state.engines.get(name), self._known[name].observation(), weights_of(state.position))

    def learn(self, result: EngineResult, taken: bool) -> None:
        self._learn(result)
        if taken and result.state == "served":
            self._bring_back_later(self._known[result.name])

    def _bring_back_later(self, known: _Known) -> None:
        """If it is taken again: two who bring an engine back at once would leave it paused."""
        now = self._clock()
        known.taken = 1 if now - known.taken_at > _PEACE else known.taken + 1
        known.taken_at = now
        if known.taken >= TAKEN_AT_ONCE:
            wait = Backoff(_RETRY_MOST, _RETRY_FAILED).pause(known.taken - TAKEN_AT_ONCE + 1)
            known.next_try = now + wait * (0.5 + 0.5 * self._jitter())

    def each(self, engines: Sequence[E], work: Callable[[E], T]) -> list[T]:
        """In threads, so that an interrupt of the caller waits for engines that are paused."""
        if not engines:
            return []
        with ThreadPoolExecutor(len(engines), thread_name_prefix="engine") as pool:
            return list(pool.map(work, engines))

    def _learn(self, result: EngineResult) -> None:
        known = self._known[result.name]
        known.last, known.reason = result, result.reason
        known.steady = result.state == "served"
        if known.steady:
            label = None if result.confirmed_by == "status-only" else result.label
            known.facts = EngineFacts(
                True,
                label=label,
                process=result.process,
                source=result.source,
                paused=result.paused,
                drafter=known.facts.drafter,
            )
            known.source = result.source
            known.failures, known.next_try = 0, 0.0
        else:
            known.process = result.process
            known.failures += 1
            known.next_try = self._clock() + self._delay(known)

    def _delay(self, known: _Known) -> float:
        """A process that is known to have failed is left alone until another is seen; a process without
        identity may have been started anew at any time."""
        failed = known.failures >= self._failed_after
        longest = _RETRY_UNSEEN if known.process is None else _RETRY_FAILED if failed else _RETRY_MOST
        first = longest if failed else _RETRY_FIRST
        return Backoff(first, longest).pause(known.failures) * (0.5 + 0.5 * self._jitter())


def _contested(taken: int) -> str:
    return (
        f"somebody else loaded other weights into it, {taken} times in a row: one engine has one subscriber; "
        "it is brought back once in some minutes"
    )


class Reload:
    """One reload of a host's engines. The verbs, in their order:

    pause_mapping       where files are to be written: they are, between this and the first batch
    batches, run        the caller proves the files before it runs each batch
    """

    def __init__(
        self,
        engines: Engines,
        local: LocalCheckpoint,
        version: int,
        chosen: list[EngineProxy],
        report: Callable[[], None],
    ) -> None:
        self.results: list[EngineResult] = []
        self._engines, self._local, self._version = engines, local, version
        self._before = local.state.position
        self._chosen = chosen
        self._notes = _Notes(local, report)
        self._paused: list[EngineReload] = []
        """engines that map the files, in the order of their pauses; those whose process is absent, too"""

    def pause_mapping(self) -> None:
        """Pauses all engines that map the files. Raises EngineFailed when one does not pause: then those
        paused before it were resumed."""
        self._chosen = [engine for engine in self._chosen if engine.copies_weights]
        together = reload_order(self._engines.mapping_present, self._notes.suspects)
        results = pause_together([self._reload_of(engine) for engine in together], self._paused)
        for result in results:
            self._take(result)
        if results:
            reasons = "; ".join(result.reason for result in results if result.reason)
            raise EngineFailed(
                f"version {self._version} is not patched in: {reasons}",
                remedy="engines that map the files must be paused first; see the engine's log",
            )

    def batches(self) -> Iterator[tuple[EngineReload, ...]]:
        """Engines to reload next, each batch once the one before is done: those that are paused, then all
        others; in a rolling reload one after the other. Those left when one is not confirmed, or the process
        is to end, have their turn in a later round, before it."""
        if self._paused:
            yield tuple(self._paused)
        doubtful = self._notes.suspects | self._engines.troubled
        if self._engines.order == "rolling":
            for number, engine in enumerate(reload_order(self._chosen, doubtful)):
                goes_wrong = not all(goes_on(one, one.name in doubtful) for one in self.results)
                if goes_wrong or (number and self._engines.stopping()):
                    return
                yield (self._reload_of(engine),)
        elif self._chosen:
            yield tuple(map(self._reload_of, self._chosen))

    def run(self, batch: Sequence[EngineReload]) -> None:
        """Reloads, reads back and resumes: engines that are paused in reverse order, others side by side."""
        if self._paused:
            while self._paused:
                self.results.append(self._take(self._paused.pop().reload(patched=True)))
        else:
            self.results += self._engines.each(batch, self._run_one)

    def abandon(self, error: BaseException) -> None:
        """After an error in the block of `reloading`."""
        state = self._local.state
        untouched = state.phase is Phase.CLEAN and state.position == self._before
        # the files of a group's other hosts may be patched already
        grouped = any(one.engine.grouped for one in self._paused)
        written = grouped or not (untouched and isinstance(error, NeedsReseed | OSError))
        try:
            abandon_all(self._paused, error, written=written)
        finally:
            if not written:
                for one in self._paused:
                    self._notes.take_back(one.name)

    def _reload_of(self, engine: EngineProxy) -> EngineReload:
        return EngineReload(engine, self._version, self._notes, self._engines.pace)

    def _run_one(self, one: EngineReload) -> EngineResult:
        taken = self._engines.prepare(one.engine, self._local.state)
        return self._take(one.run(), taken)

    def _take(self, result: EngineResult, taken: bool = False) -> EngineResult:
        self._engines.learn(result, taken)
        self._notes.record(result)
        return result


class _Notes:
    """Notes and results of one reload, each durable when its call returns; engines come in threads of their
    own."""

    def __init__(self, local: LocalCheckpoint, report: Callable[[], None]) -> None:
        self.local = local
        self.suspects = in_doubt(local.state.engines)
        self._unanswered = local.state.unanswered
        self.serving = frozenset(local.state.engines) - self.suspects - self._unanswered
        """a pause that these are found in is somebody else's"""
        self._before: Mapping[str, EngineState] = dict(local.state.engines)
        self._report = report
        self._lock = threading.Lock()

    def note(self, name: str, mark: ReloadMark) -> None:
        # What an engine came to is recorded with its result; killed before, the older note is the safer one.
        if mark not in ("pausing", "suspect"):
            return
        with self._lock:
            known = self.local.state.engines.get(name)
            self._save(name, noted(known, Mark(mark)), unanswered=True)
            self._report()
        failpoint("engine.noted")

    def take_back(self, name: str) -> None:
        """What was noted of an engine that was resumed on the weights from before. Where it was not, the note
        says `suspect` by now."""
        with self._lock:
            now = self.local.state.engines.get(name)
            if now is not None and now.mark is Mark.PAUSING and name not in self.suspects:
                self._save(name, self._before.get(name), unanswered=name in self._unanswered)
                self._report()

    def record(self, result: EngineResult) -> None:
        with self._lock:
            name = result.name
            before, now = self._before.get(name), self.local.state.engines.get(name)
            late = name in self._unanswered and not is_another(before, result)
            self._save(name, after(before, result, now), unanswered=result.unanswered or late)
            failpoint("engine.recorded")
            self._report()

    def _save(self, name: str, record: EngineState | None, *, unanswered: bool) -> None:
        state = self.local.state
        names = state.unanswered | {name} if unanswered else state.unanswered - {name}
        records = {known: each for known, each in state.engines.items() if known != name}
        if record is not None:
            records[name] = record
        if (records, names) != (dict(state.engines), state.unanswered):
            self.local.save(state.but(engines=records, unanswered=names))
