"""Gathers the facts that `plan` asks for, from the channel. Reads indexes only."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from weightcast.shared.base.elements import Part, TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError
from weightcast.shared.channel.channel import Channel, FullVersion
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import INDEX_NAME, ForeignIndex, Index
from weightcast.shared.channel.layout import Pointer, from_name
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.state.state import LocalState, Phase
from weightcast.shared.checkpoint.update.fetch import Awaited, NotThere, OnWait, ignore
from weightcast.shared.checkpoint.update.plan import (
    FULL,
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
from weightcast.shared.checkpoint.update.stage import BadDelta
from weightcast.shared.checkpoint.verify.repair import Delta, RepairSource
from weightcast.shared.files.disk_errors import error_text

_RETRY_EVERY = 0.2
AnyIndex = Index | ForeignIndex | FullVersion


@dataclass(frozen=True)
class Route:
    """A plan and the indexes it speaks of: `indexes` are the versions' own, `multi_step` those of
    multi-step deltas, by version and base version."""

    plan: Plan
    pointer: Pointer
    store: Store
    indexes: dict[int, AnyIndex]
    multi_step: dict[tuple[int, int], Index] = field(default_factory=dict)

    def files(self, version: int) -> Store:
        return self.store.within(self.pointer.version_key(version))

    def leads_from(self, version: int) -> int:
        """The base version of the delta that a leg of the plan takes to `version`."""
        then = self._then
        base = None if then is None else then.multi_step.get(version)
        index = self.indexes.get(version)
        if base is not None:
            return base
        return version - 1 if index is None or isinstance(index, FullVersion) else index.base_version

    @property
    def _then(self) -> Patch | None:
        then = self.plan.then if isinstance(self.plan, Seed | Relabel) else self.plan
        return then if isinstance(then, Patch) else None

    def delta(self, version: int) -> tuple[Index | ForeignIndex, Store]:
        """What a leg of the plan reads to arrive at `version`, and its files."""
        files = self.files(version)
        then = self._then
        base = None if then is None else then.multi_step.get(version)
        if base is not None:
            return self.multi_step[version, base], files.within(from_name(base))
        index = self.indexes[version]
        if isinstance(index, FullVersion):
            raise RetryLater(f"version {version} is full weights, no delta", remedy="it is planned again")
        return index, files


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
    route = Route(plan(facts), pointer, channel.store, {})
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
    links, multi_step = dict(facts.links), dict(facts.multi_step)
    for need in (asked, *asked.also) if isinstance(asked, Need) else ():
        if need.base_version is None:
            main = reader.read(need.version, required=need.version == facts.target)
            links[need.version] = None if main is None else link_of(main)
            if main is not None:
                route.indexes[need.version] = main
        else:
            skip = reader.skip(need.version, need.base_version)
            multi_step[need.version, need.base_version] = None if skip is None else link_of(skip)
            if skip is not None:
                route.multi_step[need.version, need.base_version] = skip
    return replace(facts, links=links, multi_step=multi_step, damaged=frozenset(reader.damaged))


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
        file = self.channel.version(self.pointer, version).place(INDEX_NAME)
        return Awaited(version, file, reason, retries, waited, self.seconds - waited)

    def _missing(self, version: int) -> str:
        files = self.channel.version(self.pointer, version)
        state = "is cut short" if files.stat(INDEX_NAME) is not None else "is not there"
        return f"{files.place(INDEX_NAME)} {state} although the pointer names {self.pointer.version}"

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


def repair_sources(
    channel: Channel, version: int, table: TensorTable, base: Path | None
) -> list[RepairSource]:
    """At most one over each kind of source: the cheapest, anchors, the base. A version that the channel
    cannot lead to has none."""
    digest = None if base is None else "" if channel.base is None else channel.base.digest
    found: list[RepairSource] = []
    for source, beside in ((digest, True), (None, True), (digest, False)):
        route = _route(channel, version, table, source, beside)
        way = None if route is None else _way(channel, route, base)
        if way is not None and way not in found and (channel.trust is None or _is_ours(way, base)):
            found.append(way)
    return found


def _is_ours(way: RepairSource, base: Path | None) -> bool:
    """Repairs read shards where they lie, proven by lanes alone: no guard against who can write there."""
    return way.directory == base and not way.deltas


def _route(
    channel: Channel, version: int, table: TensorTable, base: str | None, beside: bool
) -> Route | None:
    try:
        pointer = channel.pointer()
        if pointer is None:
            pointer = Pointer(0)
        return find_route(
            channel,
            pointer,
            table,
            None,
            target=version,
            exact=True,
            base=base,
            beside=beside,
            visible_seconds=0.0,
        )
    except (WeightcastError, OSError):
        # other sources may do; where none does, the caller seeds, and is told why that fails
        return None


def _way(channel: Channel, route: Route, base: Path | None) -> RepairSource | None:
    plan = route.plan
    if not isinstance(plan, Seed):
        return None
    deltas = tuple(Delta(*route.delta(version)) for leg in plan.then.legs for version in leg)
    if plan.version == 0:
        return None if base is None else RepairSource(base, True, deltas)
    weights = _full_weights(channel, route, plan.version)
    # other stores have no files that a repair could map
    return RepairSource(weights.directory, False, deltas) if isinstance(weights, DirectoryStore) else None


def _full_weights(channel: Channel, route: Route, version: int) -> Store:
    index = route.indexes.get(version)
    if isinstance(index, FullVersion) or (isinstance(index, Index) and index.kind == "anchor"):
        return channel.version(route.pointer, version)
    return channel.anchor_files(version)


SourceKey = tuple[int, int]
"""version and base version, `FULL` for full weights"""
LeadsFrom = Callable[[int], int]
OnDamaged = Callable[[str], None]
"""called with what is damaged before another way is planned"""


class DamagedSources:
    """Of one local checkpoint. Nothing is ever tried twice within one `run`: it ends."""

    def __init__(self) -> None:
        self.damaged: dict[SourceKey, str] = {}
        """and what is wrong with each"""
        self._met: SourceKey | None = None
        self._tried: set[SourceKey] = set()
        self._cause: Exception | None = None

    def run(self, attempt: Callable[[], None], on_detour: OnDamaged) -> None:
        """`attempt` plans and goes a way; again while it meets damage that it had not met before."""
        self._tried, self._cause = set(), None
        try:
            while True:
                self._met = None
                try:
                    return attempt()
                except (WeightcastError, OSError) as error:
                    met = self._new()
                    if met is None:
                        raise
                    self._tried.add(met)
                    self._cause = error
                    on_detour(self.damaged[met])
        finally:
            self._cause = None

    def _new(self) -> SourceKey | None:
        """What the last attempt met, unless an earlier one had."""
        return None if self._met in self._tried else self._met

    def none_left(self) -> None:
        """No way leads around what was met. Raises what was met first; returns where nothing was."""
        if self._cause is not None:
            raise self._cause

    def passed(self, version: int) -> None:
        """What leads to versions up to this one is no longer needed."""
        self.damaged = {stretch: why for stretch, why in self.damaged.items() if stretch[0] > version}

    @contextlib.contextmanager
    def delta(self, leads_from: LeadsFrom) -> Iterator[None]:
        try:
            yield
        except BadDelta as error:
            self._meet((error.version, leads_from(error.version)), error)
            raise DamagedFile(error.message, remedy=error.remedy) from error
        except NotThere as error:
            self._meet((error.version, leads_from(error.version)), error)
            raise RetryLater(error.message, remedy=error.remedy) from error

    @contextlib.contextmanager
    def full_weights(self, version: int) -> Iterator[None]:
        try:
            yield
        except (Refused, FileNotFoundError) as error:
            self._meet((version, FULL), error)
            raise

    def _meet(self, stretch: SourceKey, error: Exception) -> None:
        self.damaged[stretch] = error_text(error)
        self._met = stretch
