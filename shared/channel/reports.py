"""What hosts say about themselves: `hosts/<host>-<8 hex>.json`. docs/FORMAT.md, Reports.

Anybody with access to the channel can write a report: they are hints, never a reason to delete or to wait for
ever, and the paths in them are text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import inf, isfinite
from typing import Annotated, Literal, cast

from annotated_types import Ge, MaxLen

from weightcast.shared.base.errors import DamagedFile, UnknownFormat, WeightcastError
from weightcast.shared.channel.layout import HOSTS, report_key
from weightcast.shared.channel.run_files import FORMAT, check_format
from weightcast.shared.channel.store import Stat, Store, StoreError
from weightcast.shared.files.paths import is_plain
from weightcast.shared.files.strict_json import Members, parse_object, write_object

REPORT_LIMIT = 64 << 10
"""bytes"""
REPORTS_LIMIT = 4096
_NAMES_LIMIT = 16 * REPORTS_LIMIT
"""files that are looked at for the youngest"""
FORGOTTEN_SECONDS = 30 * 86400.0
"""after which a report may be deleted"""
UPDATES_LIMIT = 20
CAUSES = ("step", "skip", "anchor", "repair")
"""what bytes of the channel are read for"""
WHOLE_BYTES = 32 << 20
"""of a fleet's reports: beyond them the longest are remembered in brief"""
PROBE_SECONDS = 60.0
_COARSE = 2.0
"""seconds to which file times may be rounded"""
TimeSource = Literal["channel", "local", "unknown"]
ADAPTERS_LIMIT = 128
_ENGINES_LIMIT = 64
_ENGINE_TEXT = 64
_BRIEF_ENGINES, _BRIEF_TEXT = 16, 256
_ERROR_LIMIT = 4096
_PHASES_LIMIT = 32
_COUNTS_LIMIT = 16
_Word = Annotated[str, MaxLen(32)]
_State = Annotated[str, MaxLen(64)]
_Line = Annotated[str, MaxLen(256)]
_Error = Annotated[str, MaxLen(_ERROR_LIMIT)]
_SUFFIX = ".json"
_NAME = re.compile(r".+-[0-9a-f]{8}\.json", re.DOTALL)
"""as `report_key` makes them"""


@dataclass(frozen=True)
class Update:
    """One move of the local checkpoint, or one reload of engines. `began`: unix time on the host's clock;
    `seconds` by phase, and as `pause_total` the longest time that an engine was paused; `bytes` read;
    `outcome`: `done`, or `refused` where no engine took the version, whether or not the host went back."""

    version: int
    kind: _Word
    began: float
    seconds: Mapping[str, float]
    bytes: int
    outcome: _Word


@dataclass(frozen=True)
class AdapterReport:
    """An adapter on a host. `name`: `adapter/NAME`; `version`: the newest that engines have loaded;
    `main_version`: of `main`, on which it was trained; `target`: the newest in the channel. `state`: `ready`,
    or what keeps it."""

    name: _Line
    version: int | None
    target: int | None
    main_version: int | None
    state: _State
    error: _Line = ""
    remedy: _Line = ""


@dataclass(frozen=True)
class Report:
    """`run_id`: of the local checkpoint, empty until it is seeded. `state`: `ready`, or what the host is at;
    `phase`: what it is at, ready or not. `lag` counts versions; `target` is `latest`, a version or a tag.
    `counter` rises with each report: a host whose counter does not change is silent, whatever its clock
    says."""

    host: _Line
    local: Annotated[str, MaxLen(4096)]
    run_id: Annotated[str, MaxLen(128)]
    state: _State
    local_version: int | None
    served_version: int | None
    target: _Line
    lag: Annotated[int, Ge(-(1 << 62))] | None
    last_error: _Error
    engines: tuple[Mapping[str, object], ...]
    """one object per engine, as in the daemon's status"""
    counter: int
    software: _Line
    phase: _State = ""
    target_version: int | None = None
    remedy: _Error = ""
    retries: int = 0
    """steps tried again since the start"""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """read from the channel since the start, by cause"""
    clock_offset: float | None = None
    """seconds by which the host's clock is ahead of the channel's file system, or of the publisher's clock"""
    updates: tuple[Update, ...] = ()
    """newest first"""
    gate: _Line = ""
    """URL of its gate; empty: it has none"""
    requests: Mapping[str, int] = field(default_factory=dict)
    """at its gate: `under_way`, `waiting`, `closed` (1: none is admitted), and outcomes since the start"""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """of answers, by version"""
    adapters: tuple[AdapterReport, ...] = ()


def write_report(store: Store, report: Report) -> float:
    """Returns when it was written by the clock of the channel's store. Raises StoreError, on a channel
    mounted read-only for instance."""
    return write_packed(store, report_key(report.host, report.local), pack_report(report))


def write_packed(store: Store, key: str, packed: bytes) -> float:
    """As `write_report`; `key` from `report_key`."""
    store.replace(key, packed, sync=False)
    found = store.stat(key)
    return store.now(HOSTS) if found is None else found.written


def pack_report(report: Report) -> bytes:
    """Texts are cut and their control characters dropped, and what makes it too long is left out, oldest
    updates first, so that readers take the report."""
    report = replace(
        report,
        last_error=_plain(report.last_error),
        remedy=_plain(report.remedy),
        updates=report.updates[:UPDATES_LIMIT],
        engines=report.engines[:_ENGINES_LIMIT],
        adapters=report.adapters[:ADAPTERS_LIMIT],
    )
    while len(data := write_object({"format": FORMAT, **asdict(report)})) > REPORT_LIMIT:
        if report.updates:
            report = replace(report, updates=report.updates[:-1])
        elif report.engines:
            report = replace(report, engines=report.engines[:-1])
        elif report.adapters:
            report = replace(report, adapters=report.adapters[:-1])
        else:
            break
    return data


def _plain(text: str) -> str:
    return "".join(c if is_plain(c) else " " for c in text[:_ERROR_LIMIT])


def parse_report(data: bytes, what: str, updates: int = UPDATES_LIMIT) -> Report:
    """`updates`: so many of them are taken, those after them not looked at. Raises DamagedFile and
    UnknownFormat."""
    if len(data) > REPORT_LIMIT:
        raise DamagedFile(f"{what}: larger than {REPORT_LIMIT} bytes")
    members = Members(parse_object(data, what), what)
    check_format(members, what)
    engines = members.array("engines")
    if len(engines) > _ENGINES_LIMIT or any(type(engine) is not dict for engine in engines):
        raise members.bad("engines", f"at most {_ENGINES_LIMIT} objects")
    return members.record(
        Report,
        absent=("phase", "target_version", "remedy", "retries", "clock_offset", "gate"),
        engines=tuple(cast(list[dict[str, object]], engines)),
        bytes=_bytes(members, what) if "bytes" in members else {},
        updates=tuple(
            row.record(Update, seconds=_seconds(row))
            for row in islice(_rows(members, what, "updates", UPDATES_LIMIT), updates)
        ),
        requests=_counts(members, "requests", what),
        tokens=_counts(members, "tokens", what),
        adapters=tuple(
            row.record(AdapterReport, absent=("error", "remedy"))
            for row in _rows(members, what, "adapters", ADAPTERS_LIMIT)
        ),
    )


def _counts(members: Members, name: str, what: str) -> dict[str, int]:
    found = members.object(name) if name in members else {}
    if len(found) > _COUNTS_LIMIT or any(len(each) > 32 or not is_plain(each) for each in found):
        raise members.bad(name, f"at most {_COUNTS_LIMIT} numbers")
    counts = Members(found, f"{what}: {name}")
    return {each: counts.integer(each) for each in found}


def _bytes(members: Members, what: str) -> dict[str, int]:
    found = Members(members.object("bytes"), f"{what}: bytes")
    return {cause: found.integer(cause) for cause in CAUSES if cause in found}


def _rows(members: Members, what: str, name: str, most: int) -> Iterator[Members]:
    rows = members.array(name) if name in members else []
    if len(rows) > most:
        raise members.bad(name, f"at most {most} objects")
    return (Members(row, f"{what}: {name}") for row in rows)


def _seconds(row: Members) -> dict[str, float]:
    found = row.object("seconds")
    if len(found) > _PHASES_LIMIT or any(len(name) > 32 or not is_plain(name) for name in found):
        raise row.bad("seconds", f"at most {_PHASES_LIMIT} phases")
    # most of a report, and of what a fleet costs to read: what is a number anyway is not taken one by one
    if all(type(value) is float and isfinite(value) for value in found.values()):
        return cast(dict[str, float], found)
    phases = Members(found, "seconds")
    return {name: phases.number(name) for name in found}


def read_reports(store: Store, limit: int = REPORTS_LIMIT) -> list[Report]:
    """In the order of file names, the youngest `limit` of them. Unreadable reports are left out: one bad host
    must not hide the others."""
    return [stored.report for stored in ReportReader(store, limit).read()]


@dataclass(frozen=True)
class StoredReport:
    """A report in the channel. `key`: its file's name without `.json`; `written`: when, by the clock of the
    channel's store."""

    key: str
    report: Report
    written: float


@dataclass(frozen=True)
class _Seen:
    stat: Stat
    brief: bool


class ReportReader:
    """Reads again only the files that were replaced since: of 1,000 hosts a few dozen write in a second.
    Of the longest reports of a large fleet it remembers no updates and little else: whoever may report could
    fill the memory otherwise. For one thread."""

    def __init__(
        self,
        store: Store,
        limit: int = REPORTS_LIMIT,
        updates: int = UPDATES_LIMIT,
        engine_members: Collection[str] | None = None,
    ) -> None:
        """`updates`: so many of each report are read. `engine_members`: these of its engines are, short texts
        and integers; None: all."""
        self._hosts, self._limit, self._updates = store.within(HOSTS), limit, updates
        self._engine_members = engine_members
        self._known: dict[str, tuple[_Seen, Report | None]] = {}

    def read(self) -> list[StoredReport]:
        """As `read_reports`. Raises OSError when the directory cannot be listed."""
        before, self._known = self._known, {}
        # reports of hosts that are gone may be many
        found = sorted(_there(self._hosts), key=lambda each: each[1].written_ns, reverse=True)
        found = sorted(found[: self._limit], key=lambda each: each[0])
        longest = _longest_whole([stat.size for _, stat in found])
        for name, stat in found:
            seen, known = _Seen(stat, stat.size > longest), before.get(name)
            if known is not None and known[0] == seen:
                self._known[name] = known
                continue
            try:
                self._known[name] = seen, self._report(name, seen)
            except WeightcastError:
                # it changes just now, or is gone
                continue
        return [
            StoredReport(name.removesuffix(_SUFFIX), report, seen.stat.written)
            for name, (seen, report) in self._known.items()
            if report is not None
        ]

    def _report(self, name: str, seen: _Seen) -> Report | None:
        """None for a file that is not a report, and will not be one until it is replaced."""
        updates = 0 if seen.brief else self._updates
        try:
            report = parse_report(self._hosts.read(name, REPORT_LIMIT), name, updates)
        except (DamagedFile, UnknownFormat):
            return None
        if self._engine_members is not None:
            report = replace(report, engines=tuple(_some(e, self._engine_members) for e in report.engines))
        return _brief(report) if seen.brief else report


def _there(hosts: Store) -> list[tuple[str, Stat]]:
    """Raises StoreError when the directory cannot be listed."""
    reports = (entry for entry in hosts.list() if entry.name.endswith(_SUFFIX))
    found = islice(reports, _NAMES_LIMIT)
    return [(entry.name, entry.stat) for entry in found if entry.stat is not None]


def forgotten(store: Store, now: float) -> list[str]:
    """Keys of reports that nobody needs any more: both by this machine's clock, at `now`, and by the newest
    report they are older than FORGOTTEN_SECONDS, whichever of the two is wrong. None where the directory is a
    link: its files are not the channel's. Raises StoreError."""
    if not any(entry.name == HOSTS and entry.kind == "directory" for entry in store.list()):
        return []
    files = _there(store.within(HOSTS))
    newest = max((stat.written for _, stat in files), default=0.0)
    before = min(now, newest) - FORGOTTEN_SECONDS
    return [f"{HOSTS}/{name}" for name, stat in files if stat.written < before and _NAME.fullmatch(name)]


def forget(store: Store, key: str) -> bool:
    """Deletes the report `key`. False where there is none. Raises StoreError."""
    return store.within(HOSTS).delete(key + _SUFFIX)


def _longest_whole(sizes: Sequence[int]) -> int:
    """The length up to which all reports together have no more than WHOLE_BYTES."""
    left, longest = WHOLE_BYTES, REPORT_LIMIT
    for size in sorted(sizes):
        left -= size
        if left < 0:
            # of equal lengths all are brief, or a look's order would decide
            return size - 1
    return longest


def _some(engine: Mapping[str, object], members: Collection[str]) -> Mapping[str, object]:
    there = {name: engine[name] for name in members if name in engine}
    texts = {name: value[:_ENGINE_TEXT] for name, value in there.items() if isinstance(value, str)}
    return texts | {name: value for name, value in there.items() if type(value) is int}


def _brief(report: Report) -> Report:
    return replace(
        report,
        engines=report.engines[:_BRIEF_ENGINES],
        local=report.local[:_BRIEF_TEXT],
        last_error=report.last_error[:_BRIEF_TEXT],
        remedy=report.remedy[:_BRIEF_TEXT],
    )


@dataclass(frozen=True)
class ChannelTime:
    """`now`: unix time by the clock that dates the reports; None where no clock is known to agree with it."""

    now: float | None
    source: TimeSource


class ChannelClock:
    """The time of the channel's store (of a directory: of a file created in `hosts/`), read at most once in
    PROBE_SECONDS, and counted on by this process's clock. Where it cannot be read this machine's time is
    used, unless it is behind the newest report and thus proven wrong. For one thread."""

    def __init__(self, store: Store, clock: Callable[[], float], local: Callable[[], float]) -> None:
        self._store, self._clock, self._local = store, clock, local
        self._ahead: float | None = None
        """of `clock`"""
        self._due = -inf

    def read(self, newest: float) -> ChannelTime:
        """`newest`: when the newest report was written."""
        if self._clock() >= self._due:
            try:
                self._ahead = self._store.within(HOSTS).now() - self._clock()
            except StoreError:
                self._ahead = None
            self._due = self._clock() + PROBE_SECONDS
        if self._ahead is not None:
            return ChannelTime(self._clock() + self._ahead, "channel")
        now = self._local()
        return ChannelTime(None, "unknown") if now < newest - _COARSE else ChannelTime(now, "local")


@dataclass(frozen=True)
class Silence:
    """Time since a report last changed; at least so long where it is not `exact`."""

    seconds: float
    exact: bool = True


@dataclass(frozen=True)
class _Heard:
    counter: int
    since: float
    """by this process's clock"""
    exact: bool


class Heard:
    """How long ago each report last changed, by this process's clock.

    The age of a report met for the first time comes from its file and the file system's time. Without that
    time the report is at least as old as the newest one makes it, and its host is not known to be alive until
    the counter rises."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Heard] = {}
        self._looked = -inf

    def silences(self, reports: Sequence[StoredReport], channel_now: float | None) -> dict[str, Silence]:
        now, before, self._seen = self._clock(), self._seen, {}
        newest = max((each.written for each in reports), default=0.0) if channel_now is None else channel_now
        for each in reports:
            age, known = max(0.0, newest - each.written), before.get(each.key)
            if known is None or (channel_now is not None and not known.exact):
                found = _Heard(each.report.counter, now - age, channel_now is not None)
            elif known.counter == each.report.counter:
                found = known
            else:
                # a look that hung in a mount must not make an old report look new
                late = 0.0 if channel_now is None else min(age, now - self._looked)
                found = _Heard(each.report.counter, now - late, True)
            self._seen[each.key] = found
        self._looked = now
        return {key: Silence(now - heard.since, heard.exact) for key, heard in self._seen.items()}
