"""The version that all ranks' parts make, and weights that are compared before ranks meet.

For a trainer that waits for its tensors they are compared before the channel is asked for anything: a single
process writes its delta into an outbox beside the local checkpoint. One of several ranks keeps in memory what
differs from the local checkpoint, and meets the others later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weightcast.publisher.publish.commit import Files, put
from weightcast.publisher.publish.diff import PartWriter, totals_of
from weightcast.publisher.publish.publish_job import Input, PublishJob, PublishOptions
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.rendezvous import Attempt, Rank, RankPart, SegmentSums, Sent
from weightcast.publisher.ranks.shard_assignment import Holds, ShardAssignment, assign_shards
from weightcast.publisher.ranks.shards import (
    ComparedWeights,
    FromRank,
    Merged,
    RankWeights,
    runs_in,
    send,
    senders,
)
from weightcast.publisher.weights.shard_spec import Box
from weightcast.publisher.weights.tensors import InputFacts
from weightcast.shared.base.elements import ChunkKey, Part, TensorTable
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Refused
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import STEP_ENCODINGS, ChunkRecord, Index
from weightcast.shared.channel.run_files import ChannelFile, TensorRecords
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Position, unpack_lanes
from weightcast.shared.digest.checksums import Lanes, LanesArray, root
from weightcast.shared.files.paths import is_link


class Meeting:
    """One of several ranks in an attempt in which every rank knows what all hold: what it sends, receives and
    writes. The same for rank 0 and the others, who differ in what they wait for before and after."""

    def __init__(
        self,
        files: Store,
        writer: PartWriter,
        given: Input,
        own: RankWeights,
        holds: Sequence[Holds],
        deadline: float,
    ) -> None:
        """`files`: of the attempt; `holds`: of all ranks; `deadline`: on the monotonic clock, for what other
        ranks send. Raises Refused where the holds do not make the model."""
        self.files, self.writer, self.given, self.own, self.deadline = files, writer, given, own, deadline
        # slime's encodings have one payload per tensor: each tensor has one writer
        whole = writer.options.encoding not in STEP_ENCODINGS
        self.assignment = assign_shards(own.local.table, holds, given.matched.frozen, whole=whole)

    def write_part(self, job: PublishJob) -> RankPart:
        """Sends, receives and writes."""
        table, rank = self.own.local.table, self.own.rank
        with job.phase("exchange"):
            sent = self._send()
        part = Part(0, self.assignment.parts[rank].segments)
        mine, given, merged = self.assignment.answers[rank], self.given, None
        if all(mine.get(one.tensor) == Box.whole(table[one.tensor].shape) for one in part.segments):
            # this rank holds all that it writes: tensors on a device are compared there
            sources = {one.tensor: self.own.names[one.tensor] for one in part.segments}
            given = replace(given, matched=replace(given.matched, sources=sources))
        else:
            with job.phase("ranks"):
                merged = Merged(self.own, runs_in(table, mine), self._received())
        with job.phase("diff"):
            written = self.writer.write(given, part, job.advance, merged)
        return replace(written, sent=sent)

    def _send(self) -> Sent:
        own, files = self.own, self.files
        shares = send(own, self.assignment, files, self.writer.options.threads)
        doubled = sorted(self.assignment.doubled(own.rank))
        sent = Sent(shares, {n: own.digest(n, own.weights.box(own.names[n])) for n in doubled})
        files.replace(rendezvous.rank_file("sent", own.rank), rendezvous.write_sent(sent))
        return sent

    def _received(self) -> list[FromRank]:
        table, answers = self.own.local.table, self.assignment.answers
        ranks = senders(self.assignment, table, self.own.rank)
        read = rendezvous.message(self.files, "sent", rendezvous.parse_sent)
        found = rendezvous.collect(self.files, self.writer.attempt, ranks, read, self.deadline)
        return [
            FromRank(rank, runs_in(table, answers[rank]), sent, self.files)
            for rank, sent in zip(ranks, found, strict=True)
        ]


def check_doubles(assignment: ShardAssignment, table: TensorTable, parts: Sequence[RankPart]) -> None:
    """`parts`: by rank. Raises Refused, naming tensor and ranks, where ranks hold the same piece with other
    bytes."""
    for tensor, groups in sorted(assignment.doubles.items()):
        for ranks in groups:
            digests = [parts[rank].sent.digests.get(tensor) for rank in ranks]
            if len(set(digests)) > 1 or None in digests:
                other = ranks[next(n for n, digest in enumerate(digests) if digest != digests[0])]
                raise Refused(
                    f"{table[tensor].name} has other values on rank {ranks[0]} than on rank {other}",
                    remedy="make replicas and tied tensors equal before you publish them",
                )


def assemble(
    table: TensorTable, base: Position, parts: Sequence[RankPart], *, rename: bool, prefix: str = ""
) -> tuple[Index, Mapping[str, str]]:
    """Joins the ranks' parts: the version's index, and the name in the attempt of each of its files. Raises
    NeedsReseed when the bytes of a tensor that several ranks write are not the recorded ones with these
    changes. `rename`: whether files get other names than in the attempt; otherwise `prefix` and their own."""
    drafts = [one.draft for one in parts]
    shards = [one.files[0] for one in drafts if one.files]
    renamed = {
        shard.name: f"model-{i:05d}-of-{len(shards):05d}.safetensors" if rename else prefix + shard.name
        for i, shard in enumerate(shards)
    }
    recorded = unpack_lanes(base.lanes)
    lanes, changed, listed = recorded.copy(), np.zeros(len(table), np.int64), np.zeros(len(table), np.bool_)
    for one in drafts:
        numbers = one.tensors.numbers(table)
        lanes[numbers] = one.tensors.lanes
        changed[numbers] += one.tensors.changed
        listed[numbers] = True
    for number, proven in _proven(table, recorded, [one.sums for one in parts]).items():
        if listed[number]:
            lanes[number] = proven
    tensors = TensorRecords.numbered(table, np.flatnonzero(listed), lanes[listed], changed[listed])
    index = replace(
        drafts[0],
        root=root(table, lanes),
        files=tuple(replace(shard, name=renamed[shard.name]) for shard in shards),
        weight_map={name: renamed[file] for one in drafts for name, file in one.weight_map.items()},
        tensors=tensors,
        checksums={name: text for one in drafts for name, text in one.checksums.items()},
        parts=tuple(Part(number, one.parts[0].segments) for number, one in enumerate(drafts)),
        chunks=tuple(
            _renamed(chunk, number, renamed) for number, one in enumerate(drafts) for chunk in one.chunks
        ),
        totals=totals_of(table, tensors, shards),
    )
    return index, {new: old for old, new in renamed.items()}


def _renamed(chunk: ChunkRecord, part: int, renamed: Mapping[str, str]) -> ChunkRecord:
    return chunk._replace(key=ChunkKey(part, chunk.key.dtype, chunk.key.number), file=renamed[chunk.file])


def _proven(
    table: TensorTable, recorded: LanesArray, sums: Sequence[Mapping[int, SegmentSums]]
) -> dict[int, Lanes]:
    """Lanes of the new bytes of tensors that several ranks write."""
    added: dict[int, SegmentSums] = {}
    for one in sums:
        for tensor, own in one.items():
            added[tensor] = added[tensor].plus(own) if tensor in added else own
    for tensor, whole in added.items():
        if not whole.proves(Lanes(*recorded[tensor].tolist())):
            raise NeedsReseed(
                f"{table[tensor].name} has drifted in the local checkpoint of one of the ranks; nothing was "
                "published",
                remedy="publish again: all ranks first read their local checkpoints in full",
            )
    return {tensor: whole.full for tensor, whole in added.items()}


_OUTBOX = "outbox"


@dataclass(frozen=True)
class EarlyInput(Input):
    """Weights that a rank compared before it asked the channel."""

    weights: ComparedWeights


def compares_early(job: PublishJob, rank: Rank) -> bool:
    """Somebody waits for the tensors."""
    return job.source.lent and (rank.alone or not job.source.copied)


def compare_early(
    local: LocalCheckpoint, file: ChannelFile, job: PublishJob, rank: Rank, threads: int
) -> EarlyInput:
    """One of several ranks. The tensors belong to their owner again when this returns or raises."""
    try:
        given = Input.open(job.source, file, local.table, rank, job.phase)
        try:
            with job.phase("compare"):
                own = RankWeights.of(rank.number, local, given.weights, given.matched)
                compared = ComparedWeights.compared(own, threads)
        finally:
            given.weights.close()
    finally:
        job.source.release_tensors()
    with job.phase("prove"):
        compared.prove(threads)
    return EarlyInput(compared, given.matched, given.facts)


@dataclass(frozen=True)
class SpooledDelta:
    """A delta in the outbox, a local directory; not durable yet."""

    part: RankPart
    outbox: DirectoryStore
    facts: InputFacts

    def copy_to(self, files: Files) -> None:
        """Makes its shards durable in `files`. Raises DamagedFile when they are not what was written."""
        for record in self.part.draft.files:
            name = files.prefix + record.name
            if put(files.directory, name, self.outbox.pieces(record.name)) != replace(record, name=name):
                raise DamagedFile(
                    f"{files.directory.place(name)} differs from what was written to {self.outbox.place()}",
                    remedy="nothing was published; check memory and disks of this machine",
                )
        self.drop()

    def drop(self) -> None:
        for record in self.part.draft.files:
            (self.outbox.directory / record.name).unlink(missing_ok=True)


def spool(
    local: LocalCheckpoint, file: ChannelFile, attempt: Attempt, job: PublishJob, options: PublishOptions
) -> SpooledDelta:
    """Raises what `PartWriter.write` does."""
    given = Input.open(job.source, file, local.table, Rank(0, 1), job.phase)
    try:
        with job.phase("diff"):
            outbox = DirectoryStore(_emptied(local.paths.room / _OUTBOX))
            writer = PartWriter(local, attempt, Files(outbox, ""), 0, options, sync=False)
            part = writer.write(given, local.table.whole, job.advance)
    finally:
        given.weights.close()
    job.source.release_tensors()
    return SpooledDelta(part, outbox, given.facts)


def _emptied(outbox: Path) -> Path:
    """Without what a killed publication left."""
    if is_link(outbox):
        outbox.unlink()
    outbox.mkdir(exist_ok=True)
    for entry in os.scandir(outbox):
        os.unlink(entry.path)
    return outbox
