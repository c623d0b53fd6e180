"""What brings a local checkpoint to a target: rules without IO.

The caller gathers facts, asks `plan`, and where the answer is `Need` reads that index and asks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MOST_FOLDED = 64
"""versions in one leg: what is held of their indexes while they fold stays bounded"""


@dataclass(frozen=True)
class Link:
    """What planning needs of a version's index."""

    version: int
    kind: Literal["delta", "anchor"]
    base_version: int
    parent: str | None
    """None: the format does not say (foreign)"""
    digest: str
    root: str
    epoch: int
    grid: str
    """equal for versions that fold; empty for anchors"""
    nbytes: int


@dataclass(frozen=True)
class Here:
    """Where the local checkpoint stands."""

    version: int
    digest: str
    root: str
    epoch: int


@dataclass(frozen=True)
class Facts:
    """`links`: indexes read so far; a version mapped to None does not exist (pruned or never published).
    `anchors`: versions with full weights that may be read. `base`: the digest of version 0 when its full
    weights are at hand. `exact`: the target was asked for by number, going back is meant."""

    here: Here | None
    target: int
    links: Mapping[int, Link | None]
    base: str | None
    anchors: frozenset[int] = frozenset()
    exact: bool = False
    blocked: frozenset[str] = frozenset()
    epoch: int = 0
    """the highest that was ever followed here, also before a reseed"""


@dataclass(frozen=True)
class Need:
    """The index of `version` must be read before a plan can be made."""

    version: int


@dataclass(frozen=True)
class Stay:
    reason: str = ""


@dataclass(frozen=True)
class Relabel:
    """Same bytes under the target's number."""

    version: int


@dataclass(frozen=True)
class Patch:
    """Legs of versions to fold: versions of a leg share a grid; legs follow one another."""

    legs: tuple[tuple[int, ...], ...]
    nbytes: int


@dataclass(frozen=True)
class Seed:
    """Full weights of `version` (0: the base), then the legs."""

    version: int
    then: Patch
    reason: str


@dataclass(frozen=True)
class Refuse:
    reason: str
    remedy: str
    waits: bool = False
    """True: nothing is wrong here, a later target may be accepted"""


Plan = Stay | Relabel | Patch | Seed | Refuse | Need


@dataclass
class _Walk:
    """Deltas from the target back, newest first, and where the walk stopped."""

    versions: list[Link] = field(default_factory=list)
    stopped: str = ""
    need: int | None = None
    met: int | None = None
    """version at which the walk arrived: here, a source of full weights"""


def plan(facts: Facts) -> Plan:
    here = facts.here
    if here is not None:
        if facts.target < here.version and not facts.exact:
            return Stay(f"the pointer says {facts.target}, older than the local version {here.version}")
        if facts.target == here.version:
            return _same_version(facts, here)
    if facts.target > 0 and facts.target not in facts.links:
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


def _refusal(facts: Facts, target: Link) -> Refuse | None:
    if target.digest in facts.blocked:
        return Refuse(
            f"version {target.version} was refused by the engines", "publish a newer version", waits=True
        )
    lowest = _lowest_epoch(facts)
    if target.epoch < lowest:
        return Refuse(
            f"version {target.version} was written by a publisher of epoch {target.epoch}, "
            f"this host already follows epoch {lowest}",
            "stop the old publisher; if the channel was restored from a backup, remove the local checkpoint",
        )
    return None


def _lowest_epoch(facts: Facts) -> int:
    """Of a target. Versions asked for by number may be of earlier publishers, unless they would continue what
    lies here."""
    here = facts.here
    if facts.exact:
        return here.epoch if here is not None and facts.target > here.version else 0
    return max(facts.epoch, here.epoch if here is not None else 0)


def _same_version(facts: Facts, here: Here) -> Plan:
    if here.version == 0:
        if facts.base is not None and facts.base != here.digest:
            return _seed(facts, "the local base is another run's")
        return Stay()
    if here.version not in facts.links:
        return Need(here.version)
    link = facts.links[here.version]
    if link is not None and link.digest != here.digest:
        return _seed(facts, f"version {here.version} of the channel is not the one that lies here")
    return Stay()


def _patch(facts: Facts, here: Here) -> Plan:
    walk = _back(facts, stop_at=here.version)
    if walk.need is not None:
        return Need(walk.need)
    if walk.met != here.version:
        return _seed(facts, walk.stopped)
    oldest = walk.versions[-1]
    if oldest.parent is None and here.version > 0:
        return _patch_unproven(facts, here, walk)
    if oldest.parent is not None and oldest.parent != here.digest:
        reason = (
            f"version {oldest.version} continues another version {here.version} than the one that lies here"
        )
        return _seed(facts, reason)
    return _legs(walk)


def _patch_unproven(facts: Facts, here: Here, walk: _Walk) -> Plan:
    """Foreign indexes name no parent: the local version's own index must be the one applied."""
    if here.version not in facts.links:
        return Need(here.version)
    link = facts.links[here.version]
    if link is not None and link.digest != here.digest:
        return _seed(facts, f"version {here.version} of the channel was rewritten")
    return _legs(walk)


def _back(facts: Facts, *, stop_at: int | None) -> _Walk:
    """From the target along base versions, to `stop_at` or (None) to the nearest full weights."""
    walk = _Walk()
    version = facts.target
    expected: str | None = None
    while True:
        if stop_at is None and (version in facts.anchors or (version == 0 and facts.base is not None)):
            walk.met = version
            if version == 0 and facts.base and expected is not None and expected != facts.base:
                walk.met, walk.stopped = None, "version 1 starts from another base"
            return walk
        if version == stop_at:
            walk.met = version
            return walk
        if version <= 0 or (stop_at is not None and version < stop_at):
            walk.stopped = (
                "no full weights to start from" if stop_at is None else f"no deltas from version {stop_at}"
            )
            return walk
        if version not in facts.links:
            walk.need = version
            return walk
        link = facts.links[version]
        if link is None:
            walk.stopped = f"version {version} is no longer in the channel"
            return walk
        if expected is not None and link.digest != expected:
            walk.stopped = f"version {version} is not the one that the next version starts from"
            return walk
        if link.kind == "anchor":
            if stop_at is None:
                walk.met = version
            else:
                walk.stopped = f"version {version} begins a new chain"
            return walk
        walk.versions.append(link)
        expected, version = link.parent, link.base_version


def _legs(walk: _Walk) -> Patch:
    legs: list[list[int]] = []
    grid: str | None = None
    for link in reversed(walk.versions):
        if link.grid != grid or len(legs[-1]) == MOST_FOLDED:
            legs.append([])
            grid = link.grid
        legs[-1].append(link.version)
    return Patch(tuple(tuple(leg) for leg in legs), sum(link.nbytes for link in walk.versions))


def _seed(facts: Facts, reason: str) -> Plan:
    walk = _back(facts, stop_at=None)
    if walk.need is not None:
        return Need(walk.need)
    if walk.met is None:
        why = [reason] if reason == walk.stopped else [reason, walk.stopped]
        return Refuse(
            ": ".join([f"version {facts.target} cannot be reached", *filter(None, why)]),
            "give --base with the run's base checkpoint, or have the publisher write an anchor",
        )
    return Seed(walk.met, _legs(walk), reason or "no local checkpoint yet")
