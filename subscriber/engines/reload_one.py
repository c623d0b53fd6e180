"""The order of an engine's reload: note, pause, patch, reload, read back, resume, note.

An engine resumes only when its weights are known: the reload was never sent, was refused with the old weights
untouched, or succeeded and was read back. Otherwise it stays paused, since resuming it would serve wrong
tokens or kill it, and is reloaded again within bounds. The caller holds the patch lock throughout.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from weightcast.shared.base.errors import EngineFailed, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.daemon.backoff import Backoff
from weightcast.subscriber.engines.base import (
    Confirmation,
    Done,
    Engine,
    EngineFacts,
    EngineSpec,
    HeldWeights,
    Intact,
    KeyRefused,
    NotSent,
    Suspect,
)
from weightcast.subscriber.engines.rules import (
    EngineResult,
    PhaseSeconds,
    ResultState,
    label_of,
    reload_order,
    states,
)

AlignMark = Literal["pausing", "served", "refused", "suspect"]
"""What must be durable before the next call: `pausing` before the first, `suspect` when a reload went wrong
and before one whose label the engine shows already, `served` or `refused` after the engine resumed."""


class NotPatched(WeightcastError):
    """Raised by a patch callback that has written nothing: engines that map the files may resume."""


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


def align(
    engine: Engine,
    version: int,
    *,
    marks: Callable[[AlignMark], None],
    before_reload: Callable[[], None] | None = None,
    suspect: bool = False,
    keeps_pause: bool = False,
    pace: RetryPace | None = None,
) -> EngineResult:
    """Brings an engine to the weights of `version` under its `spec.path` and says what came of it.

    `marks` is called before the state it names can be lost to a kill, and must be durable when it returns.
    `before_reload` patches the files while the engine is paused, once. What it raises goes through: an engine
    that copies its weights is resumed first, one that maps the files only after NotPatched, else it stays
    paused and is marked suspect. `suspect`: the engine's weights were in doubt before, so that only a good
    reload resumes it. `keeps_pause`: one that is found paused stays so, whatever it then holds: somebody else
    paused it. Raises nothing else for what an engine does.
    """
    own_pace = pace_of(engine.spec, RetryPace() if pace is None else pace)
    run = _Alignment(engine, version, marks, suspect, own_pace)
    facts = engine.probe()
    run.process = facts.process
    if not facts.reachable:
        return run.unreachable(facts, before_reload)
    run.keeps_pause = keeps_pause and facts.paused is True
    # A label that it shows already would say after a kill that half a reload is a whole one.
    marks("suspect" if suspect or facts.label == run.label else "pausing")
    run.began = run.pace.clock()
    try:
        with run.timed("pause"):
            engine.pause()
    except EngineFailed as failure:
        run.not_paused(failure)
        return run.step_back(str(failure))
    failpoint("engine.paused")
    if before_reload is not None:
        hindrance = run.patch(before_reload)
        if hindrance is not None:
            return run.step_back(hindrance)
        failpoint("engine.patched")
    outcome = run.reload()
    if isinstance(outcome, Suspect):
        return run.result("failed", outcome.reason)
    if isinstance(outcome, Intact):
        return run.step_back(outcome.reason)
    return run.serve(outcome)


def silence(engine: Engine, facts: EngineFacts) -> str:
    """Why it counts as not reachable, and what to do about it."""
    remedy = f" ({facts.remedy})" if facts.remedy else ""
    return f"{facts.hindrance}{remedy}" if facts.hindrance else f"{engine.spec.shown_url} does not answer"


@dataclass
class _Alignment:
    engine: Engine
    version: int
    marks: Callable[[AlignMark], None]
    suspect: bool
    pace: RetryPace
    process: str | None = None
    source: str | None = None
    began: float = 0.0
    resumed: float | None = None
    done: Done = field(default_factory=Done)
    """of the last reload that was one"""
    attempts: int = 0
    patched: bool = False
    keeps_pause: bool = False
    unanswered: bool = False
    paused: bool = False
    phases: PhaseSeconds = field(default_factory=PhaseSeconds)

    @property
    def label(self) -> str:
        return label_of(self.version)

    @contextmanager
    def timed(self, phase: Literal["pause", "patch", "reload", "read_back", "resume"]) -> Iterator[None]:
        start = self.pace.clock()
        try:
            yield
        finally:
            spent = getattr(self.phases, phase) + self.pace.clock() - start
            self.phases = replace(self.phases, **{phase: spent})

    def result(self, state: ResultState, reason: str, confirmed: Confirmation | None = None) -> EngineResult:
        return EngineResult(
            name=self.engine.spec.name,
            state=state,
            version=self.version,
            label=self.label,
            reason=reason,
            confirmed_by=confirmed,
            process=self.process,
            source=self.source,
            attempts=self.attempts,
            patched=self.patched,
            phases=self.phases,
            unanswered=self.unanswered,
            paused=self.paused,
            pause_seconds=self.paused_for(),
        )

    def paused_for(self) -> float | None:
        if self.resumed is None:
            return None
        if self.done.resumed and self.done.still is not None:
            return self.done.still
        return self.resumed - self.began

    def unreachable(self, facts: EngineFacts, before_reload: Callable[[], None] | None) -> EngineResult:
        hindrance = None
        # A process that is not there maps nothing; one that is silent may.
        if before_reload is not None and (facts.absent or self.engine.copies_weights):
            hindrance = self.patch_beside(before_reload)
        # One that is merely slow to answer holds what it held; one that starts may read files under a patch.
        if facts.absent or not self.engine.copies_weights:
            self.doubt()
        return self.result("failed", hindrance or silence(self.engine, facts))

    def not_paused(self, failure: EngineFailed) -> None:
        """No reload was tried; unless the engine has not seen the pause, it may come late. One that refused
        the key was not paused, and would refuse to be resumed."""
        self.unanswered = not isinstance(failure, NotSent | KeyRefused)
        self.keeps_pause |= isinstance(failure, KeyRefused)

    def patch_beside(self, before_reload: Callable[[], None]) -> str | None:
        """Patches; returns what kept the other engines from being patched with."""
        try:
            before_reload()
        except _Unpaused as hindrance:
            return str(hindrance)
        self.patched = True
        return None

    def patch(self, before_reload: Callable[[], None]) -> str | None:
        try:
            with self.timed("patch"):
                return self.patch_beside(before_reload)
        except NotPatched as reason:
            self.step_back(str(reason))
            raise
        # Also on an interrupt no engine stays paused without need.
        except BaseException as error:
            if self.engine.copies_weights:
                self.step_back(str(error))
            else:
                self.doubt()
            raise

    def reload(self) -> Confirmation | Intact | Suspect:
        outcome: Confirmation | Intact | Suspect = Suspect("no reload was tried")
        for _ in self.pace.tries(self.began):
            self.attempts += 1
            outcome = self.reload_once()
            if isinstance(outcome, Intact) and self.weights_in_doubt():
                outcome = Suspect(outcome.reason)
            if not isinstance(outcome, Suspect):
                break
            self.doubt()
        return outcome

    def weights_in_doubt(self) -> bool:
        """Whether "the weights from before" are none that may be served."""
        return self.suspect or (self.patched and not self.engine.copies_weights)

    def reload_once(self) -> Confirmation | Intact | Suspect:
        self.done = Done()
        with self.timed("reload"):
            outcome = self.engine.reload(self.engine.spec.path, self.version, self.label)
        failpoint("engine.reloaded")
        if not isinstance(outcome, Done):
            if isinstance(outcome, Intact):
                self.attempts -= outcome.untried or outcome.unpaused is not None
                if outcome.unpaused is not None:
                    self.not_paused(outcome.unpaused)
            return outcome
        self.done = outcome
        try:
            with self.timed("read_back"):
                confirmed = self.engine.read_back(self.label)
        except EngineFailed as failure:
            return Suspect(str(failure))
        failpoint("engine.read-back")
        return confirmed

    def doubt(self) -> None:
        if not self.suspect:
            self.marks("suspect")
        self.suspect = True

    def step_back(self, reason: str) -> EngineResult:
        """Resumes on the weights from before."""
        if self.suspect:
            return self.result("failed", reason)
        failure = self.resume()
        if failure is not None:
            self.doubt()
            return self.result("failed", f"{reason}; then {failure}")
        self.marks("refused")
        return self.result("refused", reason)

    def serve(self, confirmed: Confirmation) -> EngineResult:
        failure = self.resume()
        if failure is not None:
            # The weights are right: where the note is `pausing` it stays, and says that a resume is due.
            return self.result("failed", str(failure))
        now = self.engine.probe()
        if not now.reachable or (None not in (now.process, self.process) and now.process != self.process):
            self.doubt()
            return self.result("suspect", f"{self.engine.spec.shown_url} went away during its reload")
        self.process, self.source, self.paused = now.process, now.source, now.paused is True
        self.marks("served")
        return self.result("served", "", confirmed)

    def resume(self) -> EngineFailed | None:
        if self.done.resumed:
            self.resumed = self.pace.clock()
            failpoint("engine.resumed")
            return None
        if self.keeps_pause:
            return None
        failure: EngineFailed | None = None
        for _ in self.pace.tries(self.began):
            try:
                with self.timed("resume"):
                    self.engine.resume()
            except EngineFailed as error:
                failure = error
            else:
                self.resumed = self.pace.clock()
                failpoint("engine.resumed")
                return None
        return failure


@dataclass(frozen=True)
class Alignment:
    """`patched`: the files are at the version. When they are not, no engine was reloaded."""

    patched: bool
    results: tuple[EngineResult, ...]


def align_all(
    engines: Sequence[Engine],
    version: int,
    *,
    patch: Callable[[], None] | None,
    marks: Callable[[str, AlignMark], None],
    suspects: Collection[str] = (),
    keep_pause: Collection[str] = (),
    pace: RetryPace | None = None,
) -> Alignment:
    """Patches the files and brings all engines of a host to them, one after the other.

    `marks(engine name, mark)` must be as durable as with `align`; `suspects` and `keep_pause` are names.
    `patch` runs once, while all engines that map the files are paused; without such engines before any pause;
    None: the files are right already. What `patch` raises goes
    through as `align` says; an engine that does not pause is an answer, not an exception: `patched` is false
    then.
    """

    def one(engine: Engine, before_reload: Callable[[], None] | None) -> EngineResult:
        return align(
            engine,
            version,
            marks=lambda mark: marks(engine.spec.name, mark),
            before_reload=before_reload,
            suspect=engine.spec.name in suspects,
            keeps_pause=engine.spec.name in keep_pause,
            pace=pace,
        )

    ordered = reload_order(engines, suspects)
    mapping = [engine for engine in ordered if not engine.copies_weights]
    results: list[EngineResult] = []
    if patch is not None and not mapping:
        patch()
    elif patch is not None:
        results += _paused_together(mapping, patch, one)
        if not results[-1].patched:
            return Alignment(False, tuple(results))
        mapping = []
    rest = [engine for engine in ordered if engine.copies_weights or engine in mapping]
    return Alignment(True, (*results, *(one(engine, None) for engine in rest)))


def _paused_together(
    engines: Sequence[Engine],
    patch: Callable[[], None],
    one: Callable[[Engine, Callable[[], None] | None], EngineResult],
) -> list[EngineResult]:
    """Pauses the engines one inside the other and patches in the innermost pause; of a and b:

        pause a, pause b, patch, reload b, resume b, reload a, resume a

    The results come in the order in which engines resume: b, a."""
    first, rest = engines[0], engines[1:]
    inner: list[EngineResult] = []

    def patch_inside() -> None:
        inner.extend(_paused_together(rest, patch, one))
        if not inner[-1].patched:
            raise _Unpaused(f"{inner[-1].name} was not paused: {inner[-1].reason}")

    outer = one(first, patch_inside if rest else patch)
    return [*inner, outer]


class _Unpaused(Exception):
    """Another engine that maps the files was not paused, so that nothing was patched."""


def resume_if_it_names(engine: Engine, weights: HeldWeights) -> bool:
    """At start, for an engine that a killed run may have left paused; whether it was resumed.

    `weights`: the local checkpoint's, whose files are known to be right. Whatever else the engine names, only
    a reload (align with `suspect=True`) makes it known again.
    """
    facts = engine.probe()
    if facts.label != label_of(weights.version) or not states(facts, weights):
        return False
    try:
        engine.resume()
    except EngineFailed:
        return False
    return True
