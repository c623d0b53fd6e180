"""The host's report in the channel: on change, else every half minute; a hint to the publisher."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.reports import Report, write_report
from weightcast.subscriber.status import HostStatus

EVERY_SECONDS = 30.0
JITTER = 0.2


class Reporter:
    """Writes when something worth telling changed or time is up; what fails is told, never raised."""

    def __init__(self, channel: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._clock = clock
        self._last: Report | None = None
        self._due = 0.0
        # a restarted host must not seem to stand still
        self._counter = int(time.time())
        self.error = ""

    def report(self, status: HostStatus) -> None:
        if status.run_id is None:
            return
        report = describe(status)
        if report == self._last and self._clock() < self._due:
            return
        self._counter += 1
        self._due = self._clock() + EVERY_SECONDS * random.uniform(1 - JITTER, 1 + JITTER)
        try:
            if _is_channel(self._channel):
                write_report(self._channel, replace(report, counter=self._counter))
        except OSError as error:
            self.error = f"{self._channel}: no report of this host can be written: {error.strerror or error}"
        else:
            self.error, self._last = "", report


def _is_channel(directory: Path) -> bool:
    """Nothing is made where no channel is mounted."""
    layout = Layout(directory)
    return layout.channel_json.exists() or layout.latest.exists()


def describe(status: HostStatus) -> Report:
    """`counter` is 0."""
    error = status.last_error
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
        engines=tuple(
            {
                "name": engine.name,
                "kind": engine.kind,
                "mark": engine.mark,
                "version": engine.version,
                "confirmed_by": engine.confirmed_by,
                "aligned": engine.aligned,
            }
            for engine in status.engines
        ),
        counter=0,
        software=status.software,
    )
