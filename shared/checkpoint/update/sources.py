"""Gathers the facts that `plan` asks for, from the channel. Reads indexes only."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from blake3 import blake3

from weightcast.shared.base.elements import Part, TensorTable
from weightcast.shared.base.errors import (
    MEND_CHANNEL,
    DamagedFile,
    Forked,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.channel.channel import Channel, FullVersion
from weightcast.shared.channel.directory_store import directory_of
from weightcast.shared.channel.index import INDEX_NAME, ForeignIndex, Index
from weightcast.shared.channel.layout import Pointer, from_name
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.state.state import LocalState, Phase, Position, pack_lanes
from weightcast.shared.checkpoint.update.fetch import Deadline, Delta, NotThere, Patience
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
from weightcast.shared.checkpoint.verify.repair import RepairSource
from weightcast.shared.checkpoint.verify.seed import SeedSource, describe, start_of
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.files.hf_checkpoint import Checkpoint, open_checkpoint
from weightcast.shared.files.side_files import check_pointers

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

    def delta(self, version: int) -> Delta:
        """What a leg of the plan reads to arrive at `version`."""
        then = self._then
        base = None if then is None else then.multi_step.get(version)
        if base is not None:
            return Delta(self.multi_step[version, base], self.files(version).within(from_name(base)))
        index = self.indexes[version]
        if isinstance(index, FullVersion):
            raise RetryLater(
                f"version {version} is an anchor, not a delta", remedy="retry: another plan is made"
            )
        return Delta(index, self.files(version))


def find_route(
    channel: Channel,
    pointer: Pointer,
    table: TensorTable | None,
    state: LocalState | None,
    *,
    target: int,
    exact: bool,
    base: str | None,
    patience: Patience = Patience(),
    shortcuts: bool = True,
    avoid: Collection[tuple[int, int]] = (),
) -> Route:
    """`base`: digest of version 0 when its weights are at hand; `table`: None while a foreign run's tensors
    are unknown; `shortcuts`: whether anchors and multi-step deltas count; `avoid`: damaged sources, as in
    `PlanFacts`. An index that the pointer implies and that does not appear in time is RetryLater for the
    target, and counts as pruned below it."""
    facts = PlanFacts(
        here=_here(state),
        target=target,
        links={},
        base=base,
        looked=target if shortcuts and not channel.foreign else 0,
        exact=exact or channel.foreign,
        avoid=frozenset(avoid),
        blocked=frozenset(b.digest for b in state.blocked) if state is not None else frozenset(),
        epoch=0 if state is None else state.epoch,
        signed=channel.trust is not None,
        reached=0 if state is None else state.position.version,
    )
    reader = _IndexReader(channel, pointer, table, patience.begin())
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
    deadline: Deadline
    damaged: dict[int, str] = field(default_factory=dict)
    """what is wrong with indexes that were passed over, by version"""

    def read(self, version: int, *, required: bool) -> AnyIndex | None:
        """An index may be visible later than the pointer that implies it. A damaged index counts as missing,
        unless it is the target's: another source may do."""
        place = self.channel.version(self.pointer, version).place(INDEX_NAME)
        try:
            return self.deadline.retry(version, place, lambda: self._read(version, place))
        except DamagedFile as error:
            if required:
                raise
            self.damaged[version] = error.message
        except NotThere:
            if required:
                raise
        return None

    def _read(self, version: int, place: str) -> AnyIndex | None:
        """None for a pruned version."""
        index = self.channel.index(self.pointer, version, self.table or TensorTable(()))
        if index is None and not self._pruned(version):
            state = "cut short" if self._is_there(version) else "missing"
            raise NotThere(
                f"{place} is {state} although the pointer names {self.pointer.version}",
                version,
                remedy="check the mount; `weightcast channel verify` lists missing files",
            )
        return index

    def _is_there(self, version: int) -> bool:
        return self.channel.version(self.pointer, version).stat(INDEX_NAME) is not None

    def skip(self, version: int, base_version: int) -> Index | None:
        """None also for an unusable index: there are other sources."""
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
    digest = base_digest(channel, base)
    found: list[RepairSource] = []
    for source, shortcuts in ((digest, True), (None, True), (digest, False)):
        way = _found(channel, version, table, source, shortcuts, base)
        if way is not None and way not in found and (channel.trust is None or _is_ours(way, base)):
            found.append(way)
    return found


def _is_ours(way: RepairSource, base: Path | None) -> bool:
    """Repairs read shards where they lie, proven by lanes alone: no guard against who can write there."""
    return way.directory == base and not way.deltas


def _found(
    channel: Channel, version: int, table: TensorTable, digest: str | None, shortcuts: bool, base: Path | None
) -> RepairSource | None:
    try:
        pointer = channel.pointer() or Pointer(0)
        route = find_route(
            channel, pointer, table, None, target=version, exact=True, base=digest, shortcuts=shortcuts
        )
        return _way(channel, route, base)
    except (WeightcastError, OSError):
        # another source may do; where none does, the caller seeds, and reports why that fails
        return None


def _way(channel: Channel, route: Route, base: Path | None) -> RepairSource | None:
    plan = route.plan
    if not isinstance(plan, Seed) or (plan.version == 0 and base is None):
        return None
    deltas = tuple(route.delta(version) for leg in plan.then.legs for version in leg)
    directory = full_weights(channel, route, plan.version, base)
    return RepairSource(directory, of_base=plan.version == 0, deltas=deltas)


def base_digest(channel: Channel, base: Path | None) -> str | None:
    """None without a base; empty where its digest is unknown, in the slime format."""
    if base is None:
        return None
    return "" if channel.base is None else channel.base.digest


def full_weights(channel: Channel, route: Route, version: int, base: Path | None) -> Path:
    """The directory with the full weights of a version that the plan of `route` seeds from. Raises Refused
    for a channel that is not in a directory: its files cannot be mapped."""
    if version == 0:
        if base is None:
            raise Refused("the base checkpoint is unknown", remedy="give --base")
        return base
    index = _main_index(channel, route, version)
    if isinstance(index, FullVersion) or (isinstance(index, Index) and index.kind == "anchor"):
        return directory_of(channel.version(route.pointer, version))
    return directory_of(channel.anchor_files(version))


def _main_index(channel: Channel, route: Route, version: int) -> AnyIndex | None:
    """The plan may know of an anchor without its version's index."""
    index = route.indexes.get(version)
    if index is None and channel.base is not None:
        index = channel.index(route.pointer, version, channel.base.table)
    return index


def seed_source(channel: Channel, route: Route, plan: Seed, directory: Path, *, threads: int) -> SeedSource:
    """`directory`: of the full weights. Raises Refused or FileNotFoundError for damaged ones."""
    found = route.indexes.get(plan.version)
    if plan.version == 0:
        checkpoint = open_base(directory)
        if channel.base is not None:
            return SeedSource(checkpoint, start_of(channel.base), channel.base.run_id, channel.base)
        return _foreign_source(checkpoint, route, plan, "", threads)
    if isinstance(found, FullVersion):
        return _foreign_source(
            open_checkpoint(directory, follow_links=False), route, plan, found.digest, threads
        )
    return _anchor_source(channel, route, plan.version, directory)


def _anchor_source(channel: Channel, route: Route, version: int, directory: Path) -> SeedSource:
    _, base = channel.require_ours()
    main = _main_index(channel, route, version)
    if not isinstance(main, Index):
        raise RetryLater(f"the index of version {version} is gone", remedy="retry: another plan is made")
    anchor: Index | None = main if main.kind == "anchor" else channel.anchor(version, base.table)
    if anchor is None or anchor.root != main.root:
        raise Forked(
            f"{directory} is not the anchor of version {version}: index missing, or with another root",
            remedy=MEND_CHANNEL,
        )
    lanes = anchor.tensors.put(base.table, np.zeros((len(base.table), 2), np.uint64))
    position = Position(main.version, main.digest, main.root, main.epoch, pack_lanes(lanes))
    checkpoint = open_checkpoint(directory, follow_links=False)
    return SeedSource(checkpoint, position, base.run_id, base, anchor=anchor)


def _foreign_source(
    checkpoint: Checkpoint, route: Route, plan: Seed, digest: str, threads: int
) -> SeedSource:
    run = _foreign_run(route, plan)
    base = describe(checkpoint, run, threads=threads)
    position = replace(start_of(base), version=plan.version, digest=digest)
    return SeedSource(checkpoint, position, run, base, foreign=True)


def _foreign_run(route: Route, plan: Seed) -> str:
    if route.pointer.run is not None:
        return route.pointer.run
    first = plan.then.legs[0][0] if plan.then.legs else plan.version
    index = route.indexes.get(first)
    return "foreign" if index is None else f"foreign-{index.digest[:16]}"


def open_base(directory: Path) -> Checkpoint:
    """Raises Refused or DamagedFile when it is not a complete checkpoint."""
    try:
        checkpoint = open_checkpoint(directory, follow_links=True, need_index=False)
        check_pointers(checkpoint)
        return checkpoint
    except FileNotFoundError as error:
        raise Refused(
            f"{directory} is missing", remedy="give an HF checkpoint directory as --base"
        ) from error


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
