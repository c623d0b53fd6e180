"""The subscriber as a daemon: status over HTTP in the main thread, `sync_once` in the work thread."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter, FastAPI

from weightcast.shared.base.errors import (
    Refused,
    RetryLater,
    UnknownFormat,
    Untrusted,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.channel.awaited import unanswered
from weightcast.shared.channel.channel import NoChannel, require_named
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import report_key
from weightcast.shared.channel.reports import Report
from weightcast.shared.checkpoint.local_checkpoint import HasWriter
from weightcast.shared.checkpoint.state.state import Phase
from weightcast.shared.checkpoint.update.sources import open_base
from weightcast.shared.checkpoint.verify.hashing import Scrub
from weightcast.shared.daemon.http import StrictRoute, make_app
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.loop import Stop, Wakeup, Watcher, begun, run_daemon
from weightcast.shared.daemon.metrics import DiskMetrics, new_registry, watch_loop
from weightcast.shared.daemon.reporter import open_reporter
from weightcast.shared.daemon.settings import text_of
from weightcast.shared.daemon.status import STATUS, LoopStatus, Readiness, Snapshot, warm_up_in_background
from weightcast.shared.files.disk_errors import DiskError
from weightcast.shared.files.paths import exists, require_directory
from weightcast.subscriber.daemon.announce import Announcer, FailedEngines
from weightcast.subscriber.daemon.metrics import SubscriberMetrics
from weightcast.subscriber.daemon.report import describe
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.daemon.wiring import open_engines, open_gate, open_lead, options_of
from weightcast.subscriber.engines.live import EngineVerify
from weightcast.subscriber.groups.messages import ADAPTERS_PATH, HOLD_PATH, RELEASE_PATH
from weightcast.subscriber.status import GateStatus, HostStatus, UpdateStatus
from weightcast.subscriber.sync.group_follower import GroupFollower, Post
from weightcast.subscriber.sync.host import Callbacks, known
from weightcast.subscriber.sync.sync import MissingBase, Sync

log = get_log("sync")


_EARLY = ("starting", "loading", "planning", "waiting", "stopped")
"""states in which a wrong setting may yet show"""
_WRONG = (MissingBase, UnknownFormat, Untrusted)
"""settings, as long as nothing is seeded; damage of the channel may yet be repaired"""


class Subscriber:
    """The parts of the daemon, wired."""

    def __init__(self, settings: SubscriberSettings) -> None:
        self.settings = settings
        self.wakeup, self.stop = Wakeup(), Stop()
        self.loop = Snapshot(LoopStatus())
        self.registry = new_registry()
        watch_loop(self.registry, self.loop)
        self.metrics = SubscriberMetrics(self.registry)
        self.disk = DiskMetrics(self.registry, {"channel": settings.channel, "local": settings.local})
        self.refused: WeightcastError | None = None
        """why this start can never come to anything"""
        self._has_moved = False
        """the local checkpoint, in the running step"""
        self._ended_well = False
        """a step did, since the start"""
        self.announcer = Announcer()
        self.failed = FailedEngines(settings.on_engine_failed, settings.hook_seconds, self.stop.set)
        self.scrub = Scrub(int(settings.verify_rate), stop=self.stop.is_set)
        self.engine_verify = EngineVerify(
            int(settings.verify_rate), settings.verify_engine_every, stop=self.stop.is_set
        )
        lead = open_lead(settings)
        self.sync = Sync(
            replace(options_of(settings), fetch_ahead=True),
            open_engines(settings, lead, stopping=self.stop.is_set),
            lead,
            Callbacks(self._show, self._moved, stop=self.stop.wait),
        )
        self.gate = open_gate(settings, self.sync.engines, self._run_id, self._wake)
        if self.gate is not None:
            self.registry.watch(self.gate)
        self.reporter = open_reporter(settings, settings.channel)
        self.follower: GroupFollower | None = None
        if settings.group_follower:
            self.follower = GroupFollower(self.sync, Post(self.wakeup.set))

    def _run_id(self) -> str:
        state = self.sync.host.state
        return "" if state is None else state.run_id

    def _show(self, status: HostStatus) -> None:
        if self.gate is not None and status.target_version is not None:
            self.gate.traffic.target = status.target_version
        self.announcer.waits(status)
        self.metrics.show(status)
        self.disk.show()

    def _moved(self, update: UpdateStatus) -> None:
        local = self.sync.updater.local
        self.announcer.moved(update, self.sync.status, 0 if local is None else local.table.elements)
        self.metrics.count(update)
        self._has_moved |= update.kind != "reload"

    def step(self, stop: Stop) -> None:
        self._has_moved = False
        try:
            if self.follower is None:
                self.sync.sync_once()
            else:
                self.follower.step()
            if self.follower is None or not self.follower.is_still:
                self.sync.verify_some(self.scrub)
                for name, fault in self.sync.verify_engines(self.engine_verify).items():
                    log.warning("engine verify", engine=name, fault=fault)
            self._ended_well = True
        except WeightcastError as error:
            if self._is_final(error):
                self.refused = error
                self.stop.set()
            raise
        finally:
            self.announcer.not_taken(self.sync.status)
            self.failed.tell(self.sync.status)
        self.announcer.ended_well(self.sync.status)
        if self._has_moved:
            # another version may have come meanwhile
            self.wakeup.set()

    def _reported(self) -> Report | None:
        """A report is a local checkpoint's: that of its writer. A start that is refused leaves none."""
        status = self.sync.status.but(loop=self.loop.get(), gate=self._gate_status())
        unknown = self.refused is not None or isinstance(self.sync.host.error, HasWriter)
        # others hear of this host once its settings have led somewhere, or only an engine keeps it
        waits = status.state == "starting" and status.last_error is not None
        is_known = status.loop.steps > 0 or status.state not in _EARLY or waits
        return None if unknown or not is_known else describe(status)

    def on_start(self) -> None:
        self.loop.set(begun(self.loop.get(), time.time()))  # a channel may hang here already
        try:
            self._check_places()
        except BaseException:
            self.sync.close()
            raise
        if self.reporter is not None:
            self.reporter.start(self._reported)

    def on_stop(self) -> None:
        if self.follower is not None:
            self.follower.close()
        self.sync.close()
        if self.reporter is not None:
            self.reporter.stop()
        if self.refused is not None and not self._is_seeded:
            # it may have reported that it seeds
            options = self.sync.options
            with suppress(OSError, Refused):
                open_store(options.channel).delete(report_key(socket.gethostname(), str(options.local)))

    @property
    def _is_seeded(self) -> bool:
        state = self.sync.host.state
        return state is not None and state.phase is not Phase.SEEDING

    def _check_places(self) -> None:
        """Before the first step. Raises Refused for a local directory or a base that will not do, HasWriter,
        and DiskError for an error that lasts; what may pass is left to the first step."""
        base, channel = self.settings.base, self.settings.channel
        try:
            require_directory("--channel", channel)
            with suppress(NoChannel):
                require_named(open_store(channel))
            if base is not None and not exists(self.sync.updater.paths.state):
                open_base(base)
            self.sync.host.own()
        except (OSError, RetryLater) as error:
            told = known(error)
            if isinstance(told, HasWriter) or told.exit_code == Refused.exit_code:
                raise told from error

    def _is_final(self, error: WeightcastError) -> bool:
        """Whether no later step can end better, as long as none has ended well."""
        if self._ended_well or self._is_seeded or isinstance(error, WrongRun):
            return isinstance(error, WrongRun) and not self._ended_well
        lasts = isinstance(error, DiskError) and error.exit_code == Refused.exit_code
        return isinstance(error, _WRONG) or (lasts and not isinstance(error.__cause__, FileNotFoundError))

    def status(self) -> HostStatus:
        status = self.sync.status
        hashed, silent = status.last_full_hash, tuple(filter(None, [unanswered()]))
        return status.but(
            degraded=status.degraded + silent,
            not_ready_reasons=status.not_ready_reasons + (() if status.ready else silent),
            loop=self.loop.get(),
            kernels=STATUS.get(),
            last_full_hash_age_seconds=None if hashed is None else max(0.0, time.time() - hashed),
            group=self.sync.lead.status() if self.follower is None else self.follower.post.status(),
            report_error="" if self.reporter is None else self.reporter.error,
            gate=self._gate_status(),
        )

    def _gate_status(self) -> GateStatus | None:
        return None if self.gate is None else self.gate.status()

    def ready(self) -> Readiness:
        status = self.sync.status
        return Readiness(ready=status.ready, reasons=status.not_ready_reasons)

    def stop_time(self) -> float:
        """A reload that may yet end well is waited for: its engine would stay paused until the next start."""
        pausing = [engine.name for engine in self.sync.status.engines if engine.mark == "pausing"]
        return max((self.sync.engines[name].pace.total for name in pausing), default=0.0)

    def app(self) -> FastAPI:
        token, title = text_of(self.settings.token), "weightcast subscriber"
        app = make_app(title, self.status, self.ready, self.registry, token, self._wake, HostStatus)
        if self.follower is not None:
            routes, post = APIRouter(tags=["group"], route_class=StrictRoute), self.follower.post
            routes.post(HOLD_PATH, name="hold")(post.take)
            routes.get(HOLD_PATH, name="look")(post.look)
            routes.post(RELEASE_PATH, name="release")(post.release)
            routes.post(ADAPTERS_PATH, name="adapters")(self.sync.adapters.share)
            app.include_router(routes)
        return app

    def _wake(self) -> None:
        self.sync.engines.wake()
        self.wakeup.set()

    def run(self) -> None:
        """Until SIGTERM, SIGINT or `stop`. Raises what `run_daemon` raises, what refuses the first start, and
        EngineFailed where the failure of an engine is to end the daemon."""
        warm_up_in_background()
        channel, gate = self.settings.channel, self.settings.gate
        with ExitStack() as stack:
            if self.gate is not None and gate is not None:
                tls = self.settings.server_tls()
                self.gate.start(self.settings.host, gate, self.settings.gate_url, tls)
                stack.callback(self.gate.stop)
            if isinstance(channel, Path):
                stack.enter_context(Watcher(channel, self.wakeup))
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


def run_subscriber(settings: SubscriberSettings) -> None:
    Subscriber(settings).run()
