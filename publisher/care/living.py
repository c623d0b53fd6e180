"""Which hosts live: those whose reports go on changing, by this publisher's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from weightcast.shared.channel.reports import Report

LIVING_SECONDS = 600.0
"""since a report last changed here"""


class Living:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def versions(self, reports: Iterable[Report]) -> list[int]:
        """Versions that living hosts hold. A report that is met for the first time counts as changed."""
        now, before, self._seen = self._clock(), self._seen, {}
        found = []
        for report in reports:
            key = report.host, report.local
            counter, since = before.get(key, (report.counter, now))
            changed = now if counter != report.counter else since
            self._seen[key] = report.counter, changed
            if report.local_version is not None and now - changed < LIVING_SECONDS:
                found.append(report.local_version)
        return found
