"""Reports that hosts post because the channel is read-only for them: taken in by any thread, written into the
channel by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.reports import REPORTS_LIMIT, Report, parse_report, write_report
from weightcast.shared.errors import Refused, WrongRun

PER_HOST_SECONDS = 0.5
"""between two reports of a host"""
ALL_PER_SECOND, BURST = 1000, 2000


class TooMany(Exception):
    """`seconds`: when to try again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"try again in {seconds:g} s")
        self.seconds = seconds


class Posted:
    """The last report of each host, until it is written."""

    def __init__(self, channel: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._lock = threading.Lock()
        self._waiting: dict[str, Report] = {}
        self._taken: dict[str, float] = {}
        self._tokens, self._filled = float(BURST), clock()

    def take(self, data: bytes, run_id: str | None) -> None:
        """Raises DamagedFile and UnknownFormat for what is no report, WrongRun for a host of another run,
        TooMany when they come too quickly, Refused when there are too many hosts."""
        with self._lock:
            self._spend()
        report = parse_report(data, "the posted report")
        if run_id is not None and report.run_id not in ("", run_id):
            raise WrongRun(
                f"the report is of run {report.run_id}, this publisher's is {run_id}",
                remedy="give --report-to the publisher of the run that --channel has",
            )
        key = Layout(self._channel).report(report.host, report.local).name
        with self._lock:
            self._admit(key)
            self._waiting[key] = report

    def _spend(self) -> None:
        """Before anything is parsed."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + ALL_PER_SECOND * (now - self._filled))
        self._filled = now
        if self._tokens < 1:
            raise TooMany(1.0)
        self._tokens -= 1

    def _admit(self, key: str) -> None:
        now = self._clock()
        last = self._taken.get(key)
        if last is not None and now - last < PER_HOST_SECONDS:
            raise TooMany(PER_HOST_SECONDS)
        if last is None and len(self._taken) >= REPORTS_LIMIT:
            raise Refused(f"more than {REPORTS_LIMIT} hosts report", remedy="restart the publisher")
        self._taken[key] = now

    def write(self) -> None:
        """Raises OSError; what is not written is kept, unless the host said something newer."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        while waiting:
            key, report = next(iter(waiting.items()))
            try:
                write_report(self._channel, report)
            except OSError:
                with self._lock:
                    self._waiting = {**waiting, **self._waiting}
                raise
            del waiting[key]
