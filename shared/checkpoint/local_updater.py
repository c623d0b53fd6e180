"""Moving a local checkpoint along its channel: what a publisher's own and a host's have in common.

`LocalUpdater` owns the local checkpoint (its owner lock) and offers the steps: load, route, seed, prepare,
patch. The daemons decide their order, and what engines do in between.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Refused, RetryLater, WrongRun
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import BASE_JSON, CHANNEL_JSON, Pointer
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths, own
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.state.side_files import SideFiles
from weightcast.shared.checkpoint.state.state import LocalState, Phase, read_state
from weightcast.shared.checkpoint.update import buffer_reuse
from weightcast.shared.checkpoint.update import patch as patching
from weightcast.shared.checkpoint.update.fetch import (
    Delta,
    Fetcher,
    Incoming,
    OnWait,
    Patience,
    Prefetch,
    PreRead,
    check_space,
    staging_room,
)
from weightcast.shared.checkpoint.update.plan import Patch, Plan, Refuse, Relabel, Seed, Stay
from weightcast.shared.checkpoint.update.sources import (
    DamagedSources,
    Route,
    SourceKey,
    base_digest,
    find_route,
    full_weights,
    repair_sources,
    seed_source,
)
from weightcast.shared.checkpoint.update.stage import Staged, files_of, stage
from weightcast.shared.checkpoint.verify.hashing import Differs
from weightcast.shared.checkpoint.verify.inspect import is_lost, recover_state, sound_state
from weightcast.shared.checkpoint.verify.repair import Repaired, repair
from weightcast.shared.checkpoint.verify.seed import seed
from weightcast.shared.files.paths import exists


@dataclass(frozen=True)
class UpdaterOptions:
    threads: int = 1
    visible_seconds: float = 120.0
    pre_read: PreRead | None = None
    on_phase: Callable[[str], None] = lambda phase: None
    """called with `fetch` and `stage` when a leg's preparation comes to them"""
    wait: Callable[[float], None] = time.sleep
    """between two looks for a file that is not visible yet; may raise to give up"""
    on_wait: OnWait = lambda awaited: None
    carries: bool = True
    """put the config files that versions carry in place; a publisher keeps the base's"""
    before_replay: Callable[[LocalCheckpoint], None] = lambda local: None
    """called before `load` finishes an update that was begun, which writes words"""
    locked: Callable[[LocalCheckpoint], contextlib.AbstractContextManager[None]] = LocalCheckpoint.patching
    """takes the patch lock"""
    base_version: int = 0
    """whose full weights the base has; above 0 only in foreign channels"""

    @property
    def patience(self) -> Patience:
        return Patience(self.visible_seconds, self.wait, self.on_wait)


class LocalUpdater:
    """One local checkpoint on its way along one channel. Not thread-safe."""

    def __init__(
        self, store: Store, local: Path, base: Path | None, options: UpdaterOptions | None = None
    ) -> None:
        self.store, self.base_dir = store, base
        self.paths = LocalPaths(local)
        self.options = UpdaterOptions() if options is None else options
        self.local: LocalCheckpoint | None = None
        self._last_state: LocalState | None = None
        self.trouble = ""
        """why the local checkpoint must be seeded again"""
        self.side_files = SideFiles(self.paths, base, self.options.patience, carries=self.options.carries)
        self._owner: FileLock | None = None
        self._was_there = True
        self._fetcher = Fetcher(self.paths, self.options.pre_read)
        self._prefetch: Prefetch | None = None
        self.damaged_sources = DamagedSources()
        self._intact: int | None = None
        """the generation whose bytes were all read and matched"""
        self._damage: Differs | None = None
        """what the last reading of all bytes found, until it is repaired or seeded over"""

    @property
    def state(self) -> LocalState | None:
        """The last known one, also when the checkpoint cannot be opened."""
        return self._last_state if self.local is None else self.local.state

    @state.setter
    def state(self, state: LocalState) -> None:
        """While the checkpoint is not open; in memory alone."""
        self._last_state = state

    def own(self) -> None:
        """Takes the owner lock, for the updater's life; again when the directory was removed meanwhile.
        RetryLater when another writer has it."""
        if self._owner is not None and not self._owner.in_place:
            self.close()
        if self._owner is None:
            self._was_there = exists(self.paths.directory)
            self._owner = own(self.paths)

    def close(self) -> None:
        self.release()
        if self._owner is not None:
            buffer_reuse.drop(self.paths)
            if not (self._was_there or exists(self.paths.state)):
                self._leave_nothing()
            self._owner.release()
            self._owner = None

    def _leave_nothing(self) -> None:
        """Of a directory that was made here, and in which nothing was seeded: a start that was refused."""
        with contextlib.suppress(OSError):  # what somebody wrote there stays
            for directory in filter(exists, (self.paths.journals, self.paths.spool)):
                directory.rmdir()
            if set(self.paths.room.iterdir()) <= {self.paths.owner, self.paths.patch}:
                self.paths.patch.unlink(missing_ok=True)
                self.paths.owner.unlink()
                self.paths.room.rmdir()
                self.paths.directory.rmdir()

    def release(self) -> None:
        """Forgets what is in memory; the next `load` reads the disk again."""
        self._stop_prefetch()
        self._fetcher.forget()
        if self.local is not None:
            self._last_state = self.local.state
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
        self._last_state = read_state(self.paths.state)
        if self._last_state is None:
            return
        self._check_run(channel, self._last_state)
        try:
            self.local = LocalCheckpoint.open(self.paths.directory, threads=self.options.threads)
            if self.local is not None:
                self._check_base(channel)
                if patching.is_replayed(self.local):
                    self.options.before_replay(self.local)
                with self.options.locked(self.local):
                    patching.recover(self.local, advance=advance)
                self.side_files.complete(self.local, channel)
        except NeedsReseed as error:
            self._give_up(error)
        except BaseException:
            # the next load recovers what this one did not
            self.release()
            raise

    def _settle(self, local: LocalCheckpoint) -> None:
        """Where this fails engines read nothing: the next load repeats it."""
        try:
            self.side_files.settle(local)
        except BaseException:
            self.release()
            raise

    def _give_up(self, error: NeedsReseed) -> None:
        self.trouble = error.message
        self._damage = error if isinstance(error, Differs) else None
        self.release()
        self._last_state = read_state(self.paths.state)

    def rehash(self, advance: Advance | None = None) -> None:
        """Reads every byte. What differs is found `dirty` by `repair`."""
        if self.local is None:
            return
        try:
            with self.options.locked(self.local):
                patching.rehash(self.local, advance=advance)
        except NeedsReseed as error:
            self._give_up(error)

    def recover_state(self, channel: Channel, advance: Advance | None = None) -> bool:
        """Finds the local version by reading all bytes where the state is unreadable; `repair` and `seed`
        are next. False when the state is readable."""
        self.own()
        if self.local is not None or not is_lost(self.paths):
            return False
        with FileLock(self.paths.patch).holding(seconds=60.0):
            recover_state(self.paths, channel, threads=self.options.threads, advance=advance)
        return True

    @property
    def repairable(self) -> bool:
        """Whether `repair` may help: there is a local checkpoint, and it is not any version."""
        return self.local is None and self.state is not None and self.state.phase is Phase.DIRTY

    def repair(self, channel: Channel, advance: Advance | None = None) -> Repaired | None:
        """Fixes the tensors in which a dirty local checkpoint differs from its version. None when that is
        impossible: then it is seeded again."""
        damage, self._damage = self._damage, None
        if not self.repairable:
            return None
        try:
            self.local = local = LocalCheckpoint.open(self.paths.directory, threads=self.options.threads)
            if local is None:
                return None
            self._check_base(channel)
            with self.options.locked(local):
                repaired = repair(
                    local,
                    lambda at: repair_sources(
                        channel, at.version, local.table, self.base_dir, self.options.base_version
                    ),
                    damage,
                    advance=advance,
                )
                patching.drop_strays(local)
            self.side_files.complete(local, channel)
        except NeedsReseed as error:
            self._give_up(error)
            self._damage = None
            return None
        self.trouble = ""
        return repaired

    def require_mounted(self, channel: Channel) -> None:
        """RetryLater when the channel of this local checkpoint is empty: its mount is missing."""
        state = read_state(self.paths.state) if self.local is None else self.local.state
        if state is not None and not state.foreign and channel.foreign and channel.pointer() is None:
            raise RetryLater(
                f"{channel.store.place(CHANNEL_JSON)} is gone",
                remedy="check the channel mount; local state was left unchanged",
            )

    def _check_run(self, channel: Channel | None, state: LocalState) -> None:
        if channel is None:
            return
        ours = "a foreign run" if state.foreign else f"run {state.run_id}"
        theirs = "a foreign run" if channel.file is None else f"run {channel.file.run_id}"
        if ours != theirs:
            raise WrongRun(
                f"{self.paths.directory} belongs to {ours}, the channel to {theirs}",
                remedy="mount its channel, or correct --channel; for a new run use another --local",
            )

    def _check_base(self, channel: Channel | None) -> None:
        """Versions of the channel are read by its table and applied by the local one."""
        if channel is None or channel.base is None or self.local is None:
            return
        base = self.local.base
        if (base.table, base.root) != (channel.base.table, channel.base.root):
            self.release()
            raise WrongRun(
                f"{channel.store.place(BASE_JSON)} is not the base of {self.paths.directory}",
                remedy="restore the channel's base.json; a run keeps its base",
            )

    def mark_damaged(self, error: NeedsReseed) -> None:
        """A reader of the local checkpoint found damage: `repair` is next. Only for its owner."""
        self.mark_dirty(error.message)
        self._give_up(error)

    def mark_dirty(self, reason: str) -> None:
        """The local checkpoint does not match its state: it is seeded again. Only for its owner."""
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
        """Avoids damaged sources; where that leaves no route, tries them once more."""
        state = None if self.local is None else self.local.state
        if state is not None:
            self.damaged_sources.passed(state.position.version)
        if channel.foreign and state is not None and pointer.run is not None and pointer.run != state.run_id:
            state = None
        # a checkpoint that cannot be used still remembers what engines refused
        known = self.state.but(phase=Phase.DIRTY) if state is None and self.state is not None else state
        local_table = None if self.local is None else self.local.table
        room = staging_room(self.paths)
        if known is None and channel.base is not None:
            room -= channel.base.table.nbytes

        def found(avoid: Collection[SourceKey]) -> Route:
            return find_route(
                channel,
                pointer,
                local_table if channel.base is None else channel.base.table,
                known,
                target=target,
                exact=exact,
                base=base_digest(channel, self.base_dir),
                patience=self.options.patience,
                avoid=avoid,
                base_version=self.options.base_version,
                room=room,
            )

        damaged = self.damaged_sources.damaged
        route = found(damaged)
        if damaged and isinstance(route.plan, Refuse):
            self.damaged_sources.none_left()
            route = found(())
        return route

    def seed(self, channel: Channel, route: Route, plan: Seed, advance: Advance | None = None) -> None:
        """Copies full weights. The caller does not hold the patch lock."""
        with self.damaged_sources.full_weights(plan.version):
            directory = full_weights(route, plan.version, self.base_dir, self.paths.spool)
        if plan.version > 0 and not channel.foreign and self.options.pre_read is not None:
            self.options.pre_read(plan.version, directory)
        with self.damaged_sources.full_weights(plan.version):
            source = seed_source(route, plan, directory, threads=self.options.threads)
        self.release()
        self.own()
        keep = self.state
        with FileLock(self.paths.patch).holding(seconds=60.0):
            with self.damaged_sources.full_weights(plan.version):
                self.local = seed(
                    self.paths, source, threads=self.options.threads, advance=advance, keep=keep
                )
            patching.drop_strays(self.local)
        self.side_files.complete(self.local, channel)
        self.trouble = ""

    def prepare(self, route: Route, leg: Sequence[int], advance: Advance | None = None) -> Staged:
        """Fetches and stages the versions of a leg into one journal; nothing of the checkpoint is written."""
        self._stop_prefetch(finish=True)
        with self.damaged_sources.delta(route.leads_from):
            deltas, local = [route.delta(version) for version in leg], self._require()
            self._fetcher.drop_others([delta.index for delta in deltas])
            self.side_files.note(local.state.position, deltas[-1].index, route.files(leg[-1]))
            check_space(self.paths, [delta.index for delta in deltas])
            self.options.on_phase("fetch")
            fetched = [self._fetcher.fetched(delta) for delta in deltas]
            try:
                with ThreadPoolExecutor(1, thread_name_prefix="stage") as pool:
                    try:
                        staging = pool.submit(stage, local, fetched)
                        for delta, copy in zip(deltas, fetched, strict=True):
                            with files_of(delta.index.version):
                                self._fetcher.fetch(delta, copy.incoming, self.options.patience, advance)
                        self.options.on_phase("stage")
                        return self._staged(local, fetched, staging, advance)
                    except BaseException as failure:
                        for copy in fetched:
                            copy.incoming.fail(failure)
                        raise
            finally:
                for delta in deltas:
                    self._fetcher.drop(delta.index)

    def _staged(
        self,
        local: LocalCheckpoint,
        fetched: Sequence[Delta],
        staging: Future[Staged],
        advance: Advance | None,
    ) -> Staged:
        """Stages again where a file had to be read twice, even when the result shows no fault: only the
        digests of the index tell forged words from published ones. Verified shards that do not apply are
        wrong, or the local words are: NeedsReseed then. Those are read once per generation."""
        restarted = any(copy.incoming.restarted for copy in fetched)
        try:
            try:
                staged = staging.result()
                if not restarted:
                    return staged
                patching.drop_journal(local, staged.step)
            except DamagedFile:
                if not restarted:
                    raise
            return stage(local, fetched)
        except DamagedFile:
            if self._intact != local.state.generation:
                with self.options.locked(local):
                    patching.rehash(local, advance=advance)
                self._intact = local.state.generation
            raise

    def stage_copy(self, local: LocalCheckpoint, delta: Delta) -> Staged:
        """Stages a version from its copy in the spool, where its store is asked anew for every chunk."""
        copy = self._fetcher.fetched(delta)
        try:
            self._fetcher.fetch(delta, copy.incoming, Patience(), None)
            return stage(local, [copy])
        finally:
            self._fetcher.drop(delta.index)

    def fetch_ahead(self, channel: Channel, after: int, most: int | None = None) -> None:
        """Begins to fetch the version after `after` in a thread, if it is published and not above `most`."""
        self._stop_prefetch()
        if most is None or after < most:
            self._prefetch = Prefetch(partial(self._fetch_after, channel, after))

    def _fetch_after(self, channel: Channel, after: int, advance: Advance) -> None:
        pointer = channel.pointer()
        if pointer is None or pointer.version <= after or channel.base is None:
            return
        index = channel.index(pointer, after + 1, channel.base.table)
        if isinstance(index, Index) and index.base_version == after:
            check_space(self.paths, [index])
            delta = Delta(index, channel.version(pointer, index.version))
            self._fetcher.fetch(delta, Incoming(), Patience(), advance)

    def _stop_prefetch(self, *, finish: bool = False) -> None:
        """`finish`: what it has begun is fetched first."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None and finish:
            prefetch.finish(self.options.wait)
        elif prefetch is not None:
            prefetch.stop()

    def patch(self, staged: Staged, *, undoable: bool = True) -> None:
        """The caller holds the patch lock. As `patching.patch`."""
        local = self._require()
        patching.patch(local, staged.step, undoable=undoable)
        self._settle(local)

    def drop_journal(self, staged: Staged) -> None:
        """After a patch without a way back."""
        patching.drop_journal(self._require(), staged.step)

    def relabel(self, route: Route, plan: Relabel) -> None:
        local, index = self._require(), route.indexes[plan.version]
        if isinstance(index, Index):
            here = local.state.position
            position = replace(here, version=index.version, digest=index.digest, epoch=index.epoch)
            self.side_files.note(here, index, route.files(index.version))
            patching.relabel(local, position)
            self._settle(local)

    def undo(self) -> None:
        """Back over all kept steps. The caller holds the patch lock."""
        local = self._require()
        patching.undo(local)
        self._settle(local)

    def forget_undo(self) -> None:
        if self.local is not None:
            patching.forget_undo(self.local)

    def update_to(self, channel: Channel, version: int | None = None, advance: Advance | None = None) -> None:
        """To `version`, older ones included, or to the latest, without engines."""

        def attempt() -> None:
            self.load(channel, advance)
            if version is None:
                self.repair(channel, advance)
            pointer = channel.pointer() or Pointer(0)
            target = pointer.version if version is None else version
            route = self.route(channel, pointer, target, exact=version is not None)
            self._carry_out(channel, route, route.plan, advance)

        self.damaged_sources.run(attempt, lambda why: self.release())

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
                    with self.options.locked(self._require()):
                        self.patch(staged, undoable=False)
                    self.drop_journal(staged)
            case Refuse():
                raise Refused(plan.reason, remedy=plan.remedy)

    def _require(self) -> LocalCheckpoint:
        if self.local is None:
            raise NeedsReseed(f"{self.paths.directory} is not seeded")
        return self.local
