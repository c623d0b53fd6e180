"""The reload of one engine: note, pause, reload, read back, resume, note.

An engine resumes only when its weights are known: the reload was never sent, was refused with the old weights
untouched, or succeeded and was read back. Otherwise it stays paused, since resuming it would serve wrong
tokens or kill it, and is reloaded again within bounds. The caller holds the patch lock throughout, and writes
files that an engine maps between `pause` and `reload`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from weightcast.shared.base.errors import EngineFailed
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.daemon.backoff import Backoff
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    EngineFacts,
    EngineSpec,
    HeldWeights,
    Intact,
    KeyRefused,
    NotSent,
    Suspect,
)
from weightcast.subscriber.engines.proxy import EngineProxy
from weightcast.subscriber.engines.rules import EngineResult, PhaseSeconds, ResultState, label_of, states

ReloadMark = Literal["pausing", "served", "refused", "suspect"]
"""What must be durable before the next call: `pausing` before the first, `suspect` when a reload went wrong
and before one whose label the engine shows already, `served` or `refused` after the engine resumed."""


class Notes(Protocol):
    """What the host knows of its engines, by name."""

    @property
    def suspects(self) -> Collection[str]:
        """Engines whose weights were in doubt before: only a good reload resumes them."""

    @property
    def serving(self) -> Collection[str]:
        """Engines that we left serving: a pause in which one of them is found was made by somebody else."""

    def note(self, name: str, mark: ReloadMark) -> None:
        """Durable when it returns."""


@dataclass(frozen=True)
class RetryPace:
    """How often and how long a doubtful engine is tried again. Times in seconds."""

    attempts: int = 3
    first: float = 0.5
    longest: float = 10.0
    total: float = 600.0
    """no attempt begins later than this after the pause"""
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


def pace_of(spec: EngineSpec, usual: RetryPace) -> RetryPace:
    """An engine's own, where it is given a deadline of its own."""
    return usual if spec.deadline is None else replace(usual, total=spec.deadline)


def silence(engine: EngineProxy, facts: EngineFacts) -> str:
    """Why it counts as not reachable, and what to do about it."""
    remedy = f" ({facts.remedy})" if facts.remedy else ""
    return f"{facts.hindrance}{remedy}" if facts.hindrance else f"{engine.spec.shown_url} does not answer"


class EngineReload:
    """One engine on its way to the weights of `version` under its `spec.path`: `pause`, then `reload`; or
    `step_back` where nothing was written. Raises nothing for what an engine does."""

    def __init__(self, engine: EngineProxy, version: int, notes: Notes, pace: RetryPace) -> None:
        self.engine = engine
        self.name = engine.spec.name
        self._version, self._label = version, label_of(version)
        self._notes = notes
        self._pace = pace_of(engine.spec, pace)
        self._suspect = self.name in notes.suspects
        self._keeps_pause = False
        self._absent = ""
        """why no process can be paused"""
        self._process: str | None = None
        self._source: str | None = None
        self._began = 0.0
        self._resumed: float | None = None
        self._done = Done()
        """of the last reload that was one"""
        self._attempts = 0
        self._patched = self._unanswered = self._paused = False
        self._phases = PhaseSeconds()

    def run(self) -> EngineResult:
        return self.pause() or self.reload()

    def pause(self) -> EngineResult | None:
        """None: it is paused, or no process is there; the files may be written. Else what became of it: it
        serves the weights from before, or is in doubt."""
        facts = self.engine.probe()
        self._process = facts.process
        if facts.absent:
            self._absent = silence(self.engine, facts)
            return None
        if not facts.reachable:
            # One that is merely slow holds what it held; one that starts may read files under a patch.
            if not self.engine.copies_weights:
                self._doubt()
            return self._result("failed", silence(self.engine, facts))
        self._keeps_pause = self.name in self._notes.serving and facts.paused is True
        # A label that it shows already would say after a kill that half a reload is a whole one.
        self._note("suspect" if self._suspect or facts.label == self._label else "pausing")
        self._began = self._pace.clock()
        try:
            with self._timed("pause"):
                self.engine.pause()
        except EngineFailed as failure:
            self._not_paused(failure)
            return self.step_back(str(failure))
        failpoint("engine.paused")
        return None

    def reload(self, *, patched: bool = False) -> EngineResult:
        """After `pause`: reload, read back, resume. `patched`: the files changed since the pause."""
        if self._absent:
            self._doubt()
            return self._result("failed", self._absent)
        if patched:
            self._patched = True
            self._add("patch", self._pace.clock() - self._began - self._phases.pause)
            failpoint("engine.patched")
        outcome = self._reload()
        if isinstance(outcome, Suspect):
            return self._result("failed", outcome.reason)
        if isinstance(outcome, Intact):
            return self.step_back(outcome.reason)
        return self._serve(outcome)

    def step_back(self, reason: str) -> EngineResult:
        """Resumes on the weights from before."""
        if self._absent:
            self._doubt()
        if self._suspect:
            return self._result("failed", reason)
        failure = self._resume()
        if failure is not None:
            self._doubt()
            return self._result("failed", f"{reason}; then {failure}")
        self._note("refused")
        return self._result("refused", reason)

    def abandon(self, reason: str, *, written: bool) -> None:
        """After `pause`, when the files could not be written. Where some were, it stays paused, in doubt."""
        if self._absent:
            return
        if written:
            self._doubt()
        else:
            self.step_back(reason)

    def _note(self, mark: ReloadMark) -> None:
        self._notes.note(self.name, mark)

    @contextmanager
    def _timed(self, phase: Literal["pause", "reload", "read_back", "resume"]) -> Iterator[None]:
        start = self._pace.clock()
        try:
            yield
        finally:
            self._add(phase, self._pace.clock() - start)

    def _add(self, phase: str, seconds: float) -> None:
        self._phases = replace(self._phases, **{phase: getattr(self._phases, phase) + seconds})

    def _result(self, state: ResultState, reason: str, confirmed: Confirmation | None = None) -> EngineResult:
        return EngineResult(
            name=self.name,
            state=state,
            version=self._version,
            label=self._label,
            reason=reason,
            confirmed_by=confirmed,
            process=self._process,
            source=self._source,
            attempts=self._attempts,
            phases=self._phases,
            unanswered=self._unanswered,
            paused=self._paused,
            pause_seconds=self._paused_for(),
        )

    def _paused_for(self) -> float | None:
        if self._resumed is None:
            return None
        if self._done.resumed and self._done.still is not None:
            return self._done.still
        return self._resumed - self._began

    def _not_paused(self, failure: EngineFailed) -> None:
        """No reload was tried; unless the engine has not seen the pause, it may come late. An engine that
        refused the key was not paused, and would refuse to be resumed."""
        self._unanswered = not isinstance(failure, NotSent | KeyRefused)
        self._keeps_pause |= isinstance(failure, KeyRefused)

    def _reload(self) -> Confirmation | Intact | Suspect:
        outcome: Confirmation | Intact | Suspect = Suspect("no reload was tried")
        for _ in self._pace.tries(self._began):
            self._attempts += 1
            outcome = self._reload_once()
            # "the weights from before" may not be served where they are in doubt, or are patched files
            if isinstance(outcome, Intact) and (self._suspect or self._patched):
                outcome = Suspect(outcome.reason)
            if not isinstance(outcome, Suspect):
                break
            self._doubt()
        return outcome

    def _reload_once(self) -> Confirmation | Intact | Suspect:
        self._done = Done()
        with self._timed("reload"):
            outcome = self.engine.reload(self.engine.spec.path, self._version, self._label)
        failpoint("engine.reloaded")
        if not isinstance(outcome, Done):
            if isinstance(outcome, Intact):
                self._attempts -= outcome.untried or outcome.unpaused is not None
                if outcome.unpaused is not None:
                    self._not_paused(outcome.unpaused)
            return outcome
        self._done = outcome
        try:
            with self._timed("read_back"):
                confirmed = self.engine.read_back(self._label)
        except EngineFailed as failure:
            return Suspect(str(failure))
        failpoint("engine.read-back")
        return confirmed

    def _doubt(self) -> None:
        if not self._suspect:
            self._note("suspect")
        self._suspect = True

    def _serve(self, confirmed: Confirmation) -> EngineResult:
        failure = self._resume()
        if failure is not None:
            # The weights are right: where the note is `pausing` it stays, and says that a resume is due.
            return self._result("failed", str(failure))
        now = self.engine.probe()
        if not now.reachable or (None not in (now.process, self._process) and now.process != self._process):
            self._doubt()
            return self._result("suspect", f"{self.engine.spec.shown_url} went away during its reload")
        self._process, self._source, self._paused = now.process, now.source, now.paused is True
        self._note("served")
        return self._result("served", "", confirmed)

    def _resume(self) -> EngineFailed | None:
        if self._done.resumed:
            self._resumed = self._pace.clock()
            failpoint("engine.resumed")
            return None
        if self._keeps_pause:
            return None
        failure: EngineFailed | None = None
        for _ in self._pace.tries(self._began):
            try:
                with self._timed("resume"):
                    self.engine.resume()
            except EngineFailed as error:
                failure = error
            else:
                self._resumed = self._pace.clock()
                failpoint("engine.resumed")
                return None
        return failure


def pause_together(reloads: Sequence[EngineReload], paused: list[EngineReload]) -> list[EngineResult]:
    """Pauses all of them, and appends each to `paused` at once. Returns nothing when all are paused; else the
    results of the engine that did not pause and of those paused before: they are resumed in reverse order."""
    for one in reloads:
        result = one.pause()
        if result is None:
            paused.append(one)
            continue
        results = [result]
        while paused:
            last = results[-1]
            results.append(paused.pop().step_back(f"{last.name} was not paused: {last.reason}"))
        return results
    return []


def abandon_all(paused: Sequence[EngineReload], error: BaseException, *, written: bool) -> None:
    """The one paused last comes first; each has its turn, whatever becomes of the others."""
    with ExitStack() as stack:
        for one in paused:
            stack.callback(one.abandon, str(error), written=written)


def resume_if_it_names(engine: EngineProxy, weights: HeldWeights) -> bool:
    """At start, for an engine that a killed run may have left paused; whether it was resumed.

    `weights`: the local checkpoint's, whose files are known to be right. Whatever else the engine names, only
    a reload makes it known again.
    """
    facts = engine.probe()
    if facts.label != label_of(weights.version) or not states(facts, weights):
        return False
    try:
        engine.resume()
    except EngineFailed:
        return False
    return True
