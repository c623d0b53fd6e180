"""Reports that hosts post because the channel is read-only for them: taken in by any thread, written into the
channel by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from weightcast.shared.base.errors import Refused, WrongRun
from weightcast.shared.channel.layout import report_key
from weightcast.shared.channel.reports import REPORTS_LIMIT, pack_report, parse_report, write_packed
from weightcast.shared.channel.store import Store
from weightcast.shared.files.disk_errors import disk_text

PER_HOST_SECONDS = 0.5
"""between two reports of a host"""
ALL_PER_SECOND, BURST = 1000, 2000
WAITING_BYTES = 32 << 20
"""of reports that are taken and not yet written"""
SILENT_SECONDS = 86400.0
"""after which a host that posted is forgotten"""
_FAILURES_IN_A_ROW = 16
"""after which the channel takes none now"""


class TooMany(Exception):
    """Reports come more quickly than they are taken."""


class _Waiting(NamedTuple):
    host: str
    packed: bytes
    """the report as it is written"""


class ReportIntake:
    """The last report of each host, until it is written."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_bytes = 0
        self._taken: dict[str, float] = {}
        self._tokens, self._filled = float(BURST), clock()
        self.problem = ""
        """why reports are not written; empty when all are"""

    def take(self, data: bytes, run_id: str | None) -> None:
        """Raises DamagedFile and UnknownFormat for what is not a report, WrongRun for a host of another run,
        TooMany when they come more quickly than they are written, Refused when there are too many hosts."""
        with self._lock:
            self._spend()
        report = parse_report(data, "the posted report")
        if run_id is not None and report.run_id not in ("", run_id):
            raise WrongRun(
                f"the report is of run {report.run_id}, this publisher's is {run_id}",
                remedy="give --report-to the publisher of the run that --channel has",
            )
        key = report_key(report.host, report.local)
        # here, where what is wrong with it is answered to who posted it
        packed = pack_report(report)
        with self._lock:
            if self._waiting_bytes + len(packed) > WAITING_BYTES:
                raise TooMany
            self._admit(key)
            self._waiting_bytes += len(packed)
            self._waiting[key] = _Waiting(report.host, packed)

    def _spend(self) -> None:
        """Before anything is parsed."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + ALL_PER_SECOND * (now - self._filled))
        self._filled = now
        if self._tokens < 1:
            raise TooMany
        self._tokens -= 1

    def _admit(self, key: str) -> None:
        now = self._clock()
        last = self._taken.get(key)
        if last is not None and now - last < PER_HOST_SECONDS:
            raise TooMany
        if last is None and len(self._taken) >= REPORTS_LIMIT:
            while self._taken and next(iter(self._taken.values())) < now - SILENT_SECONDS:
                del self._taken[next(iter(self._taken))]
        if last is None and len(self._taken) >= REPORTS_LIMIT:
            raise Refused(f"more than {REPORTS_LIMIT} hosts report", remedy="restart the publisher")
        # the order is that of the last reports
        self._taken.pop(key, None)
        self._taken[key] = now

    def write(self) -> None:
        """For one thread. What cannot be written keeps nothing else from it, and is kept for the next time,
        unless the host said something newer."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        failed: dict[str, _Waiting] = {}
        reasons: list[str] = []
        in_a_row = 0
        while waiting and in_a_row < _FAILURES_IN_A_ROW:
            key, one = next(iter(waiting.items()))
            del waiting[key]
            try:
                write_packed(self._store, key, one.packed)
            except OSError as error:
                failed[key] = one
                reasons.append(f"{one.host}: {disk_text(error, key)}")
                in_a_row += 1
            else:
                in_a_row = 0
        with self._lock:
            # those that were not tried come first
            self._waiting = {**waiting, **failed, **self._waiting}
            self._waiting_bytes = sum(len(one.packed) for one in self._waiting.values())
        more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        self.problem = reasons[0] + more if reasons else ""
