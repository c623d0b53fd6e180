"""The fleet as its hosts' reports show it: presence by the clock of the channel's file system, versions, lag.

Reports are not authenticated: everything here is a hint.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Literal

from pydantic import BaseModel, ValidationError

from weightcast.shared.base.choices import LOST_SECONDS, STALE_SECONDS
from weightcast.shared.base.errors import FIX_ENGINE, Refused, WeightcastError, age, counted
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.claims import PATIENCE_SECONDS, owner_of
from weightcast.shared.channel.claims import Owner as ClaimOwner
from weightcast.shared.channel.layout import CHANNEL_JSON, index_key, read_pointer
from weightcast.shared.channel.reports import (
    CAUSES,
    UPDATES_LIMIT,
    AdapterReport,
    ChannelClock,
    Heard,
    Report,
    ReportReader,
    Silence,
    StoredReport,
    TimeSource,
    Update,
)
from weightcast.shared.channel.run_files import CHANNEL_FILE_LIMIT, parse_channel_file
from weightcast.shared.channel.skyrl import foreign_pointer
from weightcast.shared.channel.store import Store, read_if_there

FLEET_PATH = "/v1/fleet"
"""of the publisher"""
REPORTS_PATH = "/v1/reports"
"""of the publisher, where hosts post what they cannot write into the channel"""
MOST_WITH_UPDATES = 100
"""hosts: in larger fleets the updates are shown host by host"""
PAGE_BYTES = 8 << 20
"""of a fleet as JSON: where it would have more, hosts with more than their share of it are shown bare"""
ENGINES_SHOWN, TEXT_SHOWN = 16, 512
"""of a host in a larger fleet; characters"""
_BARE_TEXT = 64
_ENGINES_OUT = ("failed", "silent", "suspect", "paused")
_LATEST = "latest"
_MOST_PARTS = 64
"""of a path in a host's short name"""
_STOPPED = "stopped"
_MOST_TEXT, _MOST_KINDS = 120, 3
"""characters of an error in the verdict; kinds of trouble"""
_DIFFERS = re.compile(r"[\d/]")
"""in words of an error that differ from host to host: paths, addresses, numbers"""

WORDS = {"ready": "up to date"}
"""standings by which people know them, where that is another word"""

Presence = Literal["live", "stale", "lost"]
Standing = Literal["ready", "behind", "stale", "lost", "failed", "stopped"]
WORST_FIRST: tuple[Standing, ...] = ("failed", "lost", "stale", "behind", "ready", "stopped")
Level = Literal["good", "warning", "bad"]
OwnerState = Literal["alive", "silent", "dead", "stopped", "unknown"]


class EngineLine(BaseModel, frozen=True):
    name: str
    kind: str
    state: str
    version: int | None
    """last confirmed"""
    confirmed_by: str


class Host(BaseModel, frozen=True):
    key: str
    """name of its report"""
    host: str
    local: str
    run_id: str
    presence: Presence
    heard_seconds_ago: float | None
    """since its report last changed; null where the reader cannot know"""
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
    updates: tuple[Update, ...]
    """newest first"""
    gate: str = ""
    """URL of its gate; empty: it has none"""
    requests: Mapping[str, int] = {}
    """at its gate: `under_way`, `waiting`, `closed` (1: none is admitted), and outcomes since its start"""
    tokens: Mapping[str, int] = {}
    """of answers, by the version that served when they were admitted"""
    adapters: tuple[AdapterReport, ...] = ()

    @property
    def lacks_adapter(self) -> bool:
        """It is ready, and serves others."""
        return self.standing == "ready" and any(one.state == "failed" for one in self.adapters)

    @property
    def takes_part(self) -> bool:
        """Whether `wait` counts it: not when it stopped, is lost, or went silent without a version."""
        return self.standing not in ("lost", "stopped") and not (self.standing == "stale" and self._is_empty)

    @property
    def is_ghost(self) -> bool:
        """Lost without ever having held a version: mostly a start with wrong settings."""
        return self.standing == "lost" and self._is_empty

    @property
    def _is_empty(self) -> bool:
        return self.local_version is None and self.served_version is None

    @property
    def severity(self) -> tuple[int, int, str]:
        """Worst first, ghosts last."""
        at = len(WORST_FIRST) if self.is_ghost else WORST_FIRST.index(self.standing)
        return at, -(self.lag or 0), self.key

    def cut(self, text: int, engines: int) -> Host:
        """With so many characters of each text and so many engines, without updates."""
        texts = ("host", "local", "run_id", "target", "last_error", "remedy", "software")
        cut: dict[str, object] = {name: getattr(self, name)[:text] for name in texts}
        few: dict[str, object] = {
            "engines": self.engines[:engines],
            "adapters": self.adapters[:engines],
            "updates": (),
        }
        few |= {} if engines else {"requests": {}, "tokens": {}}
        return self.model_copy(update={**cut, **few})


class Counts(BaseModel, frozen=True):
    """Every host counts once."""

    ready: int = 0
    """up to date: serves its target"""
    behind: int = 0
    stale: int = 0
    lost: int = 0
    failed: int = 0
    """an engine failed or no longer answers, or an error keeps the host from being ready"""
    stopped: int = 0
    """ended on request"""


class LagCount(BaseModel, frozen=True):
    lag: int
    hosts: int


class Bounds(BaseModel, frozen=True):
    """A report that does not change for this long is stale, then lost."""

    stale_seconds: float = STALE_SECONDS
    lost_seconds: float = LOST_SECONDS


class Owner(BaseModel, frozen=True):
    """The publisher that owns the channel, by its claim."""

    name: str
    state: OwnerState
    heard_seconds_ago: float | None


class RefusedCheckpoint(BaseModel, frozen=True):
    source: str
    message: str
    remedy: str
    seconds_ago: float | None
    """null where this process did not refuse it itself"""


class PublisherLine(BaseModel, frozen=True):
    """What the publisher's daemon says of itself."""

    ready: bool
    reasons: tuple[str, ...] = ()
    """why it is not ready"""
    publishing: str = ""
    """source and phase of the running publication"""
    queue: int = 0
    inbox: Mapping[str, int] = {}
    """watched checkpoints, by what became of them: waiting, refused"""
    held: str = ""
    waiting: tuple[str, ...] = ()
    """checkpoints that wait while publishing is held"""
    notes: tuple[str, ...] = ()
    """what people should know although it works: checkpoints left alone, a trainer that went back"""
    last_refused: RefusedCheckpoint | None = None
    refused_since_version: bool = False
    """no version was published after the last refusal"""


class Verdict(BaseModel, frozen=True):
    """The answer to "is all well?"."""

    level: Level = "good"
    text: str = ""


class Fleet(BaseModel, frozen=True):
    now: float
    """unix time, of who looked"""
    channel: str
    run_id: str | None
    latest: int | None
    """what the pointer names"""
    hosts: tuple[Host, ...] = ()
    counts: Counts = Counts()
    lag: tuple[LagCount, ...] = ()
    """of hosts that take part"""
    bounds: Bounds = Bounds()
    latest_age_seconds: float | None = None
    """since the newest version was published"""
    time_source: TimeSource = "channel"
    """whose clock the ages are by: the channel's file system, or this machine where nothing can be written"""
    owner: Owner | None = None
    publisher: PublisherLine | None = None
    """null where no daemon was asked"""
    rollback: pins.RollbackState | None = None
    """in effect or pending, as the channel has it; `ordered`: unix time"""
    verdict: Verdict = Verdict()

    def page(self) -> bytes:
        """As JSON: all of it in small fleets, bounded in any."""
        few = len(self.hosts) <= MOST_WITH_UPDATES
        briefs = [host.cut(TEXT_SHOWN, ENGINES_SHOWN) for host in self.hosts]
        body = self._with(self.hosts if few else briefs)
        if len(body) <= PAGE_BYTES:
            return body
        share = PAGE_BYTES // len(self.hosts)
        return self._with(
            host if len(host.model_dump_json()) <= share else host.cut(_BARE_TEXT, 0) for host in briefs
        )

    def _with(self, hosts: Iterable[Host]) -> bytes:
        return self.model_copy(update={"hosts": tuple(hosts)}).model_dump_json().encode()


def parse_fleet(body: bytes, address: str) -> Fleet:
    """What a publisher answers. Raises Refused."""
    try:
        return Fleet.model_validate_json(body)
    except ValidationError as error:
        raise Refused(
            f"{address} did not answer with a fleet: {error.error_count()} members are wrong",
            remedy="check that a weightcast publisher of this release listens there",
        ) from None


@dataclass(frozen=True)
class RunHead:
    """What hosts are held against."""

    run_id: str | None
    latest: int | None


class FleetReader:
    """Looks at a channel again and again, and remembers when each report last changed. For one thread."""

    def __init__(
        self,
        store: Store,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        updates: int = UPDATES_LIMIT,
        publisher: Callable[[], PublisherLine | None] = lambda: None,
    ) -> None:
        """`updates`: so many of each host's are read; they are most of a report."""
        self._store, self._now, self._publisher = store, now, publisher
        self._channel_clock = ChannelClock(store, clock, now)
        self._bounds = Bounds() if bounds is None else bounds
        members = EngineLine.model_fields.keys()
        self._reports = ReportReader(store, updates=updates, engine_members=members)
        self._heard = Heard(clock)
        self._shown: dict[str, tuple[Report, Host]] = {}
        self._rollback: tuple[object, int | None, pins.RollbackState | None] = None, None, None

    def read(self) -> Fleet:
        """Raises RetryLater when there is no channel, DamagedFile when its pointer cannot be read."""
        run = _run_of(self._store)
        reports = self._reports.read()
        claim = None
        with suppress(OSError):
            claim = owner_of(self._store)
        dates = [each.written for each in reports] + ([] if claim is None else [claim.written])
        clock = self._channel_clock.read(max(dates, default=0.0))
        silences = self._heard.silences(reports, clock.now)
        hosts = tuple(self._host(each, silences[each.key], run) for each in reports)
        self._shown = {each.key: self._shown[each.key] for each in reports}
        lags = Counter(host.lag for host in hosts if host.takes_part and host.lag is not None)
        fleet = Fleet(
            now=self._now(),
            channel=self._store.place(),
            run_id=run.run_id,
            latest=run.latest,
            hosts=hosts,
            counts=Counts(**Counter(str(host.standing) for host in hosts)),
            lag=tuple(LagCount(lag=lag, hosts=count) for lag, count in sorted(lags.items())),
            bounds=self._bounds,
            latest_age_seconds=_version_age(self._store, run.latest, clock.now),
            time_source=clock.source,
            owner=None if claim is None else _owner(claim, clock.now),
            publisher=self._publisher(),
            rollback=self._rollback_at(run.latest),
        )
        return fleet.model_copy(update={"verdict": verdict(fleet)})

    def _rollback_at(self, latest: int | None) -> pins.RollbackState | None:
        """The index is read once for each order and newest version."""
        with suppress(OSError, WeightcastError):
            order = pins.read_rollback(self._store)
            if order is not None and self._rollback[:2] != (order, latest):
                self._rollback = order, latest, pins.rollback_state(Channel.open(self._store))
            return None if order is None else self._rollback[2]
        return None

    def _host(self, stored: StoredReport, silence: Silence, run: RunHead) -> Host:
        known = self._shown.get(stored.key)
        # a report that was not read again is the same object
        host = known[1] if known is not None and known[0] is stored.report else as_host(stored)
        presence = presence_of(silence, self._bounds)
        shown = host.model_copy(
            update={
                "heard_seconds_ago": round(max(0.0, silence.seconds), 3) if silence.exact else None,
                "presence": presence,
                "lag": lag_of(host, run),
                "standing": standing_of(host, presence, run),
            }
        )
        self._shown[stored.key] = stored.report, host
        return shown


def _owner(claim: ClaimOwner, now: float | None) -> Owner:
    silent = None if now is None else round(max(0.0, now - claim.written), 3)
    state: OwnerState = "stopped" if claim.released else "dead" if claim.dead else "unknown"
    if silent is not None and state == "unknown":
        state = "silent" if silent >= PATIENCE_SECONDS else "alive"
    return Owner(name=claim.name, state=state, heard_seconds_ago=silent)


def _version_age(store: Store, version: int | None, now: float | None) -> float | None:
    if now is None or version is None:
        return None
    with suppress(OSError):
        found = store.stat(index_key(version) if version else CHANNEL_JSON)
        return None if found is None else round(max(0.0, now - found.written), 3)
    return None


def _run_of(store: Store) -> RunHead:
    if not store.present():
        raise NoChannel.at(store)
    data = read_if_there(store, CHANNEL_JSON, CHANNEL_FILE_LIMIT)
    if data is not None:
        pointer = read_pointer(store)
        return RunHead(parse_channel_file(data).run_id, 0 if pointer is None else pointer.version)
    pointer = foreign_pointer(store)
    return RunHead(None, None) if pointer is None else RunHead(pointer.run, pointer.version)


_MADE_HERE = {"bytes", "engines"}
_REPORTED = {each.name for each in fields(Report)} & Host.model_fields.keys() - _MADE_HERE
"""members of a host that are those of its report"""


def as_host(stored: StoredReport) -> Host:
    """As it says itself: presence, standing and lag are not judged yet."""
    report = stored.report
    same = {name: getattr(report, name) for name in _REPORTED}
    return Host(
        **same,
        key=stored.key,
        presence="live",
        heard_seconds_ago=0.0,
        ready=report.state == "ready",
        standing="behind",
        bytes={cause: report.bytes.get(cause, 0) for cause in CAUSES},
        engines=tuple(map(_engine, report.engines)),
        clock_offset_seconds=report.clock_offset,
    )


def _engine(engine: Mapping[str, object]) -> EngineLine:
    version = engine.get("version")
    given = {name: engine.get(name) for name in ("name", "kind", "state", "confirmed_by")}
    texts = {name: value[:256] if isinstance(value, str) else "" for name, value in given.items()}
    return EngineLine(version=version if type(version) is int else None, **texts)


def presence_of(silence: Silence, bounds: Bounds) -> Presence:
    """A host whose age is not known counts as live once it is heard, not before."""
    if silence.seconds >= bounds.lost_seconds:
        return "lost"
    return "live" if silence.exact and silence.seconds < bounds.stale_seconds else "stale"


def lag_of(host: Host, run: RunHead) -> int | None:
    """A host that is stuck does not know how far the others are."""
    if host.target != _LATEST or run.latest is None or _is_other(host, run):
        return host.lag
    return None if host.served_version is None else run.latest - host.served_version


def _is_other(host: Host, run: RunHead) -> bool:
    """A host that is not seeded yet is of no run."""
    return run.run_id is not None and host.run_id not in ("", run.run_id)


def standing_of(host: Host, presence: Presence, run: RunHead) -> Standing:
    if host.state == _STOPPED:
        return "stopped"
    if presence != "live":
        return presence
    engine_failed = any(engine.state == "failed" for engine in host.engines)
    fails = bool(host.last_error) and not host.ready and host.state != "starting"
    if engine_failed or _is_other(host, run) or fails:
        return "failed"
    lag = lag_of(host, run)
    return "ready" if host.ready and lag is not None and lag <= 0 else "behind"


def require_gone(host: Host) -> None:
    """Raises Refused unless the host stopped or is lost."""
    if host.standing in ("stopped", "lost"):
        return
    heard = "at an unknown time" if host.heard_seconds_ago is None else f"{age(host.heard_seconds_ago)} ago"
    raise Refused(
        f"{host.host} ({host.local}) is {host.standing}, heard {heard}; "
        "only a stopped or lost host can be forgotten",
        remedy="stop its subscriber, or wait until it is lost",
    )


def trouble_of(host: Host, run_id: str | None) -> tuple[str, str]:
    """What is wrong with a host, and what to do about it."""
    if not host.last_error and _is_other(host, RunHead(run_id, None)):
        remedy = "give it this run's channel, or a local directory of its own"
        return f"follows another run, {host.run_id}", remedy
    if not (host.last_error or host.ready):
        waits = [(f"{one.name}: {one.error}", one.remedy) for one in host.adapters if one.error]
        out = [f"engine {each.name} is {each.state}" for each in host.engines if each.state in _ENGINES_OUT]
        return (", ".join(out), FIX_ENGINE) if out else next(iter(waits), ("", ""))
    return host.last_error, host.remedy


def shown_standing(host: Host) -> str:
    """For people: a ready host at its target is up to date; one at it that is not ready is not behind."""
    if host.standing == "behind" and host.lag == 0:
        return "not ready"
    return WORDS.get(host.standing, host.standing)


def names_of(hosts: Iterable[Host]) -> dict[str, str]:
    """What people call each, by its key: its name, and its local checkpoint where others have that name."""
    shown = tuple(hosts)
    count = Counter(host.host for host in shown)
    return {h.key: h.host if count[h.host] == 1 else f"{h.host}:{h.local}" for h in shown}


def short_names_of(hosts: Iterable[Host]) -> dict[str, str]:
    """As `names_of`, with no more of each local checkpoint's path than tells them apart."""
    shown = tuple(hosts)
    names = {h.key: h.host for h in shown}
    for parts in range(1, _MOST_PARTS + 1):
        count = Counter(names.values())
        alike = [h for h in shown if count[names[h.key]] > 1]
        if not alike:
            break
        names |= {h.key: f"{h.host}:{'/'.join(h.local.split('/')[-parts:])}" for h in alike}
    return names


def of_run(fleet: Fleet) -> Sequence[Host]:
    """Hosts of the channel's run that take part."""
    return [
        host
        for host in fleet.hosts
        if host.takes_part and (fleet.run_id is None or host.run_id in ("", fleet.run_id))
    ]


def verdict(fleet: Fleet) -> Verdict:
    """One sentence: how many hosts serve the newest version, what is wrong with others, what the publisher
    lacks."""
    findings = [*_publisher_findings(fleet), *_host_findings(fleet)]
    levels = [level for level, _ in findings]
    level: Level = "bad" if "bad" in levels else "warning" if "warning" in levels else "good"
    return Verdict(level=level, text="; ".join([_turnout(fleet), *(text for _, text in findings)]))


def _turnout(fleet: Fleet) -> str:
    expected = [host for host in fleet.hosts if host.standing != "stopped" and not host.is_ghost]
    ready = [host for host in expected if host.standing == "ready"]
    if not expected:
        return "no host is running" if fleet.counts.stopped else "no host has reported"
    newest = fleet.latest is not None and all(host.served_version == fleet.latest for host in ready)
    target = f"version {fleet.latest}" if newest else "the target version"
    verb = "serves" if len(expected) == 1 else "serve"
    bare = sum(not host.engines for host in ready)
    without = f" ({bare} without an engine)" if bare else ""
    return f"{len(ready)} of {counted(len(expected), 'host')} {verb} {target}{without}"


def _host_findings(fleet: Fleet) -> list[tuple[Level, str]]:
    """By kind of trouble, the worst first."""
    kinds, names = defaultdict[tuple[str, str], list[Host]](list), short_names_of(fleet.hosts)
    for host in sorted(fleet.hosts, key=lambda host: host.severity):
        well = host.standing in ("ready", "stopped") and not host.lacks_adapter
        if not well and not host.is_ghost:
            error = trouble_of(host, fleet.run_id)[0]
            same_in_all = " ".join(word for word in error.split() if not _DIFFERS.search(word))
            kinds[host.standing, same_in_all].append(host)
    worst = sorted(kinds.values(), key=lambda some: (WORST_FIRST.index(some[0].standing), -len(some)))
    found: list[tuple[Level, str]] = []
    for hosts in worst[:_MOST_KINDS]:
        first, same = hosts[0], len(hosts) - 1
        errors = [trouble_of(host, fleet.run_id)[0] for host in hosts]
        alike = same and errors[0] and len(set(errors)) == 1
        who = counted(len(hosts), "host") if alike else names[first.key]
        more = f" (and {same} more {shown_standing(first)})" if same and not alike else ""
        level: Level = "bad" if first.standing in ("failed", "lost") else "warning"
        found.append((level, f"{who}: {short(errors[0]) or shown_standing(first)}{more}"))
    rest = Counter(host.standing for hosts in worst[_MOST_KINDS:] for host in hosts)
    if rest:
        found.append(("warning", f"also {', '.join(f'{number} {each}' for each, number in rest.items())}"))
    return found


def _publisher_findings(fleet: Fleet) -> list[tuple[Level, str]]:
    found: list[tuple[Level, str]] = []
    owner, line = fleet.owner, fleet.publisher
    if owner is not None and owner.state not in ("alive", "unknown") and line is None:
        said = f"publisher {owner.state}, heard {age(owner.heard_seconds_ago)} ago"
        found.append(("warning" if owner.state == "stopped" else "bad", said))
    if fleet.rollback is not None:
        found.append(("warning", f"publisher held: {fleet.rollback.text}"))
    if line is None:
        return found
    if not line.ready:
        found.append(("bad", f"publisher not ready: {short('; '.join(line.reasons))}"))
    if line.last_refused is not None and line.refused_since_version:
        found.append(("bad", f"{line.last_refused.source} refused: {short(line.last_refused.message)}"))
    return found


def short(text: str) -> str:
    """Cut after a word."""
    if len(text) <= _MOST_TEXT:
        return text
    return (text[: _MOST_TEXT + 1].rpartition(" ")[0] or text[:_MOST_TEXT]) + "..."
