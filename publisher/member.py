"""Ranks other than 0: their part into rank 0's attempt, then the outcome from the channel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from weightcast.publisher import rendezvous
from weightcast.publisher.draft import Frame
from weightcast.publisher.rendezvous import Attempt, Rank
from weightcast.publisher.report import PublishReport
from weightcast.publisher.turn import Turn, division_of, given_names, holds_of
from weightcast.publisher.work import PartWriter, PublishOptions, Work, matched_to_run, report_of
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.store import Channel
from weightcast.shared.errors import NeedsReseed, NotInTime, Refused, RetryLater
from weightcast.shared.failpoints import failpoint
from weightcast.shared.local.follow import Follower
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.words import TensorTable

_POLL_SECONDS = 0.05
_PATIENCE = 1.25


class Member:
    def __init__(self, follower: Follower, rank: Rank, options: PublishOptions) -> None:
        self._follower, self._rank, self._options = follower, rank, options
        self._seen = rendezvous.attempts_seen(Layout(follower.channel_dir))

    def publish(self, work: Work) -> PublishReport:
        try:
            return self._publish(work)
        except OSError as error:
            self._follower.release()
            raise RetryLater(
                f"{error.filename or self._follower.channel_dir}: {error.strerror or error}",
                remedy="check the mounts and the space on them; rank 0 may have given up",
            ) from error

    def _publish(self, work: Work) -> PublishReport:
        deadline = time.monotonic() + self._options.deadline_seconds
        channel = Channel.open(self._follower.channel_dir, self._options.trust)
        with work.phase("ranks"):
            directory, attempt = rendezvous.find_attempt(
                channel.layout,
                work.step,
                self._rank,
                channel.pointed(),
                deadline,
                self._seen,
            )
        failpoint("part.begun", directory)
        # longer than rank 0 waits: it is rank 0 that knows who is missing, and tells
        deadline = time.monotonic() + _PATIENCE * self._options.deadline_seconds
        try:
            local, shared = self._local(channel, attempt, work, deadline)
            self._leave_part(channel, local, attempt, directory, work, deadline)
        except BaseException as error:
            self._tell_failure(directory, error)
            raise
        table = local.table
        if shared:
            # rank 0 patches the files that are mapped here
            self._follower.release()
        with work.phase("commit"):
            index = self._await_commit(
                directory, attempt, lambda: _pointed(channel, attempt.version, table), deadline
            )
        if not shared:
            with work.phase("patch"):
                self._follower.catch_up(channel)
        return report_of(index, table, work, channel.layout.version_dir(index.version))

    def _await_commit(
        self, directory: Path, attempt: Attempt, committed: Callable[[], Index | None], deadline: float
    ) -> Index:
        try:
            return rendezvous.wait_for_commit(directory, attempt, committed, deadline)
        except NeedsReseed as error:
            if self._follower.owns:
                self._follower.distrust(str(error))
            raise

    def _tell_failure(self, directory: Path, error: BaseException) -> None:
        """Rank 0 need not wait for a part that will not come; where a local checkpoint has drifted, every
        rank reads its own again."""
        drifted = isinstance(error, NeedsReseed)
        with contextlib.suppress(OSError):
            rendezvous.leave_failure(directory, self._rank.number, error, drifted)
        if drifted and self._follower.owns:
            self._follower.distrust(str(error))
        self._follower.release()

    def _local(
        self, channel: Channel, attempt: Attempt, work: Work, deadline: float
    ) -> tuple[LocalCheckpoint, bool]:
        """This rank's own local checkpoint, or (True) rank 0's on the same machine, at the attempt's base."""
        with work.phase("recover"):
            try:
                self._follower.own()
            except RetryLater:
                return self._shared_local(attempt, deadline), True
            self._follower.catch_up(channel)
            return _at_base(self._follower.local, attempt), False

    def _shared_local(self, attempt: Attempt, deadline: float) -> LocalCheckpoint:
        directory = self._follower.paths.directory
        while time.monotonic() < deadline:
            local = LocalCheckpoint.open(directory)
            if local is not None and local.state.position.digest == attempt.base_digest:
                self._follower.local = local
                return local
            if local is not None:
                local.close()
            time.sleep(_POLL_SECONDS)
        raise NotInTime(
            f"{directory} did not reach version {attempt.version - 1} in time",
            remedy="look at the process that owns it",
        )

    def _leave_part(
        self,
        channel: Channel,
        local: LocalCheckpoint,
        attempt: Attempt,
        directory: Path,
        work: Work,
        deadline: float,
    ) -> None:
        if attempt.encoding != self._options.encoding:
            raise Refused(
                f"rank 0 publishes with encoding {attempt.encoding}, this rank with {self._options.encoding}",
                remedy="all ranks publish the same step with the same encoding",
            )
        frame = Frame(
            run_id=local.state.run_id,
            version=attempt.version,
            base=local.state.position,
            epoch=attempt.epoch,
            encoding=self._options.encoding,
            step=attempt.step,
            created=attempt.created,
        )
        weights = work.read()
        try:
            matched = matched_to_run(channel, weights, self._rank, work)
            names = given_names(weights, matched, local.table)
            rendezvous.leave_holds(directory, self._rank.number, holds_of(weights, names), local.table)
            with work.phase("ranks"):
                holds = rendezvous.await_plan(directory, attempt, local.table, deadline)
            division = division_of(attempt, local.table, holds, matched.frozen)
            options = self._options
            writer = PartWriter(
                local, frame, directory, self._rank, options.threads, non_finite=options.non_finite
            )
            left = Turn(writer, attempt, deadline).take(weights, matched, names, division, work)
            work.let_go()
        finally:
            weights.close()
        failpoint("part.written", directory)
        rendezvous.leave_part(directory, self._rank.number, left, local.table)
        failpoint("part.left", directory)


def _at_base(local: LocalCheckpoint | None, attempt: Attempt) -> LocalCheckpoint:
    if local is None or local.state.position.digest != attempt.base_digest:
        raise RetryLater(
            f"this rank's local checkpoint is not at version {attempt.version - 1} of the channel",
            remedy="is its mount stale? publish again",
        )
    return local


def _pointed(channel: Channel, version: int, table: TensorTable) -> Index | None:
    """The version's index once the pointer has reached it."""
    pointer = channel.pointer()
    if pointer is None or pointer.version < version:
        return None
    index = channel.index(pointer, version, table)
    return index if isinstance(index, Index) else None
