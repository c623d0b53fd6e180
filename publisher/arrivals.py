"""Waiting until hosts serve a version, by what they say of themselves in the channel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.channel.reports import Report, read_reports
from weightcast.shared.channel.store import Channel
from weightcast.shared.errors import NotInTime, Refused

GONE_SECONDS = 120.0
"""a report that stood still for so long is of a host that is gone: an idle one writes every 36 s"""
_POLL_SECONDS = 0.25
_SHOWN = 10


@dataclass(frozen=True)
class Situation:
    """Hosts that are there, in the order of their reports. `behind`: with what they say of themselves."""

    arrived: tuple[str, ...]
    behind: tuple[str, ...]

    def satisfies(self, min_hosts: int | None, fraction: float | None) -> bool:
        wanted = 1 if min_hosts is None else min_hosts
        if fraction is not None:
            share = math.ceil(fraction * (len(self.arrived) + len(self.behind)) - 1e-9)
            wanted = max(share, 1) if min_hosts is None else max(share, min_hosts)
        return len(self.arrived) >= wanted


def judge(version: int, reports: Iterable[Report]) -> Situation:
    """`reports`: of living hosts of the run."""
    arrived, behind = [], []
    for report in reports:
        if report.state == "ready" and report.served_version is not None and report.served_version >= version:
            arrived.append(report.host)
        else:
            served = "no version" if report.served_version is None else f"version {report.served_version}"
            behind.append(f"{report.host} ({report.state}, {served})")
    return Situation(tuple(arrived), tuple(behind))


class Arrivals:
    """Remembers when each report last changed, by this process's clock."""

    def __init__(
        self,
        channel: Path,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._channel, self._clock, self._pause = channel, clock, pause
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def look(self, version: int, run_id: str) -> Situation:
        mine = [report for report in read_reports(self._channel) if report.run_id == run_id]
        return judge(version, self._living(mine))

    def _living(self, reports: Iterable[Report]) -> list[Report]:
        now, before, self._seen = self._clock(), self._seen, {}
        living = []
        for report in reports:
            key = report.host, report.local
            counter, since = before.get(key, (report.counter, now))
            changed = since if counter == report.counter else now
            self._seen[key] = report.counter, changed
            if now - changed < GONE_SECONDS:
                living.append(report)
        return living

    def wait(self, version: int, min_hosts: int | None, fraction: float | None, timeout: float) -> list[str]:
        """See `Publisher.wait`."""
        if (min_hosts is not None and min_hosts < 1) or (fraction is not None and not 0 < fraction <= 1):
            raise Refused(
                f"waiting for min_hosts={min_hosts}, fraction={fraction}",
                remedy="give at least one host, or a fraction above 0 and up to 1",
            )
        run_id = Channel.open(self._channel).require_ours()[0].run_id
        deadline = self._clock() + timeout
        while True:
            found = self.look(version, run_id)
            if found.satisfies(min_hosts, fraction):
                return list(found.arrived)
            if self._clock() >= deadline:
                raise _late(version, found, timeout)
            self._pause(_POLL_SECONDS)


def _late(version: int, found: Situation, timeout: float) -> NotInTime:
    some = ", ".join(found.behind[:_SHOWN]) + (", ..." if len(found.behind) > _SHOWN else "")
    return NotInTime(
        f"{len(found.arrived)} of {len(found.arrived) + len(found.behind)} hosts are ready with version "
        f"{version} or later after {timeout:g} s; behind: {some or 'nobody reports'}",
        remedy="look at these hosts; `weightcast status` of each says more",
    )
