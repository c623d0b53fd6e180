"""The mirror as a daemon: status over HTTP in the main thread, `Mirror.step` in the work thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.publisher.mirror.mirror import Mirror, MirrorOptions, MirrorStatus
from weightcast.publisher.mirror.served import served
from weightcast.publisher.mirror.settings import MirrorPlaces
from weightcast.shared.base.errors import DamagedFile, Refused, Stopped, WeightcastError
from weightcast.shared.channel.awaited import unanswered
from weightcast.shared.channel.claims import Heart
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.rate import Rate, Rates
from weightcast.shared.channel.reports import Report
from weightcast.shared.channel.signing import Trust
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.loop import Stop, Wakeup, Watcher, failure_of, run_daemon
from weightcast.shared.daemon.metrics import NONE, PREFIX, new_registry, watch_loop
from weightcast.shared.daemon.reporter import open_reporter, report_of
from weightcast.shared.daemon.status import Failure, LoopStatus, Readiness, Snapshot
from weightcast.shared.files.paths import shown_address

_NUMBERS = {
    "local_version": "Version that the destination's pointer names; -1: none.",
    "target_version": "Version that the source's pointer names; -1: not known.",
    "lag_versions": "Versions of the source that the destination lacks; NaN while not known.",
    "ready": "1 when the last pass ended well.",
    "epoch": "Number of this mirror's claim to the destination; -1: none.",
}
_COUNTS = {
    "versions": ("mirrored_versions", "Versions copied."),
    "bytes": ("mirrored_bytes", "Bytes of files copied."),
    "mended": ("mended_files", "Files of the destination that were damaged and copied again."),
}


class MirrorMetrics(Collector):
    def __init__(self, status: Callable[[], MirrorStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, help in _NUMBERS.items():
            found, none = getattr(status, name), float("nan") if name == "lag_versions" else NONE
            yield GaugeMetricFamily(f"{PREFIX}_{name}", help, value=none if found is None else float(found))
        for name, (what, help) in _COUNTS.items():
            yield CounterMetricFamily(f"{PREFIX}_{what}", help, value=getattr(status, name))


class MirrorDaemon:
    def __init__(self, settings: MirrorPlaces) -> None:
        self._settings = settings
        self._wakeup, self._stop, self._loop = Wakeup(), Stop(), Snapshot(LoopStatus())
        self._mirror: Mirror | None = None
        self._heart: Heart | None = None
        self._before = MirrorStatus(channel=shown_address(settings.source), local=shown_address(settings.to))
        """what is shown until the destination is taken"""
        self._trouble: Failure | None = None
        """why the last pass did not end well"""
        self._is_ready = False
        self.refused: Refused | None = None
        """why this mirror may not go on"""
        self._reporter = open_reporter(settings, settings.source)

    def _open(self) -> Mirror:
        settings = self._settings
        rates = Rates(fetch=Rate(int(settings.fetch_rate), self._wait))
        options = MirrorOptions(
            settings.retention,
            settings.look_seconds,
            keep_bytes=int(settings.keep_bytes),
            trust=Trust.load(settings.trusted_key),
            take_over=settings.take_over,
            unfenced=settings.unfenced,
        )
        source, to = open_store(settings.source, rates), open_store(settings.to)
        mirror = Mirror(source, to, options, lambda _: self._wait(0.0))
        self._heart = Heart(mirror.claim)
        if self._reporter is not None:
            self._reporter.start(self._report)
        return mirror

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped("the mirror ends", remedy="the next start continues")

    def _step(self, stop: Stop) -> None:
        try:
            if self._mirror is None:
                self._mirror = self._open()
            self._mirror.step()
        except (WeightcastError, OSError) as error:
            self._is_ready, self._trouble = False, failure_of(error)
            self.refused = self._final(error)
            if self.refused is not None:
                self._stop.set()
            raise
        self._is_ready, self._trouble = True, None

    def _final(self, error: Exception) -> Refused | None:
        """Wrong settings, and another owner of the destination."""
        if not isinstance(error, Refused):
            return None
        if self._mirror is None:
            return None if isinstance(error, DamagedFile) else error
        try:
            self._mirror.claim.check()
        except Refused as lost:
            return lost
        return None

    def _close(self) -> None:
        if self._mirror is None:
            return
        if self._reporter is not None:
            self._reporter.stop()
        if self._heart is not None:
            self._heart.stop()
        if self.refused is None:
            self._mirror.close()

    def status(self) -> MirrorStatus:
        status, readiness = self._before if self._mirror is None else self._mirror.status, self._readiness()
        return status.but(
            state="stopped" if self._stop.is_set() else status.state,
            ready=readiness.ready,
            not_ready_reasons=readiness.reasons,
            last_error=self._trouble,
            report_error="" if self._reporter is None else self._reporter.error,
            loop=self._loop.get(),
        )

    def _readiness(self) -> Readiness:
        silent = unanswered()
        if self._is_ready and not silent and not self._stop.is_set():
            return Readiness(ready=True)
        trouble = self._trouble
        reason = "starting: no pass has ended" if trouble is None else trouble.message
        return Readiness(ready=False, reasons=(silent or reason,))

    def _report(self) -> Report:
        """As a host of the source; `engines` says that it is a mirror."""
        status, error = self.status(), self._trouble
        mirror = {"name": "mirror", "kind": "mirror", "state": "", "version": status.served_version}
        return report_of(
            status,
            "" if error is None else f"{error.error}: {error.message}",
            "" if error is None else error.remedy,
            engines=({**mirror, "confirmed_by": "digest"},),
        )

    def _wake(self) -> None:
        if self._mirror is not None:
            self._mirror.look_now()
        self._wakeup.set()

    def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises what `run_daemon` raises, and Refused where it may not go on."""
        registry, settings = new_registry(), self._settings
        watch_loop(registry, self._loop)
        registry.watch(MirrorMetrics(self.status))
        token = None if settings.token is None else settings.token.get_secret_value()
        readiness = self._readiness
        app = make_app("weightcast mirror", self.status, readiness, registry, token, self._wake, MirrorStatus)
        if settings.serve:
            if not isinstance(settings.to, Path):
                raise Refused(
                    f"--serve needs a directory, and --to is {shown_address(settings.to)}",
                    remedy="give a directory; hosts read a bucket themselves",
                )
            app.include_router(served(settings.to))
        source, step, loop, stop = settings.source, self._step, self._loop, self._stop
        with Watcher(source, self._wakeup) if isinstance(source, Path) else nullcontext():
            run_daemon(app, step, self._wakeup, settings, on_stop=self._close, loop=loop, stop=stop)
        if self.refused is not None:
            raise self.refused


def run_mirror(settings: MirrorPlaces) -> None:
    MirrorDaemon(settings).run()
