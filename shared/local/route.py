"""Gathers the facts that `plan` asks for, from the channel. Reads indexes only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.pointer import Pointer
from weightcast.shared.channel.store import Channel, FullVersion
from weightcast.shared.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.files.entries import exists
from weightcast.shared.local.awaited import Awaited, OnWait, ignore
from weightcast.shared.local.plan import (
    Here,
    Link,
    Look,
    Need,
    Patch,
    Plan,
    PlanFacts,
    Refuse,
    Relabel,
    Seed,
    plan,
)
from weightcast.shared.local.state import LocalState, Phase
from weightcast.shared.words import Part, TensorTable

_RETRY_EVERY = 0.2
AnyIndex = Index | ForeignIndex | FullVersion


@dataclass(frozen=True)
class Route:
    """A plan and the indexes it speaks of: `indexes` are the versions' own, `skips` those of deltas from
    older versions, by version and base version."""

    plan: Plan
    pointer: Pointer
    indexes: dict[int, AnyIndex]
    skips: dict[tuple[int, int], Index] = field(default_factory=dict)

    def leads_from(self, version: int) -> int:
        """The base version of the delta that a leg of the plan takes to `version`."""
        then = self._then
        base = None if then is None else then.skips.get(version)
        index = self.indexes.get(version)
        if base is not None:
            return base
        return version - 1 if index is None or isinstance(index, FullVersion) else index.base_version

    @property
    def _then(self) -> Patch | None:
        then = self.plan.then if isinstance(self.plan, Seed | Relabel) else self.plan
        return then if isinstance(then, Patch) else None

    def delta(self, version: int) -> tuple[Index | ForeignIndex, Path]:
        """What a leg of the plan reads to arrive at `version`, and the directory it lies in."""
        then = self._then
        base = None if then is None else then.skips.get(version)
        if base is not None:
            return self.skips[version, base], Layout(self.pointer.prefix).from_dir(version, base)
        index = self.indexes[version]
        if isinstance(index, FullVersion):
            raise RetryLater(f"version {version} is full weights, no delta", remedy="it is planned again")
        return index, Layout(self.pointer.prefix).version_dir(version)


def find_route(
    channel: Channel,
    pointer: Pointer,
    table: TensorTable | None,
    state: LocalState | None,
    *,
    target: int,
    exact: bool,
    base: str | None,
    visible_seconds: float,
    beside: bool = True,
    wait: Callable[[float], None] = time.sleep,
    on_wait: OnWait = ignore,
    avoid: Collection[tuple[int, int]] = (),
) -> Route:
    """`base`: digest of version 0 when its weights are at hand; `table`: None while a foreign run's tensors
    are unknown; `beside`: whether anchors and deltas from older versions, which lie beside versions, count;
    `avoid`: what was found damaged, as `PlanFacts` has it. An index that the pointer implies and that does
    not show within `visible_seconds` is RetryLater for the target, and taken as pruned below it."""
    facts = PlanFacts(
        here=_here(state),
        target=target,
        links={},
        base=base,
        looked=target if beside and not channel.foreign else 0,
        exact=exact or channel.foreign,
        avoid=frozenset(avoid),
        blocked=frozenset(b.digest for b in state.blocked) if state is not None else frozenset(),
        epoch=0 if state is None else state.epoch,
        signed=channel.trust is not None,
        reached=0 if state is None else state.position.version,
    )
    reader = _IndexReader(channel, pointer, table, time.monotonic(), visible_seconds, wait, on_wait)
    route = Route(plan(facts), pointer, {})
    while isinstance(route.plan, Need | Look):
        facts = _answered(facts, route, reader)
        route = replace(route, plan=plan(facts))
    if isinstance(route.plan, Refuse) and reader.damaged:
        reasons = "; ".join([route.plan.reason, *list(reader.damaged.values())[:3]])
        route = replace(route, plan=replace(route.plan, reason=reasons))
    return route


def _answered(facts: PlanFacts, route: Route, reader: _IndexReader) -> PlanFacts:
    """`facts` and what the plan asked for; indexes go into the route's too."""
    asked = route.plan
    if isinstance(asked, Look):
        shown = reader.channel.shown(route.pointer, above=asked.above, up_to=facts.looked)
        return replace(facts, shown={**facts.shown, **shown}, looked=asked.above)
    links, skips = dict(facts.links), dict(facts.skips)
    for need in (asked, *asked.also) if isinstance(asked, Need) else ():
        if need.base_version is None:
            main = reader.read(need.version, required=need.version == facts.target)
            links[need.version] = None if main is None else link_of(main)
            if main is not None:
                route.indexes[need.version] = main
        else:
            skip = reader.skip(need.version, need.base_version)
            skips[need.version, need.base_version] = None if skip is None else link_of(skip)
            if skip is not None:
                route.skips[need.version, need.base_version] = skip
    return replace(facts, links=links, skips=skips, damaged=frozenset(reader.damaged))


def _here(state: LocalState | None) -> Here | None:
    if state is None or state.phase is not Phase.CLEAN:
        return None
    position = state.position
    return Here(position.version, position.digest, position.root, position.epoch)


@dataclass
class _IndexReader:
    channel: Channel
    pointer: Pointer
    table: TensorTable | None
    began: float
    seconds: float
    wait: Callable[[float], None]
    on_wait: OnWait
    damaged: dict[int, str] = field(default_factory=dict)
    """what is wrong with indexes that were passed over, by version"""

    def read(self, version: int, *, required: bool) -> AnyIndex | None:
        """An index may be visible later than the pointer that implies it. One that stays damaged is as
        good as none, unless it is the target's: there may be a way around it."""
        damage: DamagedFile | None = None
        retries = 0
        while True:
            try:
                index = self.channel.index(self.pointer, version, self.table or TensorTable(()))
                if index is not None or self._pruned(version):
                    if retries:
                        self.on_wait(None)
                    return index
            except DamagedFile as error:
                damage = error
            waited, retries = time.monotonic() - self.began, retries + 1
            if waited >= self.seconds:
                break
            self.on_wait(self._awaited(version, damage, retries, waited))
            self.wait(_RETRY_EVERY)
        if damage is not None:
            if required:
                raise damage
            self.damaged[version] = damage.message
        elif required:
            raise RetryLater(
                self._missing(version),
                remedy="is the mount stale? `weightcast channel verify` says what is missing",
            )
        return None

    def _awaited(self, version: int, damage: DamagedFile | None, retries: int, waited: float) -> Awaited:
        reason = self._missing(version) if damage is None else damage.message
        file = str(Layout(self.pointer.prefix).index(version))
        return Awaited(version, file, reason, retries, waited, self.seconds - waited)

    def _missing(self, version: int) -> str:
        path = Layout(self.pointer.prefix).index(version)
        state = "is cut short" if exists(path) else "is not there"
        return f"{path} {state} although the pointer names {self.pointer.version}"

    def skip(self, version: int, base_version: int) -> Index | None:
        """None also for one that cannot be used: there are other ways."""
        try:
            return self.channel.skip(version, base_version, self.table or TensorTable(()))
        except Refused:
            return None

    def _pruned(self, version: int) -> bool:
        return self.channel.file is not None and version < self.channel.file.horizon


def link_of(index: AnyIndex) -> Link:
    if isinstance(index, FullVersion):
        return Link(index.version, "anchor", -1, None, index.digest, "", 0, "", 0)
    if isinstance(index, ForeignIndex):
        return Link(index.version, "delta", index.base_version, None, index.digest, "", 0, "whole", 0)
    return Link(
        index.version,
        index.kind,
        index.base_version,
        index.parent,
        index.version_digest,
        index.root,
        index.epoch,
        grid_digest(index.parts),
        sum(file.size for file in index.files),
    )


@lru_cache(maxsize=4)
def grid_digest(parts: tuple[Part, ...]) -> str:
    """Equal for versions whose chunks fold onto each other."""
    plain = [[[s.tensor, s.start, s.stop] for s in part.segments] for part in parts]
    return blake3(json.dumps(plain).encode()).hexdigest()
