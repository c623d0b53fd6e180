"""Reports of a host or a mirror: on change, else every half minute; a hint to the publisher.

In a thread of its own, so that who is in a long step is heard from, and one whose channel hangs still ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import CHANNEL_JSON, LATEST, report_key
from weightcast.shared.channel.reports import Report, pack_report, write_report
from weightcast.shared.daemon.client import Daemon
from weightcast.shared.daemon.fleet import REPORTS_PATH
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.settings import ReportSettings
from weightcast.shared.daemon.timing import Backoff, Due, jittered
from weightcast.shared.daemon.tls import TrustFor, client_context
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import ChannelAddress

EVERY_SECONDS = 30.0
CHANGE_SECONDS = 1.0
"""between two reports, however much changes"""
PHASE_SECONDS = 5.0
"""before a phase is worth a report of its own"""
LONGEST_PAUSE = 60.0
"""before the next try where reports cannot be delivered"""
_UNDELIVERED = Backoff(CHANGE_SECONDS, LONGEST_PAUSE)
_LOOK_SECONDS = 0.25
_STOP_SECONDS = 2.0
_LAST_PAUSE = 0.6
_POST_SECONDS = 5.0
_LOOK_AT_CHANNEL = 600.0
_TICK = 0.05
"""seconds within which two clocks count as equal: file times are coarse"""

log = get_log("report")


class Undelivered(Exception):
    """The message says where to, and why."""


class InChannel:
    """Reports are files in the channel. `deliver` returns the receiver's time, as far as it tells; raises
    Undelivered."""

    def __init__(self, channel: ChannelAddress) -> None:
        self._channel, self._store = channel, open_store(channel)
        self._looks = Due(_LOOK_AT_CHANNEL)

    def deliver(self, report: Report) -> float | None:
        """Nothing is made where no channel is mounted: then nothing is returned. A mount may go at any time;
        at an object store every look is a request, and few of them tell the time."""
        store = self._store
        try:
            if not (store.renames or self._looks.take()):
                store.replace(report_key(report.host, report.local), pack_report(report), sync=False)
                return None
            if store.stat(CHANNEL_JSON) is None and store.stat(LATEST) is None:
                self._looks.at_once()
                return None
            return write_report(store, report)
        except OSError as error:
            self._looks.at_once()
            raise Undelivered(
                f"no report of this host can be written: {disk_text(error, self._channel)}; "
                "give --report-to where the channel is read-only"
            ) from error

    def close(self) -> None:
        pass


class ToPublisher:
    """Reports are posted to the publisher, for hosts that cannot write to the channel. `deliver`: as of
    InChannel."""

    def __init__(
        self,
        url: str,
        token: str | None,
        seconds: float = _POST_SECONDS,
        trust_for: TrustFor = client_context,
    ) -> None:
        self._daemon = Daemon(url, token, seconds, "WEIGHTCAST_REPORT_TOKEN", trust_for)

    def deliver(self, report: Report) -> float | None:
        try:
            answer = self._daemon.ask_object("POST", REPORTS_PATH, pack_report(report))
        except WeightcastError as error:
            raise Undelivered(f"no report of this host reaches the publisher: {error}") from error
        there = answer.get("now")
        return there if isinstance(there, float) else None

    def close(self) -> None:
        self._daemon.close()


_STATED = ("host", "local", "software", "target", "target_version", "local_version", "served_version")
"""what is reported of a status as it is"""


def report_of(status: Any, last_error: str, remedy: str, **more: Any) -> Report:
    """Of a host's status or a mirror's. `counter` is 0."""
    return Report(
        **{name: getattr(status, name) for name in _STATED},
        run_id=status.run_id or "",
        state="ready" if status.ready else status.state,
        lag=status.lag_versions,
        last_error=last_error,
        counter=0,
        phase=status.state,
        remedy=remedy,
        retries=status.loop.retries,
        **more,
    )


def ahead_by(began: float, ended: float, there: float) -> float:
    """Seconds by which a clock that read `began` and then `ended` is ahead of another that read `there` in
    between; 0 when they may agree."""
    if there < began - _TICK:
        return round(began - there, 3)
    return round(ended - there, 3) if there > ended + _TICK else 0.0


def open_reporter(settings: ReportSettings, channel: ChannelAddress) -> Reporter | None:
    """None where nobody is told."""
    if settings.report_to is not None:
        token = settings.secret(settings.report_token)
        publisher = ToPublisher(settings.report_to, token, trust_for=settings.client_tls)
        return Reporter(publisher, settings.report_seconds)
    if not settings.report or open_store(channel).is_static:
        return None
    return Reporter(InChannel(channel), settings.report_seconds)


class Reporter:
    """Delivers when something worth telling changed or time is up. A failed delivery is logged, never
    raised. `start` and `stop` belong to one thread."""

    def __init__(
        self,
        endpoint: InChannel | ToPublisher,
        every_seconds: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint, self._every, self._clock = endpoint, every_seconds, clock
        self._last: Report | None = None
        self._due = self._free = 0.0
        """when a report is due, changed or not, and when the next may be delivered"""
        self._told = 0.0
        self._failures = 0
        # a restarted host must not seem to stand still
        self._counter = int(time.time())
        self._offset: float | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.error = ""
        """why the last report was not delivered"""

    def start(self, look: Callable[[], Report | None]) -> None:
        """In a thread: delivers what `look` returns. None: nothing, another process speaks for this host."""
        self._thread = threading.Thread(target=self._run, args=(look,), name="report", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The last report says that the host stopped; a channel that hangs is not waited for."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self, look: Callable[[], Report | None]) -> None:
        pause = _LOOK_SECONDS
        while not self._ending.wait(pause):
            try:
                report = look()
                if report is not None:
                    self.report(report)
                pause = _LOOK_SECONDS
            except Exception:
                log.exception("reporting crashed")
                pause = min(2 * pause, LONGEST_PAUSE)
        report = look()
        if report is not None:
            self.last(report)
        self._endpoint.close()

    def report(self, report: Report) -> None:
        """Called often: mostly nothing is due. Its `counter` is set here."""
        now = self._clock()
        if now >= self._free and (now >= self._due or self._tells(report, now)):
            self._deliver(report, now)

    def last(self, report: Report) -> None:
        """As the process ends: now, whatever was reported a moment ago. A failed delivery is tried once more:
        a publisher takes no two reports of a host within half a second."""
        self._deliver(report, self._clock())
        if self.error:
            time.sleep(_LAST_PAUSE)
            self._deliver(report, self._clock())

    def _tells(self, report: Report, now: float) -> bool:
        if self._last is None:
            return True
        # they change all the time
        report = replace(report, requests=self._last.requests, tokens=self._last.tokens)
        if report == self._last:
            return False
        alike = replace(report, phase=self._last.phase, retries=self._last.retries, bytes=self._last.bytes)
        return alike != self._last or now >= self._told + PHASE_SECONDS

    def _deliver(self, report: Report, now: float) -> None:
        self._counter += 1
        began = time.time()
        try:
            there = self._endpoint.deliver(replace(report, counter=self._counter, clock_offset=self._offset))
        except Undelivered as error:
            if str(error) != self.error:
                log.warning("no report", reason=str(error))
            self.error = str(error)
            self._failures += 1
            self._free = now + jittered(min(_UNDELIVERED.pause(self._failures), self._every))
            return
        if there is not None:
            self._offset = ahead_by(began, time.time(), there)
        self.error, self._last, self._failures = "", report, 0
        self._told, self._free = now, now + CHANGE_SECONDS
        self._due = now + jittered(self._every)
