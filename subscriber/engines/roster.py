"""Rules over the engines of a host: no IO.

States of an engine towards a target version:
served   it confirmed the target and generates
refused  it generates with the weights from before; the target was not taken
suspect  nobody knows its weights; it waits, paused, for a reload that may come at once
failed   as suspect (or absent, or paused with the right weights), and the bounded attempts are used up
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from weightcast.subscriber.engines.base import Confirmation, Engine, EngineFacts

ResultState = Literal["served", "refused", "suspect", "failed"]
ReloadOrder = Literal["together", "rolling"]
"""All engines of a host at the same time, or one after the other confirmed."""


@dataclass(frozen=True)
class PhaseSeconds:
    """Time spent in each phase, all attempts together."""

    pause: float = 0.0
    patch: float = 0.0
    reload: float = 0.0
    read_back: float = 0.0
    resume: float = 0.0


@dataclass(frozen=True)
class EngineResult:
    """What one alignment came to."""

    name: str
    state: ResultState
    version: int
    label: str
    reason: str = ""
    """why it is not served; for people"""
    confirmed_by: Confirmation | None = None
    """set when served"""
    process: str | None = None
    source: str | None = None
    """the directory that the engine names once it serves"""
    attempts: int = 0
    """reloads tried"""
    patched: bool = False
    """`before_reload` ran to its end"""
    phases: PhaseSeconds = PhaseSeconds()
    unanswered: bool = False
    """a pause was sent that the engine may yet carry out"""
    paused: bool = False
    """it said so at the end"""
    pause_seconds: float | None = None
    """from the first pause call until resume returned, or as an engine says that pauses itself; None: not
    resumed, or never paused"""


@dataclass(frozen=True)
class EnginesVerdict:
    """A host's engines sorted by state, and what the host may do now."""

    served: tuple[str, ...]
    refused: tuple[str, ...]
    suspect: tuple[str, ...]
    failed: tuple[str, ...]
    ready: bool
    """an engine confirmed the target"""
    may_roll_back: bool
    """No engine confirmed the target and at least one was asked to load it. Otherwise the fault is the
    engine's."""
    journal_droppable: bool
    """each engine confirmed, or needs a full reload anyway"""


def judge(results: Sequence[EngineResult]) -> EnginesVerdict:
    """`results`: one per engine of the host; none: nothing to wait for."""

    def of(state: ResultState) -> tuple[str, ...]:
        return tuple(result.name for result in results if result.state == state)

    served, refused = of("served"), of("refused")
    return EnginesVerdict(
        served=served,
        refused=refused,
        suspect=of("suspect"),
        failed=of("failed"),
        ready=bool(served),
        may_roll_back=not served and any(result.attempts > 0 for result in results),
        journal_droppable=not refused,
    )


def reload_order(engines: Sequence[Engine], suspects: Collection[str]) -> tuple[Engine, ...]:
    """Engines in doubt come last: one that hangs must not keep the healthy ones waiting."""
    return tuple(sorted(engines, key=lambda engine: engine.spec.name in suspects))


def goes_on(result: EngineResult, doubtful: bool) -> bool:
    """Whether the next engine of a rolling reload may be paused. One that was broken before (`doubtful`)
    comes last and holds nobody back."""
    return doubtful or result.state == "served"


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
