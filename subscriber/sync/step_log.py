"""What happens in a step, as a log of typed events. Each says by `onto` what it does to the view.

`StepView` is the fold over them; status, report, metrics and log lines are made from it and the log's moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.checkpoint.local_checkpoint import HasWriter
from weightcast.shared.checkpoint.verify.hashing import ScrubStatus
from weightcast.subscriber.engines.rules import EngineResult
from weightcast.subscriber.status import (
    Cause,
    EngineVerifyStatus,
    ReloadProof,
    State,
    UpdateStatus,
    WaitingFor,
)


@dataclass(frozen=True)
class MoveView:
    """The move that is under way. Times are of the log's clock, in seconds."""

    began: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    """by phase"""
    bytes: int = 0
    changes: int = 0
    step: int | None = None
    """the trainer's, of the version"""
    pause_seconds: float | None = None
    phase: str = ""
    phase_began: float = 0.0

    def with_seconds(self, phase: str, seconds: float) -> MoveView:
        return replace(self, seconds={**self.seconds, phase: self.seconds.get(phase, 0.0) + seconds})


@dataclass(frozen=True)
class FilesView:
    """Files other than the weights."""

    left_behind: tuple[str, ...] = ()
    """files of the base that are not copied"""
    base_notes: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    """config files that the local version has in place of the base's"""
    to_restart: tuple[str, ...] = ()
    """engines that read such files at their start alone, and have not been restarted since these changed"""
    base_files: str = ""
    """what is wrong with the files of the base that are copied"""


@dataclass(frozen=True)
class StepView:
    """What the events up to now come to."""

    move: MoveView
    state: State = "starting"
    usable: bool = False
    """the local checkpoint is a version of this run, although it may be closed after an error"""
    target_version: int | None = None
    progress_bytes: int = 0
    bytes_read: int = 0
    bytes_by_cause: Mapping[Cause, int] = field(default_factory=lambda: dict.fromkeys(get_args(Cause), 0))
    degraded: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    """damage that this step went around"""
    files: FilesView = FilesView()
    not_ready: tuple[str, ...] = ("starting",)
    error: WeightcastError | None = None
    last_error: Failed | None = None
    """stays while the next step runs, until one ends well"""
    scrub: ScrubStatus | None = None
    proof: ReloadProof | None = None
    waiting_for: WaitingFor | None = None
    engine_verify: Mapping[str, EngineVerifyStatus] = field(default_factory=dict)
    """by the engine's name"""


class Event(Protocol):
    def onto(self, view: StepView) -> StepView: ...


@dataclass(frozen=True)
class StepBegan:
    at: float

    def onto(self, view: StepView) -> StepView:
        error = view.error if isinstance(view.error, HasWriter) else None
        return replace(view, move=MoveView(self.at), degraded=(), around=(), waiting_for=None, error=error)


@dataclass(frozen=True)
class MoveBegan:
    """Also in place of a move that was given up."""

    at: float

    def onto(self, view: StepView) -> StepView:
        return replace(view, move=MoveView(self.at))


@dataclass(frozen=True)
class Entered:
    state: State

    def onto(self, view: StepView) -> StepView:
        ended_well = self.state == "idle" and view.error is None
        last = None if ended_well else view.last_error
        return replace(view, state=self.state, progress_bytes=0, last_error=last)


@dataclass(frozen=True)
class PhaseBegan:
    """Ends the phase before; "" begins none."""

    phase: str
    at: float

    def onto(self, view: StepView) -> StepView:
        move = view.move
        if move.phase:
            move = move.with_seconds(move.phase, self.at - move.phase_began)
        return replace(view, move=replace(move, phase=self.phase, phase_began=self.at))


@dataclass(frozen=True)
class Took:
    phase: str
    seconds: float

    def onto(self, view: StepView) -> StepView:
        return replace(view, move=view.move.with_seconds(self.phase, self.seconds))


@dataclass(frozen=True)
class Advanced:
    """`nbytes` done in this state; `fetched`: they were read from the channel."""

    nbytes: int
    fetched: bool = False

    def onto(self, view: StepView) -> StepView:
        done = replace(view, progress_bytes=view.progress_bytes + self.nbytes)
        if not self.fetched:
            return done
        move = replace(view.move, bytes=view.move.bytes + self.nbytes)
        return replace(done, move=move, bytes_read=view.bytes_read + self.nbytes)


@dataclass(frozen=True)
class ReadFor:
    """What bytes that were read from the channel were for. `fetched`: they are counted already."""

    cause: Cause
    nbytes: int
    fetched: bool = False

    def onto(self, view: StepView) -> StepView:
        causes = {**view.bytes_by_cause, self.cause: view.bytes_by_cause[self.cause] + self.nbytes}
        read = view.bytes_read + (0 if self.fetched else self.nbytes)
        return replace(view, bytes_by_cause=causes, bytes_read=read)


@dataclass(frozen=True)
class Changed:
    """Words that this move changes, and the trainer's step of its version."""

    words: int
    step: int | None = None

    def onto(self, view: StepView) -> StepView:
        move = view.move
        return replace(view, move=replace(move, changes=move.changes + self.words, step=self.step))


@dataclass(frozen=True)
class Seeded:
    nbytes: int

    def onto(self, view: StepView) -> StepView:
        return replace(view, move=replace(view.move, bytes=self.nbytes))


@dataclass(frozen=True)
class Reloaded:
    """Engines work side by side: the slowest counts."""

    results: Sequence[EngineResult]

    def onto(self, view: StepView) -> StepView:
        move = view.move
        for phase in ("pause", "reload", "read_back", "resume"):
            slowest = max((result.phases[phase] for result in self.results), default=0.0)
            if slowest:
                move = move.with_seconds(phase, slowest)
        pauses = [result.pause_seconds for result in self.results if result.pause_seconds is not None]
        return replace(view, move=replace(move, pause_seconds=max(pauses)) if pauses else move)


@dataclass(frozen=True)
class Moved:
    update: UpdateStatus

    def onto(self, view: StepView) -> StepView:
        return view


@dataclass(frozen=True)
class Usable:
    usable: bool

    def onto(self, view: StepView) -> StepView:
        return replace(view, usable=self.usable)


@dataclass(frozen=True)
class Aimed:
    version: int

    def onto(self, view: StepView) -> StepView:
        return replace(view, target_version=self.version)


@dataclass(frozen=True)
class Degraded:
    reason: str

    def onto(self, view: StepView) -> StepView:
        known = not self.reason or self.reason in view.degraded
        return view if known else replace(view, degraded=(*view.degraded, self.reason))


@dataclass(frozen=True)
class WentAround:
    damage: str

    def onto(self, view: StepView) -> StepView:
        return replace(view, around=(*view.around, self.damage))


@dataclass(frozen=True)
class NotReady:
    """Empty: the host is ready."""

    reasons: tuple[str, ...]

    def onto(self, view: StepView) -> StepView:
        return replace(view, not_ready=self.reasons)


@dataclass(frozen=True)
class Waits:
    """None: no longer."""

    waiting: WaitingFor | None

    def onto(self, view: StepView) -> StepView:
        state = view.state if self.waiting is None else "waiting"
        return replace(view, waiting_for=self.waiting, state=state)


@dataclass(frozen=True)
class Failed:
    error: WeightcastError
    at: float
    """unix time"""

    def onto(self, view: StepView) -> StepView:
        return replace(view, error=self.error, last_error=self)


@dataclass(frozen=True)
class WriterTaken:
    """This process is the writer of the local checkpoint: whoever was is gone."""

    def onto(self, view: StepView) -> StepView:
        return replace(view, error=None)


@dataclass(frozen=True)
class FilesSeen:
    files: FilesView

    def onto(self, view: StepView) -> StepView:
        return replace(view, files=self.files)


@dataclass(frozen=True)
class Proven:
    proof: ReloadProof

    def onto(self, view: StepView) -> StepView:
        return replace(view, proof=self.proof)


@dataclass(frozen=True)
class Scrubbed:
    status: ScrubStatus

    def onto(self, view: StepView) -> StepView:
        return replace(view, scrub=self.status)


@dataclass(frozen=True)
class EnginesVerified:
    facts: Mapping[str, EngineVerifyStatus]

    def onto(self, view: StepView) -> StepView:
        return replace(view, engine_verify=self.facts)


class StepLog:
    """`events` are those of the running step, `view` the fold over them and all before. The work thread and
    threads of a reload append, never at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.events: list[Event] = []
        self.view = StepView(MoveView(clock()))

    def begin(self) -> None:
        self.events.clear()
        self.append(StepBegan(self._clock()))

    def append(self, event: Event) -> None:
        """Bytes done one after the other become one event: there may be many."""
        self.view = event.onto(self.view)
        last = self.events[-1] if self.events else None
        if isinstance(event, Advanced) and isinstance(last, Advanced) and event.fetched == last.fetched:
            self.events[-1] = replace(last, nbytes=last.nbytes + event.nbytes)
        else:
            self.events.append(event)

    @property
    def moves(self) -> tuple[UpdateStatus, ...]:
        """Of the running step."""
        return tuple(event.update for event in self.events if isinstance(event, Moved))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self.append(Took(phase, self._clock() - began))

    def begin_phase(self, phase: str) -> None:
        self.append(PhaseBegan(phase, self._clock()))

    def end_phase(self) -> None:
        self.begin_phase("")

    def begin_move(self) -> None:
        self.append(MoveBegan(self._clock()))

    def end_move(self) -> MoveView:
        """With all of its seconds; the next move begins."""
        self.end_phase()
        move = self.view.move
        self.begin_move()
        return move.with_seconds("total", self._clock() - move.began)
