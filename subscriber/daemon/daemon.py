"""The subscriber as a daemon: status over HTTP in the main thread, `sync_once` in the work thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fastapi import APIRouter, FastAPI

from weightcast.shared.base.errors import (
    Refused,
    RetryLater,
    UnknownFormat,
    Untrusted,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.channel.channel import NoChannel, require_named
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import report_key
from weightcast.shared.checkpoint.local_checkpoint import HasWriter
from weightcast.shared.checkpoint.state.state import Phase
from weightcast.shared.checkpoint.update.sources import open_base
from weightcast.shared.checkpoint.verify.hashing import Scrub
from weightcast.shared.daemon.http import StrictRoute, make_app
from weightcast.shared.daemon.logs import get_log, setup_logs
from weightcast.shared.daemon.loop import Stop, Wakeup, begun, run_daemon
from weightcast.shared.daemon.metrics import DiskMetrics, new_registry, watch_loop
from weightcast.shared.daemon.status import (
    STATUS,
    LoopStatus,
    Readiness,
    Snapshot,
    warm_up_in_background,
)
from weightcast.shared.daemon.watch import Watcher
from weightcast.shared.files.disk_errors import DiskError
from weightcast.shared.files.paths import exists, require_directory
from weightcast.subscriber.daemon.failed_engines import FailedEngines
from weightcast.subscriber.daemon.metrics import SubscriberMetrics
from weightcast.subscriber.daemon.report import Reporting, open_reporter
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.daemon.status import StatusBuilder, group_status, of_move
from weightcast.subscriber.daemon.wiring import open_engines, open_lead, options_of
from weightcast.subscriber.engines.verify import EngineVerify
from weightcast.subscriber.groups.messages import Hold, HoldRequest, ReleaseRequest
from weightcast.subscriber.groups.order import HOLD_PATH, RELEASE_PATH
from weightcast.subscriber.status import HostStatus, UpdateStatus, WaitingFor, readiness
from weightcast.subscriber.sync.group_follower import GroupFollower, Post
from weightcast.subscriber.sync.host import Outcome, known
from weightcast.subscriber.sync.planner import MissingBase
from weightcast.subscriber.sync.sync import Sync

log = get_log("sync")


class Subscriber:
    """The parts of the daemon, wired."""

    def __init__(self, settings: SubscriberSettings) -> None:
        self.settings = settings
        self.options = replace(options_of(settings), fetch_ahead=True)
        self.wakeup, self.stop = Wakeup(), Stop()
        self.loop = Snapshot(LoopStatus())
        self.status_builder = StatusBuilder(self.options)
        self.registry = new_registry()
        watch_loop(self.registry, self.loop)
        self.metrics = SubscriberMetrics(self.registry)
        self.disk = DiskMetrics(self.registry, {"channel": settings.channel, "local": settings.local})
        self.refused: WeightcastError | None = None
        """why this start can never come to anything"""
        self._troubles: tuple[str, ...] = ()
        self._left: tuple[str, ...] = ()
        self._base_notes: tuple[str, ...] = ()
        self._to_restart: tuple[str, ...] = ()
        self._awaited = ""
        self._logged = 0
        """moves of the running step"""
        self.failed = FailedEngines(settings.on_engine_failed, settings.hook_seconds, self.stop.request)
        self.scrub = Scrub(int(settings.verify_rate), stop=lambda: self.stop.requested)
        self.engine_verify = EngineVerify(
            int(settings.verify_rate), settings.verify_engine_every, stop=lambda: self.stop.requested
        )
        lead = open_lead(settings)
        engines = open_engines(settings, lead, stopping=lambda: self.stop.requested)
        self.sync = Sync(self.options, engines, lead, show=self._show, stop=self.stop.wait)
        self.start = Start(self.sync)
        reporter = open_reporter(settings)
        self.reporting = None if reporter is None else Reporting(reporter, self._reported)
        self.post = Post(self.wakeup.set) if settings.group_follower else None
        self.follower = None if self.post is None else GroupFollower(self.sync, self.post)

    def _show(self, sync: Sync) -> None:
        self.status_builder.show(sync)
        self._log_moves()
        self._log_wait(sync.log.view.waiting_for)
        self.metrics.show(self.status_builder.status.get())
        self.disk.show()

    def step(self, stop: Stop) -> None:
        try:
            self._step()
        except WeightcastError as error:
            if self.start.is_final(error):
                self.refused = error
                self.stop.request()
            raise
        self.start.ended_well()

    def _step(self) -> None:
        try:
            outcome = self.sync.sync_once() if self.follower is None else self.follower.step()
            if self.follower is None or not self.follower.is_still:
                self.sync.verify_some(self.scrub)
                self._verify_engines()
        finally:
            self._log_untaken()
            self.failed.tell(self.status_builder.status.get())
        self._log(outcome)
        self._awaited = ""
        if outcome.moved:
            # another version may have come meanwhile
            self.wakeup.set()

    def _log_wait(self, waiting: WaitingFor | None) -> None:
        """Once for each file, also where several steps wait for it."""
        if waiting is not None and waiting.file != self._awaited:
            self._awaited = waiting.file
            seconds = round(waiting.until - time.time())
            log.warning(
                "waiting for a file",
                sentence=f"waiting for version {waiting.version}: {waiting.reason}; up to {seconds} s more",
                **waiting.by_name(),
            )

    def _verify_engines(self) -> None:
        for name, fault in self.sync.verify_engines(self.engine_verify).items():
            log.warning("engine verify", engine=name, fault=fault)

    def _log_moves(self) -> None:
        """As they come: what follows in the same step may take long."""
        moves = self.sync.log.moves
        self._logged = min(self._logged, len(moves))
        for move in moves[self._logged :]:
            if move.taken:
                self._log_move(move)
        self._logged = len(moves)

    def _log_move(self, move: UpdateStatus) -> None:
        local = self.sync.updater.local
        words = 0 if local is None else local.table.elements
        parts = {f"{part}_s": round(seconds, 4) for part, seconds in move.seconds.items()}
        log.info(
            "engines reloaded" if move.kind == "reload" else "version",
            sentence=of_move(move, self.status_builder.status.get().served_version, words),
            kind=move.kind,
            from_version=move.from_version,
            version=move.version,
            step=move.step,
            target=self.sync.log.view.target_version,
            folded=move.folded,
            bytes=move.bytes,
            changes=move.changes,
            pause_total_s=None if move.pause_seconds is None else round(move.pause_seconds, 4),
            **parts,
        )

    def _log_untaken(self) -> None:
        """What no engine took, unless the last line said the same."""
        reasons = self.sync.log.view.not_ready
        untaken = [move.version for move in self.sync.log.moves if not move.taken]
        if untaken and reasons != self._troubles:
            self._troubles = reasons
            log.warning("engines not reloaded", version=untaken[-1], reasons=list(reasons))

    def _log(self, outcome: Outcome) -> None:
        to_restart = self.sync.log.view.files.to_restart
        if to_restart != self._to_restart:
            self._to_restart = to_restart
            if to_restart:
                files = list(self.sync.log.view.files.carried)
                log.warning("config files changed: restart engines", engines=list(to_restart), files=files)
        left = self.sync.log.view.files.left_behind
        if left != self._left:
            self._left = left
            log.info("files left behind", files=list(left))
        notes = self.sync.log.view.files.base_notes
        if notes != self._base_notes:
            self._base_notes = notes
            log.info("small faults in the base, tolerated", notes=list(notes))
        troubles = (*outcome.waiting, *outcome.degraded)
        if troubles != self._troubles:
            self._troubles = troubles
            if troubles:
                log.warning("not where it should be", version=outcome.version, reasons=list(troubles))
            else:
                sentence = f"all engines serve version {outcome.version}"
                log.info("all engines serve", sentence=sentence, version=outcome.version)

    def _reported(self) -> HostStatus | None:
        """A report is a local checkpoint's: that of its writer. A start that is refused leaves none."""
        status = self.status_builder.status.get().but(loop=self.loop.get())
        unknown = self.refused is not None or isinstance(self.sync.log.view.error, HasWriter)
        return None if unknown or not self.start.is_known(status) else status

    def on_start(self) -> None:
        self.loop.set(begun(self.loop.get(), time.time()))  # a channel may hang here already
        try:
            self.start.check_places()
        except BaseException:
            self.sync.close()
            raise
        if self.reporting is not None:
            self.reporting.start()

    def on_stop(self) -> None:
        if self.follower is not None:
            self.follower.close()
        self.sync.close()
        if self.reporting is not None:
            self.reporting.stop()
        if self.refused is not None:
            self.start.withdraw()

    def status(self) -> HostStatus:
        status = self.status_builder.status.get()
        hashed = status.last_full_hash
        return status.but(
            loop=self.loop.get(),
            kernels=STATUS.get(),
            last_full_hash_age_seconds=None if hashed is None else max(0.0, time.time() - hashed),
            group=group_status(self.sync.lead, self.post),
            report_error="" if self.reporting is None else self.reporting.error,
        )

    def ready(self) -> Readiness:
        return readiness(self.status_builder.status.get())

    def stop_time(self) -> float:
        """A reload that may yet end well is waited for: its engine would stay paused until the next start."""
        engines, engine_status = self.sync.engines, self.status_builder.status.get().engines
        return max(
            (engines[one.name].pace.total for one in engine_status if one.mark == "pausing"), default=0.0
        )

    def app(self) -> FastAPI:
        token = None if self.settings.token is None else self.settings.token.get_secret_value()
        app = make_app(
            "weightcast subscriber",
            self.status,
            self.ready,
            self.registry,
            token,
            self._wake,
            HostStatus,
        )
        if self.post is not None:
            app.include_router(group_routes(self.post))
        return app

    def _wake(self) -> None:
        self.sync.engines.wake()
        self.wakeup.set()

    def run(self) -> None:
        """Until SIGTERM, SIGINT or `stop`. Raises what `run_daemon` raises, what refuses the first start, and
        EngineFailed where the failure of an engine is to end the daemon."""
        warm_up_in_background()
        with Watcher(self.settings.channel, self.wakeup):
            run_daemon(
                self.app(),
                self.step,
                self.wakeup,
                self.settings,
                self.on_start,
                self.on_stop,
                loop=self.loop,
                stop=self.stop,
                stop_time=self.stop_time,
            )
        error = self.refused or self.failed.error
        if error is not None:
            raise error


def run_subscriber(
    settings: SubscriberSettings, make: Callable[[SubscriberSettings], Subscriber] = Subscriber
) -> None:
    setup_logs(settings.log_format, settings.log_level)
    make(settings).run()


_EARLY = ("starting", "loading", "planning", "waiting", "stopped")
"""states in which a wrong setting may yet show"""
_WRONG = (MissingBase, UnknownFormat, Untrusted)
"""settings, as long as nothing is seeded; damage of the channel may yet be repaired"""


class Start:
    """Used by the work thread; `is_known` by any."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self._ended_well = False

    @property
    def _is_seeded(self) -> bool:
        state = self._sync.host.state
        return state is not None and state.phase is not Phase.SEEDING

    def check_places(self) -> None:
        """Before the first step. Raises Refused for a local directory or a base that will not do, HasWriter,
        and DiskError for an error that lasts; what may pass is left to the first step."""
        base, channel = self._sync.options.base, self._sync.options.channel
        try:
            require_directory("--channel", channel)
            with suppress(NoChannel):
                require_named(open_store(channel))
            if base is not None and not exists(self._sync.updater.paths.state):
                open_base(base)
            self._sync.take_local()
        except (OSError, RetryLater) as error:
            told = known(error)
            if isinstance(told, HasWriter) or told.exit_code == Refused.exit_code:
                raise told from error

    def is_final(self, error: WeightcastError) -> bool:
        """Whether no later step can end better, as long as none has ended well."""
        if self._ended_well or self._is_seeded or isinstance(error, WrongRun):
            return isinstance(error, WrongRun) and not self._ended_well
        lasts = isinstance(error, DiskError) and error.exit_code == Refused.exit_code
        return isinstance(error, _WRONG) or (lasts and not isinstance(error.__cause__, FileNotFoundError))

    def withdraw(self) -> None:
        """Deletes the report of a host that was refused when it had begun to seed."""
        options = self._sync.options
        if not self._is_seeded:
            with suppress(OSError):
                open_store(options.channel).delete(report_key(socket.gethostname(), str(options.local)))

    def ended_well(self) -> None:
        self._ended_well = True

    def is_known(self, status: HostStatus) -> bool:
        """Whether others may hear of this host: its settings have led somewhere."""
        return status.loop.steps > 0 or status.state not in _EARLY


def group_routes(post: Post) -> APIRouter:
    router = APIRouter(tags=["group"], route_class=StrictRoute)

    @router.post(HOLD_PATH)
    def hold(request: HoldRequest) -> Hold:
        """Come to a version and stand still there, or only prepare for it, until the lease ends. Repeated by
        the leader, which renews the lease and tells how far it is."""
        return post.take(request.order(), request.seconds)

    @router.get(HOLD_PATH)
    def look() -> Hold:
        """The order that is here and where the local checkpoint is."""
        return post.look()

    @router.post(RELEASE_PATH)
    def release(request: ReleaseRequest) -> Hold:
        """The leader's order of this term ends before its lease does."""
        return post.release(request.leader, request.term, request.served)

    return router
