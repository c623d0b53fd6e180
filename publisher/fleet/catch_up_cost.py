"""What the publisher's page shows of versions: rows, what catching up costs, what pruning would do. Rules
without IO."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel

from weightcast.publisher.fleet.version_history import History
from weightcast.publisher.maintenance.retention import (
    CheapestWay,
    Hop,
    Retention,
    Situation,
    cheapest,
    decide,
    window,
)
from weightcast.shared.channel.reports import Update
from weightcast.shared.daemon.fleet import Host

_PREPARING = ("plan", "fetch", "stage", "patch")
_RELOADING = ("pause", "reload", "read_back", "resume")


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
    kept: bool
    """kept by name"""
    tags: tuple[str, ...]
    anchor: bool
    """it has an anchor, or is one"""
    skips: tuple[int, ...]
    """older versions from which a delta leads here"""


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


def version_rows(page: History, publish_seconds: Mapping[int, float]) -> Versions:
    rows = []
    for version in sorted(page.facts, reverse=True):
        facts, stored = page.facts[version], page.versions[version]
        totals, nbytes = facts.totals, stored.shown.nbytes
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
                kept=version in page.kept,
                tags=tuple(sorted(name for name, tagged in page.tags.items() if tagged == version)),
                anchor=stored.full is not None,
                skips=tuple(sorted(stored.shown.skips)),
            )
        )
    return Versions(versions=tuple(rows), complete=page.complete)


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
        return PlannedVersion(version=version, bytes=situation.versions[version].nbytes, why=why)

    gone = {removal.version for removal in verdict.removals}
    return PrunePlan(
        horizon=verdict.horizon,
        remove=tuple(planned(one.version, one.why) for one in verdict.removals),
        keep=tuple(planned(v, why_kept(v)) for v in sorted(situation.versions) if v not in gone),
        why_not=verdict.why_not,
    )
