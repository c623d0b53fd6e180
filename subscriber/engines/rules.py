"""Rules over the engines of a host: no IO.

States of an engine towards a target version:
served   it confirmed the target and generates
refused  it generates with the weights from before; the target was not taken
suspect  nobody knows its weights; it waits, paused, for a reload that may come at once
failed   as suspect (or absent, or paused with the right weights), and the bounded attempts are used up
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from weightcast.shared.base.choices import ReloadOrder
from weightcast.shared.checkpoint.state.state import Blocked, EngineState, LocalState, Mark, Position
from weightcast.shared.daemon.timing import Backoff
from weightcast.subscriber.engines.base import Confirmation, EngineFacts, HeldWeights

ResultState = Literal["served", "refused", "suspect", "failed"]
PHASES = ("pause", "patch", "reload", "read_back", "resume")


@dataclass(frozen=True)
class EngineResult:
    """What the reload of one engine came to."""

    name: str
    state: ResultState
    version: int
    reason: str = ""
    """why it is not served; for people"""
    confirmed_by: Confirmation | None = None
    """set when served"""
    process: str | None = None
    source: str | None = None
    """the directory that the engine names once it serves"""
    attempts: int = 0
    """reloads tried"""
    phases: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """seconds in each phase, all attempts together"""
    unanswered: bool = False
    """a pause was sent that the engine may yet carry out"""
    paused: bool = False
    """it said so at the end"""
    pause_seconds: float | None = None
    """from the first pause call until resume returned, or as an engine says that pauses itself; None: not
    resumed, or never paused"""

    @property
    def label(self) -> str:
        return label_of(self.version)


def needs_reload(
    facts: EngineFacts,
    served_process: str | None,
    served_label: str | None,
    served_source: str | None = None,
) -> bool:
    """Whether an engine that was served is no longer what it was: it restarted, or names other weights.
    An engine that tells neither cannot be seen to restart."""
    if not facts.reachable:
        return False
    return any(
        None not in (now, then) and now != then
        for now, then in (
            (facts.process, served_process),
            (facts.label, served_label),
            (facts.source, served_source),
        )
    )


ROLL_BACK_AFTER = 3
"""reloads in a row that leave no engine on the version"""
ROLL_BACK_AFTER_ROLLING = 2
MOST_BLOCKED = 63
REASON_LIMIT = 2000
_REFUSED = Backoff(60.0, 6 * 3600.0, factor=4.0)
DOUBTFUL = (Mark.PAUSING, Mark.SUSPECT)
Records = Mapping[str, EngineState]


def label_of(version: int) -> str:
    """What engines call a version."""
    return str(version)


def weights_of(position: Position) -> HeldWeights:
    """What an engine states that holds a local checkpoint's version."""
    return HeldWeights(position.version, position.root)


@dataclass(frozen=True)
class Observation:
    """`facts`: what an engine says now. `steady`: this process reloaded it and has reached it at every look
    since; only then a process that tells no identity counts as the same. `source`: the directory that it
    named after that reload."""

    facts: EngineFacts
    steady: bool
    source: str | None = None


def is_in_sync(record: EngineState | None, observation: Observation, weights: HeldWeights) -> bool:
    """Whether the engine holds `weights`, the local checkpoint's, because of a reload of ours, in this
    process."""
    if record is None or record.mark is not Mark.SERVED or record.version != weights.version:
        return False
    facts = observation.facts
    if facts.in_doubt or not states(facts, weights):
        return False
    if not facts.reachable or needs_reload(facts, record.process, _label(record), observation.source):
        return False
    return observation.steady or None not in (facts.process, record.process)


def states(facts: EngineFacts, weights: HeldWeights) -> bool:
    """Whether what the engine states to hold, if it does, is `weights`: another run has versions of the same
    numbers, and other roots."""
    return facts.held is None or facts.held == weights


def is_taken(record: EngineState | None, observation: Observation, weights: HeldWeights) -> bool:
    """Whether the process that served `weights` since a reload of ours was loaded with something else: by
    another subscriber or tool, as an engine does not do that itself."""
    if record is None or record.mark is not Mark.SERVED or record.version != weights.version:
        return False
    facts = observation.facts
    if not facts.reachable or facts.process is None or facts.process != record.process:
        return False
    return not states(facts, weights) or needs_reload(facts, None, _label(record), observation.source)


def may_relabel(record: EngineState | None, observation: Observation, weights: HeldWeights) -> bool:
    """Whether the engine itself says that it is the process that took `weights` and still holds them: of one
    that tells less, nobody would see that it holds something else."""
    facts = observation.facts
    if facts.process is None or facts.label != label_of(weights.version):
        return False
    return is_in_sync(record, observation, weights)


def _label(record: EngineState) -> str | None:
    """That it must show to be what it was."""
    if record.version is None or record.confirmed_by not in ("label", "digest"):
        return None
    return label_of(record.version)


def noted(known: EngineState | None, mark: Mark) -> EngineState:
    """The record with another mark; what the engine last confirmed stays."""
    return EngineState(mark) if known is None else replace(known, mark=mark)


def with_record(state: LocalState, name: str, record: EngineState | None) -> LocalState:
    others = {known: each for known, each in state.engines.items() if known != name}
    return state.but(engines=others if record is None else {**others, name: record})


def without_served(records: Records) -> dict[str, EngineState]:
    """The records without what engines served: the bytes of the local checkpoint become others. Who may be
    paused, or is in doubt, stays so."""
    return {name: record for name, record in records.items() if record.mark in DOUBTFUL}


def in_doubt(records: Records) -> frozenset[str]:
    return frozenset(name for name, record in records.items() if record.mark in DOUBTFUL)


def after(record: EngineState | None, result: EngineResult, now: EngineState | None) -> EngineState | None:
    """The record of an engine after its reload. `record`: from before it, `now`: with the notes made
    during it."""
    if result.state == "served":
        return EngineState(Mark.SERVED, result.version, result.confirmed_by or "", result.process, "")
    if result.state == "refused":
        return record
    if now is None:
        return None
    return EngineState(now.mark, now.version, now.confirmed_by, now.process, result.reason)


def is_another(record: EngineState | None, result: EngineResult) -> bool:
    """Whether another process took the version than the one before it."""
    if record is None or result.state != "served":
        return False
    return None not in (record.process, result.process) and record.process != result.process


def is_confirmed(records: Records, names: Iterable[str], version: int) -> bool:
    """Whether one of the engines `names` took the version."""
    found = (records.get(name) for name in names)
    return any(r is not None and r.mark is Mark.SERVED and r.version == version for r in found)


def rolls_back(results: Sequence[EngineResult], failures: int, order: ReloadOrder = "together") -> bool:
    """Whether a version that no engine confirmed is at fault rather than an engine. `failures`: reloads in a
    row, with this one, that left no engine on it. In a rolling reload it takes two, mostly two engines: one
    alone may be at fault, a third engine must not be lost to the version."""
    asked = [result for result in results if result.attempts > 0]
    if order == "rolling":
        return bool(asked) and failures >= ROLL_BACK_AFTER_ROLLING
    refused = bool(asked) and all(result.state == "refused" for result in asked)
    return refused or (bool(asked) and failures >= ROLL_BACK_AFTER)


def needs_undo(results: Sequence[EngineResult]) -> bool:
    """Whether the way back from a version that no engine confirmed must be kept: one may still refuse it."""
    return any(result.state == "refused" or result.attempts > 0 for result in results)


def block(blocked: Sequence[Blocked], refused: Blocked) -> tuple[Blocked, ...]:
    """The list with `refused`, newest last."""
    others = [one for one in blocked if one.digest != refused.digest]
    return (*others[-MOST_BLOCKED:], refused)


def retry_delay(attempts: int) -> float:
    """Seconds until a refused version is tried again: the engine may have been at fault."""
    return _REFUSED.pause(attempts)
