"""Ranks other than 0: their part into rank 0's attempt, then the outcome from the channel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from weightcast.publisher.publish.commit import Files
from weightcast.publisher.publish.diff import PartWriter
from weightcast.publisher.publish.draft import EarlyInput, Meeting, compare_early, compares_early
from weightcast.publisher.publish.publish_job import (
    Input,
    PublishJob,
    PublishOptions,
    PublishReport,
    report_of,
)
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.rendezvous import Attempt, Rank, RankPart
from weightcast.publisher.ranks.shards import RankWeights
from weightcast.shared.base.errors import (
    NeedsReseed,
    NotInTime,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import index_key
from weightcast.shared.channel.run_files import ChannelFile
from weightcast.shared.channel.store import Store, StoreError
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.state.state import Phase, read_state
from weightcast.shared.files.disk_errors import disk_error

_PATIENCE = 1.25


class MemberRank:
    """Publishes as a rank other than 0. An error is written into the attempt, where there is one, so that
    rank 0 need not wait for its deadline."""

    def __init__(self, updater: LocalUpdater, rank: Rank, options: PublishOptions) -> None:
        self._updater, self._rank, self._options = updater, rank, options
        self._seen = set(rendezvous.attempts(updater.store))
        """what became of these is no news"""
        self._last: _Last | None = None

    def publish(self, job: PublishJob) -> PublishReport:
        last, self._last = self._last, None
        try:
            return self._publish(job, last)
        except OSError as error:
            self._updater.release()
            if isinstance(error, StoreError):
                raise
            raise disk_error(error, self._updater.paths.directory) from error

    def _publish(self, job: PublishJob, last: _Last | None) -> PublishReport:
        early = self._compare_early(job, last)
        deadline = time.monotonic() + self._options.deadline_seconds
        channel = Channel.open(self._updater.store, self._options.signer.trust)
        met, part = self._meet_and_write(channel, early, job, deadline)
        shared = not self._updater.owns
        if shared:
            # rank 0 patches the files that are mapped here
            self._updater.release()
        with job.phase("commit"):
            index = self._await_commit(channel, met)
        if not shared:
            with job.phase("patch"):
                self._updater.update_to(channel)
        self._last = _Last(channel.require_ours()[0], index.parent, index.digest)
        found = channel.store.stat(index_key(index.version))
        return report_of(
            index,
            met.own.local.table,
            0 if found is None else found.size,
            met.given.facts,
            seconds=job.phase.seconds,
            non_finite=part.non_finite,
        )

    def _meet_and_write(
        self, channel: Channel, early: EarlyInput | Exception | None, job: PublishJob, deadline: float
    ) -> tuple[Meeting, RankPart]:
        with contextlib.ExitStack() as opened:
            given: Input | None = None
            while True:
                try:
                    with job.phase("ranks"):
                        key, attempt = rendezvous.find_attempt(
                            channel.store, job.step, self._rank, channel.pointed(), deadline, self._seen
                        )
                except WeightcastError as late:
                    if isinstance(early, Exception):
                        # this rank's own error says more than that rank 0 did not come
                        raise early from late
                    raise
                files = channel.store.within(key)
                failpoint("part.begun", files.place())
                # longer than rank 0 waits: rank 0 knows who is missing, and tells
                until = time.monotonic() + _PATIENCE * self._options.deadline_seconds
                try:
                    with self._told(files):
                        local = self._local(channel, attempt, early, job, until)
                        if isinstance(early, EarlyInput):
                            # RetryLater where it was compared with another base than the attempt's
                            early.weights.moved_to(local)
                            given = early
                        elif given is None:
                            file, base = channel.require_ours()
                            given = Input.open(job.source, file, base.table, self._rank, job.phase)
                        opened.callback(given.weights.close)
                        shards = Files.of(channel.store, key)
                        met = self._joined(files, shards, attempt, local, given, job, until)
                    break
                except (RetryLater, OSError):
                    # rank 0 was killed and begins again: there will be another attempt
                    if not rendezvous.is_cleared(files):
                        raise
            with self._told(files):
                part = met.write_part(job)
                job.source.release_tensors()
                opened.close()
                failpoint("part.written", files.place())
                rendezvous.leave_part(files, self._rank.number, part, local.table)
                failpoint("part.left", files.place())
            return met, part

    def _compare_early(self, job: PublishJob, last: _Last | None) -> EarlyInput | Exception | None:
        """An error is returned: rank 0 has to be told. None where the channel has to be asked first: at the
        first publication, after an error, and where nobody waits for the tensors."""
        if last is None or not compares_early(job, self._rank):
            return None
        try:
            local = self._updater.local if self._updater.owns else self._followed(last)
            if local is None:
                return None
            return compare_early(local, last.file, job, self._rank, self._options.threads)
        except Exception as error:
            job.source.release_tensors()
            return error

    def _followed(self, last: _Last) -> LocalCheckpoint | None:
        """Rank 0's local checkpoint, once it has followed the last version. None when it went elsewhere."""
        paths = self._updater.paths
        for _ in rendezvous.looks(time.monotonic() + self._options.deadline_seconds):
            state = read_state(paths.state)
            if state is None or state.phase not in (Phase.CLEAN, Phase.PATCHING):
                return None
            at = state.position.digest
            if at == last.digest and state.phase is Phase.CLEAN:
                self._updater.local = LocalCheckpoint.open(paths.directory)
                return self._updater.local
            if at not in (last.digest, last.base_digest):
                return None
        return None

    def _local(
        self,
        channel: Channel,
        attempt: Attempt,
        early: EarlyInput | Exception | None,
        job: PublishJob,
        deadline: float,
    ) -> LocalCheckpoint:
        """This rank's own local checkpoint at the attempt's base, or rank 0's on the same machine."""
        if isinstance(early, Exception):
            raise early
        with job.phase("recover"):
            if not self._updater.owns:
                # opened to be compared with, without the lock that keeps it as it was
                self._updater.release()
            try:
                self._updater.own()
            except RetryLater:
                local = self._shared_local(attempt, deadline)
            else:
                self._updater.update_to(channel)
                found = self._updater.local
                if found is None or found.state.position.digest != attempt.base_digest:
                    raise RetryLater(
                        f"this rank's local checkpoint is not at version {attempt.version - 1}",
                        remedy="publish again; check the channel mount of this rank if it stays",
                    )
                local = found
        if attempt.encoding != self._options.encoding:
            raise Refused(
                f"rank 0 publishes with encoding {attempt.encoding}, this rank with {self._options.encoding}",
                remedy="open all ranks with the same encoding",
            )
        return local

    def _shared_local(self, attempt: Attempt, deadline: float) -> LocalCheckpoint:
        directory = self._updater.paths.directory
        for _ in rendezvous.looks(deadline):
            local = LocalCheckpoint.open(directory)
            if local is not None and local.state.position.digest == attempt.base_digest:
                self._updater.local = local
                return local
            if local is not None:
                local.close()
        raise NotInTime(
            f"{directory} did not reach version {attempt.version - 1} in time",
            remedy="check the process that owns it",
        )

    def _joined(
        self,
        files: Store,
        shards: Files,
        attempt: Attempt,
        local: LocalCheckpoint,
        given: Input,
        job: PublishJob,
        deadline: float,
    ) -> Meeting:
        """Tells what this rank holds; returns when all ranks have."""
        writer = PartWriter(local, attempt, shards, self._rank.number, self._options)
        own = RankWeights.of(self._rank.number, local, given.weights, given.matched)
        files.replace(rendezvous.rank_file("holds", own.rank), rendezvous.write_holds(own.holds))
        with job.phase("ranks"):
            holds = rendezvous.await_plan(files, attempt, local.table, deadline)
        return Meeting(files, writer, given, own, holds, deadline)

    @contextlib.contextmanager
    def _told(self, files: Store) -> Iterator[None]:
        """Tells rank 0 of an error in the block: it need not wait for a part that will not come. Where a
        local checkpoint has drifted, every rank reads its own again."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                rendezvous.leave_failure(files, self._rank.number, error)
            if isinstance(error, NeedsReseed) and self._updater.owns:
                self._updater.mark_dirty(str(error))
            self._updater.release()
            raise

    def _await_commit(self, channel: Channel, met: Meeting) -> Index:
        attempt = met.writer.attempt

        def pointed() -> Index | None:
            return channel.own_index(attempt.version) if channel.pointed() >= attempt.version else None

        try:
            return rendezvous.wait_for_commit(met.files, attempt, pointed, met.deadline)
        except NeedsReseed as error:
            if self._updater.owns:
                self._updater.mark_dirty(str(error))
            raise


@dataclass(frozen=True)
class _Last:
    """What the last publication here left: digests of the indexes of its base and of its own."""

    file: ChannelFile
    base_digest: str
    digest: str
