"""Moving a local checkpoint along its channel: what a publisher's own and a host's have in common.

`LocalUpdater` owns the local checkpoint (its owner lock) and offers the steps: load, route, seed, prepare,
patch. The daemons decide their order, and what engines do in between.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weightcast.shared.base.errors import (
    MEND_CHANNEL,
    Forked,
    NeedsReseed,
    Refused,
    RetryLater,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel, FullVersion
from weightcast.shared.channel.directory_store import directory_of, open_store
from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.channel.layout import BASE_JSON, CHANNEL_JSON, Pointer
from weightcast.shared.channel.signing import Trust
from weightcast.shared.channel.store import Address, Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths, own
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.state.recover_state import is_lost, recover_state, sound_state
from weightcast.shared.checkpoint.state.side_files import Carried, complete
from weightcast.shared.checkpoint.state.state import LocalState, Phase, Position, pack_lanes, read_state
from weightcast.shared.checkpoint.update import buffer_reuse
from weightcast.shared.checkpoint.update import patch as patching
from weightcast.shared.checkpoint.update.fetch import OnWait, Patience, Spool, ignore
from weightcast.shared.checkpoint.update.plan import Patch, Plan, Refuse, Relabel, Seed, Stay
from weightcast.shared.checkpoint.update.prepare import Fetching, Prefetch, PreRead, Shipment, prepare
from weightcast.shared.checkpoint.update.sources import (
    DamagedSources,
    Route,
    SourceKey,
    find_route,
    repair_sources,
)
from weightcast.shared.checkpoint.update.stage import Staged
from weightcast.shared.checkpoint.verify.hashing import Differs
from weightcast.shared.checkpoint.verify.repair import Repaired, RepairSource, repair
from weightcast.shared.checkpoint.verify.seed import SeedSource, describe, seed, start_of
from weightcast.shared.files.hf_checkpoint import Checkpoint, open_checkpoint
from weightcast.shared.files.side_files import check_pointers, side_files

OnPhase = Callable[[str], None]
"""Called with `fetch` and `stage` when a leg's preparation comes to them."""


@dataclass(frozen=True)
class UpdaterOptions:
    threads: int = 1
    visible_seconds: float = 120.0
    pre_read: PreRead | None = None
    on_phase: OnPhase | None = None
    wait: Callable[[float], None] = time.sleep
    """between two looks for a file that is not visible yet; may raise to give up"""
    on_wait: OnWait = ignore
    carries: bool = True
    """put the config files that versions carry in place; a publisher keeps the base's"""
    before_replay: Callable[[LocalCheckpoint], None] | None = None
    """called before a step that was begun is finished at `load`: words are written then"""


@dataclass(frozen=True)
class _Anchor:
    """Full weights of a version in the channel: its main index, that of the anchor, the anchor's files."""

    main: Index
    index: Index
    files: Store

    def source(self, channel: Channel) -> SeedSource:
        _, base = channel.require_ours()
        main = self.main
        lanes = self.index.tensors.put(base.table, np.zeros((len(base.table), 2), np.uint64))
        position = Position(main.version, main.digest, main.root, main.epoch, pack_lanes(lanes))
        checkpoint = open_checkpoint(directory_of(self.files), follow_links=False)
        return SeedSource(checkpoint, position, base.run_id, base, anchor=self.index)


class LocalUpdater:
    """One local checkpoint on its way along one channel. Not thread-safe."""

    def __init__(
        self, channel: Address, local: Path, base: Path | None, options: UpdaterOptions | None = None
    ) -> None:
        self.store, self.base_dir = open_store(channel), base
        self.paths = LocalPaths(local)
        self.options = UpdaterOptions() if options is None else options
        self.local: LocalCheckpoint | None = None
        self.state: LocalState | None = None
        """last known state; survives when the checkpoint itself cannot be opened"""
        self.trouble = ""
        """why the local checkpoint must be seeded again"""
        self.missing: tuple[str, ...] = ()
        """files of the base that are not here, and could not be copied"""
        self.carried = Carried(self.paths)
        self.changed_configs: list[str] = []
        """carried files that were put in place or taken away since somebody asked"""
        self.lists_too_few = False
        """base.json of an older release may not list all files of the base"""
        self.left_behind: tuple[str, ...] = ()
        self.base_notes: tuple[str, ...] = ()
        """small faults in the base that are tolerated"""
        """files of the base that are not copied"""
        self._base: Checkpoint | None = None
        """as it was last opened"""
        self._owner: FileLock | None = None
        self._spool = Spool(self.paths)
        self._prefetch: Prefetch | None = None
        self.damaged_sources = DamagedSources()
        self._trust: Trust | None = None
        self._intact: int | None = None
        """the generation whose bytes were all read and found right"""
        self._damage: Differs | None = None
        """what the last reading of all bytes found, until it is repaired or seeded over"""

    @property
    def channel_dir(self) -> Path:
        """Of a channel in a directory. Raises Refused for others."""
        return directory_of(self.store)

    def own(self) -> None:
        """Takes the owner lock, for the updater's life; again when the directory was removed meanwhile.
        RetryLater when another writer has it."""
        if self._owner is not None and not self._owner.in_place:
            self.close()
        if self._owner is None:
            self._owner = own(self.paths)

    def close(self) -> None:
        self.release()
        if self._owner is not None:
            buffer_reuse.drop(self.paths)
            self._owner.release()
            self._owner = None

    def release(self) -> None:
        """Forgets what is in memory; the next `load` reads the disk again."""
        self._stop_prefetch()
        self._spool.forget()
        if self.local is not None:
            self.state = self.local.state
            self.local.close()
            self.local = None

    def load(self, channel: Channel | None, advance: Advance | None = None) -> None:
        """Opens the local checkpoint and finishes what a kill left behind. WrongRun when it is another run's
        (nothing is changed then). `channel`: None when it cannot be reached now."""
        self.own()
        if self.local is not None:
            self._check_run(channel, self.local.state)
            self._check_base(channel)
            return
        self.trouble = ""
        self.state = read_state(self.paths.state)
        if self.state is None:
            return
        self._check_run(channel, self.state)
        try:
            self.local = LocalCheckpoint.open(self.paths.directory)
            if self.local is not None:
                self._check_base(channel)
                if self.options.before_replay is not None and patching.is_replayed(self.local):
                    self.options.before_replay(self.local)
                with self.local.patching():
                    patching.recover(self.local, threads=self.options.threads, advance=advance)
                self._complete(channel)
        except NeedsReseed as error:
            self._give_up(error)
        except BaseException:
            # the next load recovers what this one did not
            self.release()
            raise
        self.state = read_state(self.paths.state)

    def _complete(self, channel: Channel | None) -> None:
        """Files beside the weights that an older release left out, or that were removed since."""
        if self.local is None:
            return
        run = None if channel is None else channel.base
        self.missing = complete(self.local, run, self._opened_base())
        self._learn(channel)
        if self.carried.sets():
            with self.local.patching():
                self._settle()
        self.lists_too_few = self.local.base.side_files is None

    def _learn(self, channel: Channel | None) -> None:
        """What the local version carries, where it was not noted on the way to it."""
        if channel is None or channel.base is None or self.local is None or not self.options.carries:
            return
        position, sets = self.local.state.position, self.carried.sets()
        if position.version == 0 or position.digest in sets:
            return
        # pruned, damaged or unreadable: a newer version brings its own, and the local one is intact
        with contextlib.suppress(WeightcastError, OSError):
            pointer = channel.pointer()
            index = pointer and channel.index(pointer, position.version, channel.base.table)
            if pointer is not None and isinstance(index, Index) and index.version_digest == position.digest:
                self._note(index, channel.version(pointer, index.version), seconds=0.0)

    def _note(self, index: Index | ForeignIndex | FullVersion, version: Store, seconds: float) -> None:
        """Before the local checkpoint is moved there."""
        if not isinstance(index, Index) or not self.options.carries:
            return
        here = None if self.local is None else self.local.state.position.digest
        options = self.options
        patience = Patience(index.version, seconds, options.wait, options.on_wait)
        self.carried.note(here, index.version_digest, index.carried, version, patience)

    def _settle(self) -> None:
        """Where this fails nothing is read by engines: the next load does it."""
        if self.local is None or not self.options.carries:
            return
        try:
            self.changed_configs += self.carried.settle(self.local)
        except BaseException:
            self.release()
            raise

    def _opened_base(self) -> Checkpoint | None:
        """None where it is not given, or cannot be read now: it is not needed any more once it was copied."""
        if self._base is None and self.base_dir is not None:
            with contextlib.suppress(WeightcastError, OSError):
                base = open_base(self.base_dir)
                self.left_behind, self.base_notes = side_files(base).left, base.notes
                self._base = base
        return self._base

    def _give_up(self, error: NeedsReseed) -> None:
        self.trouble = error.message
        self._damage = error if isinstance(error, Differs) else None
        self.release()

    def rehash(self, advance: Advance | None = None) -> None:
        """Reads every byte. What differs is found `dirty` by `repair`."""
        if self.local is None:
            return
        try:
            with self.local.patching():
                patching.rehash(self.local, threads=self.options.threads, advance=advance)
        except NeedsReseed as error:
            self._give_up(error)
            self.state = read_state(self.paths.state)

    def recover_state(self, channel: Channel, advance: Advance | None = None) -> bool:
        """Finds out what lies here where the state cannot be read: what differs from a version is left to
        `repair`, what is none to `seed`. False when the state can be read."""
        self.own()
        if self.local is not None or not is_lost(self.paths):
            return False
        with FileLock(self.paths.patch).holding(seconds=60.0):
            recover_state(self.paths, channel, threads=self.options.threads, advance=advance)
        return True

    @property
    def repairable(self) -> bool:
        """Whether `repair` may help: there is a local checkpoint, and it is no version."""
        return self.local is None and self.state is not None and self.state.phase is Phase.DIRTY

    def repair(self, channel: Channel, advance: Advance | None = None) -> Repaired | None:
        """Brings right the tensors in which a dirty local checkpoint differs from the version that it was.
        None when that cannot be done: then it is seeded again."""
        damage, self._damage = self._damage, None
        if not self.repairable:
            return None
        repaired: Repaired | None = None
        try:
            self.local = LocalCheckpoint.open(self.paths.directory)
            if self.local is not None:
                self._check_base(channel)
                repaired = self._repair(self.local, channel, damage, advance)
                self._complete(channel)
                self.trouble = ""
        except NeedsReseed as error:
            self.trouble = error.message
            self.release()
        self.state = read_state(self.paths.state)
        return repaired

    def sources(self, channel: Channel) -> list[Path]:
        """Directories with full weights from which the version that lies here can be had."""
        local = self._require()
        ways = repair_sources(channel, local.state.position.version, local.table, self.base_dir)
        return [way.directory for way in ways]

    def _repair(
        self, local: LocalCheckpoint, channel: Channel, damage: Differs | None, advance: Advance | None
    ) -> Repaired:
        def ways(position: Position) -> list[RepairSource]:
            return repair_sources(channel, position.version, local.table, self.base_dir)

        with local.patching():
            repaired = repair(local, ways, damage, threads=self.options.threads, advance=advance)
            patching.drop_strays(local)
        return repaired

    def require_mounted(self, channel: Channel) -> None:
        """RetryLater when nothing is left of the channel that was followed here: an empty mount point."""
        state = read_state(self.paths.state) if self.local is None else self.local.state
        if state is not None and not state.foreign and channel.foreign and channel.pointer() is None:
            raise RetryLater(
                f"{channel.store.place(CHANNEL_JSON)} is gone",
                remedy="is the channel mounted? nothing is changed here",
            )

    def _check_run(self, channel: Channel | None, state: LocalState) -> None:
        if channel is None:
            return
        if channel.foreign != state.foreign:
            kinds = {True: "a foreign channel", False: "one of weightcast's"}
            raise WrongRun(
                f"{self.paths.directory} followed {kinds[state.foreign]}, {channel.place} is "
                f"{kinds[channel.foreign]}",
                remedy="use another --local directory",
            )
        if channel.file is not None and channel.file.run_id != state.run_id:
            raise WrongRun(
                f"{self.paths.directory} is of run {state.run_id}, the channel of run {channel.file.run_id}",
                remedy="use another --local directory, or remove this one",
            )

    def _check_base(self, channel: Channel | None) -> None:
        """Versions of the channel are read by its table and applied by the local one."""
        if channel is None or channel.base is None or self.local is None:
            return
        ours, theirs = self.local.base, channel.base
        if (ours.table, ours.root) != (theirs.table, theirs.root):
            self.release()
            raise WrongRun(
                f"{channel.store.place(BASE_JSON)} is not the base of {self.paths.directory}",
                remedy="restore the channel's base.json; a run keeps its base",
            )

    def mark_damaged(self, error: NeedsReseed) -> None:
        """Somebody who read the local checkpoint found it wrong: `repair` is next. Only for its owner."""
        self.mark_dirty(error.message)
        self._give_up(error)
        self.state = read_state(self.paths.state)

    def mark_dirty(self, reason: str) -> None:
        """The local checkpoint is not what it claims: it is seeded again. Only for its owner."""
        if self.local is not None and self.local.state.phase is Phase.CLEAN:
            self.local.save(self.local.state.but(phase=Phase.DIRTY))
        self.release()
        self.trouble = reason

    @property
    def epoch(self) -> int:
        """The highest epoch that was ever followed here."""
        state = sound_state(self.paths)
        return 0 if state is None else state.epoch

    @property
    def owns(self) -> bool:
        return self._owner is not None

    def route(self, channel: Channel, pointer: Pointer, target: int, *, exact: bool) -> Route:
        """Around what was found damaged; where nothing leads around that, over it once more."""
        if self.local is not None:
            self.damaged_sources.passed(self.local.state.position.version)
        route = self._route(channel, pointer, target, exact=exact, avoid=self.damaged_sources.damaged)
        if self.damaged_sources.damaged and isinstance(route.plan, Refuse):
            self.damaged_sources.none_left()
            route = self._route(channel, pointer, target, exact=exact, avoid=())
        return route

    def _route(
        self,
        channel: Channel,
        pointer: Pointer,
        target: int,
        *,
        exact: bool,
        avoid: Collection[SourceKey],
    ) -> Route:
        self._trust = channel.trust
        if self.local is not None:
            self.state = self.local.state
        state = self.state if self.local is not None else None
        if channel.foreign and state is not None and pointer.run is not None and pointer.run != state.run_id:
            state = None
        table = self.local.table if self.local is not None else None
        return find_route(
            channel,
            pointer,
            channel.base.table if channel.base is not None else table,
            _as_here(state, self.state),
            target=target,
            exact=exact,
            base=self._base_digest(channel),
            visible_seconds=self.options.visible_seconds,
            wait=self.options.wait,
            on_wait=self.options.on_wait,
            avoid=avoid,
        )

    def _base_digest(self, channel: Channel) -> str | None:
        if self.base_dir is None:
            return None
        return "" if channel.base is None else channel.base.digest

    def seed(self, channel: Channel, route: Route, plan: Seed, advance: Advance | None = None) -> None:
        """Brings full weights in. The caller does not hold the patch lock."""
        source = self._source(channel, route, plan)
        self.release()
        self.own()
        keep = self.state
        with FileLock(self.paths.patch).holding(seconds=60.0):
            with self.damaged_sources.full_weights(plan.version):
                self.local = seed(
                    self.paths, source, threads=self.options.threads, advance=advance, keep=keep
                )
            patching.drop_strays(self.local)
        self._complete(channel)
        self.state, self.trouble = self.local.state, ""

    def _source(self, channel: Channel, route: Route, plan: Seed) -> SeedSource:
        found = route.indexes.get(plan.version)
        with self.damaged_sources.full_weights(plan.version):
            if plan.version == 0:
                return self._base_source(channel, route, plan)
            if isinstance(found, FullVersion):
                checkpoint = open_checkpoint(found.directory, follow_links=False)
                return _foreign_source(
                    checkpoint, _foreign_run(route, plan), found.version, found.digest, self.options
                )
            anchor = self._anchor(channel, route, plan.version)
        if self.options.pre_read is not None:
            self.options.pre_read(plan.version, directory_of(anchor.files))
        with self.damaged_sources.full_weights(plan.version):
            return anchor.source(channel)

    def _base_source(self, channel: Channel, route: Route, plan: Seed) -> SeedSource:
        if self.base_dir is None:
            raise Refused("no base checkpoint is known", remedy="give --base")
        checkpoint = open_base(self.base_dir)
        if channel.base is None:
            return _foreign_source(checkpoint, _foreign_run(route, plan), 0, "", self.options)
        return SeedSource(checkpoint, start_of(channel.base), channel.base.run_id, channel.base)

    def _anchor(self, channel: Channel, route: Route, version: int) -> _Anchor:
        _, base = channel.require_ours()
        main = route.indexes.get(version)
        if main is None:
            main = channel.index(route.pointer, version, base.table)
        if not isinstance(main, Index):
            raise RetryLater(f"the index of version {version} is gone", remedy="it is planned again")
        anchor, files = main, channel.version(route.pointer, version)
        if main.kind != "anchor":
            beside = channel.anchor(version, base.table)
            if beside is None or beside.root != main.root:
                raise Forked(
                    f"{channel.anchor_files(version).place()} is not the anchor of version {version}: "
                    "its index is missing or states another root",
                    remedy=MEND_CHANNEL,
                )
            anchor, files = beside, channel.anchor_files(version)
        return _Anchor(main, anchor, files)

    def prepare(self, route: Route, leg: Sequence[int], advance: Advance | None = None) -> Staged:
        """Fetches and stages the versions of a leg; nothing of the checkpoint is written."""
        self._finish_prefetch()
        with self.damaged_sources.delta(route.leads_from):
            shipments = [Shipment(*route.delta(version)) for version in leg]
            self._spool.drop_others([shipment.index for shipment in shipments])
            last = shipments[-1].index
            self._note(last, route.files(last.version), self.options.visible_seconds)
            return prepare(
                self._require(),
                shipments,
                self._fetching(advance),
                threads=self.options.threads,
                on_phase=self._enter,
                on_misfit=lambda: self._rehash(advance),
            )

    def _fetching(self, advance: Advance | None = None) -> Fetching:
        options = self.options
        return Fetching(
            self._spool, options.visible_seconds, options.pre_read, options.wait, advance, options.on_wait
        )

    def fetch_ahead(self, after: int, most: int | None = None) -> None:
        """Begins to fetch the version after `after`, if it is there already and not above `most`, beside what
        is done next."""
        self._stop_prefetch()
        if most is None or after < most:
            self._prefetch = Prefetch(self.paths, lambda: self._next(after), self._fetching())

    def _next(self, after: int) -> Shipment | None:
        channel = Channel.open(self.store, self._trust)
        pointer = channel.pointer()
        if pointer is None or pointer.version <= after or channel.base is None:
            return None
        index = channel.index(pointer, after + 1, channel.base.table)
        if not isinstance(index, Index) or index.base_version != after:
            return None
        return Shipment(index, channel.version(pointer, index.version))

    def _finish_prefetch(self) -> None:
        if self._prefetch is not None:
            prefetch, self._prefetch = self._prefetch, None
            prefetch.finish(self.options.wait)

    def _stop_prefetch(self) -> None:
        if self._prefetch is not None:
            prefetch, self._prefetch = self._prefetch, None
            prefetch.stop()

    def _rehash(self, advance: Advance | None) -> None:
        """Verified shards that do not fit: they were made badly, or other words lie here than the state says.
        NeedsReseed for the latter. Bytes are read once per generation."""
        local = self._require()
        if self._intact != local.state.generation:
            with local.patching():
                patching.rehash(local, threads=self.options.threads, advance=advance)
            self._intact = local.state.generation

    def _enter(self, phase: str) -> None:
        if self.options.on_phase is not None:
            self.options.on_phase(phase)

    def patch(self, staged: Staged, *, undoable: bool = True) -> None:
        """The caller holds the patch lock. As `patching.patch`."""
        local = self._require()
        try:
            patching.patch(local, staged.step, undoable=undoable, threads=self.options.threads)
        finally:
            self.state = local.state
        self._settle()

    def drop_journal(self, staged: Staged) -> None:
        """After a patch without a way back."""
        patching.drop_journal(self._require(), staged.step)

    def relabel(self, route: Route, plan: Relabel) -> None:
        if self.local is None:
            raise NeedsReseed(f"{self.paths.directory} is not seeded")
        index = route.indexes[plan.version]
        if isinstance(index, Index):
            here = self.local.state.position
            position = replace(here, version=index.version, digest=index.digest, epoch=index.epoch)
            self._note(index, route.files(index.version), self.options.visible_seconds)
            patching.relabel(self.local, position)
            self.state = self.local.state
            self._settle()

    def undo(self) -> None:
        """Back over all kept steps. The caller holds the patch lock."""
        local = self._require()
        try:
            patching.undo(local, threads=self.options.threads)
        finally:
            self.state = local.state
        self._settle()

    def forget_undo(self) -> None:
        if self.local is not None:
            patching.forget_undo(self.local)
            self.state = self.local.state

    def update_to_latest(self, channel: Channel, advance: Advance | None = None) -> None:
        """To the pointer, without engines: how the publisher keeps its own local checkpoint."""
        self.damaged_sources.run(lambda: self._update_to_latest(channel, advance), lambda why: self.release())

    def _update_to_latest(self, channel: Channel, advance: Advance | None) -> None:
        self.load(channel, advance)
        self.repair(channel, advance)
        pointer = channel.pointer()
        target = 0 if pointer is None else pointer.version
        route = self.route(channel, pointer or Pointer(0), target, exact=False)
        self._carry_out(channel, route, route.plan, advance)

    def update_to(self, channel: Channel, version: int, advance: Advance | None = None) -> None:
        """To this version, older ones included, without engines."""
        self.damaged_sources.run(
            lambda: self._update_to(channel, version, advance), lambda why: self.release()
        )

    def _update_to(self, channel: Channel, version: int, advance: Advance | None) -> None:
        self.load(channel, advance)
        pointer = channel.pointer() or Pointer(0)
        route = self.route(channel, pointer, version, exact=True)
        self._carry_out(channel, route, route.plan, advance)

    def _carry_out(self, channel: Channel, route: Route, plan: Plan, advance: Advance | None) -> None:
        match plan:
            case Stay():
                return
            case Relabel():
                self.relabel(route, plan)
                self._carry_out(channel, route, plan.then, advance)
            case Seed():
                self.seed(channel, route, plan, advance)
                self._carry_out(channel, route, plan.then, advance)
            case Patch():
                for leg in plan.legs:
                    staged = self.prepare(route, leg, advance)
                    with self._require().patching():
                        self.patch(staged, undoable=False)
                    self.drop_journal(staged)
            case Refuse():
                raise Refused(plan.reason, remedy=plan.remedy)

    def _require(self) -> LocalCheckpoint:
        if self.local is None:
            raise NeedsReseed(f"{self.paths.directory} is not seeded")
        return self.local


def _as_here(state: LocalState | None, known: LocalState | None) -> LocalState | None:
    """A checkpoint that cannot be used still remembers what engines refused."""
    if state is not None or known is None:
        return state
    return known.but(phase=Phase.DIRTY)


def open_base(directory: Path) -> Checkpoint:
    try:
        checkpoint = open_checkpoint(directory, follow_links=True)
        check_pointers(checkpoint)
        return checkpoint
    except FileNotFoundError as error:
        raise Refused(
            f"{directory} is not there", remedy="give an HF checkpoint directory as --base"
        ) from error


def _foreign_run(route: Route, plan: Seed) -> str:
    if route.pointer.run is not None:
        return route.pointer.run
    first = plan.then.legs[0][0] if plan.then.legs else plan.version
    index = route.indexes.get(first)
    return f"foreign-{index.digest[:16]}" if index is not None else "foreign"


def _foreign_source(
    checkpoint: Checkpoint, run: str, version: int, digest: str, options: UpdaterOptions
) -> SeedSource:
    base = describe(checkpoint, run, threads=options.threads)
    position = replace(start_of(base), version=version, digest=digest)
    return SeedSource(checkpoint, position, run, base, foreign=True)
