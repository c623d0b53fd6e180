"""Rank 0: owns the channel, makes and commits versions, finishes what a kill left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from weightcast.publisher.publish.anchors import anchor_index, write_anchor_beside, write_weights
from weightcast.publisher.publish.carried_configs import carry
from weightcast.publisher.publish.commit import (
    advance_pointer,
    commit_version,
    discard,
    drop_parts,
    move_shards,
    new_parts_dir,
    put_pointer_right,
    verify_files,
)
from weightcast.publisher.publish.compare import Ahead, Spooled, compare_first, may_compare_first, spool
from weightcast.publisher.publish.diff import refuse_moved
from weightcast.publisher.publish.draft import Assembled, Frame, assemble
from weightcast.publisher.publish.publish_job import (
    PartWriter,
    PublishOptions,
    Work,
    check_root,
    matched_to,
    matched_to_run,
    report_of,
    step_of_version,
)
from weightcast.publisher.publish.report import PublishReport
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.rank_publish import Turn, check_doubles, division_of, given_names, holds_of
from weightcast.publisher.ranks.rendezvous import Attempt, Rank
from weightcast.publisher.weights.match import Matched
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import TensorTable, Words, whole_part
from weightcast.shared.base.errors import (
    DamagedFile,
    Linked,
    NeedsReseed,
    Refused,
    RetryLater,
    Untrusted,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.index import INDEX_NAME, Index, parse_index, write_index
from weightcast.shared.channel.layout import Layout, Pointer, version_of
from weightcast.shared.channel.run_files import Base, ChannelFile
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater, open_base
from weightcast.shared.checkpoint.state.known_bases import find_base
from weightcast.shared.checkpoint.state.side_files import Carried
from weightcast.shared.checkpoint.update.fetch import ROOM_BYTES, journal_bytes
from weightcast.shared.checkpoint.update.stage import Fetched, Staged, stage
from weightcast.shared.files.disk_errors import NoRoom, disk_error, lacks_room
from weightcast.shared.files.paths import exists
from weightcast.shared.files.side_files import side_files
from weightcast.shared.files.system import nearest_directory, space_of

Made = TypeVar("Made")


class Owner:
    """Publishes as rank 0, which alone commits. After an error either nothing was committed, or the version
    is whole and `recover` finishes it; the local checkpoint is behind then, never ahead."""

    def __init__(self, updater: LocalUpdater, claim: Claim, rank: Rank, options: PublishOptions) -> None:
        self._updater, self._claim, self._rank, self._options = updater, claim, rank, options
        self._anchor_due = False
        self._has_published = False
        self._step: int | None = None
        """of the last version that has one, once this owner has published"""
        self._file: ChannelFile | None = None
        """as the last publication read it"""

    def hold_pointer(self) -> None:
        """Puts it where this owner last had it, if another one put it back since."""
        put_pointer_right(Layout(self._updater.channel_dir), self._claim)

    def recover(self, advance: Advance | None = None) -> None:
        """Finishes a version that was committed and never pointed to; brings the local checkpoint to the
        pointer; clears away parts that came to nothing."""
        channel = self._channel()
        put_pointer_right(channel.layout, self._claim)
        self._finish_committed(channel)
        drop_parts(channel.layout, self._claim.epoch)
        try:
            self._catch_up(channel, advance)
        except (WrongRun, Untrusted):
            raise
        except OSError:
            # which of two states lies on disk is not known
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

    def _catch_up(self, channel: Channel, advance: Advance | None) -> None:
        def catch_up() -> None:
            try:
                self._updater.update_to_latest(channel, advance)
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
        """`work` writes `nbytes` and something to the local disk. Where that is short, it is done again for
        as long as giving up what is kept there makes room."""
        while self._free_bytes() < nbytes and self._made_room():
            pass
        while True:
            try:
                return work()
            except (OSError, NoRoom) as error:
                if not lacks_room(error) or not self._made_room():
                    raise

    def _made_room(self) -> bool:
        """By giving up one thing. Where somebody still reads it, its room comes later."""
        free = self._free_bytes()
        return self._options.give_up() and self._free_bytes() > free

    def _free_bytes(self) -> int:
        return space_of(nearest_directory(self._updater.paths.room)).free_bytes

    def _channel(self) -> Channel:
        return Channel.open(self._updater.channel_dir, self._options.trust)

    def _finish_committed(self, channel: Channel) -> None:
        _, base = channel.require_ours()
        at = channel.pointed()
        for version in sorted(_committed(channel, above=at)):
            try:
                index = channel.index(Pointer(version, None, channel.directory), version, base.table)
                finish = isinstance(index, Index) and _follows(channel, at, index)
                if isinstance(index, Index) and finish:
                    verify_files(channel.layout.version_dir(version), index)
            except (DamagedFile, Untrusted):
                # its number is lost: the next publication begins a new chain behind it
                continue
            if finish:
                advance_pointer(channel.layout, version, self._claim, self._options.post_write)
                at = version

    def publish(self, work: Work) -> PublishReport:
        try:
            return self._publish_once(work)
        except NeedsReseed:
            # the local checkpoint is brought anew. Other ranks have seen this attempt end: their next call
            # meets ours
            if not self._rank.alone or work.changeable or work.is_committed:
                raise
        return self._publish_once(work)

    def _publish_once(self, work: Work) -> PublishReport:
        try:
            return self._publish(work)
        except NeedsReseed as error:
            self._updater.mark_dirty(error.message)
            raise
        except OSError as error:
            self._updater.release()
            raise disk_error(error, self._updater.channel_dir) from error
        except BaseException:
            self._updater.release()
            raise

    def _publish(self, work: Work) -> PublishReport:
        spooled, ahead = self._spool_first(work), self._compare_first(work)
        if work.allowed is not None:
            work.allowed()
        self._claim.check()
        with work.phase("recover"):
            self.recover(work.advance)
        failpoint("publish.recovered", self._updater.channel_dir)
        channel = self._channel()
        self._file, _ = channel.require_ours()
        if spooled is not None:
            return self._publish_spooled(channel, spooled, work)
        with self._given(channel, work, ahead) as (weights, matched):
            local = self._updater.local
            if ahead is not None:
                self._go_on_with(channel, ahead, work)
            if local is None or not _next_is_free(channel, local):
                return self._publish_anchor(channel, weights, matched, work)
            return self._publish_delta(channel, local, weights, matched, work)

    def _spool_first(self, work: Work) -> Spooled | None:
        """For trainers that wait for their tensors. None where the channel has to be asked first: at the
        first publication, after an error, among several ranks."""
        local, file = self._updater.local, self._file
        if work.compared is None or not self._rank.alone or local is None or file is None:
            return None
        return self._with_room(lambda: self._spooled(local, file, work))

    def _spooled(self, local: LocalCheckpoint, file: ChannelFile, work: Work) -> Spooled:
        with work.phase("read"):
            weights = work.read()
        try:
            with work.phase("diff"):
                matched = matched_to(file, local.table, weights, self._rank, work)
                frame = self._frame(local, work.step)
                spooled = spool(local, frame, weights, matched, self._options, work.advance)
            work.non_finite = spooled.non_finite
            work.let_go()
            return spooled
        finally:
            weights.close()

    def _compare_first(self, work: Work) -> Ahead | None:
        """Among several ranks, for trainers that wait for their tensors; as `_spool_first`."""
        local, file = self._updater.local, self._file
        if local is None or file is None or not may_compare_first(work, self._rank):
            return None
        try:
            return compare_first(local, file, work, self._rank, self._options.threads)
        except BaseException as error:
            # the error counts, not that it could not be told
            with contextlib.suppress(OSError, WeightcastError):
                self._claim.check()
                self._call_off(self._channel(), work.step, error)
            raise

    def _publish_spooled(self, channel: Channel, spooled: Spooled, work: Work) -> PublishReport:
        local, frame = self._updater.local, spooled.frame
        if local is None or local.state.position != frame.base or not _next_is_free(channel, local):
            spooled.drop()
            raise RetryLater(
                f"the channel went on from version {frame.base.version} while step {frame.step} was compared",
                remedy="nothing was published; submit again",
            )
        with work.phase("copy"):
            parts = new_parts_dir(channel.layout, frame.version, frame.epoch)
            spooled.copy_to(parts)
        assembled = assemble(local.table, frame.base, [spooled.draft])
        return self._commit(channel, local, assembled, parts, work)

    @contextlib.contextmanager
    def _given(
        self, channel: Channel, work: Work, ahead: Ahead | None
    ) -> Iterator[tuple[NewWeights, Matched]]:
        """What is to be published. Where this fails the other ranks need not wait for it."""
        if ahead is not None:
            yield ahead.weights, ahead.matched
            return
        try:
            with work.phase("read"):
                weights = work.read()
                try:
                    matched = matched_to_run(channel, weights, self._rank, work)
                except BaseException:
                    weights.close()
                    raise
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._call_off(channel, work.step, error)
            raise
        try:
            yield weights, matched
        finally:
            weights.close()

    def _go_on_with(self, channel: Channel, ahead: Ahead, work: Work) -> None:
        """Raises RetryLater, on all ranks, when the local checkpoint is not where it was compared with."""
        try:
            ahead.weights.moved_to(self._updater.local)
        except RetryLater as error:
            self._call_off(channel, work.step, error)
            raise

    def _call_off(self, channel: Channel, step: int | None, error: BaseException) -> None:
        if self._rank.alone:
            return
        version = channel.pointed() + 1
        attempt = Attempt(
            version, self._claim.epoch, "", step, self._rank.world_size, self._options.encoding, time.time()
        )
        parts = new_parts_dir(channel.layout, version, self._claim.epoch)
        rendezvous.close_attempt(parts, error)
        rendezvous.open_attempt(parts, attempt)

    def _publish_delta(
        self, channel: Channel, local: LocalCheckpoint, weights: NewWeights, matched: Matched, work: Work
    ) -> PublishReport:
        frame = self._frame(local, work.step)
        assembled, parts = self._gather_parts(channel, local, frame, weights, matched, work)
        return self._commit(channel, local, assembled, parts, work)

    def _commit(
        self, channel: Channel, local: LocalCheckpoint, assembled: Assembled, parts: Path, work: Work
    ) -> PublishReport:
        self._claim.check()
        failpoint("publish.assembled", parts)
        made = move_shards(parts, assembled.sources)
        with work.phase("stage"):
            carried = carry(channel, Carried(local.paths), made, work)
            data = write_index(replace(assembled.index, request=work.request, carried=carried), local.table)
            index = parse_index(data, local.table)
            staged = self._prove(local, index, assembled.sources, made)
            check_root(work, index)
        failpoint("publish.proven", made)
        directory = self._put_out(channel, made, index, data, work)
        report = self._report(channel, index, local.table, work, directory)
        work.tell_out(report)
        with work.phase("patch"):
            local = self._patched(local, staged, work)
        drop_parts(channel.layout, self._claim.epoch)
        problem = self._anchor_if_due(channel, local, work)
        return replace(report, seconds=dict(work.seconds), anchor_problem=problem)

    def _put_out(self, channel: Channel, made: Path, index: Index, data: bytes, work: Work) -> Path:
        """Commits what lies in `made` as a version and tells the fleet. Returns its directory."""
        with work.phase("commit"):
            directory = commit_version(channel.layout, made, index, data, self._claim, self._options.key)
            work.is_committed = True
            advance_pointer(channel.layout, index.version, self._claim, self._options.post_write)
        return directory

    def _anchor_if_due(self, channel: Channel, local: LocalCheckpoint, work: Work) -> str:
        """Returns why there is none. The version is out whatever becomes of its anchor; one that could not be
        written is made up for beside the next version."""
        every, version = self._options.anchor_every, local.state.position.version
        self._anchor_due |= every > 0 and version % every == 0
        if not self._anchor_due:
            return ""
        try:
            with work.phase("anchor"):
                write_anchor_beside(channel.layout, local, self._claim, self._options.key)
        except (OSError, WeightcastError) as error:
            return rendezvous.reason_of(error)
        self._anchor_due = False
        return ""

    def _frame(self, local: LocalCheckpoint, step: int | None) -> Frame:
        position = local.state.position
        return Frame(
            run_id=local.state.run_id,
            version=position.version + 1,
            base=position,
            epoch=self._claim.epoch,
            encoding=self._options.encoding,
            step=step,
            created=time.time(),
        )

    def _gather_parts(
        self,
        channel: Channel,
        local: LocalCheckpoint,
        frame: Frame,
        weights: NewWeights,
        matched: Matched,
        work: Work,
    ) -> tuple[Assembled, Path]:
        """Writes this rank's part and waits for the others'. A failure closes the attempt for all ranks."""
        parts = new_parts_dir(channel.layout, frame.version, frame.epoch)
        attempt = Attempt.of(frame, self._rank.world_size)
        rendezvous.open_attempt(parts, attempt)
        try:
            options = self._options
            writer = PartWriter(
                local, frame, parts, self._rank, options.threads, non_finite=options.non_finite
            )
            if not self._rank.alone:
                return self._all_parts(writer, attempt, weights, matched, work), parts
            with work.phase("diff"):
                own = writer.write(weights, matched, whole_part(local.table), work.advance)
            work.non_finite = own.non_finite
            work.let_go()
            return assemble(local.table, frame.base, [own.draft]), parts
        except BaseException as error:
            # the error counts, not that it could not be told
            with contextlib.suppress(OSError):
                rendezvous.close_attempt(parts, error)
            raise

    def _all_parts(
        self, writer: PartWriter, attempt: Attempt, weights: NewWeights, matched: Matched, work: Work
    ) -> Assembled:
        """What all ranks hold, told to all; this rank's part; the others' parts."""
        table, parts = writer.local.table, writer.directory
        deadline = time.monotonic() + self._options.deadline_seconds
        names = given_names(weights, matched, table)
        with work.phase("ranks"):
            own = holds_of(weights, names)
            holds = [own, *rendezvous.collect_holds(parts, attempt, table, deadline)]
            division = division_of(attempt, table, holds, matched.frozen)
            rendezvous.leave_plan(parts, holds, table)
        left = [Turn(writer, attempt, deadline).take(weights, matched, names, division, work)]
        work.let_go()
        with work.phase("ranks"):
            left += rendezvous.collect_parts(parts, attempt, division, table, deadline)
        check_doubles(division, table, left)
        return assemble(table, writer.frame.base, [one.draft for one in left], [one.sums for one in left])

    def _prove(
        self, local: LocalCheckpoint, index: Index, sources: Mapping[str, str], directory: Path
    ) -> Staged:
        """Stages the written files as a host would: no host sees a version that did not pass. `sources`: what
        each of them was called."""
        if not self._rank.alone:
            # what fails is left for the next attempt to move away: after a takeover it may be another
            # owner's. Digests of our own files were just read from them
            own = rendezvous.shard_name(self._rank.number)
            verify_files(directory, index, [new for new, old in sources.items() if old == own])
        fetched = [Fetched(index, directory)]
        wanted = ROOM_BYTES + journal_bytes(index)
        return self._with_room(lambda: stage(local, fetched, threads=self._options.threads), wanted)

    def _patched(self, local: LocalCheckpoint, staged: Staged, work: Work) -> LocalCheckpoint:
        """The local checkpoint at the version: the same, or one brought anew where that was drifted. Who was
        told that the version is out is told of the drift too."""
        try:
            self._patch(local, staged, work)
            return local
        except NeedsReseed as error:
            if work.out is not None:
                raise
            self._updater.mark_dirty(error.message)
            self.recover(work.advance)
            if self._updater.local is None:
                raise
            return self._updater.local

    def _patch(self, local: LocalCheckpoint, staged: Staged, work: Work) -> None:
        began = time.monotonic()
        with local.patching():
            self._updater.patch(staged, undoable=False)
            if self._options.keep is not None:
                # under the lock: who reads older versions finds no gap behind the new one
                seconds = work.seconds.get("stage", 0.0) + time.monotonic() - began
                self._options.keep(staged.step, seconds)
        self._updater.drop_journal(staged)

    def write_anchor(self) -> bool:
        """Full weights of the current version beside it. False when they exist."""
        self.recover()
        channel, local = self._channel(), self._updater.local
        if local is None or channel.pointed() == 0:
            raise Refused("there is no version to anchor", remedy="publish one first")
        return write_anchor_beside(channel.layout, local, self._claim, self._options.key)

    def _publish_anchor(
        self, channel: Channel, weights: NewWeights, matched: Matched, work: Work
    ) -> PublishReport:
        """Where no delta can be made (local checkpoint ahead of the channel, or lost): full weights under the
        next free number begin a new chain."""
        if not self._rank.alone or matched.absent:
            why = self._updater.trouble or "the local checkpoint is ahead of the channel"
            refused = Refused(
                f"no delta can be made ({why}) and an anchor needs all tensors in one process",
                remedy="publish once with world_size 1, or restore the publisher's local checkpoint",
            )
            self._call_off(channel, work.step, refused)
            raise refused
        _, base = channel.require_ours()
        version = self._free_number(channel)
        parts = new_parts_dir(channel.layout, version, self._claim.epoch)
        try:
            with work.phase("diff"):
                words_in = _by_number(weights, matched)
                base, beside = self._files_beside(base)
                written = write_weights(parts, base.table, words_in, beside, advance=work.advance)
                weights.finish()
            work.let_go()
            index = anchor_index(base.run_id, version, self._claim.epoch, work.step, base, written)
            moved = (index.tensors.lanes != base.lanes).any(axis=1)
            refuse_moved(base.table, [tensor for tensor in sorted(matched.frozen) if moved[tensor]])
            index = replace(index, request=work.request)
            check_root(work, index)
        except BaseException:
            discard(channel.layout, parts)
            raise
        self._claim.check()
        made = move_shards(parts, {file.name: file.name for file in index.all_files})
        index = replace(index, carried=carry(channel, Carried(self._updater.paths), made, work))
        directory = self._put_out(channel, made, index, write_index(index, base.table), work)
        drop_parts(channel.layout, self._claim.epoch)
        with work.phase("patch"):
            self.recover(work.advance)
        return self._report(channel, index, base.table, work, directory)

    def _report(
        self, channel: Channel, index: Index, table: TensorTable, work: Work, directory: Path
    ) -> PublishReport:
        """Remembers the step for the report of the next version."""
        if not self._has_published:
            self._step, self._has_published = step_of_version(channel, index.version - 1), True
        report = report_of(index, table, work, directory, self._step)
        self._step = self._step if index.step is None else index.step
        return report

    def _free_number(self, channel: Channel) -> int:
        state = self._updater.state
        at = channel.pointed()
        taken = {at, *_committed(channel, above=at)}
        return max(taken | ({state.position.version} if state is not None else set())) + 1

    def _files_beside(self, base: Base) -> tuple[Base, Mapping[str, Path]]:
        """What lists the files of an anchor beside its weights, and where they are."""
        if self._updater.local is not None:
            return self._updater.local.base, self._updater.local.files_beside
        directory = self._updater.base_dir or find_base(self._channel())
        return base, side_files(open_base(directory)).files


def _by_number(weights: NewWeights, matched: Matched) -> Callable[[int, int, int], Words]:
    return lambda tensor, start, stop: weights.words_in(matched.sources[tensor], start, stop)


def _next_is_free(channel: Channel, local: LocalCheckpoint) -> bool:
    """False when the local checkpoint is not at the pointer, or the next number is taken by a version that no
    pointer may ever lead to."""
    at = channel.pointed()
    return local.state.position.version == at and not exists(channel.layout.index(at + 1))


def _committed(channel: Channel, *, above: int) -> set[int]:
    """Versions with an index that the pointer does not reach yet. Only the owner may look there."""
    found = set()
    for entry in channel.directory.iterdir():
        version = version_of(entry.name)
        if version is not None and version > above and exists(entry / INDEX_NAME):
            found.add(version)
    return found


def _follows(channel: Channel, at: int, index: Index) -> bool:
    if index.kind == "anchor":
        return True
    _, base = channel.require_ours()
    return index.base_version == at and index.parent == _digest_at(channel, at, base.table)


def _digest_at(channel: Channel, version: int, table: TensorTable) -> str:
    if version == 0:
        return channel.require_ours()[1].digest
    index = channel.index(Pointer(version, None, channel.directory), version, table)
    if index is None:
        raise DamagedFile(
            f"{channel.layout.index(version)} is missing although the pointer names it",
            remedy="restore it; run `weightcast channel verify`",
        )
    return index.digest
