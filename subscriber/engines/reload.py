"""One reload of engines, under the patch lock: note, pause, patch, reload, read back, resume, record.

An engine resumes only when its weights are known: the reload was never sent, was refused with the old weights
untouched, or succeeded and was read back. Otherwise it stays paused, since resuming it would serve wrong
tokens or kill it, and is reloaded again within bounds. The caller holds the patch lock throughout, and writes
files that an engine maps between `Reload.pause_mapping` and the first batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from weightcast.shared.base.errors import EngineFailed, NeedsReseed
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import EngineState, Mark, Phase
from weightcast.subscriber.engines.base import Confirmation, Done, Intact, NotSent, Suspect, Unhandled
from weightcast.subscriber.engines.host import Engines, HostEngine, Traffic
from weightcast.subscriber.engines.live import Offer, side_by_side
from weightcast.subscriber.engines.rules import (
    PHASES,
    EngineResult,
    ResultState,
    after,
    in_doubt,
    is_another,
    label_of,
    noted,
    with_record,
)


class Reload:
    """One reload of a host's engines to `version`, in a `with` block that gives it its order:

    pause_mapping       where files are to be written: they are, between this and the first batch
    batches, run        the caller proves the files before it runs each batch

    `only`: these engines, else all that are due; those that map the files are always among them where the
    block pauses them. `report` is called after every engine. An error in the block resumes engines that are
    paused still, if no word of the files was written; else they stay paused, in doubt.
    """

    def __init__(
        self,
        engines: Engines,
        local: LocalCheckpoint,
        version: int,
        *,
        only: Sequence[HostEngine] | None = None,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self.results: list[EngineResult] = []
        self._engines, self._local, self._version = engines, local, version
        self._before = local.state.position
        self._chosen = [engine for engine in engines.engines if engine.is_due] if only is None else list(only)
        self._notes = Notes(local, report)
        self._paused: list[EngineReload] = []
        """engines that map the files, in the order of their pauses; those whose process is absent, too"""

    def __enter__(self) -> Reload:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._abandon(error)
        finally:
            self._engines.forget_offers(self._local)

    def pause_mapping(self) -> None:
        """Pauses all engines that map the files. Raises EngineFailed when one does not pause: then those
        paused before it were resumed."""
        self._chosen = [engine for engine in self._chosen if engine.spec.copies_weights]
        present = [engine for engine in self._engines.mapping if not engine.facts.absent]
        together = reload_order(present, self._notes.suspects)
        results = pause_together([self._reload_of(engine) for engine in together], self._paused)
        for result in results:
            self._record(self._engines[result.name], result)
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
        if self._engines.order == "rolling":
            doubtful = self._notes.suspects | {one.name for one in self._engines.engines if one.failures}
            for number, engine in enumerate(reload_order(self._chosen, doubtful)):
                # an engine that was broken before comes last and holds nobody back
                goes_wrong = any(one.state != "served" and one.name not in doubtful for one in self.results)
                if goes_wrong or (number and self._engines.stopping()):
                    return
                yield (self._reload_of(engine),)
        elif self._chosen:
            yield tuple(map(self._reload_of, self._chosen))

    def run(self, batch: Sequence[EngineReload]) -> None:
        """Reloads, reads back and resumes: engines that are paused in reverse order, others side by side."""
        if self._paused:
            while self._paused:
                one = self._paused.pop()
                self.results.append(self._record(one.engine, one.reload(patched=True)))
        else:
            self.results += side_by_side(batch, self._run_one)

    def _abandon(self, error: BaseException) -> None:
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
                    self._notes.take_back(one.engine.name)

    def _reload_of(self, engine: HostEngine) -> EngineReload:
        return EngineReload(engine, self._version, self._notes, self._engines.traffic)

    def _run_one(self, one: EngineReload) -> EngineResult:
        taken = one.engine.prepare(self._local.state, self._engines.offers.get(one.engine.name, Offer()))
        return self._record(one.engine, one.pause() or one.reload(), taken)

    def _record(self, engine: HostEngine, result: EngineResult, taken: bool = False) -> EngineResult:
        engine.learn(result, taken)
        self._notes.record(result)
        return result


class EngineReload:
    """One engine on its way to the weights of `version`: `pause`, then `reload`; or `step_back` where nothing
    was written. Raises nothing for what an engine does."""

    def __init__(
        self, engine: HostEngine, version: int, notes: Notes, traffic: Traffic | None = None
    ) -> None:
        self.engine, self._traffic = engine, traffic
        self._version = version
        self._notes, self._pace = notes, engine.pace
        self._suspect = engine.name in notes.suspects
        self._keeps_pause = False
        self._absent = ""
        """why no process can be paused"""
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._so_far = EngineResult(engine.name, "failed", version, phases=self._phases)
        self._began = 0.0
        self._resumed: float | None = None
        self._done = Done()
        """of the last reload that was one"""
        self._patched = False

    def pause(self) -> EngineResult | None:
        """None: it is paused, or no process is there; the files may be written. Else what became of it: it
        serves the weights from before, or is in doubt."""
        facts = self.engine.probe()
        self._so_far = replace(self._so_far, process=facts.process)
        if facts.absent:
            self._absent = self.engine.silence(facts)
            return None
        if not facts.reachable:
            # One that is merely slow holds what it held; one that starts may read files under a patch.
            if not self.engine.spec.copies_weights:
                self._doubt()
            return self._result("failed", self.engine.silence(facts))
        try:
            self.engine.require_fit()
        except EngineFailed as failure:
            return self._result("failed" if self._suspect else "refused", str(failure))
        self._keeps_pause = self.engine.name in self._notes.serving and facts.paused is True
        # A label that it shows already would say after a kill that half a reload is a whole one.
        doubtful = self._suspect or facts.label == label_of(self._version)
        self._notes.note(self.engine.name, Mark.SUSPECT if doubtful else Mark.PAUSING)
        if self._traffic is not None:
            self._traffic.close(self.engine.name, self._version)
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
            self._phases["patch"] = self._pace.clock() - self._began - self._phases["pause"]
            failpoint("engine.patched")
        outcome = self._try_reloads()
        if isinstance(outcome, Suspect):
            return self._result("failed", outcome.reason)
        if isinstance(outcome, Intact):
            return self.step_back(outcome.reason)
        failure = self._resume()
        if failure is not None:
            # The weights are right: where the note is `pausing` it stays, and says that a resume is due.
            return self._result("failed", str(failure))
        now = self.engine.probe()
        before = self._so_far.process
        if not now.reachable or (None not in (now.process, before) and now.process != before):
            self._doubt()
            return self._result("suspect", f"{self.engine.spec.shown_url} went away during its reload")
        self._so_far = replace(
            self._so_far, process=now.process, source=now.source, paused=now.paused is True
        )
        return self._result("served", "", outcome)

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
        return self._result("refused", reason)

    def abandon(self, reason: str, *, written: bool) -> None:
        """After `pause`, when the files could not be written. Where some were, it stays paused, in doubt."""
        if self._absent:
            return
        if written:
            self._doubt()
        else:
            self.step_back(reason)

    def _try_reloads(self) -> Confirmation | Intact | Suspect:
        outcome: Confirmation | Intact | Suspect = Suspect("no reload was tried")
        for _ in self._pace.tries(self._began):
            outcome = self._reload_once()
            # "the weights from before" may not be served where they are in doubt, or are patched files
            if isinstance(outcome, Intact) and (self._suspect or self._patched):
                outcome = Suspect(outcome.reason)
            if not isinstance(outcome, Suspect):
                break
            self._doubt()
        return outcome

    def _reload_once(self) -> Confirmation | Intact | Suspect:
        self._done, label = Done(), label_of(self._version)
        with self._timed("reload"):
            outcome = self.engine.reload(label)
        failpoint("engine.reloaded")
        unpaused = outcome.unpaused if isinstance(outcome, Intact) else None
        if unpaused is not None:
            self._not_paused(unpaused)
        elif not (isinstance(outcome, Intact) and outcome.untried):
            self._so_far = replace(self._so_far, attempts=self._so_far.attempts + 1)
        if not isinstance(outcome, Done):
            return outcome
        self._done = outcome
        try:
            with self._timed("read_back"):
                confirmed = self.engine.read_back(label)
        except EngineFailed as failure:
            return Suspect(str(failure))
        failpoint("engine.read-back")
        return confirmed

    def _resume(self) -> EngineFailed | None:
        if self._keeps_pause and not self._done.resumed:
            return None
        failure: EngineFailed | None = None
        for _ in self._pace.tries(self._began):
            try:
                if not self._done.resumed:
                    with self._timed("resume"):
                        self.engine.resume()
            except EngineFailed as error:
                failure = error
            else:
                self._resumed = self._pace.clock()
                failpoint("engine.resumed")
                return None
        return failure

    def _doubt(self) -> None:
        if not self._suspect:
            self._notes.note(self.engine.name, Mark.SUSPECT)
        self._suspect = True

    def _not_paused(self, failure: EngineFailed) -> None:
        """No reload was tried; unless the engine has not seen the pause, it may come late. An engine that
        did not handle it was not paused, and would not handle a resume."""
        self._so_far = replace(self._so_far, unanswered=not isinstance(failure, NotSent | Unhandled))
        self._keeps_pause |= isinstance(failure, Unhandled)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._pace.clock()
        try:
            yield
        finally:
            self._phases[phase] += self._pace.clock() - start

    def _result(self, state: ResultState, reason: str, confirmed: Confirmation | None = None) -> EngineResult:
        pause_seconds = None if self._resumed is None else self._resumed - self._began
        if self._resumed is not None and self._done.resumed and self._done.still is not None:
            pause_seconds = self._done.still
        return replace(
            self._so_far, state=state, reason=reason, confirmed_by=confirmed, pause_seconds=pause_seconds
        )


def reload_order(engines: Sequence[HostEngine], suspects: Collection[str]) -> tuple[HostEngine, ...]:
    """Engines in doubt come last: a hanging engine must not keep the healthy ones waiting."""
    return tuple(sorted(engines, key=lambda engine: engine.name in suspects))


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


class Notes:
    """Notes and results of one reload, each durable when its call returns; engines come in threads of their
    own."""

    def __init__(self, local: LocalCheckpoint, report: Callable[[], None]) -> None:
        self._local, self._before = local, local.state
        self.suspects = in_doubt(local.state.engines)
        """engines whose weights were in doubt before: only a good reload resumes them"""
        self.serving = frozenset(local.state.engines) - self.suspects - local.state.unanswered
        """a pause that these are found in is somebody else's"""
        self._report = report
        self._lock = threading.Lock()

    def note(self, name: str, mark: Mark) -> None:
        """Before the first call `PAUSING`; `SUSPECT` when a reload went wrong, and before one whose label the
        engine shows already."""
        with self._lock:
            self._save(name, noted(self._local.state.engines.get(name), mark), unanswered=True)
            self._report()
        failpoint("engine.noted")

    def take_back(self, name: str) -> None:
        """What was noted of an engine that was resumed on the weights from before. Where it was not, the note
        says `suspect` by now."""
        with self._lock:
            now = self._local.state.engines.get(name)
            if now is not None and now.mark is Mark.PAUSING and name not in self.suspects:
                self._save(name, self._before.engines.get(name), unanswered=name in self._before.unanswered)
                self._report()

    def record(self, result: EngineResult) -> None:
        """What an engine came to, after it was resumed: killed before, the older note is the safer one."""
        with self._lock:
            name = result.name
            before, now = (state.engines.get(name) for state in (self._before, self._local.state))
            late = name in self._before.unanswered and not is_another(before, result)
            self._save(name, after(before, result, now), unanswered=result.unanswered or late)
            failpoint("engine.recorded")
            self._report()

    def _save(self, name: str, record: EngineState | None, *, unanswered: bool) -> None:
        state = self._local.state
        names = state.unanswered | {name} if unanswered else state.unanswered - {name}
        new = with_record(state, name, record).but(unanswered=names)
        if new != state:
            self._local.save(new)
