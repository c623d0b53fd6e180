"""One host: its local checkpoint, its engines, and what the running pass knows and tells of them."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from weightcast.shared.base.errors import RetryLater, Stopped, WeightcastError
from weightcast.shared.channel.components import component_store
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.rate import Rate, Rates
from weightcast.shared.checkpoint.local_checkpoint import HasWriter, LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.state.locks import EngineLoads, FileLock
from weightcast.shared.checkpoint.state.state import LocalState, Mark, Phase, Position, write_state
from weightcast.shared.checkpoint.update.fetch import Awaited
from weightcast.shared.daemon.status import SOFTWARE
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.hf_checkpoint import left_text
from weightcast.shared.files.paths import is_directory, require_no_overlap, shown_address
from weightcast.subscriber.engines.host import Engines
from weightcast.subscriber.engines.rules import EngineResult, noted
from weightcast.subscriber.groups.lead import Lead
from weightcast.subscriber.status import (
    KEPT_UPDATES,
    AdapterStatus,
    Cause,
    HostStatus,
    LastError,
    MoveKind,
    State,
    UpdateStatus,
    WaitingFor,
    with_local,
)
from weightcast.subscriber.sync.options import SyncOptions

_SHOW_EVERY_SECONDS = 0.25
_PATIENCE_SECONDS = 2.0
"""before a wait for a file is shown; most files are late by less"""
LOOK_SECONDS = 10.0
"""between two looks for components where every look is a request"""
_VISIBLE_SECONDS = 5.0
"""that what a component's pointer implies is waited for in a step: main versions wait behind it"""
_LOOK_EVERY_SECONDS = 1.0
"""at engines while a file is waited for"""


class EnginesFirst(RetryLater):
    """A wait for the channel is broken off: an engine does not hold the local version yet."""


def _never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@dataclass(frozen=True)
class Callbacks:
    show: Callable[[HostStatus], None] = lambda status: None
    """the status has news"""
    moved: Callable[[UpdateStatus], None] = lambda update: None
    """a move of the local checkpoint, or a reload, ended"""
    advance: Callable[[int], None] = lambda nbytes: None
    """bytes were done"""
    stop: Callable[[float], bool] = _never
    """waits for these seconds, or returns True as soon as the process is to end"""
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic


class Move:
    """The move of the local checkpoint, or the reload, that is under way: times by phase, bytes, words.
    Filled by the work thread and by threads of a reload, never at once."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Also in place of a move that was given up."""
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._bytes = self._changes = 0
        self._step: int | None = None
        self._pause_seconds: float | None = None
        self._phase, self._phase_began = "", 0.0

    def end(self) -> dict[str, Any]:
        """What UpdateStatus says of it; the next move begins."""
        self.enter("")
        self._took("total", time.monotonic() - self._began)
        facts = {
            "bytes": self._bytes,
            "changes": self._changes,
            "seconds": self._seconds,
            "pause_seconds": self._pause_seconds,
            "step": self._step,
        }
        self.begin()
        return facts

    def enter(self, phase: str) -> None:
        """Ends the phase before; "" begins none."""
        now = time.monotonic()
        if self._phase:
            self._took(self._phase, now - self._phase_began)
        self._phase, self._phase_began = phase, now

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Of the move that is under way when the block ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._took(phase, time.monotonic() - began)

    def _took(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def read(self, nbytes: int) -> None:
        self._bytes += nbytes

    def changed(self, words: int, step: int | None = None) -> None:
        """`step`: the trainer's, of the version."""
        self._changes, self._step = self._changes + words, step

    def reloaded(self, results: Sequence[EngineResult]) -> None:
        """Engines work side by side: the slowest counts."""
        for phase in ("pause", "reload", "read_back", "resume"):
            slowest = max((result.phases[phase] for result in results), default=0.0)
            if slowest:
                self._took(phase, slowest)
        pauses = [result.pause_seconds for result in results if result.pause_seconds is not None]
        self._pause_seconds = max(pauses, default=self._pause_seconds)


class StepHost:
    """Shared by the parts of a pass. Used by the work thread, and by threads of a reload while that waits;
    `shown` is read by any thread."""

    def __init__(self, options: SyncOptions, engines: Engines, lead: Lead, callbacks: Callbacks) -> None:
        self.options, self.engines, self.lead = options, engines, lead
        self.stop, self.now, self.clock = callbacks.stop, callbacks.now, callbacks.clock
        self._callbacks = callbacks
        lead.wait = self.wait
        self.move = Move()
        self.status = self.shown = HostStatus(
            software=SOFTWARE,
            host=socket.gethostname(),
            channel=str(shown_address(options.channel)),
            local=str(options.local.absolute()),
            target=options.target.text,
            bytes_by_cause=dict.fromkeys(get_args(Cause), 0),
        )
        """what the pass knows, and what it last showed"""
        self.adapters: Callable[[], Iterable[AdapterStatus]] = tuple
        self.adapters_trouble = ""
        """why it is not known which there are"""
        self.draft: Callable[[], AdapterStatus | None] = lambda: None
        self.bring_draft: Callable[[Position], None] = lambda main: None
        """called before engines are reloaded with these main weights; they load the draft model too"""
        self.usable = False
        """the local checkpoint is a version of this run, although it may be closed after an error"""
        self.error: WeightcastError | None = None
        """of this pass; a pass that waits for another writer starts with the last one's"""
        self.bytes_read = 0
        """from the channel, since the start"""
        self._progress_bytes = 0
        self.fetch_bytes: int | None = None
        """of the versions that are fetched together"""
        self.around: tuple[str, ...] = ()
        """damage in the channel that this pass went around"""
        self._read_before: dict[str, str | None] = {}
        """processes of engines when config files were last changed under them"""
        self._shown_at, self._looked = 0.0, -math.inf
        self.updater = LocalUpdater(
            open_store(options.channel, Rates(fetch=Rate(options.fetch_rate, self.wait))),
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
                locked=self.patching,
                base_version=options.base_version,
            ),
        )

    def updater_of(self, component: str, local: Path) -> LocalUpdater:
        """Of a component, in `local`."""
        seconds = min(self.options.visible_seconds, _VISIBLE_SECONDS)
        options = UpdaterOptions(self.options.threads, seconds, self.options.pre_read, wait=self.wait)
        return LocalUpdater(component_store(self.updater.store, component), local, None, options)

    def begin(self) -> None:
        """A pass begins."""
        self.move.begin()
        self.around = ()
        if isinstance(self.error, EngineLoads):
            self.note(last_error=None)
        if not isinstance(self.error, HasWriter):
            self.error = None
        self.note(degraded=(), waiting_for=None)

    def own(self) -> None:
        """Makes the local checkpoint this process's. Raises HasWriter, Refused for a directory that will not
        do, and OSError."""
        if not is_directory(self.updater.paths.room):
            # the first time: nothing is made in a channel, whatever it is called here
            require_no_overlap("--local", self.updater.paths.directory, "--channel", self.options.channel)
        self.updater.own()
        self.error = None

    @property
    def state(self) -> LocalState | None:
        return self.updater.state

    @property
    def position(self) -> Position | None:
        """The local version, if it is whole."""
        local = self.updater.local
        return None if local is None or local.state.phase is not Phase.CLEAN else local.state.position

    def local(self) -> LocalCheckpoint:
        if self.updater.local is None:
            raise RetryLater(f"{self.options.local} is not open", remedy="the next step opens it")
        return self.updater.local

    def note(self, **facts: Any) -> None:
        """Facts of the status; shown by the next `tell`."""
        self.status = self.status.but(**facts)

    def tell(self) -> None:
        self._shown_at = self.clock()
        state, trust = self.state, self.options.trust
        signer = None if trust is None or state is None else trust.signer(state.position.digest)
        self.note(
            progress_bytes=self._progress_bytes,
            progress_total=self.fetch_bytes if self.status.state == "fetching" else None,
            bytes_read=self.bytes_read,
            signed="not checked" if trust is None else f"verified by {signer}" if signer else "not verified",
        )
        self._note_components()
        if self.status.ready and self.status.lacking:
            # taken from an engine just now
            self.judge_ready()
        self.engines.admit(state)
        self.shown = self.status = with_local(self.status, state, self.engines.status(state))
        self._callbacks.show(self.shown)

    def enter(self, state: State) -> None:
        self._progress_bytes = 0
        ended_well = state == "idle" and self.error is None
        self.note(state=state, last_error=None if ended_well else self.status.last_error)
        self.tell()

    def not_ready(self, *reasons: str) -> None:
        """Without a reason the host is ready."""
        self.note(ready=not reasons, not_ready_reasons=reasons)

    def judge_ready(self) -> None:
        state = self.state
        if state is None or not self.usable:
            waiting = self.status.waiting_for
            reason = "the local checkpoint is not seeded" if self.error is None else self.error.message
            self.not_ready(*((reason,) if waiting is None else (reason, str(waiting))))
            return
        self._note_components()
        serving, lacking = self.engines.serving(state), self.status.lacking
        self.not_ready(
            *(
                f"engine {one.name}{' failed' if one.failed else ''}: {one.reason or 'not reloaded yet'}"
                for one in self.engines.engines
                if one.name not in serving
            ),
            *(f"{name}: {one.error or 'not loaded yet'}" for name, one in lacking.items()),
            *filter(None, [self.adapters_trouble]),
        )
        for name, one in self.status.components.items():
            if one.error and name not in lacking:
                self.degrade(f"{name}: {one.error}")

    def _note_components(self) -> None:
        self.note(adapters=tuple(self.adapters()), draft=self.draft())

    def degrade(self, reason: str) -> None:
        if reason and reason not in self.status.degraded:
            self.note(degraded=(*self.status.degraded, reason))

    def failed(self, error: BaseException) -> WeightcastError:
        failure = self.error = known(error)
        facts = {"error": type(failure).__name__, "message": failure.message, "remedy": failure.remedy}
        self.note(last_error=LastError(**facts, at=self.now()))
        return failure

    def moved(self, kind: MoveKind, before: int | None, folded: int, taken: bool | None = None) -> None:
        """`taken`: None where it follows from the engines as they are."""
        if taken is None:
            follow = kind in ("patch", "relabel") and self.engines.engines
            taken = not follow or bool(self.engines.in_sync(self.local().state))
        update = UpdateStatus(
            kind=kind,
            from_version=before,
            version=self.local().state.position.version,
            folded=folded,
            around=self.around,
            taken=taken,
            at=self.now(),
            **self.move.end(),
        )
        self.note(updates=(*self.status.updates, update)[-KEPT_UPDATES:])
        self.tell()
        self._callbacks.moved(update)

    def read_for(self, cause: Cause, nbytes: int, *, fetched: bool = False) -> None:
        """What bytes of the channel were for. `fetched`: they are counted already."""
        self.bytes_read += 0 if fetched else nbytes
        by_cause = self.status.bytes_by_cause
        self.note(bytes_by_cause={**by_cause, cause: by_cause[cause] + nbytes})

    def advance(self, nbytes: int) -> None:
        self.wait(0.0)
        self._progress_bytes += nbytes
        self._callbacks.advance(nbytes)
        if self.clock() - self._shown_at > _SHOW_EVERY_SECONDS:
            self.tell()

    def advance_fetch(self, nbytes: int) -> None:
        """As `advance`; the bytes were read from the channel."""
        self.bytes_read += nbytes
        self.move.read(nbytes)
        self.advance(nbytes)

    def wait(self, seconds: float) -> None:
        if self.stop(seconds):
            raise Stopped("the process ends", remedy="the next start continues")

    @contextmanager
    def patching(self, local: LocalCheckpoint) -> Iterator[None]:
        """The patch lock. A wait for an engine that loads is shown meanwhile."""
        before = self.status

        def wait(seconds: float) -> None:
            refusal = FileLock(local.paths.patch).refusal()
            if isinstance(refusal, EngineLoads) and self.status.last_error is before.last_error:
                self.failed(refusal)
                self.enter("starting")
            self.wait(seconds)

        with local.patching(wait=wait):
            if self.status.last_error is not before.last_error:
                self.error = None
                self.note(last_error=before.last_error)
                self.enter(before.state)
            yield

    def on_phase(self, phase: str) -> None:
        self.move.enter(phase)
        self.enter("fetching" if phase == "fetch" else "staging")

    def on_wait(self, awaited: Awaited | None) -> None:
        """Shows a wait that lasts. Engines do not wait for the channel: EnginesFirst is raised for an engine
        that is to be reloaded with the local version, unless it failed to do that a moment ago."""
        clock, shown = self.clock(), self.status.waiting_for
        if awaited is None:
            self.note(waiting_for=None)
            return
        lasts = awaited.waited >= _PATIENCE_SECONDS or (shown is not None and shown.file == awaited.file)
        if not lasts or clock - self._looked < _LOOK_EVERY_SECONDS:
            return
        self._looked, now = clock, self.now()
        waiting = WaitingFor(
            version=awaited.version,
            file=awaited.file,
            reason=awaited.reason,
            retries=awaited.retries,
            since=now - awaited.waited,
            until=now + awaited.left,
        )
        self.note(waiting_for=waiting, state="waiting")
        self.engines.look_if_due(self.state)
        self.judge_ready()
        self.tell()
        local = self.updater.local
        if not all(one.failures for one in (() if local is None else self.engines.due(local.state))):
            self.move.begin()
            raise EnginesFirst(awaited.reason)

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
        record = state.engines.get(name)
        if record is not None and record.mark is Mark.SUSPECT:
            return
        state = state.but(engines={**state.engines, name: noted(record, Mark.SUSPECT)})
        if local is not None:
            local.save(state)
        else:
            write_state(self.updater.paths.state, state)
            self.updater.state = state

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
        position, before = self.position, self._read_before
        self.note(
            left_behind=updater.side_files.left_behind,
            base_notes=updater.side_files.base_notes,
            carried=self.status.carried if position is None else updater.side_files.names(position),
            engines_to_restart=tuple(
                name for name in before if self.engines[name].facts.process == before[name]
            ),
            base_files=f"missing: {missing}" if updater.side_files.missing else "",
        )

    def tell_reload(self) -> None:
        """An engine in doubt is shown at once: the others may take minutes."""
        state = self.state
        if state is not None and any(one.mark is Mark.SUSPECT for one in state.engines.values()):
            self.judge_ready()
        self.tell()


def known(error: BaseException) -> WeightcastError:
    if isinstance(error, WeightcastError):
        return error
    if isinstance(error, OSError):
        return disk_error(error, "a file")
    return WeightcastError(f"{type(error).__name__}: {error}", remedy="see the log for the traceback")
