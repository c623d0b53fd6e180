"""Which versions a channel keeps: rules without IO.

Kept are the newest ones, those that living hosts still need (up to a bound), everything from the full weights
that come before these, and whatever the shortest way to a kept or tagged version, or of a newcomer, is made
of. Without full weights before the newest ones nothing goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcast.shared.base.options import check_options

if TYPE_CHECKING:
    from weightcast.shared.channel.channel import Shown

_HOUR = 3600.0
GRACE_SECONDS = 3600.0
"""that pruned versions stay in the trash"""


@dataclass(frozen=True)
class Retention:
    """`keep_versions`, `keep_hours`: the newest by either are kept; both None: all are. `host_versions`: how
    many more at most for hosts that are behind."""

    keep_versions: int | None = None
    keep_hours: float | None = None
    host_versions: int = 64

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def bounded(self) -> bool:
        return self.keep_versions is not None or self.keep_hours is not None


@dataclass(frozen=True)
class Situation:
    """`hosts`: versions of the hosts that live; `wanted`: versions that were kept or tagged by name."""

    pointer: int
    versions: Mapping[int, Shown]
    now: float
    hosts: Collection[int] = ()
    wanted: Collection[int] = ()


@dataclass(frozen=True)
class Removal:
    version: int
    nbytes: int
    why: str


@dataclass(frozen=True)
class Verdict:
    """`horizon`: lowest version from which every delta is kept. `why_not`: what keeps everything here."""

    horizon: int = 0
    removals: tuple[Removal, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Hop:
    """The delta to `version` from `base_version`; None: its full weights."""

    version: int
    base_version: int | None


@dataclass(frozen=True)
class CheapestWay:
    """What is read on the way of the fewest bytes, in order."""

    nbytes: int
    hops: tuple[Hop, ...]


def decide(situation: Situation, retention: Retention) -> Verdict:
    if not retention.bounded or not situation.versions:
        return Verdict(why_not="no bound is set" if situation.versions else "nothing is published")
    first = window(situation, retention)
    start = max((v for v, held in situation.versions.items() if v <= first and held.full), default=None)
    if start is None:
        return Verdict(why_not=f"no full weights at or before version {first}, the first that must be kept")
    needed = _needed(situation, start)
    why = f"before version {first}, the first that is kept; version {start} has full weights"
    gone = tuple(
        Removal(version, held.stored, why)
        for version, held in sorted(situation.versions.items())
        if version < start and version not in needed
    )
    return Verdict(start, gone, "" if gone else f"every version from {start} on is kept")


def window(situation: Situation, retention: Retention) -> int:
    """The first version that a host may still take on its own."""
    pointer, first = situation.pointer, situation.pointer
    if retention.keep_versions is not None:
        first = min(first, pointer - retention.keep_versions + 1)
    if retention.keep_hours is not None:
        most = retention.keep_hours * _HOUR
        young = (v for v, age in ages(situation, most).items() if age <= most)
        first = min([first, *young])
    lowest = first - retention.host_versions
    behind = [host + 1 for host in situation.hosts if lowest <= host + 1 <= pointer]
    return max(1, min([first, *behind]))


def ages(situation: Situation, most: float) -> dict[int, float]:
    """Seconds since each version, as far as the clock can be believed: of the time between two versions, or
    since the newest, no more counts than an eighth of `most`, or twice what is usual here. So a clock that
    jumps, or a long pause, takes little of what is kept."""
    from statistics import median  # imports more than help needs

    versions = sorted(situation.versions, reverse=True)
    at = [situation.now, *(situation.versions[version].created for version in versions)]
    gaps = [max(0.0, later - earlier) for later, earlier in itertools.pairwise(at)]
    usual = median(gaps[1:]) if len(gaps) > 1 else 0.0
    bound = max(most / 8, 2 * usual)
    return dict(zip(versions, itertools.accumulate(min(gap, bound) for gap in gaps), strict=True))


def _needed(situation: Situation, start: int) -> set[int]:
    """Versions before `start` that ways to wanted ones, and of newcomers, lead over."""
    needed: set[int] = set()
    for target in {*situation.wanted, situation.pointer}:
        way = cheapest(situation.versions, target, {})
        if way is None and target < start:
            # only hosts with the base can go there, and they still can
            way = cheapest(situation.versions, target, {0: 0})
        if way is not None:
            needed.update(hop.version for hop in way.hops)
        elif target < start:
            # a listing may lack what leads there
            needed.update(version for version in situation.versions if version <= target)
    return {version for version in needed if version < start}


def cheapest(versions: Mapping[int, Shown], target: int, start: Mapping[int, int]) -> CheapestWay | None:
    """From full weights in the channel, or from a version that is held at the price given in `start`."""
    best, last = dict(start), dict[int, Hop]()
    for version in sorted(version for version in versions if version <= target):
        held = versions[version]
        ways = {} if held.full is None else {Hop(version, None): held.full}
        hops = {**held.skips, **({} if held.whole else {version - 1: held.nbytes})}
        ways |= {Hop(version, base): best[base] + nbytes for base, nbytes in hops.items() if base in best}
        hop = min(ways, key=lambda hop: ways[hop], default=None)
        if hop is not None and (version not in best or ways[hop] < best[version]):
            best[version], last[version] = ways[hop], hop
    if target not in best:
        return None
    found: list[Hop] = []
    at: int | None = target
    while at is not None and at in last:
        found.append(last[at])
        at = last[at].base_version
    return CheapestWay(best[target], tuple(reversed(found)))
