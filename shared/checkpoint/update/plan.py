"""What brings a local checkpoint to a target: rules without IO.

The caller gathers facts, asks `plan`, and where the answer is `Need` or `Look` reads that and asks again.

Versions are nodes; steps, deltas from older versions and full weights are ways between them. The way of the
fewest bytes is searched from the target back, on sizes that the directories show; only the indexes on it are
read, and a source that contradicts them is not used.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from weightcast.shared.base.errors import MEND_CHANNEL
from weightcast.shared.channel.channel import Shown
from weightcast.shared.checkpoint.state.state import Position

FULL = -1
"""in place of the base version: full weights"""
MOST_FOLDED = 64
"""versions in one leg: what is held of their indexes while they fold stays bounded"""


@dataclass(frozen=True)
class Link:
    """What planning needs of an index. `digest` is that of the version's own index, also for a delta from an
    older version, stored next to it."""

    version: int
    kind: Literal["delta", "anchor"]
    base_version: int
    parent: str | None
    """None: the format does not say (foreign)"""
    digest: str
    root: str
    epoch: int
    grid: object
    """equal for versions whose chunks fold onto each other"""
    nbytes: int
    space: int = 0
    """bytes on the local disk, at most, to fetch and stage it"""


@dataclass(frozen=True)
class PlanFacts:
    """`links`: main indexes read so far; a version mapped to None does not exist (pruned or never published).
    `multi_step`: indexes of multi-step deltas read so far, by version and base version. `shown`: what
    directories show, of the versions above `looked`; one without an entry is missing. `base`: the digest of
    the base version when its full weights are at hand. `exact`: the target was asked for by number, going
    back is meant."""

    here: Position | None
    target: int
    links: Mapping[int, Link | None]
    base: str | None
    shown: Mapping[int, Shown] = field(default_factory=dict)
    looked: int = 0
    multi_step: Mapping[tuple[int, int], Link | None] = field(default_factory=dict)
    exact: bool = False
    avoid: Collection[tuple[int, int]] = ()
    """what was found damaged, as version and base version, `FULL` for full weights: no way leads over it"""
    damaged: Collection[int] = ()
    """versions in `links` mapped to None because their index cannot be used"""
    blocked: frozenset[str] = frozenset()
    epoch: int = 0
    """the highest that was ever followed here, also before a reseed"""
    signed: bool = False
    """every link is signed by a trusted key: a version that does not continue the local one was forged"""
    reached: int = 0
    """the version that was last applied here, also where its bytes are lost"""
    base_version: int = 0
    """whose full weights the base has; above 0 only in foreign channels"""
    room: int | None = None
    """bytes on the local disk for the `space` of a leg; None: not known"""


@dataclass(frozen=True)
class Need:
    """The index of `version` must be read before a plan can be made: the main one, or the one of its delta
    from `base_version`. `also`: others that will be asked for if nothing speaks against it."""

    version: int
    base_version: int | None = None
    also: tuple[Need, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Look:
    """The directories of the versions above `above`, up to the target, must be looked at."""

    above: int


@dataclass(frozen=True)
class Stay:
    reason: str = ""


@dataclass(frozen=True)
class Patch:
    """Legs of versions to fold; the versions of a leg share a grid, and the local disk has room for them.
    Where it has none for a single version, that is a leg. `multi_step`: versions that a multi-step delta
    leads to, and its base version."""

    legs: tuple[tuple[int, ...], ...]
    nbytes: int
    multi_step: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Relabel:
    """Same bytes under the version's number, then the legs."""

    version: int
    then: Patch = Patch((), 0)


@dataclass(frozen=True)
class Seed:
    """Full weights of `version` (the base's where it is the base version), then the legs."""

    version: int
    then: Patch
    reason: str


@dataclass(frozen=True)
class Refuse:
    reason: str
    remedy: str
    waits: bool = False
    """True: nothing is wrong here, a later target may be accepted"""


Plan = Stay | Relabel | Patch | Seed | Refuse | Need | Look


@dataclass(frozen=True)
class _Hop:
    """One delta: from `base_version` to `version`."""

    version: int
    base_version: int
    nbytes: int
    beside: bool
    """True: a multi-step delta"""


_Source = Literal["here", "equal", "base", "anchor"]


@dataclass(frozen=True)
class _Way:
    """From a source at `version` along `hops`, oldest first."""

    source: _Source
    version: int
    hops: tuple[_Hop, ...]


def plan(facts: PlanFacts) -> Plan:
    here = facts.here
    reached = facts.reached if here is None else here.version
    if facts.target < reached and not facts.exact and (here is not None or facts.signed):
        return _rewound(facts, reached)
    if here is not None and facts.target == here.version:
        return _same_version(facts, here)
    seeds = here is None or facts.target < here.version
    is_base = seeds and _is_base(facts, facts.target)
    if facts.target > 0 and facts.target not in facts.links and not is_base:
        return Need(facts.target)
    target = facts.links.get(facts.target)
    if target is not None:
        refusal = _refusal(facts, target)
        if refusal is not None:
            return refusal
        if here is not None and target.root and target.root == here.root:
            return Relabel(facts.target)
    if here is None:
        return _seed(facts, "")
    if facts.target < here.version:
        return _seed(facts, f"going back from version {here.version}")
    return _patch(facts, here)


def _refusal(facts: PlanFacts, target: Link) -> Refuse | None:
    if target.digest in facts.blocked:
        return Refuse(
            f"version {target.version} was refused by the engines", "publish a newer version", waits=True
        )
    here = facts.here
    lowest = max(facts.epoch, here.epoch if here is not None else 0)
    if facts.exact:
        # versions asked for by number may be of earlier publishers, unless they would continue the local one
        lowest = here.epoch if here is not None and facts.target > here.version else 0
    if target.epoch < lowest:
        return Refuse(
            f"version {target.version} was written by a publisher of epoch {target.epoch}, "
            f"this host already follows epoch {lowest}",
            "stop the old publisher; if the channel was restored from a backup, remove the local checkpoint",
        )
    return None


def _same_version(facts: PlanFacts, here: Position) -> Plan:
    if here.version == 0 or not here.digest:
        if facts.base is not None and facts.base != here.digest:
            return _forked(facts, "the local base is another run's")
        return Stay()
    if here.version not in facts.links:
        return Need(here.version)
    link = facts.links[here.version]
    if link is not None and link.digest != here.digest:
        return _forked(
            facts, f"version {here.version} of the channel differs from the local version {here.version}"
        )
    return Stay()


def _forked(facts: PlanFacts, reason: str) -> Plan:
    """Two histories of one run. Unsigned, the channel is right: it may have been restored. Signed, somebody
    may be replaying what its publisher once wrote."""
    return _replayed(reason) if facts.signed else _seed(facts, reason)


def _rewound(facts: PlanFacts, reached: int) -> Plan:
    """Nothing goes back on the pointer's word. Unsigned, it may be a stale mount's or an operator's."""
    reason = (
        f"the channel was rewound: latest names version {facts.target}, "
        f"version {reached} was applied here before"
    )
    return _replayed(reason) if facts.signed else Stay(reason)


def _replayed(reason: str) -> Refuse:
    return Refuse(
        reason,
        "find out who can write to the channel; to go back give --target with the version's number; "
        "if the channel was restored from a backup, remove the local checkpoint",
    )


def _patch(facts: PlanFacts, here: Position) -> Plan:
    if facts.looked > here.version and not _is_next(facts, here):
        return Look(here.version)
    way = _search_within(facts, here)
    if isinstance(way, Need):
        return way
    fork = _fork(facts, here)
    if fork and facts.signed and (way is None or way.source == "anchor"):
        return _replayed(fork)
    if way is None:
        return _seed(facts, _why_not(facts, here))
    then = _legs(facts, way)
    if way.source == "anchor":
        reason = _why_not(facts, here) or f"full weights of version {way.version} are fewer bytes"
        return Seed(way.version, then, reason)
    return then if way.source == "here" else Relabel(way.version, then)


def _is_next(facts: PlanFacts, here: Position) -> bool:
    """Whether the target's own delta starts from the local version: no multi-step delta is shorter."""
    link = facts.links.get(facts.target)
    if link is None or link.kind != "delta" or (link.version, link.base_version) in facts.avoid:
        return False
    return link.base_version == here.version and _starts_from(facts, here, link)


def _seed(facts: PlanFacts, reason: str) -> Plan:
    if facts.looked > 0:
        return Look(0)
    way = _search_within(facts, None)
    if isinstance(way, Need):
        return way
    if way is None:
        why = dict.fromkeys(filter(None, [reason, _why_not(facts, None)]))
        return Refuse(
            ": ".join([f"version {facts.target} cannot be reached", *why]),
            MEND_CHANNEL
            if facts.damaged
            else "give --base (of a resumed run with --base-version), or run `weightcast channel anchor`",
        )
    return Seed(way.version, _legs(facts, way), reason or "no local checkpoint yet")


def _legs(facts: PlanFacts, way: _Way) -> Patch:
    legs: list[list[_Hop]] = []
    grid: object = None
    for hop in way.hops:
        link = _link(facts, hop)
        found = "" if link is None else link.grid
        if found != grid or len(legs[-1]) == MOST_FOLDED or not _fit(facts, *legs[-1], hop):
            legs.append([])
            grid = found
        legs[-1].append(hop)
    multi_step = {hop.version: hop.base_version for hop in way.hops if hop.beside}
    versions = tuple(tuple(hop.version for hop in leg) for leg in legs)
    return Patch(versions, sum(hop.nbytes for hop in way.hops), multi_step)


def _fit(facts: PlanFacts, *hops: _Hop) -> bool:
    """Whether the local disk has room to stage them together."""
    taken = sum(0 if (link := _link(facts, hop)) is None else link.space for hop in hops)
    return facts.room is None or taken <= facts.room


def _search_within(facts: PlanFacts, here: Position | None) -> _Way | Need | None:
    """As `_search`, but not over deltas for which the local disk has no room, where other deltas lead on."""
    way = _search(facts, here)
    while isinstance(way, _Way):
        large = {(hop.version, hop.base_version) for hop in way.hops if not _fit(facts, hop)}
        facts = replace(facts, avoid={*facts.avoid, *large})
        other = _search(facts, here) if large else None
        if other is None or (here is not None and isinstance(other, _Way) and other.source == "anchor"):
            return way
        way = other
    return way


def _search(facts: PlanFacts, here: Position | None) -> _Way | Need | None:
    """The way of the fewest bytes to the target, from `here` or full weights, its indexes all read; None
    without one."""
    onward: dict[int, _Hop | None] = {}
    """the hop from each version that was reached towards the target"""
    tie = count()
    queue: list[tuple[int, int, int, int, _Source | None, _Hop | None]]
    queue = [(0, 0, next(tie), facts.target, None, None)]
    while queue:
        cost, hops, _, version, source, hop = heapq.heappop(queue)
        if source is not None:
            way = _Way(source, version, _from(version, onward))
            return _unread(facts, here, way) or way
        if version in onward:
            continue
        onward[version] = hop
        for kind, nbytes in _sources(facts, here, version):
            heapq.heappush(queue, (cost + nbytes, hops, next(tie), version, kind, None))
        is_known = version in facts.links or version in facts.shown
        is_known |= here is None and _is_base(facts, version)
        if not is_known and _beyond(here, version):
            return Need(version)
        for one in _hops(facts, here, version):
            heapq.heappush(queue, (cost + one.nbytes, hops + 1, next(tie), one.base_version, None, one))
    # nothing leads on: a version taken for a step may hold full weights; largest first
    unread = [version for version in onward if version in facts.shown and version not in facts.links]
    return Need(max(unread, key=lambda version: (facts.shown[version].nbytes, version))) if unread else None


def _from(version: int, onward: Mapping[int, _Hop | None]) -> tuple[_Hop, ...]:
    hops: list[_Hop] = []
    while (hop := onward[version]) is not None:
        hops.append(hop)
        version = hop.version
    return tuple(hops)


def _beyond(here: Position | None, version: int) -> bool:
    """Whether deltas to `version` may be part of a way."""
    return version > (0 if here is None else here.version)


def _is_base(facts: PlanFacts, version: int) -> bool:
    """Whether the base has its full weights: then no index of the channel is needed to seed."""
    is_usable = facts.base is not None and (version, FULL) not in facts.avoid
    return is_usable and version == facts.base_version


def _sources(facts: PlanFacts, here: Position | None, version: int) -> Iterator[tuple[_Source, int]]:
    """Where a way may begin at `version`, and the bytes of that."""
    link, shown = facts.links.get(version), facts.shown.get(version)
    if here is not None and version == here.version:
        yield "here", 0
    elif here is not None and link is not None and link.root and link.root == here.root:
        yield "equal", 0
    if (version, FULL) in facts.avoid:
        return
    if here is None and _is_base(facts, version):
        yield "base", 0
    if not _beyond(here, version) or (link is None and version in facts.links):
        return
    if link is not None and link.kind == "anchor":
        yield "anchor", link.nbytes
    elif shown is not None and shown.anchor is not None:
        yield "anchor", shown.anchor


def _hops(facts: PlanFacts, here: Position | None, version: int) -> Iterator[_Hop]:
    """Deltas that lead to `version`, as far as nothing that was read speaks against them."""
    shown, link = facts.shown.get(version), facts.links.get(version)
    lowest = 0 if here is None else here.version
    if not _beyond(here, version) or (link is None and version in facts.links):
        return
    found: list[_Hop] = []
    if link is None and shown is not None:
        # an unread one is taken for a step
        found.append(_Hop(version, version - 1, shown.nbytes, False))
    elif link is not None and link.kind == "delta":
        found.append(_Hop(version, link.base_version, link.nbytes if shown is None else shown.nbytes, False))
    if shown is not None:
        found += [_Hop(version, base_version, nbytes, True) for base_version, nbytes in shown.skips.items()]
    for hop in found:
        sound = (hop.version, hop.base_version) not in facts.avoid
        if sound and hop.base_version >= lowest and _holds(facts, here, hop):
            yield hop


def _link(facts: PlanFacts, hop: _Hop) -> Link | None:
    if hop.beside:
        return facts.multi_step.get((hop.version, hop.base_version))
    return facts.links.get(hop.version)


def _holds(facts: PlanFacts, here: Position | None, hop: _Hop) -> bool:
    link, main = _link(facts, hop), facts.links.get(hop.version)
    if link is None:
        return not hop.beside or (hop.version, hop.base_version) not in facts.multi_step
    if hop.beside and main is not None and (link.digest, link.root) != (main.digest, main.root):
        return False
    return _starts_from(facts, here, link)


def _starts_from(facts: PlanFacts, here: Position | None, link: Link) -> bool:
    """Whether a delta's base is the local version."""
    base = facts.links.get(link.base_version)
    if here is not None and link.base_version == here.version:
        if link.parent is None and here.version > 0 and here.digest:
            # foreign indexes name no parent: the local version's own index must be the one applied
            return base is None or base.digest == here.digest
        return link.parent is None or link.parent == here.digest
    if link.parent is None:
        return True
    if link.base_version == 0 and facts.base:
        return link.parent == facts.base
    return base is None or link.parent == base.digest


def _unread(facts: PlanFacts, here: Position | None, way: _Way) -> Need | None:
    """What of the way was not read yet, from the target back."""
    needs = [need for hop in reversed(way.hops) for need in _unread_of(facts, here, hop)]
    if way.source == "anchor" and way.version not in facts.links:
        needs.append(Need(way.version))
    return replace(needs[0], also=tuple(needs[1:])) if needs else None


def _unread_of(facts: PlanFacts, here: Position | None, hop: _Hop) -> Iterator[Need]:
    if hop.version not in facts.links:
        yield Need(hop.version)
    if hop.beside and (hop.version, hop.base_version) not in facts.multi_step:
        yield Need(hop.version, hop.base_version)
    link = _link(facts, hop)
    if here is None or link is None or link.parent is not None:
        return
    if hop.base_version == here.version > 0 and here.digest and hop.base_version not in facts.links:
        yield Need(hop.base_version)


def _why_not(facts: PlanFacts, here: Position | None) -> str:
    """Where the steps from the target back to `here`, or to full weights, break off; empty if they do not."""
    if here is None and facts.base is not None and facts.target < facts.base_version:
        return f"the base has version {facts.base_version}"
    stop_at = 0 if here is None else here.version
    version, expected = facts.target, None
    while version > stop_at:
        link = facts.links.get(version)
        if link is None and version in facts.damaged:
            return f"the index of version {version} is damaged"
        if link is None:
            return f"version {version} is no longer in the channel" if version in facts.links else ""
        if expected is not None and link.digest != expected:
            return f"version {version} is not the base of the next version"
        if (version, link.base_version) in facts.avoid:
            return f"the delta of version {version} is damaged"
        if link.kind == "anchor":
            return f"version {version} begins a new chain"
        if not _starts_from(facts, here, link) and link.base_version == stop_at:
            return _other_base(link, here)
        expected, version = link.parent, link.base_version
    if version < stop_at:
        return f"no deltas from version {stop_at}"
    return "no full weights to start from" if here is None and facts.base is None else ""


def _fork(facts: PlanFacts, here: Position) -> str:
    """Empty unless a delta that was read continues another version than the local one."""
    for link in facts.links.values():
        continues = link is not None and link.kind == "delta" and link.base_version == here.version
        if link is not None and continues and not _starts_from(facts, here, link):
            return _other_base(link, here)
    return ""


def _other_base(link: Link, here: Position | None) -> str:
    if here is None:
        return f"version {link.version} starts from another base"
    if link.parent is None:
        return f"version {here.version} of the channel was rewritten"
    return f"version {link.version} continues another version {here.version} than the local one"
