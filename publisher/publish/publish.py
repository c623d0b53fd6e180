"""Rank 0, which owns the channel and alone commits: the steps of a publication in their order.

`OwnerRank._publish` is the protocol; every step is a method below it. After an error either nothing was
committed, or the version is whole and the next `recover` finishes it; the local checkpoint is then behind,
never ahead.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from weightcast.publisher.publish.anchors import anchor_index, write_anchor_beside, write_weights
from weightcast.publisher.publish.commit import (
    Files,
    advance_pointer,
    announced,
    begin_attempt,
    carry,
    commit_version,
    drop_parts,
    end_attempt,
    move_shards,
    put_pointer_right,
    verify_files,
)
from weightcast.publisher.publish.diff import PartWriter, refuse_moved
from weightcast.publisher.publish.draft import (
    EarlyInput,
    Meeting,
    SpooledDelta,
    assemble,
    check_doubles,
    compare_early,
    compares_early,
    spool,
)
from weightcast.publisher.publish.publish_job import (
    Input,
    PublishJob,
    PublishOptions,
    PublishReport,
    report_of,
    step_of_version,
)
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.rendezvous import Attempt, Rank, RankPart
from weightcast.publisher.ranks.shards import RankWeights
from weightcast.publisher.weights.config import config_of
from weightcast.publisher.weights.tensors import InputFacts
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import (
    DamagedFile,
    Linked,
    NeedsReseed,
    Refused,
    RetryLater,
    Untrusted,
    WeightcastError,
    WrongRun,
    on_error,
)
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import committed
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import Claim, Claimant
from weightcast.shared.channel.index import Index, parse_index, write_index
from weightcast.shared.channel.layout import index_key, version_name
from weightcast.shared.channel.run_files import Base, ChannelFile
from weightcast.shared.channel.store import Store, StoreError
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.state.side_files import SideFiles
from weightcast.shared.checkpoint.update.fetch import ROOM_BYTES, Delta, journal_bytes
from weightcast.shared.checkpoint.update.sources import find_base, open_base
from weightcast.shared.checkpoint.update.stage import Staged, stage
from weightcast.shared.files.disk_errors import NoRoom, disk_error, lacks_room
from weightcast.shared.files.hf_checkpoint import side_files
from weightcast.shared.files.system import nearest_directory, space_of

Made = TypeVar("Made")


@dataclass(frozen=True)
class Draft:
    """A version whose files are written, under names of the attempt: `sources` has the name in `parts`, the
    attempt's key, of each of the version's files."""

    index: Index
    parts: str
    sources: Mapping[str, str]
    facts: InputFacts
    non_finite: Mapping[int, int]
    local: LocalCheckpoint | None
    """the delta's base; None: full weights begin a new chain"""


@dataclass(frozen=True)
class Proven:
    """A version that lacks only its index and its name. `made`: key of its directory; `data`: the index,
    written."""

    made: str
    index: Index
    data: bytes
    staged: Staged | None
    """the step of the local checkpoint; None for full weights"""


class OwnerRank:
    """Publishes as rank 0."""

    def __init__(self, updater: LocalUpdater, claim: Claim, rank: Rank, options: PublishOptions) -> None:
        self._updater, self._claim, self._rank, self._options = updater, claim, rank, options
        self.configs: Mapping[str, str] = {}
        """config files of the last input from files that differ from the base's: BLAKE3 hex by name"""
        self._anchor_due = False
        self._has_published = False
        self._step: int | None = None
        """of the last version that has one, once this owner has published"""
        self._file: ChannelFile | None = None
        """as the last publication read it"""
        self._processes: dict[int, Claimant] = {}
        """of the other ranks, as they last came; an ended process is named once, and may come again"""

    def publish(self, job: PublishJob) -> PublishReport:
        try:
            return self._publish(job)
        except NeedsReseed:
            # the second try brings the local checkpoint anew. Other ranks have seen this attempt end: their
            # next call meets ours
            if not self._rank.alone or job.source.spent or "commit" in job.phase.seconds:
                raise
        return self._publish(job)

    def _publish(self, job: PublishJob) -> PublishReport:
        with self._forgetting_on_error():
            early = self._compare_early(job)
            channel = self._recover(job)
            with self._compared(channel, early, job) as given:
                draft = self._write(channel, given, job)
            proven = self._prove(channel, draft, job)
            with job.phase("commit"):
                # the version exists once its directory has its name; then `latest` tells the fleet
                commit_version(self._claim, proven.made, proven.index, proven.data, self._options.signer.key)
                advance_pointer(self._claim, proven.index.version, self._options.post_write)
            report = self._report(channel, draft, proven, job)
            return self._follow(draft, proven, report, job)

    @contextlib.contextmanager
    def _forgetting_on_error(self) -> Iterator[None]:
        """Memory is a cache: after an error local checkpoint and channel are read again."""
        try:
            yield
        except NeedsReseed as error:
            self._updater.mark_dirty(error.message)
            raise
        except BaseException as error:
            self._updater.release()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise disk_error(error, self._updater.paths.directory) from error
            raise

    # compare, where a trainer waits for its tensors

    def _compare_early(self, job: PublishJob) -> SpooledDelta | EarlyInput | None:
        """None where nobody waits, and where the channel has to be asked first: at the first publication and
        after an error."""
        local, file = self._updater.local, self._file
        if local is None or file is None or not compares_early(job, self._rank):
            return None
        if self._rank.alone:
            base = local.state.position
            attempt = self._attempt(base.version + 1, base.digest, job.step)
            return self._with_room(lambda: spool(local, file, attempt, job, self._options))
        try:
            return compare_early(local, file, job, self._rank, self._options.threads)
        except BaseException as error:
            # the error counts, not that the other ranks could not read it
            with contextlib.suppress(OSError, WeightcastError):
                self._claim.check()
                self._call_off(self._channel(), job.step, error)
            raise

    # recover

    def _channel(self) -> Channel:
        return Channel.open(self._updater.store, self._options.signer.trust)

    def _recover(self, job: PublishJob) -> Channel:
        if job.check_allowed is not None:
            job.check_allowed()
        self._claim.check()
        with job.phase("recover"):
            channel = self.recover(job.advance)
        failpoint("publish.recovered", self._updater.store.place())
        return channel

    def recover(self, advance: Advance | None = None) -> Channel:
        """What a killed publication left is finished or cleared away, and the local checkpoint brought to the
        pointer."""
        channel = self._channel()
        put_pointer_right(self._claim)
        self._finish_committed(channel)
        drop_parts(self._claim)
        try:
            self._catch_up(channel, advance)
        except (WrongRun, Untrusted):
            raise
        except OSError:
            # which of two states is on disk is unknown
            self._updater.release()
            raise
        except Linked as error:
            # what an operator can mend is no reason to publish full weights
            self._updater.release()
            raise RetryLater(error.message, remedy=error.remedy) from error
        except Refused as error:
            # the next publication begins a new chain with an anchor
            self._updater.release()
            self._updater.trouble = error.message
        return channel

    def _catch_up(self, channel: Channel, advance: Advance | None) -> None:
        def catch_up() -> None:
            try:
                self._updater.update_to(channel, advance=advance)
            except BaseException as error:
                if lacks_room(error):
                    self._updater.release()
                raise

        try:
            self._with_room(catch_up)
        except NeedsReseed as error:
            self._updater.mark_dirty(error.message)
            self._with_room(catch_up)

    def _with_room(self, work: Callable[[], Made], nbytes: int = 0) -> Made:
        """Calls `work`, which writes `nbytes` and a little more to the local disk. While the disk is full,
        gives up what is kept there for speed and calls it again."""
        while self._free_bytes() < nbytes and self._made_room():
            pass
        while True:
            try:
                return work()
            except (OSError, NoRoom) as error:
                if not lacks_room(error) or not self._made_room():
                    raise

    def _made_room(self) -> bool:
        """By giving up one file. While somebody still reads it, its room is not free."""
        free = self._free_bytes()
        return self._options.free_space() and self._free_bytes() > free

    def _free_bytes(self) -> int:
        return space_of(nearest_directory(self._updater.paths.room)).free_bytes

    def _finish_committed(self, channel: Channel) -> None:
        at = channel.pointed()
        for version in committed(channel.store, at):
            try:
                index = channel.own_index(version)
                if index is None or not _follows(channel, at, index):
                    continue
                verify_files(channel.store.within(version_name(version)), index)
            except (DamagedFile, Untrusted):
                # its number is lost: the next publication begins a new chain behind it
                continue
            advance_pointer(self._claim, version, self._options.post_write)
            at = version

    # compare

    @contextlib.contextmanager
    def _compared(
        self, channel: Channel, early: SpooledDelta | EarlyInput | None, job: PublishJob
    ) -> Iterator[SpooledDelta | Input]:
        """What is to be published, open and compared with the run's names and ties, or in full where `early`.
        Ends the attempt of all ranks when that fails."""
        self._file, base = channel.require_ours()
        if isinstance(early, SpooledDelta):
            yield early
            return
        try:
            given: Input
            if early is None:
                given = Input.open(job.source, self._file, base.table, self._rank, job.phase)
            else:
                early.weights.moved_to(self._updater.local)
                given = early
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._call_off(channel, job.step, error)
            raise
        try:
            yield given
        finally:
            given.weights.close()

    def _call_off(self, channel: Channel, step: int | None, error: BaseException) -> None:
        """Tells the other ranks that there is no version of this step."""
        if self._rank.alone:
            return
        attempt = self._attempt(channel.pointed() + 1, "", step)
        parts = channel.store.within(begin_attempt(self._claim, attempt.version))
        rendezvous.leave_failure(parts, 0, error)
        rendezvous.open_attempt(parts, attempt)

    def _attempt(self, version: int, base_digest: str, step: int | None) -> Attempt:
        ranks, encoding = self._rank.world_size, self._options.encoding
        return Attempt(version, self._claim.epoch, base_digest, step, ranks, encoding, time.time())

    # write

    def _write(self, channel: Channel, given: SpooledDelta | Input, job: PublishJob) -> Draft:
        local = self._updater.local
        if isinstance(given, SpooledDelta):
            return self._write_spooled(channel, local, given, job)
        if local is None or not _next_is_free(channel, local):
            return self._write_full(channel, given, job)
        return self._write_delta(channel, local, given, job)

    def _write_spooled(
        self, channel: Channel, local: LocalCheckpoint | None, spooled: SpooledDelta, job: PublishJob
    ) -> Draft:
        draft = spooled.part.draft
        if local is None or local.state.position.digest != draft.parent or not _next_is_free(channel, local):
            spooled.drop()
            raise RetryLater(
                f"the channel left version {draft.base_version} while step {draft.step} was compared",
                remedy="nothing was published; submit again",
            )
        with job.phase("copy"):
            parts = begin_attempt(self._claim, draft.version)
            files = Files.of(channel.store, parts)
            spooled.copy_to(files)
        renames, base = channel.store.renames, local.state.position
        index, sources = assemble(local.table, base, [spooled.part], rename=renames, prefix=files.prefix)
        return Draft(index, parts, sources, spooled.facts, spooled.part.non_finite, local)

    def _write_delta(self, channel: Channel, local: LocalCheckpoint, given: Input, job: PublishJob) -> Draft:
        """This rank's part and, where there are others, theirs. A failure ends the attempt for all ranks."""
        base = local.state.position
        attempt = self._attempt(base.version + 1, base.digest, job.step)
        parts = begin_attempt(self._claim, attempt.version)
        files = channel.store.within(parts)
        rendezvous.open_attempt(files, attempt)
        shards = Files.of(channel.store, parts)
        writer = PartWriter(local, attempt, shards, self._rank.number, self._options)
        try:
            if self._rank.alone:
                with job.phase("diff"):
                    written = [writer.write(given, local.table.whole, job.advance)]
                job.source.release_tensors()
            else:
                written = self._all_parts(files, writer, given, job)
            index, sources = assemble(local.table, base, written, rename=channel.store.renames)
        except BaseException as error:
            # the error counts, not that the other ranks could not read it
            with contextlib.suppress(OSError):
                rendezvous.leave_failure(files, 0, error)
            raise
        non_finite = sum((Counter(one.non_finite) for one in written), Counter[int]())
        return Draft(index, parts, sources, given.facts, non_finite, local)

    def _all_parts(self, parts: Store, writer: PartWriter, given: Input, job: PublishJob) -> list[RankPart]:
        """What all ranks hold, shared with all; this rank's part; the others' parts."""
        table, attempt = writer.local.table, writer.attempt
        deadline = time.monotonic() + self._options.deadline_seconds
        own = RankWeights.of(self._rank.number, writer.local, given.weights, given.matched)
        with job.phase("ranks"):
            read = rendezvous.message(parts, "holds", partial(rendezvous.parse_holds, table=table))
            ranks, processes = range(1, attempt.world_size), self._processes
            others = rendezvous.collect(parts, attempt, ranks, read, deadline, processes)
            processes.update((rank, process) for rank, (process, _) in zip(ranks, others, strict=True))
            holds = [own.holds, *(one for _, one in others)]
            meeting = Meeting(parts, writer, given, own, holds, deadline)
            parts.replace(rendezvous.PLAN, rendezvous.write_plan(holds))
        written = [meeting.write_part(job)]
        job.source.release_tensors()
        with job.phase("ranks"):
            written += rendezvous.collect_parts(
                parts, attempt, meeting.assignment, table, deadline, self._processes
            )
        check_doubles(meeting.assignment, table, written)
        return written

    def _write_full(self, channel: Channel, given: Input, job: PublishJob) -> Draft:
        """Where no delta can be made (local checkpoint ahead of the channel, or lost): full weights under the
        next free number begin a new chain."""
        if not self._rank.alone or given.matched.absent:
            why = self._updater.trouble or "the local checkpoint is ahead of the channel"
            refused = Refused(
                f"cannot make a delta ({why}), and an anchor needs all tensors in one process",
                remedy="publish once with world_size 1, or restore the publisher's local checkpoint",
            )
            self._call_off(channel, job.step, refused)
            raise refused
        _, base = channel.require_ours()
        version = self._free_number(channel)
        parts = begin_attempt(self._claim, version)
        with on_error(partial(end_attempt, channel.store, parts)):
            with job.phase("diff"):
                base, beside = self._files_beside(base)
                files = Files.of(channel.store, parts)
                written = write_weights(files, base.table, given.words_in, beside, advance=job.advance)
                given.weights.finish()
            job.source.release_tensors()
            index = anchor_index(version, self._claim.epoch, job.step, base, written)
            moved = (index.tensors.lanes != base.lanes).any(axis=1)
            refuse_moved(base.table, [tensor for tensor in sorted(given.matched.frozen) if moved[tensor]])
            job.check_root(index)
        return Draft(index, parts, {file.name: file.name for file in index.all_files}, given.facts, {}, None)

    def _free_number(self, channel: Channel) -> int:
        state = self._updater.state
        at = channel.pointed()
        taken = {at, *committed(channel.store, at)}
        return max(taken | ({state.position.version} if state is not None else set())) + 1

    def _files_beside(self, base: Base) -> tuple[Base, Mapping[str, Path]]:
        """What lists the files of an anchor beside its weights, and where they are."""
        if self._updater.local is not None:
            return self._updater.local.base, self._updater.local.side_files
        if base.component != MAIN:
            return base, {}
        directory = self._updater.base_dir or find_base(self._channel())
        return base, side_files(open_base(directory)).files

    # prove

    def _prove(self, channel: Channel, draft: Draft, job: PublishJob) -> Proven:
        """Stages the written files as a host would: no host sees a version that did not pass."""
        self._claim.check()
        failpoint("publish.assembled", channel.store.place(draft.parts))
        made = move_shards(channel.store, draft.parts, draft.sources)
        files = channel.store.within(made)
        with job.phase("stage"):
            carried = carry(channel, SideFiles(self._updater.paths), files, draft.facts, job.carried_of)
            table = channel.require_ours()[1].table
            index = replace(draft.index, request=job.request, carried=carried)
            if table.component != MAIN:
                index = _belonging(channel, index, job)
            data = write_index(index, table)
            if draft.local is None:
                return Proven(made, index, data, None)
            index = parse_index(data, table)
            staged = self._staged(draft.local, index, draft.sources, files)
            job.check_root(index)
        failpoint("publish.proven", files.place())
        return Proven(made, index, data, staged)

    def _staged(
        self, local: LocalCheckpoint, index: Index, sources: Mapping[str, str], files: Store
    ) -> Staged:
        if not self._rank.alone and files.renames:
            # what fails is left for the next attempt to move away: after a takeover it may be another
            # owner's. Digests of our own files were just computed from them
            own = rendezvous.shard_name(self._rank.number)
            verify_files(files, index, [new for new, old in sources.items() if old.endswith(own)])
        delta, wanted = Delta(index, files), ROOM_BYTES + journal_bytes(index)
        if files.renames:
            return self._with_room(lambda: stage(local, [delta]), wanted)
        wanted += sum(file.size for file in index.files)
        return self._with_room(lambda: self._updater.stage_copy(local, delta), wanted)

    def _report(self, channel: Channel, draft: Draft, proven: Proven, job: PublishJob) -> PublishReport:
        index, configs = proven.index, draft.facts.configs
        if not self._has_published:
            # for the report of the next version
            self._step, self._has_published = step_of_version(channel, index.version - 1), True
        report = report_of(
            index,
            channel.require_ours()[1].table,
            len(proven.data),
            draft.facts,
            seconds=job.phase.seconds,
            step_before=self._step,
            configs_before=self.configs,
            non_finite=draft.non_finite,
        )
        self._step = self._step if index.step is None else index.step
        if configs is not None:
            self.configs = {name: digest for name, digest in configs.items() if digest}
        if job.on_pointer_moved is not None and draft.local is not None:
            job.on_pointer_moved(report)
        return report

    # the publisher's own files, behind the pointer

    def _follow(self, draft: Draft, proven: Proven, report: PublishReport, job: PublishJob) -> PublishReport:
        problem = ""
        with job.phase("patch"):
            local = self._patched(draft.local, proven.staged, job)
        drop_parts(self._claim)
        if draft.local is not None and local is not None:
            problem = self._anchor_if_due(local, job)
        return replace(report, seconds=dict(job.phase.seconds), anchor_problem=problem)

    def _patched(
        self, local: LocalCheckpoint | None, staged: Staged | None, job: PublishJob
    ) -> LocalCheckpoint | None:
        """The local checkpoint at the version: the same one, or a new one where that had drifted. Who was
        told that the version is out is told of the drift too."""
        if local is None or staged is None:
            self.recover(job.advance)
            return None
        try:
            self._patch(local, staged, job)
            return local
        except NeedsReseed as error:
            if job.on_pointer_moved is not None:
                raise
            self._updater.mark_dirty(error.message)
            self.recover(job.advance)
            if self._updater.local is None:
                raise
            return self._updater.local

    def _patch(self, local: LocalCheckpoint, staged: Staged, job: PublishJob) -> None:
        began = time.monotonic()
        with local.patching():
            self._updater.patch(staged, undoable=False)
            if self._options.keep_journal is not None:
                # under the lock: who reads older versions finds no gap behind the new one
                seconds = job.phase.seconds.get("stage", 0.0) + time.monotonic() - began
                self._options.keep_journal(staged.step, seconds)
        self._updater.drop_journal(staged)

    def _anchor_if_due(self, local: LocalCheckpoint, job: PublishJob) -> str:
        """Returns why there is none. The version is out whatever becomes of its anchor; one that could not be
        written is made up for beside the next version."""
        every, version = self._options.anchor_every, local.state.position.version
        self._anchor_due |= every > 0 and version % every == 0
        if not self._anchor_due:
            return ""
        try:
            with job.phase("anchor"):
                write_anchor_beside(local, self._claim, self._options.signer.key)
        except (OSError, WeightcastError) as error:
            return rendezvous.reason_of(error)
        self._anchor_due = False
        return ""

    def write_anchor(self) -> bool:
        """Full weights of the current version beside it. False when they exist."""
        channel, local = self.recover(), self._updater.local
        if local is None or channel.pointed() == 0:
            raise Refused("nothing to anchor: no version is published", remedy="publish a version first")
        return write_anchor_beside(local, self._claim, self._options.signer.key)


def _belonging(channel: Channel, index: Index, job: PublishJob) -> Index:
    """With the version of main that an adapter or draft was trained on. Raises Refused where its
    configuration is not known."""
    config = config_of(channel.store.component)
    if not any(file.name == config for file in index.carried):
        raise Refused(
            f"{channel.place} has no {config} yet",
            remedy="give config= with the first version",
        )
    version, digest = job.trained_on or (0, "")
    if not digest:
        like = announced(channel, job.carried_of or channel.pointed())
        version, digest = like.main_version, like.main_root
    return replace(index, main_version=version, main_root=digest)


def _follows(channel: Channel, at: int, index: Index) -> bool:
    if index.kind == "anchor":
        return True
    if index.base_version != at:
        return False
    return index.parent == (channel.require_ours()[1] if at == 0 else announced(channel, at)).digest


def _next_is_free(channel: Channel, local: LocalCheckpoint) -> bool:
    """False when the local checkpoint is not at the pointer, or the next number is taken by a version that no
    pointer may ever lead to."""
    at = channel.pointed()
    return local.state.position.version == at and channel.store.stat(index_key(at + 1)) is None
