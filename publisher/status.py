"""What the publisher says of itself, and the numbers it exports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from weightcast.publisher.inbox import Waiting
from weightcast.publisher.queue import Job, Publication, total_seconds
from weightcast.shared.channel.reports import Report
from weightcast.shared.service.kernels import KernelStatus
from weightcast.shared.service.snapshot import Failure, Frozen, LoopStatus, Readiness
from weightcast.shared.service.verify import VerifyStatus

PUBLICATIONS_SHOWN = 20
WAITING_SHOWN = 20
REFUSED_SHOWN = 20


class Progress(Frozen):
    """The running publication."""

    source: str
    phase: str
    done_bytes: int = 0
    """read in this phase"""
    total_bytes: int
    """of a whole checkpoint"""
    since: float
    """unix time of the publisher's clock"""


class HostStatus(Frozen):
    """A host as its report shows it; reports are not authenticated."""

    host: str
    local: str
    state: str
    local_version: int | None
    served_version: int | None
    lag: int | None
    last_error: str
    age_seconds: float
    """since this publisher last saw the report change"""


class WaitingStatus(Frozen):
    name: str
    reason: str


class RefusedStatus(Frozen):
    name: str
    error: Failure


class InboxStatus(Frozen):
    watch: str
    waiting: tuple[WaitingStatus, ...] = ()
    refused: tuple[RefusedStatus, ...] = ()


class UpkeepStatus(Frozen):
    """What is made beside the versions."""

    made: str = ""
    """the last thing"""
    problem: str = ""
    """why the last step made nothing; empty when all is well"""


class DatedFailure(Failure):
    at: float
    """unix time of the publisher's clock"""


class Totals(Frozen):
    """Since the daemon started; sizes in bytes."""

    publications: int = 0
    failures: int = 0
    changed_elements: int = 0
    delta_bytes: int = 0
    full_bytes: int = 0
    seconds: float = 0.0


class PublisherStatus(Frozen):
    role: str = "publisher"
    run_id: str | None = None
    channel: str
    local: str
    version: int | None = None
    epoch: int | None = None
    encoding: str
    queue: tuple[Job, ...] = ()
    publishing: Progress | None = None
    publications: tuple[Publication, ...] = ()
    """newest first"""
    totals: Totals = Totals()
    hosts: tuple[HostStatus, ...] = ()
    inbox: InboxStatus | None = None
    verify: VerifyStatus | None = None
    last_error: DatedFailure | None = None
    held: str | None = None
    upkeep: UpkeepStatus = UpkeepStatus()
    ready: bool = False
    not_ready_reasons: tuple[str, ...] = ("starting",)
    kernels: KernelStatus = KernelStatus()
    loop: LoopStatus = LoopStatus()

    def readiness(self) -> Readiness:
        return Readiness(ready=self.ready, reasons=self.not_ready_reasons)


def add(totals: Totals, done: Publication) -> Totals:
    return Totals(
        publications=totals.publications + 1,
        failures=totals.failures,
        changed_elements=totals.changed_elements + done.changed_elements,
        delta_bytes=totals.delta_bytes + done.delta_bytes,
        full_bytes=totals.full_bytes + done.full_bytes,
        seconds=totals.seconds + total_seconds(done.seconds),
    )


def waiting_status(waiting: Iterable[Waiting]) -> tuple[WaitingStatus, ...]:
    return tuple(WaitingStatus(name=each.name, reason=each.reason) for each in waiting)[:WAITING_SHOWN]


class Hosts:
    """Remembers when each report last changed: their time stamps are of foreign clocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}

    def update(self, reports: Iterable[Report]) -> tuple[HostStatus, ...]:
        now, before, self._seen = self._clock(), self._seen, {}
        shown = []
        for report in reports:
            key = (report.host, report.local)
            counter, since = before.get(key, (report.counter, now))
            self._seen[key] = (report.counter, since if counter == report.counter else now)
            shown.append(_host(report, now - self._seen[key][1]))
        return tuple(shown)


def _host(report: Report, age_seconds: float) -> HostStatus:
    return HostStatus(
        host=report.host,
        local=report.local,
        state=report.state,
        local_version=report.local_version,
        served_version=report.served_version,
        lag=report.lag,
        last_error=report.last_error,
        age_seconds=age_seconds,
    )


def start_status(channel: Path, local: Path, encoding: str) -> PublisherStatus:
    return PublisherStatus(channel=str(channel), local=str(local), encoding=encoding)
