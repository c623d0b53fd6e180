"""The mirror as a daemon: status over HTTP in the main thread, `Mirror.step` in the work thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.publisher.mirror.mirror import Mirror, MirrorOptions, MirrorStatus
from weightcast.publisher.mirror.settings import MirrorPlaces
from weightcast.shared.base.errors import DamagedFile, Refused, Stopped, WeightcastError
from weightcast.shared.channel.claims import Heart
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.rate import Rate, Rates
from weightcast.shared.channel.reports import Report
from weightcast.shared.channel.signing import Trust
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.loop import Stop, Wakeup, Watcher, failure_of, run_daemon
from weightcast.shared.daemon.metrics import NONE, PREFIX, new_registry, watch_loop
from weightcast.shared.daemon.reporter import InChannel, Reporter
from weightcast.shared.daemon.status import LoopStatus, Readiness, Snapshot
from weightcast.shared.files.disk_errors import disk_error
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
        self._failed: WeightcastError | None = None
        """why the last pass did not end well"""
        self._steps = 0
        self.refused: Refused | None = None
        """why this mirror may not go on"""
        self._reporter = Reporter(InChannel(settings.source), settings.report_seconds)

    def _open(self) -> Mirror:
        settings = self._settings
        rates = Rates(fetch=Rate(int(settings.fetch_rate), self._wait))
        options = MirrorOptions(
            settings.retention,
            settings.look_seconds,
            trust=Trust.load(settings.trusted_key),
            take_over=settings.take_over,
            unfenced=settings.unfenced,
        )
        mirror = Mirror(
            open_store(settings.source, rates), open_store(settings.to), options, lambda _: self._wait(0.0)
        )
        self._heart = Heart(mirror.claim)
        if settings.report:
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
            self._failed = error if isinstance(error, WeightcastError) else disk_error(error, "a file")
            self._give_up_where_nothing_helps(error)
            raise
        self._failed, self._steps = None, self._steps + 1

    def _give_up_where_nothing_helps(self, error: Exception) -> None:
        """To wrong settings, and to another owner of the destination."""
        if not isinstance(error, Refused):
            return
        if self._mirror is None and not isinstance(error, DamagedFile):
            self.refused = error
        elif self._mirror is not None:
            try:
                self._mirror.claim.check()
            except Refused as lost:
                self.refused = lost
        if self.refused is not None:
            self._stop.set()

    def _close(self) -> None:
        if self._mirror is None:
            return
        self._reporter.stop()
        if self._heart is not None:
            self._heart.stop()
        if self.refused is None:
            self._mirror.close()

    def status(self) -> MirrorStatus:
        status = self._before if self._mirror is None else self._mirror.status
        failed = self._failed
        reason = "starting: no pass has ended" if failed is None else failed.message
        return status.but(
            state="stopped" if self._stop.is_set() else status.state,
            ready=self._is_ready,
            not_ready_reasons=() if self._is_ready else (reason,),
            last_error=None if failed is None else failure_of(failed),
            report_error=self._reporter.error,
            loop=self._loop.get(),
        )

    @property
    def _is_ready(self) -> bool:
        return self._failed is None and self._steps > 0 and not self._stop.is_set()

    def _report(self) -> Report:
        """As a host of the source; `engines` says that it is a mirror."""
        status = self.status()
        error = status.last_error
        mirror = {"name": "mirror", "kind": "mirror", "state": "", "version": status.served_version}
        return Report(
            host=status.host,
            local=status.local,
            run_id=status.run_id or "",
            state="ready" if status.ready else status.state,
            local_version=status.local_version,
            served_version=status.served_version,
            target=status.target,
            lag=status.lag_versions,
            last_error="" if error is None else f"{error.error}: {error.message}",
            engines=({**mirror, "confirmed_by": "digest"},),
            counter=0,
            software=status.software,
            phase=status.state,
            target_version=status.target_version,
            remedy="" if error is None else error.remedy,
            retries=status.loop.retries,
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
        app = make_app(
            "weightcast mirror",
            self.status,
            lambda: Readiness(ready=self._is_ready, reasons=self.status().not_ready_reasons),
            registry,
            None if settings.token is None else settings.token.get_secret_value(),
            self._wake,
            MirrorStatus,
        )
        source = settings.source
        with Watcher(source, self._wakeup) if isinstance(source, Path) else nullcontext():
            run_daemon(
                app,
                self._step,
                self._wakeup,
                settings,
                on_stop=self._close,
                loop=self._loop,
                stop=self._stop,
            )
        if self.refused is not None:
            raise self.refused
