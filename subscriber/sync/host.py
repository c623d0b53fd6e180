"""One host: its local checkpoint, its engines, and what the running step knows and tells of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from weightcast.shared.base.errors import RetryLater, Stopped, WeightcastError
from weightcast.shared.channel.signing import Trust
from weightcast.shared.checkpoint.local_checkpoint import HasWriter, LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.state.access import Readers
from weightcast.shared.checkpoint.state.side_files import UNLISTED
from weightcast.shared.checkpoint.state.state import LocalState, Mark, Phase, Position, write_state
from weightcast.shared.checkpoint.update.fetch import Awaited
from weightcast.shared.checkpoint.update.prepare import PreRead
from weightcast.shared.checkpoint.verify.scrub import ScrubStatus
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.side_files import left_text
from weightcast.subscriber.engines.reload import Engines
from weightcast.subscriber.engines.rules import EngineResult, noted
from weightcast.subscriber.engines.verify import EngineVerifyFacts
from weightcast.subscriber.groups.lead import Lead
from weightcast.subscriber.status import (
    Cause,
    MoveKind,
    ReloadProof,
    State,
    UpdateStatus,
    WaitingFor,
)
from weightcast.subscriber.sync.target import FOLLOW_LATEST, Target

_SHOW_EVERY_SECONDS = 0.25
_PATIENCE_SECONDS = 2.0
"""before a wait for a file is shown; most files are late by less"""
_LOOK_EVERY_SECONDS = 1.0
"""at engines while a file is waited for"""


class EnginesFirst(RetryLater):
    """A wait for the channel is broken off: an engine does not hold the local version yet."""


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
    verified_within: float = 600.0
    """seconds; bytes last hashed longer ago are hashed again before engines load them"""
    group_patch: bool = False
    """a follower also stages patches for the group's engines"""
    group_follower: bool = False
    """the local checkpoint moves only towards `Sync.order`"""


def _no_bytes() -> dict[Cause, int]:
    return dict.fromkeys(get_args(Cause), 0)


@dataclass
class StepView:
    """What a step knows, for the status. Only the step writes it."""

    state: State = "starting"
    local: LocalState | None = None
    target_version: int | None = None
    progress_bytes: int = 0
    bytes_read: int = 0
    bytes_by_cause: dict[Cause, int] = field(default_factory=_no_bytes)
    degraded: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    """files of the base that are not copied"""
    base_notes: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    """config files that the local version has in place of the base's"""
    to_restart: tuple[str, ...] = ()
    """engines that read such files at their start alone, and have not been restarted since these changed"""
    base_files: str = ""
    """what is not right with the files of the base that are"""
    not_ready: tuple[str, ...] = ("starting",)
    moves: list[UpdateStatus] = field(default_factory=list)
    """of the running step"""
    error: WeightcastError | None = None
    scrub: ScrubStatus | None = None
    proof: ReloadProof | None = None
    waiting_for: WaitingFor | None = None
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


@dataclass(frozen=True)
class Calls:
    """What a step asks of the process that it runs in. `show`: the view changed; `stop(seconds)` waits, or
    returns True as soon as the process is to end; `advance`: bytes done; `now`, `clock`: seconds."""

    show: Callable[[], None]
    stop: Callable[[float], bool]
    advance: Callable[[int], None]
    now: Callable[[], float]
    clock: Callable[[], float]


class StepHost:
    """Shared by the parts of a step, used by one thread."""

    def __init__(self, options: SyncOptions, engines: Engines, lead: Lead, calls: Calls) -> None:
        self.options, self.engines, self.lead, self.calls = options, engines, lead, calls
        lead.wait = self.wait
        self.view = StepView()
        self.watch = Stopwatch()
        self.usable = False
        """the local checkpoint is a version of this run, although it may be closed after an error"""
        self.around: tuple[str, ...] = ()
        """damage that this step went around"""
        self._read_before: dict[str, str | None] = {}
        """processes of engines when config files were last changed under them"""
        self._shown, self._looked = 0.0, -math.inf
        self.updater = LocalUpdater(
            options.channel,
            options.local,
            options.base,
            UpdaterOptions(
                options.threads,
                options.visible_seconds,
                options.pre_read,
                self.on_phase,
                self.wait,
                self.on_wait,
                before_replay=self.pause_for_replay,
            ),
        )

    def begin(self) -> None:
        """A step."""
        self.watch = Stopwatch()
        self.around = ()
        self.view.moves, self.view.degraded, self.view.waiting_for = [], (), None
        if not isinstance(self.view.error, HasWriter):
            self.view.error = None

    def outcome(self) -> Outcome:
        """As of the last step."""
        local = self.updater.local
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
        local = self.updater.local
        return None if local is None or local.state.phase is not Phase.CLEAN else local.state.position

    def reasons_not_ready(self) -> tuple[str, ...]:
        state = self.state
        if state is None or not self.usable:
            error = self.view.error
            waiting = self.view.waiting_for
            reason = "the local checkpoint is not seeded" if error is None else error.message
            if waiting is None:
                return (reason,)
            return reason, f"waiting for version {waiting.version}: {waiting.reason}"
        serving = self.engines.serving(state)
        names = [engine.spec.name for engine in self.engines.engines if engine.spec.name not in serving]
        return tuple(self._reason_of(name) for name in names)

    def _reason_of(self, name: str) -> str:
        reason = self.engines.reason(name) or "not reloaded yet"
        return f"engine {name}{' failed' if self.engines.failed(name) else ''}: {reason}"

    @property
    def state(self) -> LocalState | None:
        return self.updater.state if self.updater.local is None else self.updater.local.state

    def pause_for_replay(self, local: LocalCheckpoint) -> None:
        """An engine that was resumed, or that started since, may serve from files that are written on now."""
        mapping = {engine.spec.name for engine in self.engines.mapping}
        engines = local.state.engines
        served = {name for name in mapping & set(engines) if engines[name].mark is Mark.SERVED}
        if served:
            local.save(local.state.but(engines={n: one for n, one in engines.items() if n not in served}))
        self.engines.pause_mapping(self.note_doubt)

    def note_doubt(self, name: str) -> None:
        """Before files are written on under an engine. It may name the version that they come to already:
        after a kill that would say that it was reloaded since."""
        state, local = self.state, self.updater.local
        if state is None:
            return
        known = state.engines.get(name)
        if known is not None and known.mark is Mark.SUSPECT:
            return
        state = state.but(engines={**state.engines, name: noted(known, Mark.SUSPECT)})
        if local is not None:
            local.save(state)
        else:
            write_state(self.updater.paths.state, state)
            self.updater.state = state

    def degrade(self, reason: str) -> None:
        if reason and reason not in self.view.degraded:
            self.view.degraded = (*self.view.degraded, reason)

    def count_read(self, cause: Cause, nbytes: int) -> None:
        self.view.bytes_read += nbytes
        self.view.bytes_by_cause[cause] += nbytes

    def local(self) -> LocalCheckpoint:
        if self.updater.local is None:
            raise RetryLater(f"{self.options.local} is not open", remedy="the next step opens it")
        return self.updater.local

    def moved(self, kind: MoveKind, before: int | None, folded: int, taken: bool = True) -> None:
        watch, self.watch = self.watch, Stopwatch()
        move = UpdateStatus(
            kind=kind,
            from_version=before,
            version=self.local().state.position.version,
            folded=folded,
            bytes=watch.bytes,
            changes=watch.changes,
            seconds=watch.total(),
            pause_seconds=watch.pause_seconds,
            around=self.around,
            step=watch.step,
            taken=taken,
            at=self.calls.now(),
        )
        self.view.moves.append(move)
        self.tell()

    def on_wait(self, awaited: Awaited | None) -> None:
        """Shows a wait that lasts. Engines do not wait for the channel: EnginesFirst is raised for one that
        is to be reloaded with the local version, unless it failed to do that a moment ago."""
        now, shown = self.calls.clock(), self.view.waiting_for
        if awaited is None:
            self.view.waiting_for = None
            return
        lasts = awaited.waited >= _PATIENCE_SECONDS or (shown is not None and shown.file == awaited.file)
        if lasts and now - self._looked >= _LOOK_EVERY_SECONDS:
            self._looked = now
            self._show_wait(awaited)
            local = self.updater.local
            due = () if local is None else self.engines.due(local.state)
            if any(not self.engines.failures(engine.spec.name) for engine in due):
                self.watch = Stopwatch()
                raise EnginesFirst(awaited.reason)

    def _show_wait(self, awaited: Awaited) -> None:
        now = self.calls.now()
        self.view.waiting_for = WaitingFor(
            version=awaited.version,
            file=awaited.file,
            reason=awaited.reason,
            retries=awaited.retries,
            since=now - awaited.waited,
            until=now + awaited.left,
        )
        self.view.state = "waiting"
        self.engines.look_if_due(self.state)
        self.view.not_ready = self.reasons_not_ready()
        self.tell()

    def on_phase(self, phase: str) -> None:
        self.watch.enter(phase)
        self.enter("fetching" if phase == "fetch" else "staging")

    def enter(self, state: State) -> None:
        self.view.state, self.view.progress_bytes = state, 0
        self.tell()

    def wait(self, seconds: float) -> None:
        if self.calls.stop(seconds):
            raise Stopped("the process ends", remedy="the next start continues")

    def advance(self, nbytes: int) -> None:
        self.wait(0.0)
        self.view.progress_bytes += nbytes
        self.calls.advance(nbytes)
        if self.calls.clock() - self._shown > _SHOW_EVERY_SECONDS:
            self.tell()

    def advance_fetch(self, nbytes: int) -> None:
        self.watch.count(nbytes)
        self.view.bytes_read += nbytes
        self.advance(nbytes)

    def tell_files(self) -> None:
        """Which files of the base are not here, by intent or not."""
        updater = self.updater
        if self.position is not None:
            self.view.carried = updater.carried.names(self.position)
        if updater.changed_configs:
            updater.changed_configs.clear()
            self._read_before = {
                engine.spec.name: self.engines.facts(engine.spec.name).process
                for engine in self.engines.engines
                if engine.spec.kind != "webhook"
            }
        self.view.to_restart = tuple(
            name for name, process in self._read_before.items() if self.engines.facts(name).process == process
        )
        self.view.left_behind, self.view.base_notes = updater.left_behind, updater.base_notes
        self.view.base_files = UNLISTED if updater.lists_too_few else ""
        if updater.missing:
            self.view.base_files = f"missing: {left_text(updater.missing)}"
            self.degrade(
                f"files of the base are missing; sync once with --base: {left_text(updater.missing)}"
            )

    def tell_reload(self) -> None:
        """An engine in doubt is told at once: the others may take minutes."""
        state = self.state
        if state is not None and any(one.mark is Mark.SUSPECT for one in state.engines.values()):
            self.view.not_ready = self.reasons_not_ready()
        self.tell()

    def tell(self) -> None:
        self._shown = self.calls.clock()
        self.view.local = self.state
        self.calls.show()


def known(error: BaseException) -> WeightcastError:
    if isinstance(error, WeightcastError):
        return error
    if isinstance(error, OSError):
        return disk_error(error, "a file")
    return WeightcastError(f"{type(error).__name__}: {error}", remedy="see the log for the traceback")


@dataclass
class Stopwatch:
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    changes: int = 0
    step: int | None = None
    """the trainer's, of the version"""
    pause_seconds: float | None = None
    _began: float = 0.0
    _phase: str = ""
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.clock()

    def enter(self, phase: str) -> None:
        """Ends the phase before; "" starts none."""
        now = self.clock()
        if self._phase:
            self.add(self._phase, now - self._phase_began)
        self._phase, self._phase_began = phase, now

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.add(phase, self.clock() - began)

    def count(self, nbytes: int) -> None:
        self.bytes += nbytes

    def take(self, results: Sequence[EngineResult]) -> None:
        """Engines work side by side: the slowest counts."""
        for phase in ("pause", "reload", "read_back", "resume"):
            slowest = max((getattr(result.phases, phase) for result in results), default=0.0)
            if slowest:
                self.add(phase, slowest)
        pauses = [result.pause_seconds for result in results if result.pause_seconds is not None]
        if pauses:
            self.pause_seconds = max(pauses)

    def total(self) -> dict[str, float]:
        self.enter("")
        return {**self.seconds, "total": self.clock() - self._began}
