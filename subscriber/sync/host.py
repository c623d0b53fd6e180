"""One host: its local checkpoint, its engines, and what the running step knows and tells of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import RetryLater, Stopped, WeightcastError
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.signing import Trust
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, Readers
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.state.side_files import UNLISTED
from weightcast.shared.checkpoint.state.state import LocalState, Mark, Phase, Position, write_state
from weightcast.shared.checkpoint.update.fetch import Awaited, PreRead
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.side_files import left_text
from weightcast.subscriber.engines.host import Engines
from weightcast.subscriber.engines.rules import noted
from weightcast.subscriber.groups.lead import Lead
from weightcast.subscriber.status import MoveKind, State, UpdateStatus, WaitingFor
from weightcast.subscriber.sync.step_log import (
    Advanced,
    Degraded,
    Entered,
    FilesSeen,
    FilesView,
    Moved,
    NotReady,
    StepLog,
    StepView,
    Waits,
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


@dataclass(frozen=True)
class Outcome:
    """`version` is on disk (None: not seeded); `moved`: this step changed it; `waiting`: why the host is
    not ready."""

    version: int | None
    target: int | None
    moved: bool
    waiting: tuple[str, ...]
    degraded: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return self.version is not None and not self.waiting


class StepHost:
    """Shared by the parts of a step, used by one thread."""

    def __init__(
        self,
        options: SyncOptions,
        engines: Engines,
        lead: Lead,
        *,
        show: Callable[[], None],
        stop: Callable[[float], bool],
        advance: Callable[[int], None],
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        """`show`: the log has news; `stop(seconds)` waits, or returns True as soon as the process is to end;
        `advance`: bytes done; `now`: unix time; `clock`: seconds."""
        self.options, self.engines, self.lead = options, engines, lead
        self.stop, self.now, self.clock = stop, now, clock
        self._show, self._advance = show, advance
        lead.wait_by(self.wait)
        self.log = StepLog()
        self._read_before: dict[str, str | None] = {}
        """processes of engines when config files were last changed under them"""
        self._shown, self._looked = 0.0, -math.inf
        self.updater = LocalUpdater(
            open_store(options.channel),
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

    @property
    def view(self) -> StepView:
        return self.log.view

    def outcome(self) -> Outcome:
        """As of the last step."""
        local = self.updater.local
        return Outcome(
            version=None if local is None else local.state.position.version,
            target=self.view.target_version,
            moved=any(move.kind != "reload" for move in self.log.moves),
            waiting=self.view.not_ready,
            degraded=self.view.degraded,
        )

    @property
    def position(self) -> Position | None:
        """The local version, if it is whole."""
        local = self.updater.local
        return None if local is None or local.state.phase is not Phase.CLEAN else local.state.position

    def reasons_not_ready(self) -> tuple[str, ...]:
        state = self.state
        if state is None or not self.view.usable:
            error = self.view.error
            waiting = self.view.waiting_for
            reason = "the local checkpoint is not seeded" if error is None else error.message
            if waiting is None:
                return (reason,)
            return reason, f"waiting for version {waiting.version}: {waiting.reason}"
        serving = self.engines.serving(state)
        return tuple(
            f"engine {engine.name}{' failed' if engine.failed else ''}: {engine.reason or 'not reloaded yet'}"
            for engine in self.engines.engines
            if engine.name not in serving
        )

    @property
    def state(self) -> LocalState | None:
        return self.updater.state if self.updater.local is None else self.updater.local.state

    def pause_for_replay(self, local: LocalCheckpoint) -> None:
        """An engine that was resumed, or that started since, may serve from files that are written on now."""
        mapping = {engine.name for engine in self.engines.mapping}
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
        self.log.append(Degraded(reason))

    def local(self) -> LocalCheckpoint:
        if self.updater.local is None:
            raise RetryLater(f"{self.options.local} is not open", remedy="the next step opens it")
        return self.updater.local

    def moved(self, kind: MoveKind, before: int | None, folded: int, taken: bool = True) -> None:
        move = self.log.end_move()
        update = UpdateStatus(
            kind=kind,
            from_version=before,
            version=self.local().state.position.version,
            folded=folded,
            bytes=move.bytes,
            changes=move.changes,
            seconds=move.seconds,
            pause_seconds=move.pause_seconds,
            around=self.view.around,
            step=move.step,
            taken=taken,
            at=self.now(),
        )
        self.log.append(Moved(update))
        self.tell()

    def on_wait(self, awaited: Awaited | None) -> None:
        """Shows a wait that lasts. Engines do not wait for the channel: EnginesFirst is raised for an engine
        that is to be reloaded with the local version, unless it failed to do that a moment ago."""
        now, shown = self.clock(), self.view.waiting_for
        if awaited is None:
            self.log.append(Waits(None))
            return
        lasts = awaited.waited >= _PATIENCE_SECONDS or (shown is not None and shown.file == awaited.file)
        if lasts and now - self._looked >= _LOOK_EVERY_SECONDS:
            self._looked = now
            self._show_wait(awaited)
            local = self.updater.local
            due = () if local is None else self.engines.due(local.state)
            if not all(engine.failures for engine in due):
                self.log.begin_move()
                raise EnginesFirst(awaited.reason)

    def _show_wait(self, awaited: Awaited) -> None:
        now = self.now()
        waiting = WaitingFor(
            version=awaited.version,
            file=awaited.file,
            reason=awaited.reason,
            retries=awaited.retries,
            since=now - awaited.waited,
            until=now + awaited.left,
        )
        self.log.append(Waits(waiting))
        self.engines.look_if_due(self.state)
        self.log.append(NotReady(self.reasons_not_ready()))
        self.tell()

    def on_phase(self, phase: str) -> None:
        self.log.begin_phase(phase)
        self.enter("fetching" if phase == "fetch" else "staging")

    def enter(self, state: State) -> None:
        self.log.append(Entered(state))
        self.tell()

    def wait(self, seconds: float) -> None:
        if self.stop(seconds):
            raise Stopped("the process ends", remedy="the next start continues")

    def advance(self, nbytes: int) -> None:
        self._advanced(Advanced(nbytes))

    def advance_fetch(self, nbytes: int) -> None:
        self._advanced(Advanced(nbytes, fetched=True))

    def _advanced(self, event: Advanced) -> None:
        self.wait(0.0)
        self.log.append(event)
        self._advance(event.nbytes)
        if self.clock() - self._shown > _SHOW_EVERY_SECONDS:
            self.tell()

    def tell_files(self) -> None:
        """Which files of the base are not here, by intent or not."""
        updater = self.updater
        if updater.side_files.changed:
            updater.side_files.changed.clear()
            self._read_before = {
                engine.name: engine.facts.process
                for engine in self.engines.engines
                if engine.spec.kind != "webhook"
            }
        missing = left_text(updater.side_files.missing)
        if updater.side_files.missing:
            self.degrade(f"files of the base are missing; sync once with --base: {missing}")
        base_files = UNLISTED if updater.side_files.lists_too_few else ""
        position, before = self.position, self._read_before
        files = FilesView(
            left_behind=updater.side_files.left_behind,
            base_notes=updater.side_files.base_notes,
            carried=self.view.files.carried if position is None else updater.side_files.names(position),
            to_restart=tuple(name for name in before if self.engines[name].facts.process == before[name]),
            base_files=f"missing: {missing}" if updater.side_files.missing else base_files,
        )
        self.log.append(FilesSeen(files))

    def tell_reload(self) -> None:
        """An engine in doubt is shown at once: the others may take minutes."""
        state = self.state
        if state is not None and any(one.mark is Mark.SUSPECT for one in state.engines.values()):
            self.log.append(NotReady(self.reasons_not_ready()))
        self.tell()

    def tell(self) -> None:
        self._shown = self.clock()
        self._show()


def known(error: BaseException) -> WeightcastError:
    if isinstance(error, WeightcastError):
        return error
    if isinstance(error, OSError):
        return disk_error(error, "a file")
    return WeightcastError(f"{type(error).__name__}: {error}", remedy="see the log for the traceback")
