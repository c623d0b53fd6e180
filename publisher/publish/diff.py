"""The part of a version that one rank writes: every old and new byte read once, changed chunks encoded, the
new bytes hashed in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.publish.commit import Files
from weightcast.publisher.publish.publish_job import Input, PublishOptions
from weightcast.publisher.ranks.rendezvous import Attempt, RankPart, SegmentSums, shard_name
from weightcast.publisher.weights.precision import became_non_finite, check_finite
from weightcast.shared.base.elements import DTYPES, Chunk, Part, TensorTable, Words, grid
from weightcast.shared.base.errors import NeedsReseed, Refused, RetryLater, on_error
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.delta import ChunkStep, PartFiles, ShardWriter, begin_shard
from weightcast.shared.channel.index import FileRecord, Index, VersionTotals
from weightcast.shared.channel.run_files import TensorRecords
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, gather
from weightcast.shared.checkpoint.state.state import unpack_lanes
from weightcast.shared.codec.changes import Changes, scan
from weightcast.shared.digest.checksums import Lanes, SpanSums, StepSums, hash_bytes
from weightcast.shared.kernels.parallel import ordered

_NO_COUNTS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Compared:
    """`full`: of all new words of each span. `changed`: elements, of each span that `step` names."""

    chunk: Chunk
    new: Words
    full: NDArray[np.uint64]
    changed: NDArray[np.int64]
    step: ChunkStep | None = None
    prepared: bytes = b""
    non_finite: tuple[tuple[int, int], ...] = ()
    """(tensor, elements that became so)"""


@dataclass(frozen=True)
class PartWriter:
    """Writes the part of rank `rank` into `files`. `local` is at the base of `attempt`."""

    local: LocalCheckpoint
    attempt: Attempt
    files: Files
    rank: int
    options: PublishOptions
    sync: bool = True
    """False for files that are copied on, and worth nothing after a loss of power"""

    def write(
        self,
        given: Input,
        part: Part,
        advance: Advance | None,
        merged: Callable[[Chunk], Words] | None = None,
    ) -> RankPart:
        """The diff pass. `merged`: the new words of a chunk where they do not all come from `given`. Leaves
        nothing behind when it raises: Refused when a frozen tensor changed, or elements became NaN or
        infinite that are not to, NeedsReseed when the local checkpoint is not what its state says; of tensors
        that the part has not alone the caller proves that."""
        table = self.local.table
        chunks = sum(1 for _ in grid(table, part))
        name, files = self.files.prefix + shard_name(self.rank), self.files.directory
        writer = begin_shard(self.options.encoding, files, name, table, chunks, sync=self.sync)
        with on_error(writer.abandon):
            with self.local.reading():
                written = self._write(given, part, writer, advance, merged)
            given.weights.finish()
        return written

    def _write(
        self,
        given: Input,
        part: Part,
        writer: ShardWriter,
        advance: Advance | None,
        merged: Callable[[Chunk], Words] | None,
    ) -> RankPart:
        local, table = self.local, self.local.table
        comparison = _Comparison(local, given, writer, merged)
        totals = _Accumulator(len(table))
        for one in ordered(comparison.compare, grid(table, part), self.options.threads):
            writer.append(one.chunk, one.prepared, one.new, one.step)
            totals.add(one)
            if advance is not None:
                advance(one.chunk.words * one.chunk.kind.width)
        refuse_moved(table, [one for one in sorted(given.matched.frozen) if totals.step.words[one]])
        if self.options.non_finite == "refuse":
            check_finite(table, totals.non_finite)
        split = {tensor: totals.segment_sums(tensor) for tensor in _split(table, part)}
        _check_baseline(local, totals, split)
        moved = totals.step.changed
        tensors = TensorRecords.numbered(table, moved, totals.full[moved], totals.elements[moved])
        return RankPart(self._draft(part, writer.close(), tensors), split, non_finite=totals.non_finite)

    def _draft(self, part: Part, written: PartFiles, tensors: TensorRecords) -> Index:
        """The part as an index with a single part, number 0, so that one strict parser reads both. Its root
        is the base's, and no pointer ever leads to it."""
        base, table = self.local.state.position, self.local.table
        return Index(
            run_id=self.local.state.run_id,
            version=self.attempt.version,
            kind="delta",
            base_version=base.version,
            base_root=base.root,
            root=base.root,
            parent=base.digest,
            epoch=self.attempt.epoch,
            encoding=self.options.encoding,
            step=self.attempt.step,
            created=self.attempt.created,
            files=written.files,
            tensors=tensors,
            parts=(part,),
            chunks=written.chunks,
            totals=totals_of(table, tensors, written.files),
            checksums=written.checksums,
        )


def totals_of(table: TensorTable, tensors: TensorRecords, files: Iterable[FileRecord]) -> VersionTotals:
    nbytes = sum(file.size for file in files)
    return VersionTotals(int(tensors.changed.sum()), table.elements, table.nbytes, nbytes)


def _split(table: TensorTable, part: Part) -> set[int]:
    if part == table.whole:
        return set()
    pieces = ((one.tensor, (one.start, one.stop)) for one in part.segments)
    return {tensor for tensor, place in pieces if place != (0, table[tensor].words)}


@dataclass
class _Comparison:
    local: LocalCheckpoint
    given: Input
    writer: ShardWriter
    merged: Callable[[Chunk], Words] | None

    def compare(self, chunk: Chunk) -> _Compared:
        old = self.local.chunk_words(chunk)
        new = self.merged(chunk) if self.merged is not None else self._new(chunk)
        found = scan(chunk, old, new)
        if not len(found.changes):
            return _Compared(chunk, new, found.full, _NO_COUNTS)
        prepared = self.writer.prepare(chunk, old, new, found.changes)
        step = ChunkStep(found.changes, found.sums)
        changed = changed_elements(self.local.table, chunk, found.changes, found.sums)
        odd = tuple(became_non_finite(chunk, found.changes, new))
        return _Compared(chunk, new, found.full, changed, step, prepared, odd)

    def _new(self, chunk: Chunk) -> Words:
        run = self.given.weights.run_in(chunk, self.given.matched.numbers[chunk.tensors])
        return gather(chunk, self._new_words) if run is None else run

    def _new_words(self, tensor: int, start: int, stop: int) -> Words:
        owner = self.given if tensor in self.given.matched.sources else self.local
        return owner.words_in(tensor, start, stop)


class _Accumulator:
    """Sums and counts of the part's tensors. `full`: uint64[tensors, 2], over all new words of those `seen`;
    `elements`: int64[tensors], changed ones."""

    def __init__(self, tensors: int) -> None:
        self.step = StepSums(tensors)
        self.full = np.zeros((tensors, 2), np.uint64)
        self.seen = np.zeros(tensors, np.bool_)
        self.elements = np.zeros(tensors, np.int64)
        self.non_finite: dict[int, int] = {}

    def add(self, one: _Compared) -> None:
        np.add.at(self.full, one.chunk.tensors, one.full)
        self.seen[one.chunk.tensors] = True
        if one.step is not None:
            self.step.add(one.step.sums)
            np.add.at(self.elements, one.step.sums.tensors, one.changed)
        for tensor, count in one.non_finite:
            self.non_finite[tensor] = self.non_finite.get(tensor, 0) + count

    def segment_sums(self, tensor: int) -> SegmentSums:
        old_a, old_b, new_a, new_b = self.step.lanes[tensor].tolist()
        return SegmentSums(Lanes(old_a, old_b), Lanes(new_a, new_b), Lanes(*self.full[tensor].tolist()))


def refuse_moved(table: TensorTable, moved: Sequence[int]) -> None:
    """`moved`: frozen tensors that changed."""
    if moved:
        names = ", ".join(table[tensor].name for tensor in moved[:5])
        raise Refused(f"frozen tensors changed: {names}", remedy="unfreeze them in a new channel")


def _check_baseline(local: LocalCheckpoint, totals: _Accumulator, split: Iterable[int]) -> None:
    """The full hash of the new bytes must be what arithmetic on the recorded lanes gives: else the local
    checkpoint has drifted from what the channel says, or somebody wrote into the weights meanwhile."""
    recorded = unpack_lanes(local.state.position.lanes)
    drifted_from = totals.seen & (totals.step.after(recorded) != totals.full).any(axis=1)
    drifted_from[list(split)] = False
    for tensor in np.flatnonzero(drifted_from)[:1].tolist():
        own = hash_bytes(local.words_in(tensor, 0, local.table[tensor].words).view(np.uint8))
        if own == Lanes(*recorded[tensor].tolist()):
            raise RetryLater(
                f"{local.table[tensor].name} changed while it was published; nothing was published",
                remedy="publish again, and do not write into the weights until it returns",
            )
        raise NeedsReseed(
            f"{local.directory}: {local.table[tensor].name} has drifted from version "
            f"{local.state.position.version}; nothing was published",
            remedy="publish again: the local checkpoint is seeded again from base and channel",
        )


def changed_elements(table: TensorTable, chunk: Chunk, changes: Changes, sums: SpanSums) -> NDArray[np.int64]:
    """int64[n]: of each of the spans that `sums` names."""
    width = chunk.kind.width
    if chunk.dtype in DTYPES and DTYPES[chunk.dtype][0] == width:
        return sums.changed
    borders = np.searchsorted(changes.index, [span.offset for span in chunk.spans] + [chunk.words])
    counts = np.zeros(len(chunk.spans), np.int64)
    for n in np.flatnonzero(np.diff(borders)).tolist():
        spec = table[chunk.spans[n].tensor]
        words = changes.index[borders[n] : borders[n + 1]]
        per_element = max(1, spec.nbytes // max(1, spec.elements) // width)
        first = chunk.spans[n].start - chunk.spans[n].offset
        counts[n] = len(np.unique((words.astype(np.int64) + first) // per_element))
    return counts[counts > 0]
