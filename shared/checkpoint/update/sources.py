"""Gathers the facts that `plan` asks for, reading indexes only; finds full weights and bases."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from weightcast.shared.base.elements import MAIN, TensorTable
from weightcast.shared.base.errors import (
    MEND_CHANNEL,
    DamagedFile,
    Forked,
    Refused,
    RetryLater,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.channel.chain import AnyIndex
from weightcast.shared.channel.channel import Channel, FullVersion
from weightcast.shared.channel.delta import stated_digests
from weightcast.shared.channel.directory_store import directory_of, may_map
from weightcast.shared.channel.index import INDEX_NAME, ForeignIndex, Index
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.channel.run_files import is_adapter
from weightcast.shared.channel.store import Store, joined
from weightcast.shared.checkpoint.state.state import LocalState, Phase, Position, pack_lanes
from weightcast.shared.checkpoint.update.fetch import Delta, NotThere, Patience, staging_bytes
from weightcast.shared.checkpoint.update.plan import (
    FULL,
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
from weightcast.shared.checkpoint.verify.seed import (
    ReadCheckpoint,
    SeedSource,
    check_table,
    describe,
    start_of,
)
from weightcast.shared.codec.slime import digest_stream
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.files.hf_checkpoint import (
    ADAPTER_MODEL,
    SINGLE,
    Checkpoint,
    check_pointers,
    open_checkpoint,
)
from weightcast.shared.files.paths import is_directory
from weightcast.shared.files.safetensors import Entry, pack_header
from weightcast.shared.files.strict_json import parse_object, write_object
from weightcast.shared.kernels.loader import private_directory


@dataclass(frozen=True)
class Route:
    """A plan and the indexes it speaks of: `indexes` are the versions' own, `multi_step` those of
    multi-step deltas, by version and base version."""

    plan: Plan
    pointer: Pointer
    channel: Channel
    indexes: Mapping[int, AnyIndex]
    multi_step: Mapping[tuple[int, int], Index]
    base_version: int = 0
    """whose full weights the base has"""

    def files(self, version: int) -> Store:
        return self.channel.version(self.pointer, version)

    def leads_from(self, version: int) -> int:
        """The base version of the delta that a leg of the plan takes to `version`."""
        base, index = self._base_of(version), self.indexes.get(version)
        if base is not None:
            return base
        return version - 1 if index is None or isinstance(index, FullVersion) else index.base_version

    def delta(self, version: int) -> Delta:
        """What a leg of the plan reads to arrive at `version`."""
        base = self._base_of(version)
        if base is not None:
            return Delta(self.multi_step[version, base], self.channel.multi_step_files(version, base))
        index = self.indexes[version]
        if isinstance(index, FullVersion):
            raise RetryLater(
                f"version {version} is an anchor, not a delta", remedy="retry: another plan is made"
            )
        return Delta(index, self.files(version))

    def _base_of(self, version: int) -> int | None:
        """None: not by a multi-step delta."""
        then = self.plan.then if isinstance(self.plan, Seed | Relabel) else self.plan
        return then.multi_step.get(version) if isinstance(then, Patch) else None


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
    base_version: int = 0,
    room: int | None = None,
) -> Route:
    """`base`: digest of the base version when its weights are at hand; `table`: None while a foreign run's
    tensors are unknown; `shortcuts`: whether anchors and multi-step deltas count; `avoid`, damaged sources,
    and `room`: as in `PlanFacts`. An index that the pointer implies and that does not appear in time is
    RetryLater for the target, and counts as pruned below it. Raises Refused for a `base_version` in a channel
    with a base.json."""
    if base_version and not channel.foreign:
        raise Refused(
            f"--base-version {base_version}: the base of {channel.place} is version 0",
            remedy="leave it out; it is for foreign channels whose run was resumed",
        )
    facts = PlanFacts(
        here=None if state is None or state.phase is not Phase.CLEAN else state.position,
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
        base_version=base_version,
        room=room,
    )
    reader = _IndexReader(channel, pointer, table or TensorTable(()), patience.begin())
    found = plan(facts)
    while isinstance(found, Need | Look):
        facts = reader.answered(facts, found)
        found = plan(facts)
    if isinstance(found, Refuse) and reader.damaged:
        found = replace(found, reason="; ".join([found.reason, *list(reader.damaged.values())[:3]]))
    return Route(found, pointer, channel, reader.indexes, reader.multi_step, base_version)


@dataclass
class _IndexReader:
    channel: Channel
    pointer: Pointer
    table: TensorTable
    patience: Patience
    indexes: dict[int, AnyIndex] = field(default_factory=dict)
    multi_step: dict[tuple[int, int], Index] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    """what is wrong with indexes that were passed over, by version"""

    def answered(self, facts: PlanFacts, asked: Need | Look) -> PlanFacts:
        """`facts` and what the plan asked for."""
        if isinstance(asked, Look):
            shown = self.channel.shown(self.pointer, above=asked.above, up_to=facts.looked)
            return replace(facts, shown={**facts.shown, **shown}, looked=asked.above)
        links, multi_step = dict(facts.links), dict(facts.multi_step)
        for need in (asked, *asked.also):
            version, base = need.version, need.base_version
            if base is None:
                main = self._main(version, required=version == facts.target)
                links[version] = None if main is None else link_of(main)
                if main is not None:
                    self.indexes[version] = main
                continue
            multi_step[version, base] = None
            # a damaged one is not used: there are other sources
            with contextlib.suppress(Refused):
                index = self.channel.skip(version, base, self.table)
                if index is not None:
                    multi_step[version, base] = link_of(index)
                    self.multi_step[version, base] = index
        return replace(facts, links=links, multi_step=multi_step, damaged=frozenset(self.damaged))

    def _main(self, version: int, *, required: bool) -> AnyIndex | None:
        """An index may be visible later than the pointer that implies it. A damaged index counts as missing,
        unless it is the target's: another source may do."""
        place = self.channel.version(self.pointer, version).place(self.pointer.index_name)
        try:
            return self.patience.retry(version, place, lambda: self._read(version, place))
        except (DamagedFile, NotThere) as error:
            if required:
                raise
            if isinstance(error, DamagedFile):
                self.damaged[version] = error.message
        return None

    def _read(self, version: int, place: str) -> AnyIndex | None:
        """None for a pruned version."""
        index = self.channel.index(self.pointer, version, self.table)
        pruned = self.channel.file is not None and version < self.channel.file.horizon
        if index is None and not pruned:
            there = self.channel.version(self.pointer, version).stat(self.pointer.index_name) is not None
            raise NotThere(
                f"{place} is {'cut short' if there else 'missing'} "
                f"although the pointer names {self.pointer.version}",
                version,
                remedy="check the mount; `weightcast channel verify` lists missing files"
                if self.channel.file is not None
                else f"check the mount; if the run was resumed at version {version}, give that checkpoint as "
                f"--base with --base-version {version}",
            )
        return index


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
        index.parts,
        sum(file.size for file in index.files),
        staging_bytes(index),
    )


def repair_sources(
    channel: Channel, version: int, table: TensorTable, base: Path | None, base_version: int = 0
) -> list[RepairSource]:
    """At most one over each kind of source: the cheapest, anchors, the base. A version that the channel
    cannot lead to has none."""
    digest = base_digest(channel, base)
    found: list[RepairSource] = []
    for source, shortcuts in ((digest, True), (None, True), (digest, False)):
        # another source may do; where none does, the caller seeds, and reports why that fails
        with contextlib.suppress(WeightcastError, OSError):
            pointer = channel.pointer() or Pointer(0)
            route = find_route(
                channel,
                pointer,
                table,
                None,
                target=version,
                exact=True,
                base=source,
                shortcuts=shortcuts,
                base_version=base_version,
            )
            of_base = isinstance(route.plan, Seed) and route.plan.version == base_version
            if isinstance(route.plan, Seed) and not (of_base and base is None):
                deltas = tuple(route.delta(version) for leg in route.plan.then.legs for version in leg)
                weights, index = _full_weights(route, route.plan.version, base)
                shards: tuple[str, ...] = ()
                if isinstance(index, Index):
                    shards = tuple(sorted(set(index.weight_map.values())))
                elif not isinstance(weights, Path):
                    weights = directory_of(weights)
                one = RepairSource(weights, shards, of_base=of_base, deltas=deltas)
                # repairs read shards where they are, proven by lanes alone: no guard against who can write
                # there
                is_safe = channel.trust is None or (of_base and not deltas)
                if is_safe and one not in found:
                    found.append(one)
    return found


def base_digest(channel: Channel, base: Path | None) -> str | None:
    """None without a base; empty where its digest is unknown, in the slime format. The base of a component,
    zeros, is everywhere."""
    if base is None and (channel.base is None or channel.base.component == MAIN):
        return None
    return "" if channel.base is None else channel.base.digest


def full_weights(route: Route, version: int, base: Path | None, spool: Path) -> Path:
    """The directory with the full weights of a version that the plan of `route` seeds from: its files are
    mapped. From a channel that is not in a directory they are streamed into `spool`."""
    described = route.channel.base
    if version == 0 and described is not None and described.component != MAIN:
        return _zeros(described.table, spool / "zeros")
    files, index = _full_weights(route, version, base)
    if isinstance(files, Path):
        return files
    if may_map(files):
        return directory_of(files)
    if isinstance(index, Index):
        names: Iterable[str] = [INDEX_NAME, *(file.name for file in index.all_files)]
    else:
        names = _keys(files)
    target = spool / f"full-{version}"
    for key in names:
        durable.replace(durable.make_within(target, key), files.pieces(key), sync=False)
    return target


def _zeros(table: TensorTable, directory: Path) -> Path:
    """A checkpoint of `table` whose bytes are all zero, in a sparse file."""
    ends = list(itertools.accumulate(spec.nbytes for spec in table))
    entries = [
        Entry(spec.name, spec.dtype, spec.shape, end - spec.nbytes, end)
        for spec, end in zip(table, ends, strict=True)
    ]
    name = ADAPTER_MODEL if is_adapter(table.component) else SINGLE
    header, path = pack_header(entries, {"format": "pt"}), directory / name
    directory.mkdir(exist_ok=True)
    path.write_bytes(header)
    os.truncate(path, len(header) + table.nbytes)
    return directory


def _full_weights(route: Route, version: int, base: Path | None) -> tuple[Path | Store, AnyIndex | None]:
    """The base's directory, or where the channel has the full weights of `version`, and their index."""
    if version == route.base_version:
        if base is None:
            raise Refused("the base checkpoint is unknown", remedy="give --base")
        return base, None
    index, described = _main_index(route, version), route.channel.base
    is_anchor = isinstance(index, Index) and index.kind == "anchor"
    if is_anchor or isinstance(index, FullVersion) or described is None:
        return route.files(version), index
    return route.channel.anchor_files(version), route.channel.anchor(version, described.table)


def _keys(files: Store, prefix: str = "") -> Iterator[str]:
    for entry in files.list(prefix):
        key = joined(prefix, entry.name)
        yield from _keys(files, key) if entry.kind == "directory" else (key,)


def _main_index(route: Route, version: int) -> AnyIndex | None:
    """The plan may know of an anchor without its version's index."""
    index, base = route.indexes.get(version), route.channel.base
    if index is None and base is not None:
        index = route.channel.index(route.pointer, version, base.table)
    return index


def seed_source(route: Route, plan: Seed, directory: Path, *, threads: int) -> SeedSource:
    """`directory`: of the full weights. Raises Refused or FileNotFoundError for damaged ones."""
    base = route.channel.base
    if base is None:
        return _foreign_source(route, plan, directory, threads)
    if plan.version == 0:
        return SeedSource(open_base(directory, adapter=base.is_adapter), start_of(base), base)
    main = _main_index(route, plan.version)
    if not isinstance(main, Index):
        raise RetryLater(f"the index of version {plan.version} is gone", remedy="retry: another plan is made")
    anchor = main if main.kind == "anchor" else route.channel.anchor(plan.version, base.table)
    if anchor is None or anchor.root != main.root:
        raise Forked(
            f"{directory} is not the anchor of version {plan.version}: index missing, or with another root",
            remedy=MEND_CHANNEL,
        )
    lanes = anchor.tensors.put(base.table, np.zeros((len(base.table), 2), np.uint64))
    position = Position(main.version, main.digest, main.root, main.epoch, pack_lanes(lanes))
    checkpoint = open_checkpoint(directory, follow_links=False, adapter=base.is_adapter)
    return SeedSource(checkpoint, position, base, anchor=anchor)


def _foreign_source(route: Route, plan: Seed, directory: Path, threads: int) -> SeedSource:
    is_base = plan.version == route.base_version
    checkpoint = open_base(directory) if is_base else open_checkpoint(directory, follow_links=False)
    if is_base and plan.version > 0:
        _check_base_version(route, checkpoint)
    first = route.indexes.get(plan.then.legs[0][0] if plan.then.legs else plan.version)
    run = route.pointer.run or ("foreign" if first is None else f"foreign-{first.digest[:16]}")
    base = describe(checkpoint, run, threads=threads)
    digest = "" if is_base else route.indexes[plan.version].digest
    position = replace(start_of(base), version=plan.version, digest=digest)
    return SeedSource(checkpoint, position, base, foreign=True)


def _check_base_version(route: Route, checkpoint: Checkpoint) -> None:
    """Where the channel has the delta to the base's version: it states digests of the tensors that it
    changed. Raises WrongRun. Without that delta the next one shows a wrong base."""
    version, table = route.base_version, checkpoint.table
    index, files = route.channel.index(route.pointer, version, table), route.files(version)
    if not isinstance(index, ForeignIndex):
        return
    with ReadCheckpoint(checkpoint) as read:
        for name, form, stated in stated_digests(index, files):
            digest = digest_stream(form)
            if name in table.numbers:
                digest.update(read.bytes_at(checkpoint.places[table.numbers[name]]).tobytes())
            if digest.hexdigest() != stated:
                raise WrongRun(
                    f"{checkpoint.directory} is not version {version}: {name} differs",
                    remedy="give the checkpoint of that version as --base, or another --base-version",
                )


def open_base(directory: Path, *, adapter: bool = False) -> Checkpoint:
    """Raises Refused or DamagedFile when it is not a complete checkpoint."""
    try:
        checkpoint = open_checkpoint(directory, follow_links=True, need_index=False, adapter=adapter)
        check_pointers(checkpoint)
        return checkpoint
    except FileNotFoundError as error:
        raise Refused(
            f"{directory} is missing", remedy="give an HF checkpoint directory as --base"
        ) from error


_BASES = "bases.json"
"""in this user's cache directory: where the bases of runs are on this machine. A hint: whoever seeds from the
base compares its files and every byte with the channel"""
_BASES_LIMIT = 4 << 20
_BASES_KEPT = 256
"""runs, the newest"""


def remember_base(run_id: str, base: Path) -> None:
    """Does nothing where no directory is writable: then the base must be given."""
    directory = private_directory(os.environ, "bases")
    if directory is None:
        return
    known = _known_bases(directory)
    known.pop(run_id, None)
    known[run_id] = str(base.absolute())
    with contextlib.suppress(OSError, UnicodeError):
        newest = dict(list(known.items())[-_BASES_KEPT:])
        durable.replace(directory / _BASES, write_object(newest), sync=False)


def recorded_base(channel: Channel) -> Path | None:
    """The base from which this user made `channel` on this machine, not looked at. None: no record, or it is
    gone; an adapter has none."""
    path = _base_path(channel)
    return path if path is not None and is_directory(path) else None


def _base_path(channel: Channel) -> Path | None:
    directory = private_directory(os.environ, "bases") if channel.store.component == MAIN else None
    found = None if directory is None else _known_bases(directory).get(channel.require_ours()[0].run_id)
    return Path(found) if isinstance(found, str) else None


def find_base(channel: Channel) -> Path:
    """As `recorded_base`, with its tensors compared. Raises Refused, with what was tried."""
    file, described = channel.require_ours()
    base = _base_path(channel)
    if base is None or not is_directory(base):
        why = "this user has no record of it on this machine" if base is None else f"{base} is gone"
        raise Refused(
            f"unknown base of run {file.run_id}: {why}",
            remedy="give --base with the checkpoint that the run starts from",
        )
    check_table(base, open_base(base).table, described.table)
    return base


def _known_bases(directory: Path) -> dict[str, object]:
    try:
        return parse_object(durable.read_file(directory / _BASES, _BASES_LIMIT), _BASES)
    except (OSError, DamagedFile):
        return {}


SourceKey = tuple[int, int]
"""version and base version, `FULL` for full weights"""


class DamagedSources:
    """Of one local checkpoint. Nothing is ever tried twice within one `run`: it ends."""

    def __init__(self) -> None:
        self.damaged: dict[SourceKey, str] = {}
        """and what is wrong with each"""
        self._met: SourceKey | None = None
        self._cause: Exception | None = None

    def run(self, attempt: Callable[[], None], on_detour: Callable[[str], None]) -> None:
        """`attempt` plans and goes a way; again while it meets damage that it had not met before. `on_detour`
        is called with what is damaged before another way is planned."""
        tried: set[SourceKey] = set()
        self._forget()
        try:
            while True:
                try:
                    return attempt()
                except (WeightcastError, OSError) as error:
                    met, self._met = self._met, None
                    if met is None or met in tried:
                        raise
                    tried.add(met)
                    self._cause = error
                    on_detour(self.damaged[met])
        finally:
            self._forget()

    def _forget(self) -> None:
        self._met = self._cause = None

    def none_left(self) -> None:
        """No way leads around what was met. Raises what was met first; returns where nothing was."""
        if self._cause is not None:
            raise self._cause

    def passed(self, version: int) -> None:
        """What leads to versions up to this one is no longer needed."""
        self.damaged = {stretch: why for stretch, why in self.damaged.items() if stretch[0] > version}

    @contextlib.contextmanager
    def delta(self, leads_from: Callable[[int], int]) -> Iterator[None]:
        try:
            yield
        except (BadDelta, NotThere) as error:
            self._meet((error.version, leads_from(error.version)), error)
            kind = DamagedFile if isinstance(error, BadDelta) else RetryLater
            raise kind(error.message, remedy=error.remedy) from error

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
