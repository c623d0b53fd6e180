"""The fleet as its hosts' reports show it: presence by this process's own clock, versions, lag.

Reports are not authenticated: everything here is a hint.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightcast.shared.channel.channel_file import ChannelFile, parse_channel_file
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.pointer import read_pointer
from weightcast.shared.channel.reports import CAUSES, UPDATES_LIMIT, Heard, Report, ReportReader, StoredReport
from weightcast.shared.errors import RetryLater
from weightcast.shared.files.durable import read_file
from weightcast.shared.files.entries import is_directory
from weightcast.shared.service.snapshot import Frozen

REPORTS_PATH = "/v1/reports"
"""of the publisher, where hosts post what they cannot write into the channel"""
STALE_SECONDS = 60.0
LOST_SECONDS = 120.0
MOST_WITH_UPDATES = 100
"""hosts: in larger fleets the updates are shown host by host"""
PAGE_BYTES = 8 << 20
"""of a fleet as JSON: where it would have more, hosts with more than their share of it are shown bare"""
ENGINES_SHOWN, TEXT_SHOWN = 16, 512
"""of a host in a larger fleet; characters"""
_BARE_TEXT = 64
_CHANNEL_FILE_LIMIT = 16 << 20
_LATEST = "latest"

Presence = Literal["live", "stale", "lost"]
Standing = Literal["ready", "behind", "stale", "lost", "failed"]


class EngineLine(Frozen):
    name: str
    kind: str
    state: str
    version: int | None
    """the last one that it confirmed"""
    confirmed_by: str


class UpdateLine(Frozen):
    version: int
    kind: str
    """seed, patch, relabel, reload, undo or repair"""
    began: float
    """unix time, on the host's clock"""
    seconds: Mapping[str, float]
    """by phase"""
    bytes: int
    outcome: str
    """done, or refused by the engines"""


class Host(Frozen):
    key: str
    """name of its report"""
    host: str
    local: str
    run_id: str
    presence: Presence
    heard_seconds_ago: float
    """since its report last changed, by the clock of who reads it"""
    state: str
    """ready, or what it is at"""
    ready: bool
    standing: Standing
    phase: str
    """what it is at, ready or not"""
    local_version: int | None
    served_version: int | None
    target: str
    """latest, a version or a tag"""
    target_version: int | None
    lag: int | None
    """versions: of a host that follows latest to the newest one, else to its own target"""
    last_error: str
    remedy: str
    retries: int
    """steps tried again since its start"""
    bytes: Mapping[str, int]
    """read from the channel since its start, by cause"""
    engines: tuple[EngineLine, ...]
    software: str
    clock_offset_seconds: float | None
    """by which its clock is ahead"""
    updates: tuple[UpdateLine, ...]
    """newest first"""

    def in_brief(self) -> Host:
        return self._cut(TEXT_SHOWN, ENGINES_SHOWN)

    def bare(self) -> Host:
        """Where it stands, and little of what it says."""
        return self._cut(_BARE_TEXT, 0)

    def _cut(self, text: int, engines: int) -> Host:
        told = ("host", "local", "run_id", "target", "last_error", "remedy", "software")
        cut: dict[str, object] = {name: getattr(self, name)[:text] for name in told}
        return self.model_copy(update={**cut, "engines": self.engines[:engines], "updates": ()})


class Counts(Frozen):
    """Every host counts once."""

    ready: int = 0
    """serves its target"""
    behind: int = 0
    stale: int = 0
    lost: int = 0
    failed: int = 0
    """an engine failed, or an error keeps it from being ready"""


class LagCount(Frozen):
    lag: int
    hosts: int


class Bounds(Frozen):
    """A report that stands still for so long is stale, then lost."""

    stale_seconds: float = STALE_SECONDS
    lost_seconds: float = LOST_SECONDS


class Fleet(Frozen):
    now: float
    """unix time, of who looked"""
    channel: str
    run_id: str | None
    latest: int | None
    """what the pointer names"""
    hosts: tuple[Host, ...] = ()
    counts: Counts = Counts()
    lag: tuple[LagCount, ...] = ()
    """of hosts that are not lost"""
    bounds: Bounds = Bounds()

    def page(self) -> bytes:
        """As JSON: all of it in small fleets, bounded in any."""
        few = len(self.hosts) <= MOST_WITH_UPDATES
        body = self._with(self.hosts if few else (host.in_brief() for host in self.hosts))
        if len(body) <= PAGE_BYTES:
            return body
        share = PAGE_BYTES // len(self.hosts)
        briefs = (host.in_brief() for host in self.hosts)
        return self._with(host if len(host.model_dump_json()) <= share else host.bare() for host in briefs)

    def _with(self, hosts: Iterable[Host]) -> bytes:
        return self.model_copy(update={"hosts": tuple(hosts)}).model_dump_json().encode()


@dataclass(frozen=True)
class RunHead:
    """What hosts are held against."""

    run_id: str | None
    latest: int | None


class FleetReader:
    """Looks at a channel again and again, and remembers when each report last changed. For one thread."""

    def __init__(
        self,
        channel: Path,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        updates: int = UPDATES_LIMIT,
    ) -> None:
        """`updates`: so many of each host's are read; they are most of a report."""
        self._channel, self._now = channel, now
        self._bounds = Bounds() if bounds is None else bounds
        members = EngineLine.model_fields.keys()
        self._reports = ReportReader(channel, updates=updates, engine_members=members)
        self._heard = Heard(clock)
        self._shown: dict[str, tuple[Report, Host]] = {}

    def read(self) -> Fleet:
        """Raises RetryLater when there is no channel, DamagedFile when its pointer cannot be read."""
        run = _run_of(self._channel)
        sightings = self._reports.read()
        heard = self._heard.seconds_ago(sightings)
        hosts = tuple(self._host(each, heard[each.key], run) for each in sightings)
        self._shown = {each.key: self._shown[each.key] for each in sightings}
        return Fleet(
            now=self._now(),
            channel=str(self._channel),
            run_id=run.run_id,
            latest=run.latest,
            hosts=hosts,
            counts=count(hosts),
            lag=distribution(hosts),
            bounds=self._bounds,
        )

    def _host(self, sighting: StoredReport, heard_seconds_ago: float, run: RunHead) -> Host:
        known = self._shown.get(sighting.key)
        # a report that was not read again is the same object
        host = known[1] if known is not None and known[0] is sighting.report else as_host(sighting)
        presence = presence_of(heard_seconds_ago, self._bounds)
        standing = standing_of(host, presence, run)
        shown = host.model_copy(
            update={
                "heard_seconds_ago": round(max(0.0, heard_seconds_ago), 3),
                "presence": presence,
                "lag": lag_of(host, run),
                "standing": standing,
            }
        )
        self._shown[sighting.key] = sighting.report, host
        return shown


def _run_of(channel: Path) -> RunHead:
    if not is_directory(channel):
        raise RetryLater(f"{channel} is not a directory", remedy="mount it, or correct --channel")
    pointer, file = read_pointer(channel), _channel_file(channel)
    if pointer is None:
        return RunHead(None if file is None else file.run_id, None if file is None else 0)
    return RunHead(pointer.run if file is None else file.run_id, pointer.version)


def _channel_file(channel: Path) -> ChannelFile | None:
    try:
        return parse_channel_file(read_file(Layout(channel).channel_json, _CHANNEL_FILE_LIMIT))
    except FileNotFoundError:
        return None


def as_host(sighting: StoredReport) -> Host:
    """As it says itself: presence, standing and lag are not judged yet."""
    report = sighting.report
    return Host(
        key=sighting.key,
        host=report.host,
        local=report.local,
        run_id=report.run_id,
        presence="live",
        heard_seconds_ago=0.0,
        state=report.state,
        ready=report.state == "ready",
        standing="behind",
        phase=report.phase,
        local_version=report.local_version,
        served_version=report.served_version,
        target=report.target,
        target_version=report.target_version,
        lag=report.lag,
        last_error=report.last_error,
        remedy=report.remedy,
        retries=report.retries,
        bytes={cause: report.bytes.get(cause, 0) for cause in CAUSES},
        engines=tuple(map(_engine, report.engines)),
        software=report.software,
        clock_offset_seconds=report.clock_offset,
        updates=tuple(UpdateLine(**vars(update)) for update in report.updates),
    )


def _engine(engine: Mapping[str, object]) -> EngineLine:
    def text(member: str) -> str:
        value = engine.get(member)
        return value[:256] if isinstance(value, str) else ""

    version = engine.get("version")
    return EngineLine(
        name=text("name"),
        kind=text("kind"),
        state=text("state"),
        version=version if type(version) is int else None,
        confirmed_by=text("confirmed_by"),
    )


def presence_of(heard_seconds_ago: float, bounds: Bounds) -> Presence:
    if heard_seconds_ago >= bounds.lost_seconds:
        return "lost"
    return "stale" if heard_seconds_ago >= bounds.stale_seconds else "live"


def lag_of(host: Host, run: RunHead) -> int | None:
    """A host that stands still does not know how far the others went."""
    if host.target != _LATEST or run.latest is None or _is_other(host, run):
        return host.lag
    return None if host.served_version is None else run.latest - host.served_version


def _is_other(host: Host, run: RunHead) -> bool:
    """A host that is not seeded yet is of no run."""
    return run.run_id is not None and host.run_id not in ("", run.run_id)


def standing_of(host: Host, presence: Presence, run: RunHead) -> Standing:
    if presence != "live":
        return presence
    engine_failed = any(engine.state == "failed" for engine in host.engines)
    if engine_failed or _is_other(host, run) or (host.last_error and not host.ready):
        return "failed"
    lag = lag_of(host, run)
    return "ready" if host.ready and lag is not None and lag <= 0 else "behind"


def count(hosts: Iterable[Host]) -> Counts:
    found = Counter(str(host.standing) for host in hosts)
    return Counts(**found)


def distribution(hosts: Iterable[Host]) -> tuple[LagCount, ...]:
    found = Counter(host.lag for host in hosts if host.presence != "lost" and host.lag is not None)
    return tuple(LagCount(lag=lag, hosts=hosts) for lag, hosts in sorted(found.items()))


def names_of(hosts: Iterable[Host]) -> dict[str, str]:
    """What people call each, by its key: its name, and its local checkpoint where others have that name."""
    shown = tuple(hosts)
    count = Counter(host.host for host in shown)
    return {h.key: h.host if count[h.host] == 1 else f"{h.host}:{h.local}" for h in shown}


def of_run(fleet: Fleet) -> Sequence[Host]:
    """Hosts of the channel's run that are not lost."""
    return [
        host
        for host in fleet.hosts
        if host.presence != "lost" and (fleet.run_id is None or host.run_id in ("", fleet.run_id))
    ]
