"""Ranks other than 0: their part into rank 0's attempt, then the outcome from the channel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weightcast.publisher.publish.compare import Ahead, compare_first, may_compare_first
from weightcast.publisher.publish.draft import Frame
from weightcast.publisher.publish.publish_job import (
    PartWriter,
    PublishOptions,
    Work,
    matched_to_run,
    report_of,
)
from weightcast.publisher.publish.report import PublishReport
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.rank_publish import Turn, division_of, given_names, holds_of
from weightcast.publisher.ranks.rendezvous import Attempt, Rank
from weightcast.publisher.ranks.shard_assignment import Division
from weightcast.publisher.weights.match import Matched
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import TensorTable
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
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.run_files import ChannelFile
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.state.state import Phase, read_state
from weightcast.shared.files.disk_errors import disk_error

_POLL_SECONDS = 0.05
_PATIENCE = 1.25


class MemberRank:
    """Publishes as a rank other than 0. An error is told in the attempt, where there is one, so that rank 0
    need not wait for its deadline; what was read of the tensors is not needed any more."""

    def __init__(self, updater: LocalUpdater, rank: Rank, options: PublishOptions) -> None:
        self._updater, self._rank, self._options = updater, rank, options
        self._seen = rendezvous.attempts_seen(Layout(updater.channel_dir))
        self._last: _Last | None = None

    def publish(self, work: Work) -> PublishReport:
        last, self._last = self._last, None
        try:
            return self._publish(work, last)
        except OSError as error:
            self._updater.release()
            raise disk_error(error, self._updater.channel_dir) from error

    def _publish(self, work: Work, last: _Last | None) -> PublishReport:
        began = self._compare_first(work, last)
        deadline = time.monotonic() + self._options.deadline_seconds
        channel = Channel.open(self._updater.channel_dir, self._options.trust)
        with contextlib.closing(_Given(began, self._rank, work)) as given:
            met: _Meeting | None = None
            while met is None:
                met = self._meet(channel, given, work, deadline)
            with self._told(met.directory):
                self._leave_part(met, given, work)
        table, attempt = met.local.table, met.attempt
        if met.shared:
            # rank 0 patches the files that are mapped here
            self._updater.release()
        with work.phase("commit"):
            index = self._await_commit(
                met.directory, attempt, lambda: _pointed(channel, attempt.version, table), met.deadline
            )
        if not met.shared:
            with work.phase("patch"):
                self._updater.update_to_latest(channel)
        self._last = _Last(channel.require_ours()[0], attempt.base_digest, index.digest)
        return report_of(index, table, work, channel.layout.version_dir(index.version))

    def _meet(self, channel: Channel, given: _Given, work: Work, deadline: float) -> _Meeting | None:
        """Joins an attempt, up to where every rank knows what all hold. None where it was cleared away
        meanwhile: rank 0 was killed and begins again, so that there will be another."""
        with work.phase("ranks"), _rather(given.began):
            directory, attempt = rendezvous.find_attempt(
                channel.layout, work.step, self._rank, channel.pointed(), deadline, self._seen
            )
        failpoint("part.begun", directory)
        # longer than rank 0 waits: it is rank 0 that knows who is missing, and tells
        until = time.monotonic() + _PATIENCE * self._options.deadline_seconds
        try:
            with self._told(directory):
                return self._joined(channel, directory, attempt, given, work, until)
        except (RetryLater, OSError):
            if rendezvous.is_cleared(directory):
                return None
            raise

    def _joined(
        self, channel: Channel, directory: Path, attempt: Attempt, given: _Given, work: Work, deadline: float
    ) -> _Meeting:
        if isinstance(given.began, BaseException):
            raise given.began
        local, shared = self._local(channel, attempt, work, deadline)
        if attempt.encoding != self._options.encoding:
            raise Refused(
                f"rank 0 publishes with encoding {attempt.encoding}, this rank with {self._options.encoding}",
                remedy="all ranks publish the same step with the same encoding",
            )
        weights, matched = given.to(channel, local)
        names = given_names(weights, matched, local.table)
        rendezvous.leave_holds(directory, self._rank.number, holds_of(weights, names), local.table)
        with work.phase("ranks"):
            plan = rendezvous.await_plan(directory, attempt, local.table, deadline)
        division = division_of(attempt, local.table, plan, matched.frozen)
        return _Meeting(directory, attempt, local, shared, names, division, deadline)

    def _compare_first(self, work: Work, last: _Last | None) -> Ahead | Exception | None:
        """An error is returned: rank 0 is to be told. None where the channel has to be asked first: at the
        first publication, after an error, and where nobody waits for the tensors."""
        if last is None or not may_compare_first(work, self._rank):
            return None
        try:
            local = self._updater.local if self._updater.owns else self._followed(last)
            if local is None:
                return None
            return compare_first(local, last.file, work, self._rank, self._options.threads)
        except Exception as error:
            work.let_go()
            return error

    def _followed(self, last: _Last) -> LocalCheckpoint | None:
        """Rank 0's local checkpoint, once it has followed the last version. None when it went elsewhere."""
        paths, deadline = self._updater.paths, time.monotonic() + self._options.deadline_seconds
        while time.monotonic() < deadline:
            state = read_state(paths.state)
            if state is None or state.phase not in (Phase.CLEAN, Phase.PATCHING):
                return None
            at = state.position.digest
            if at == last.digest and state.phase is Phase.CLEAN:
                self._updater.local = LocalCheckpoint.open(paths.directory)
                return self._updater.local
            if at not in (last.digest, last.base_digest):
                return None
            time.sleep(_POLL_SECONDS)
        return None

    def _await_commit(
        self, directory: Path, attempt: Attempt, committed: Callable[[], Index | None], deadline: float
    ) -> Index:
        try:
            return rendezvous.wait_for_commit(directory, attempt, committed, deadline)
        except NeedsReseed as error:
            if self._updater.owns:
                self._updater.mark_dirty(str(error))
            raise

    @contextlib.contextmanager
    def _told(self, directory: Path) -> Iterator[None]:
        """Of an error in the block rank 0 is told: it need not wait for a part that will not come; where a
        local checkpoint has drifted, every rank reads its own again."""
        try:
            yield
        except BaseException as error:
            drifted = isinstance(error, NeedsReseed)
            with contextlib.suppress(OSError):
                rendezvous.leave_failure(directory, self._rank.number, error, drifted)
            if drifted and self._updater.owns:
                self._updater.mark_dirty(str(error))
            self._updater.release()
            raise

    def _local(
        self, channel: Channel, attempt: Attempt, work: Work, deadline: float
    ) -> tuple[LocalCheckpoint, bool]:
        """This rank's own local checkpoint, or (True) rank 0's on the same machine, at the attempt's base."""
        with work.phase("recover"):
            if not self._updater.owns:
                # opened to be compared with, without the lock that says that it is as it was
                self._updater.release()
            try:
                self._updater.own()
            except RetryLater:
                return self._shared_local(attempt, deadline), True
            self._updater.update_to_latest(channel)
            return _at_base(self._updater.local, attempt), False

    def _shared_local(self, attempt: Attempt, deadline: float) -> LocalCheckpoint:
        directory = self._updater.paths.directory
        while time.monotonic() < deadline:
            local = LocalCheckpoint.open(directory)
            if local is not None and local.state.position.digest == attempt.base_digest:
                self._updater.local = local
                return local
            if local is not None:
                local.close()
            time.sleep(_POLL_SECONDS)
        raise NotInTime(
            f"{directory} did not reach version {attempt.version - 1} in time",
            remedy="look at the process that owns it",
        )

    def _leave_part(self, met: _Meeting, given: _Given, work: Work) -> None:
        local, attempt, directory, options = met.local, met.attempt, met.directory, self._options
        frame = Frame(
            run_id=local.state.run_id,
            version=attempt.version,
            base=local.state.position,
            epoch=attempt.epoch,
            encoding=options.encoding,
            step=attempt.step,
            created=attempt.created,
        )
        writer = PartWriter(
            local, frame, directory, self._rank, options.threads, non_finite=options.non_finite
        )
        weights, matched = given.opened
        left = Turn(writer, attempt, met.deadline).take(weights, matched, met.names, met.division, work)
        work.let_go()
        given.close()
        failpoint("part.written", directory)
        rendezvous.leave_part(directory, self._rank.number, left, local.table)
        failpoint("part.left", directory)


class _Given:
    """This rank's new weights: opened at the first attempt that it joins, kept where there is another.
    `began`: what it compared before, or the error of that."""

    def __init__(self, began: Ahead | Exception | None, rank: Rank, work: Work) -> None:
        self.began = began
        self._rank, self._work = rank, work
        self._opened: tuple[NewWeights, Matched] | None = None

    @property
    def opened(self) -> tuple[NewWeights, Matched]:
        if self._opened is None:
            raise ValueError("no weights were given")
        return self._opened

    def to(self, channel: Channel, local: LocalCheckpoint) -> tuple[NewWeights, Matched]:
        """`local` is at the attempt's base. RetryLater where weights were compared with another before."""
        if isinstance(self.began, Ahead):
            self.began.weights.moved_to(local)
            self._opened = self.began.weights, self.began.matched
        elif self._opened is None:
            weights = self._work.read()
            try:
                self._opened = weights, matched_to_run(channel, weights, self._rank, self._work)
            except BaseException:
                weights.close()
                raise
        return self.opened

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()


@dataclass(frozen=True)
class _Meeting:
    """An attempt in which every rank knows what all hold. `shared`: `local` is rank 0's, on this machine;
    `names`: of `given_names`."""

    directory: Path
    attempt: Attempt
    local: LocalCheckpoint
    shared: bool
    names: Mapping[int, str]
    division: Division
    deadline: float


@dataclass(frozen=True)
class _Last:
    """What the last publication here left: digests of the indexes of its base and of its own."""

    file: ChannelFile
    base_digest: str
    digest: str


@contextlib.contextmanager
def _rather(error: object) -> Iterator[None]:
    """This rank's own error tells more than that rank 0 did not come."""
    try:
        yield
    except WeightcastError as late:
        if isinstance(error, Exception):
            raise error from late
        raise


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
