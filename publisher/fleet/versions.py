"""The versions of a channel, for people who look: every index is read once, newest first, a few at a
time. Then without IO: rows, what catching up costs, what pruning would do."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from weightcast.publisher.maintenance.prune import held_versions
from weightcast.publisher.maintenance.retention import (
    CheapestWay,
    Hop,
    Retention,
    Situation,
    cheapest,
    decide,
    window,
)
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel, Shown
from weightcast.shared.channel.index import VersionTotals
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.reports import Update
from weightcast.shared.channel.store import Store
from weightcast.shared.daemon.fleet import Host
from weightcast.shared.daemon.timing import Due

ROWS_LIMIT = 1000
"""versions whose indexes are read"""
_AT_ONCE_SECONDS = 0.2
"""of reading indexes in one look"""
_LOOK_SECONDS = 10.0
_NEWEST = 16
"""versions that are looked at again also while nobody watches: anchors are added to them later"""
_MORE = 64
"""versions beyond twice those that lay there, with which all directories are looked at: nobody may watch for
months, and what was pruned is to be forgotten"""


@dataclass(frozen=True)
class VersionFacts:
    """What a version's index says; `created`: unix time on the publisher's clock."""

    step: int | None
    created: float
    totals: VersionTotals
    root: str


@dataclass(frozen=True)
class History:
    """`versions`: all that lie there; `facts`: of those whose indexes were read; `complete`: no more of them
    will be."""

    pointer: int = 0
    versions: Mapping[int, Shown] = field(default_factory=dict)
    facts: Mapping[int, VersionFacts] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    tags: Mapping[str, int] = field(default_factory=dict)
    complete: bool = False


class VersionHistory:
    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._channel: Channel | None = None
        self._held: dict[int, Shown] = {}
        self._facts: dict[int, VersionFacts] = {}
        self._pointer = self._lay_there = 0
        self._look_due = Due(_LOOK_SECONDS, clock)

    def read(self, *, look_around: bool) -> History:
        """`look_around`: at all versions that were there before, not only at the newest, for what was added
        to them, and pruned. Raises WeightcastError and OSError where the channel cannot be read now."""
        if self._channel is None or self._channel.foreign:
            self._channel = Channel.open(self._store)
        pointer = self._channel.pointer()
        if pointer is None or self._channel.foreign:
            return History(complete=True)
        self._look(self._channel, pointer, look_around)
        self._read_indexes(self._channel)
        wanted = sorted(self._held, reverse=True)[:ROWS_LIMIT]
        return History(
            pointer.version,
            dict(self._held),
            dict(self._facts),
            frozenset(pins.kept(self._store)),
            pins.tags(self._store),
            all(version in self._facts for version in wanted),
        )

    def _look(self, channel: Channel, pointer: Pointer, look_around: bool) -> None:
        again = self._look_due.take()
        many = len(self._held) > 2 * self._lay_there + _MORE
        all_of_them = many or (again and look_around) or pointer.version < self._pointer
        above = 0 if all_of_them else max(0, self._pointer - (_NEWEST if again else 0))
        if above == pointer.version:
            return
        found = held_versions(channel, pointer, above)
        if not above:
            self._lay_there = len(found)
        self._held = {version: held for version, held in self._held.items() if version <= above} | found
        self._facts = {version: facts for version, facts in self._facts.items() if version in self._held}
        self._pointer = pointer.version

    def _read_indexes(self, channel: Channel) -> None:
        until = self._clock() + _AT_ONCE_SECONDS
        for version in sorted(self._held, reverse=True)[:ROWS_LIMIT]:
            if version in self._facts:
                continue
            index = None
            # what cannot be read or was removed is found out by the next scan of all directories
            with contextlib.suppress(WeightcastError, OSError):
                index = channel.own_index(version)
            if index is not None:
                self._facts[version] = VersionFacts(index.step, index.created, index.totals, index.root)
            if self._clock() > until:
                return


_PREPARING = ("plan", "fetch", "stage", "patch")
_RELOADING = ("pause", "reload", "read_back", "resume")
_SERVING = ("patch", "relabel", "reload")
"""kinds of updates that bring a version to engines"""


class VersionRow(BaseModel, frozen=True):
    version: int
    step: int | None
    created: float
    """unix time on the publisher's clock"""
    bytes: int
    """all files of the version, index included, without its anchor and multi-step deltas"""
    changed: int
    elements: int
    density: float
    """changed / elements"""
    ratio: float | None
    """bytes of the model / bytes"""
    publish_seconds: float | None
    """null for what this process did not publish"""
    served_seconds: float | None = None
    """from `created` until half of the hosts that took it served it; null: no host reports that any more"""
    pause_seconds: float | None = None
    """the longest that it paused an engine; null as above"""
    kept: bool
    """kept by name"""
    tags: tuple[str, ...]
    anchor: bool
    """it has an anchor, or is one"""
    skips: tuple[int, ...]
    """older versions from which a delta leads here"""
    same_as: int | None = None
    """the version before it with the same weights: mostly what a rollback went back to"""


class Versions(BaseModel, frozen=True):
    versions: tuple[VersionRow, ...] = ()
    """newest first"""
    complete: bool = False
    """false while older indexes are still being read"""


class CatchUpRow(BaseModel, frozen=True):
    lag: int
    bytes: int
    steps: tuple[str, ...]
    """what is read, in order"""
    seconds: float | None
    """estimated from what hosts report"""


class WithoutBase(BaseModel, frozen=True):
    bytes: int
    steps: tuple[str, ...]


class Joiner(BaseModel, frozen=True):
    """A host that joins: with the base at hand, and (null where nothing leads there) without."""

    bytes: int | None = None
    steps: tuple[str, ...] = ()
    seconds: float | None = None
    without_base: WithoutBase | None = None


class CatchUp(BaseModel, frozen=True):
    rows: tuple[CatchUpRow, ...] = ()
    joiner: Joiner = Joiner()


class PlannedVersion(BaseModel, frozen=True):
    version: int
    bytes: int
    """of the version with its anchor and multi-step deltas"""
    why: str


class PrunePlan(BaseModel, frozen=True):
    horizon: int = 0
    """lowest version from which every delta is kept"""
    remove: tuple[PlannedVersion, ...] = ()
    keep: tuple[PlannedVersion, ...] = ()
    why_not: str = ""
    """what keeps everything here"""


def version_rows(page: History, publish_seconds: Mapping[int, float], hosts: Iterable[Host]) -> Versions:
    rows, taken = [], _taken(hosts)
    roots: dict[str, int] = {}
    for version in sorted(page.facts):
        facts, stored = page.facts[version], page.versions[version]
        totals, nbytes = facts.totals, stored.nbytes
        at, pauses = zip(*taken[version], strict=True) if version in taken else ((), ())
        rows.append(
            VersionRow(
                version=version,
                step=facts.step,
                created=facts.created,
                bytes=nbytes,
                changed=totals.changed,
                elements=totals.elements,
                density=totals.changed / totals.elements if totals.elements else 0.0,
                ratio=totals.nbytes / nbytes if nbytes else None,
                publish_seconds=publish_seconds.get(version),
                served_seconds=max(0.0, statistics.median_low(at) - facts.created) if at else None,
                pause_seconds=max(pauses, default=None),
                kept=version in page.kept,
                tags=tuple(sorted(name for name, tagged in page.tags.items() if tagged == version)),
                anchor=stored.full is not None,
                skips=tuple(sorted(stored.skips)),
                same_as=roots.get(facts.root),
            )
        )
        roots[facts.root] = version
    return Versions(versions=tuple(reversed(rows)), complete=page.complete)


def _taken(hosts: Iterable[Host]) -> Mapping[int, list[tuple[float, float]]]:
    """By version: when each host served it first, by the publisher's clock, and the pause of its engines."""
    found = defaultdict[int, list[tuple[float, float]]](list)
    for host in hosts:
        done = [one for one in host.updates if one.outcome == "done" and one.kind in _SERVING]
        # newest first: the oldest of a version is the one that remains
        for version, update in {one.version: one for one in done}.items():
            ended = update.began + update.seconds.get("total", 0.0) - (host.clock_offset_seconds or 0.0)
            found[version].append((ended, update.seconds.get("pause_total", _of(update, _RELOADING))))
    return found


def catch_up(page: History, hosts: Sequence[Host]) -> CatchUp:
    """For lags 1, 2, 4 and so on, and those that hosts have."""
    held, seconds_for = page.versions, _pace(hosts)
    lags = {1 << power for power in range(20)} | {host.lag for host in hosts if host.lag}
    rows = []
    for lag in sorted(lag for lag in lags if 0 < lag <= page.pointer):
        way = cheapest(held, page.pointer, {page.pointer - lag: 0})
        if way is not None:
            rows.append(
                CatchUpRow(lag=lag, bytes=way.nbytes, steps=steps(way), seconds=seconds_for(way.nbytes))
            )
    return CatchUp(rows=tuple(rows), joiner=_joiner(page, seconds_for))


def _joiner(page: History, seconds_for: Callable[[int], float | None]) -> Joiner:
    based, bare = (cheapest(page.versions, page.pointer, start) for start in ({0: 0}, {}))
    without = None if bare is None else WithoutBase(bytes=bare.nbytes, steps=steps(bare))
    if based is None:
        return Joiner(without_base=without)
    return Joiner(
        bytes=based.nbytes, steps=steps(based), seconds=seconds_for(based.nbytes), without_base=without
    )


def steps(way: CheapestWay) -> tuple[str, ...]:
    """`anchor 4`, `delta 4 to 8`, and runs of single steps as one: `steps 9 to 12`."""
    runs: list[list[Hop]] = []
    for hop in way.hops:
        if runs and _is_single(hop) and _is_single(runs[-1][-1]):
            runs[-1].append(hop)
        else:
            runs.append([hop])
    return tuple(map(_run_text, runs))


def _is_single(hop: Hop) -> bool:
    return hop.base_version == hop.version - 1


def _run_text(run: Sequence[Hop]) -> str:
    first, last = run[0], run[-1]
    if first.base_version is None:
        return f"anchor {first.version}"
    if not _is_single(first):
        return f"delta {first.base_version} to {first.version}"
    return f"step {last.version}" if len(run) == 1 else f"steps {first.version} to {last.version}"


def _pace(hosts: Iterable[Host]) -> Callable[[int], float | None]:
    """Seconds for so many bytes, by what hosts took for deltas of late; None while none did."""
    patches = [update for host in hosts for update in host.updates if update.kind == "patch" and update.bytes]
    if not patches:
        return lambda nbytes: None
    per_byte = sum(_of(update, _PREPARING) for update in patches) / sum(update.bytes for update in patches)
    reloading = statistics.median(_of(update, _RELOADING) for update in patches)
    return lambda nbytes: per_byte * nbytes + reloading


def _of(update: Update, phases: Iterable[str]) -> float:
    return sum(update.seconds.get(phase, 0.0) for phase in phases)


def prune_plan(situation: Situation, retention: Retention) -> PrunePlan:
    """What the publisher would take out of the channel now, and why it keeps the rest."""
    verdict = decide(situation, retention)
    first = window(situation, retention) if verdict.horizon else 0

    def why_kept(version: int) -> str:
        if version in situation.wanted:
            return "kept by name or tagged"
        if not verdict.horizon:
            return verdict.why_not
        if version >= first:
            return f"from version {first} on hosts take every step on their own"
        if version >= verdict.horizon:
            return f"from the full weights of version {verdict.horizon} hosts come to version {first}"
        return "on the way to a version that is kept by name, or of hosts that join"

    def planned(version: int, why: str) -> PlannedVersion:
        return PlannedVersion(version=version, bytes=situation.versions[version].stored, why=why)

    gone = {removal.version for removal in verdict.removals}
    return PrunePlan(
        horizon=verdict.horizon,
        remove=tuple(planned(one.version, one.why) for one in verdict.removals),
        keep=tuple(planned(v, why_kept(v)) for v in sorted(situation.versions) if v not in gone),
        why_not=verdict.why_not,
    )
