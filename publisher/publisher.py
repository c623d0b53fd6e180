"""The publisher: the only writer of versions and of the pointer.

State that must survive lies in the channel and in the local checkpoint; after any error both are read again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcast.publisher import rendezvous
from weightcast.publisher.anchors import anchor_index, write_anchor_beside, write_weights
from weightcast.publisher.commit import (
    PostWrite,
    advance_pointer,
    commit_index,
    discard,
    drop_parts,
    move_shards,
    new_parts_dir,
    verify_files,
)
from weightcast.publisher.diff import check_ties, write_difference
from weightcast.publisher.draft import Assembled, Frame, assemble, draft
from weightcast.publisher.match import Matched, match
from weightcast.publisher.report import PublishReport
from weightcast.publisher.tensors import CheckpointWeights, GivenWeights, NewWeights
from weightcast.shared.channel.claims import Claim, claim, this_process
from weightcast.shared.channel.delta import open_shard_writer
from weightcast.shared.channel.index import INDEX_NAME, Encoding, Index, parse_index, write_index
from weightcast.shared.channel.layout import version_of
from weightcast.shared.channel.pointer import Pointer
from weightcast.shared.channel.store import Channel
from weightcast.shared.errors import (
    DamagedFile,
    NeedsReseed,
    NotInTime,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.local.follow import Follower, FollowOptions, open_base
from weightcast.shared.local.local_checkpoint import LocalCheckpoint
from weightcast.shared.local.seed import check_other_files
from weightcast.shared.local.stage import Fetched, Staged, stage
from weightcast.shared.local.state import Phase
from weightcast.shared.words import Part, Segment, TensorTable, Words, grid, whole_part

Advance = Callable[[int], None]
Watching = Callable[[str], None]
"""Called with the name of each phase as it begins."""

_BEAT_SECONDS = 10.0
_VISIBLE_SECONDS = 30.0


@dataclass(frozen=True)
class PublishOptions:
    """`threads`: low by default beside a trainer. `deadline_seconds`: for ranks to meet. `anchor_every`: an
    anchor beside every Nth version, 0: none."""

    encoding: Encoding = "fast"
    threads: int = 1
    deadline_seconds: float = 600.0
    anchor_every: int = 0
    post_write: PostWrite | None = None


class _Clock:
    """Seconds by phase."""

    def __init__(self, watching: Watching | None) -> None:
        self.seconds: dict[str, float] = {}
        self._watching = watching

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._watching is not None:
            self._watching(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


class Publisher:
    """Publishes versions of one run; one per rank. Not thread-safe.

    >>> with Publisher.open("/shared/run", local="/var/lib/weightcast", base="/models/base") as publisher:
    ...     report = publisher.publish(model.state_dict(), step=1)
    """

    def __init__(
        self,
        follower: Follower,
        claimed: Claim | None,
        rank: int,
        world_size: int,
        options: PublishOptions,
    ) -> None:
        self._follower = follower
        self._claim = claimed
        self._rank, self._world_size = rank, world_size
        self._options = options
        self._reader = rank != 0
        self._heart = _Heart(claimed) if claimed is not None else None

    @classmethod
    def open(
        cls,
        channel: str | Path,
        *,
        local: str | Path,
        base: str | Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        encoding: Encoding = "fast",
        threads: int = 1,
        take_over: bool = False,
        take_over_seconds: float = 60.0,
        post_write: PostWrite | None = None,
        anchor_every: int = 0,
        deadline_seconds: float = 600.0,
    ) -> Publisher:
        """`channel`: made by `init_channel` or `weightcast channel init`. `local`: this publisher's own local
        checkpoint, seeded from `base` when it is new. Ranks other than 0 may share rank 0's `local` on its
        machine.

        Raises Refused while another publisher owns the channel, WrongRun when `local` is another run's.
        """
        if not 0 <= rank < world_size:
            raise Refused(f"rank {rank} of world_size {world_size}", remedy="ranks count from 0")
        directory = Path(channel)
        Channel.open(directory).require_ours()
        follower = Follower(
            directory,
            Path(local),
            None if base is None else Path(base),
            FollowOptions(threads=threads, visible_seconds=_VISIBLE_SECONDS),
        )
        options = PublishOptions(encoding, threads, deadline_seconds, anchor_every, post_write)
        claimed = None
        if rank == 0:
            follower.own()
            try:
                claimed = claim(directory, this_process(), take_over=take_over, patience=take_over_seconds)
            except BaseException:
                follower.close()
                raise
        publisher = cls(follower, claimed, rank, world_size, options)
        try:
            if rank == 0:
                publisher.recover()
        except BaseException:
            publisher.close()
            raise
        return publisher

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._heart is not None:
            self._heart.stop()
        if self._claim is not None:
            with contextlib.suppress(OSError):
                self._claim.release()
        self._follower.close()

    @property
    def version(self) -> int:
        """The version that the pointer names, 0 before the first."""
        pointer = self._channel().pointer()
        return 0 if pointer is None else pointer.version

    @property
    def epoch(self) -> int:
        return 0 if self._claim is None else self._claim.epoch

    @property
    def run_id(self) -> str:
        return self._channel().require_ours()[0].run_id

    @property
    def local_version(self) -> int | None:
        state = self._follower.state
        return None if state is None else state.position.version

    def _channel(self) -> Channel:
        return Channel.open(self._follower.channel_dir)

    def recover(self, advance: Advance | None = None) -> None:
        """Finishes a version that was committed and never pointed to; brings the local checkpoint to the
        pointer; clears away parts that came to nothing. Rank 0 does this by itself at `open`."""
        channel = self._channel()
        self._finish_committed(channel)
        drop_parts(channel.layout)
        try:
            self._follower.catch_up(channel, advance)
        except Refused as error:
            self._follower.release()
            self._follower.trouble = self._follower.trouble or error.message

    def _finish_committed(self, channel: Channel) -> None:
        pointer = channel.pointer()
        at = 0 if pointer is None else pointer.version
        _, base = channel.require_ours()
        for version in sorted(v for v in _committed(channel) if v > at):
            index = channel.index(Pointer(version, None, channel.directory), version, base.table)
            follows = isinstance(index, Index) and self._follows(channel, at, index)
            if not isinstance(index, Index) or not follows:
                continue
            verify_files(channel.layout.version_dir(version), index)
            advance_pointer(channel.layout, version, self._owned(), self._options.post_write)
            at = version

    def _follows(self, channel: Channel, at: int, index: Index) -> bool:
        if index.kind == "anchor":
            return True
        _, base = channel.require_ours()
        return index.base_version == at and index.parent == _digest_at(channel, at, base.table)

    def _owned(self) -> Claim:
        if self._claim is None:
            raise Refused(f"rank {self._rank} does not own the channel", remedy="only rank 0 commits")
        return self._claim

    def publish(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        *,
        step: int | None = None,
        advance: Advance | None = None,
        watching: Watching | None = None,
    ) -> PublishReport:
        """Publishes the next version from (HF name, torch tensor on any device or numpy array).

        The tensors must stand still until this returns. With several ranks each gives the tensors that it
        owns, for the same `step`. Nothing is published when this raises, except NotInTime on a rank other
        than 0 (rank 0 may still commit; the next call catches up).
        """
        return self._publish(lambda: GivenWeights(named_tensors), step, _Clock(watching), advance)

    def publish_checkpoint(
        self,
        directory: str | Path,
        *,
        step: int | None = None,
        advance: Advance | None = None,
        watching: Watching | None = None,
    ) -> PublishReport:
        """Publishes a complete HF checkpoint directory; Refused when it changes while it is read."""

        def read() -> NewWeights:
            weights = CheckpointWeights(Path(directory))
            _, base = self._channel().require_ours()
            given = {path.name for path in weights.checkpoint.other_files}
            # a trainer may leave out config and tokenizer; what it writes must be the run's
            known = [record for record in base.files if record.name in given]
            check_other_files(Path(directory), weights.checkpoint.other_files, known)
            return weights

        return self._publish(read, step, _Clock(watching), advance)

    def _publish(
        self,
        read: Callable[[], NewWeights],
        step: int | None,
        clock: _Clock,
        advance: Advance | None,
    ) -> PublishReport:
        if self._rank != 0:
            return self._publish_part(read, step, clock, advance)
        try:
            return self._publish_version(read, step, clock, advance)
        except NeedsReseed as error:
            self._distrust_local(error)
            return self._publish_version(read, step, clock, advance)
        except BaseException:
            self._follower.release()
            raise

    def _distrust_local(self, error: NeedsReseed) -> None:
        """The local checkpoint is not what it claims: it is brought anew before the one retry."""
        local = self._follower.local
        if local is not None and local.state.phase is Phase.CLEAN:
            local.save(local.state.but(phase=Phase.DIRTY))
        self._follower.release()
        self._follower.trouble = error.message

    def _publish_version(
        self,
        read: Callable[[], NewWeights],
        step: int | None,
        clock: _Clock,
        advance: Advance | None,
    ) -> PublishReport:
        self._owned().check()
        with clock.phase("recover"):
            self.recover(advance)
        channel = self._channel()
        with clock.phase("read"):
            weights = read()
        try:
            matched = self._match(channel, weights)
            local = self._follower.local
            if local is None or local.state.position.version != self.version or self._burned(channel):
                return self._publish_anchor(channel, weights, matched, step, clock, advance)
            return self._publish_delta(channel, local, weights, matched, step, clock, advance)
        finally:
            weights.close()

    def _match(self, channel: Channel, weights: NewWeights) -> Matched:
        file, base = channel.require_ours()
        matched = match(
            weights.table,
            base.table,
            frozen=file.frozen,
            aliases=file.aliases,
            partial=self._world_size > 1,
        )
        check_ties(weights, matched, base.table)
        return matched

    def _burned(self, channel: Channel) -> bool:
        """The next number is taken by a version that no pointer may ever lead to."""
        return self.version + 1 in _committed(channel)

    def _publish_delta(
        self,
        channel: Channel,
        local: LocalCheckpoint,
        weights: NewWeights,
        matched: Matched,
        step: int | None,
        clock: _Clock,
        advance: Advance | None,
    ) -> PublishReport:
        owned, layout = self._owned(), channel.layout
        frame = self._frame(local, step)
        parts = new_parts_dir(layout, frame.version, owned.epoch)
        try:
            attempt = self._attempt(frame)
            rendezvous.open_attempt(parts, attempt)
            with clock.phase("diff"):
                own = self._write_part(local, frame, parts, weights, matched, advance)
                weights.finish()
            with clock.phase("ranks"):
                deadline = time.monotonic() + self._options.deadline_seconds
                others = rendezvous.collect_drafts(parts, attempt, local.table, deadline)
            assembled = assemble(local.table, frame.base, [own, *others], _frozen(channel, local.table))
            directory = move_shards(layout, frame.version, parts, assembled.sources)
        except BaseException as error:
            rendezvous.close_attempt(parts, str(error)[:500])
            raise
        with clock.phase("stage"):
            index, staged = self._prove(local, assembled, directory)
        with clock.phase("commit"):
            self._commit(layout, index, local.table, directory)
        with clock.phase("patch"):
            self._patch(staged)
        # ranks that still look find the version's index; the parts are not needed any more
        drop_parts(layout)
        self._anchor_beside(channel, index.version)
        return _report(index, local.table, clock.seconds, directory)

    def _frame(self, local: LocalCheckpoint, step: int | None) -> Frame:
        position = local.state.position
        return Frame(
            run_id=local.state.run_id,
            version=position.version + 1,
            base=position,
            epoch=self._owned().epoch,
            encoding=self._options.encoding,
            step=step,
            created=time.time(),
        )

    def _attempt(self, frame: Frame) -> rendezvous.Attempt:
        return rendezvous.Attempt(
            version=frame.version,
            epoch=frame.epoch,
            base_digest=frame.base.digest,
            step=frame.step,
            world_size=self._world_size,
            encoding=frame.encoding,
            created=frame.created,
        )

    def _write_part(
        self,
        local: LocalCheckpoint,
        frame: Frame,
        directory: Path,
        weights: NewWeights,
        matched: Matched,
        advance: Advance | None,
    ) -> Index:
        part = whole_part(local.table) if self._world_size == 1 else _part_of(local.table, matched)
        chunks = sum(1 for _ in grid(local.table, part))
        path = directory / rendezvous.shard_name(self._rank)
        writer = open_shard_writer(frame.encoding, path, local.table, chunks)
        try:
            with local.standing_still():
                difference = write_difference(
                    local,
                    part,
                    weights,
                    matched,
                    writer,
                    threads=self._options.threads,
                    advance=advance,
                )
        except BaseException:
            writer.abandon()
            raise
        return draft(frame, local.table, part, difference)

    def _prove(self, local: LocalCheckpoint, assembled: Assembled, directory: Path) -> tuple[Index, Staged]:
        """Stages the written files as a host would: no host sees a version that did not pass."""
        index = parse_index(write_index(assembled.index, local.table), local.table)
        try:
            verify_files(directory, index)
            return index, stage(local, [Fetched(index, directory)], threads=self._options.threads)
        except BaseException:
            discard(self._channel().layout, directory)
            raise

    def _commit(self, layout: Any, index: Index, table: TensorTable, directory: Path) -> None:
        commit_index(layout, index, table, self._owned(), directory)
        advance_pointer(layout, index.version, self._owned(), self._options.post_write)

    def _patch(self, staged: Staged) -> None:
        local = self._follower.local
        if local is None:
            raise RetryLater("the local checkpoint was closed", remedy="publish again")
        with local.patching():
            self._follower.patch(staged)
        self._follower.forget_undo()

    def _anchor_beside(self, channel: Channel, version: int) -> None:
        every, local = self._options.anchor_every, self._follower.local
        if every > 0 and version % every == 0 and local is not None:
            write_anchor_beside(channel.layout, local, self._owned())

    def write_anchor(self) -> bool:
        """Full weights of the current version beside it, for hosts without a base. False when they exist."""
        self.recover()
        local = self._follower.local
        if local is None or self.version == 0:
            raise Refused("there is no version to anchor", remedy="publish one first")
        return write_anchor_beside(self._channel().layout, local, self._owned())

    def _publish_anchor(
        self,
        channel: Channel,
        weights: NewWeights,
        matched: Matched,
        step: int | None,
        clock: _Clock,
        advance: Advance | None,
    ) -> PublishReport:
        """Where no delta can be made (local checkpoint ahead of the channel, or lost): full weights under the
        next free number begin a new chain."""
        if self._world_size > 1 or matched.absent:
            why = self._follower.trouble or "the local checkpoint is ahead of the channel"
            raise Refused(
                f"no delta can be made ({why}) and an anchor needs all tensors in one process",
                remedy="publish once with world_size 1, or restore the publisher's local checkpoint",
            )
        table = channel.require_ours()[1].table
        version = self._next_anchor_version(channel)
        directory = channel.layout.version_dir(version)
        if directory.exists():
            discard(channel.layout, directory)
        directory.mkdir()
        try:
            with clock.phase("diff"):
                words_in = _by_number(weights, matched)
                written = write_weights(directory, table, words_in, self._other_files(), advance=advance)
                weights.finish()
            index = anchor_index(self.run_id, version, self.epoch, step, table, written)
        except BaseException:
            discard(channel.layout, directory)
            raise
        with clock.phase("commit"):
            self._commit(channel.layout, index, table, directory)
        with clock.phase("patch"):
            self.recover(advance)
        return _report(index, table, clock.seconds, directory)

    def _next_anchor_version(self, channel: Channel) -> int:
        local = self._follower.state
        taken = [self.version, *_committed(channel)]
        if local is not None:
            taken.append(local.position.version)
        return max(taken) + 1

    def _other_files(self) -> Sequence[Path]:
        if self._follower.local is not None:
            return self._follower.local.checkpoint.other_files
        if self._follower.base_dir is not None:
            return open_base(self._follower.base_dir).other_files
        raise Refused(
            "the local checkpoint is lost and no base is known", remedy="give --base for config and tokenizer"
        )

    def _publish_part(
        self,
        read: Callable[[], NewWeights],
        step: int | None,
        clock: _Clock,
        advance: Advance | None,
    ) -> PublishReport:
        """A rank other than 0: its part into rank 0's attempt, then the outcome from the channel."""
        deadline = time.monotonic() + self._options.deadline_seconds
        channel = self._channel()
        with clock.phase("ranks"):
            directory, attempt = rendezvous.find_attempt(
                channel.layout, step, self._world_size, self.version, deadline
            )
        try:
            with clock.phase("recover"):
                local = self._local_of_rank(channel, attempt, deadline)
            with clock.phase("diff"):
                own = self._draft_of_rank(channel, local, attempt, directory, read, advance)
            rendezvous.leave_draft(directory, self._rank, own, local.table)
        except WeightcastError as error:
            rendezvous.leave_failure(directory, self._rank, str(error)[:500])
            self._follower.release()
            raise
        table = local.table
        if self._reader:
            # rank 0 patches the files that are mapped here
            self._follower.release()
        with clock.phase("commit"):
            index = rendezvous.wait_for_commit(
                channel.layout, directory, attempt, lambda: self._seen(attempt.version, table), deadline
            )
        if not self._reader:
            with clock.phase("patch"):
                self._follower.catch_up(channel)
        return _report(index, table, clock.seconds, channel.layout.version_dir(index.version))

    def _draft_of_rank(
        self,
        channel: Channel,
        local: LocalCheckpoint,
        attempt: rendezvous.Attempt,
        directory: Path,
        read: Callable[[], NewWeights],
        advance: Advance | None,
    ) -> Index:
        weights = read()
        try:
            frame = Frame(
                local.state.run_id,
                attempt.version,
                local.state.position,
                attempt.epoch,
                self._options.encoding,
                attempt.step,
                attempt.created,
            )
            matched = self._match(channel, weights)
            own = self._write_part(local, frame, directory, weights, matched, advance)
            weights.finish()
            return own
        finally:
            weights.close()

    def _local_of_rank(
        self, channel: Channel, attempt: rendezvous.Attempt, deadline: float
    ) -> LocalCheckpoint:
        """This rank's own local checkpoint, or rank 0's on the same machine, at the attempt's base."""
        self._reader = False
        try:
            self._follower.catch_up(channel)
        except RetryLater:
            self._reader = True
        if not self._reader:
            return _at_base(self._follower.local, attempt)
        while time.monotonic() < deadline:
            local = LocalCheckpoint.open(self._follower.paths.directory)
            if local is not None and local.state.position.digest == attempt.base_digest:
                self._follower.local = local
                return local
            if local is not None:
                local.close()
            time.sleep(0.05)
        raise NotInTime(
            f"{self._follower.paths.directory} did not reach version {attempt.version - 1} in time",
            remedy="look at the process that owns it",
        )

    def _seen(self, version: int, table: TensorTable) -> Index | None:
        channel = self._channel()
        pointer = channel.pointer()
        if pointer is None or pointer.version < version:
            return None
        index = channel.index(pointer, version, table)
        return index if isinstance(index, Index) else None


def _at_base(local: LocalCheckpoint | None, attempt: rendezvous.Attempt) -> LocalCheckpoint:
    if local is None or local.state.position.digest != attempt.base_digest:
        raise RetryLater(
            f"this rank's local checkpoint is not at version {attempt.version - 1} of the channel",
            remedy="is its mount stale? publish again",
        )
    return local


def _part_of(table: TensorTable, matched: Matched) -> Part:
    return Part(0, tuple(Segment(tensor, 0, table[tensor].words) for tensor in sorted(matched.sources)))


def _frozen(channel: Channel, table: TensorTable) -> frozenset[int]:
    file, _ = channel.require_ours()
    return match(TensorTable(()), table, frozen=file.frozen, aliases={}, partial=True).frozen


def _by_number(weights: NewWeights, matched: Matched) -> Callable[[int, int, int], Words]:
    return lambda tensor, start, stop: weights.words_in(matched.sources[tensor], start, stop)


def _committed(channel: Channel) -> set[int]:
    """Versions with an index, whatever the pointer says. Only the owner may look there."""
    found = set()
    for entry in channel.directory.iterdir():
        version = version_of(entry.name)
        if version is not None and (entry / INDEX_NAME).exists():
            found.add(version)
    return found


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


def _report(index: Index, table: TensorTable, seconds: Mapping[str, float], directory: Path) -> PublishReport:
    changed_bytes = sum(
        record.changed * table[n].nbytes // max(1, table[n].elements)
        for name, record in index.tensors.items()
        for n in (table.numbers[name],)
    )
    return PublishReport(
        run_id=index.run_id,
        version=index.version,
        base_version=index.base_version,
        kind=index.kind,
        step=index.step,
        root=index.root,
        encoding=index.encoding,
        elements=table.elements,
        changed_elements=index.totals.changed,
        full_bytes=table.nbytes,
        changed_bytes=changed_bytes,
        delta_bytes=index.totals.delta_bytes + (directory / INDEX_NAME).stat().st_size,
        tensors_changed=len(index.tensors),
        seconds=dict(seconds),
    )


class _Heart:
    """Shows in the claim that this process lives, also while a trainer does not publish."""

    def __init__(self, claimed: Claim) -> None:
        self._claim = claimed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightcast-claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            # the channel may be away for a while; the next beat tells
            with contextlib.suppress(OSError):
                self._claim.beat()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


__all__ = ["PublishOptions", "Publisher"]
