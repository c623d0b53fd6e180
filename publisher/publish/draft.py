"""Writing a delta: each rank's part, and the version that all parts make.

The draft of a part has the form of an index, so that one strict parser reads both; its `root` is the base's,
and no pointer ever leads to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightcast.publisher.publish.diff import Difference, write_difference
from weightcast.publisher.publish.publish_job import Input, PublishOptions
from weightcast.publisher.ranks.messages import SegmentSums
from weightcast.publisher.ranks.rendezvous import RankPart, shard_name
from weightcast.shared.base.elements import Chunk, ChunkKey, Part, TensorTable, Words, grid
from weightcast.shared.base.errors import NeedsReseed
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.delta_writer import begin_shard
from weightcast.shared.channel.index import ChunkRecord, Encoding, FileRecord, Index, VersionTotals
from weightcast.shared.channel.index_records import TensorRecords
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Position, unpack_lanes
from weightcast.shared.digest.checksums import Lanes, LanesArray
from weightcast.shared.digest.root import root


@dataclass(frozen=True)
class DeltaHeader:
    """What all parts of one version share."""

    run_id: str
    version: int
    base: Position
    epoch: int
    encoding: Encoding
    step: int | None
    created: float


@dataclass(frozen=True)
class PartWriter:
    """Writes the part of rank `rank` into `files`; `prefix`: of its name there."""

    local: LocalCheckpoint
    header: DeltaHeader
    files: Store
    rank: int
    options: PublishOptions
    prefix: str = ""
    sync: bool = True
    """False for files that are copied on, and worth nothing after a loss of power"""

    def write(
        self,
        given: Input,
        part: Part,
        advance: Advance | None,
        merged: Callable[[Chunk], Words] | None = None,
    ) -> RankPart:
        """The diff pass. `merged`: the part's new words where `given` does not have all of them. Leaves
        nothing behind when it raises."""
        table = self.local.table
        chunks = sum(1 for _ in grid(table, part))
        name, encoding = self.prefix + shard_name(self.rank), self.header.encoding
        writer = begin_shard(encoding, self.files, name, table, chunks, sync=self.sync)
        try:
            with self.local.reading():
                difference = write_difference(
                    self.local,
                    part,
                    given.weights,
                    given.matched,
                    writer,
                    threads=self.options.threads,
                    advance=advance,
                    non_finite=self.options.non_finite,
                    merged=merged,
                )
            given.weights.finish()
        except BaseException:
            writer.abandon()
            raise
        odd = {table[tensor].name: count for tensor, count in sorted(difference.non_finite.items())}
        return RankPart(draft(self.header, table, part, difference), difference.split, non_finite=odd)


def draft(header: DeltaHeader, table: TensorTable, part: Part, difference: Difference) -> Index:
    """One rank's part as an index with a single part, number 0."""
    return Index(
        run_id=header.run_id,
        version=header.version,
        kind="delta",
        base_version=header.base.version,
        base_root=header.base.root,
        root=header.base.root,
        parent=header.base.digest,
        epoch=header.epoch,
        encoding=header.encoding,
        step=header.step,
        created=header.created,
        # a part has one shard, or none where nothing changed
        weight_map={name: file.name for file in difference.files.files for name in difference.tensors.names},
        files=difference.files.files,
        tensors=difference.tensors,
        parts=(part,),
        chunks=difference.files.chunks,
        totals=_totals(table, difference),
        checksums=difference.files.checksums,
    )


def _totals(table: TensorTable, difference: Difference) -> VersionTotals:
    return VersionTotals(
        changed=int(difference.tensors.changed.sum()),
        elements=table.elements,
        nbytes=table.nbytes,
        delta_bytes=sum(file.size for file in difference.files.files),
    )


def assemble(
    table: TensorTable, base: Position, parts: Sequence[RankPart], *, rename: bool = True
) -> tuple[Index, Mapping[str, str]]:
    """Joins the ranks' parts: the version's index, and the name in the attempt of each of its files. Raises
    NeedsReseed when the bytes of a tensor that several ranks write are not the recorded ones with these
    changes. `rename`: whether files get other names than in the attempt."""
    drafts = [one.draft for one in parts]
    shards = [one.files[0] for one in drafts if one.files]
    renamed = {
        shard.name: f"model-{i:05d}-of-{len(shards):05d}.safetensors" if rename else shard.name
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
    first = drafts[0]
    index = replace(
        first,
        root=root(table, lanes),
        files=tuple(FileRecord(renamed[s.name], s.size, s.blake3) for s in shards),
        weight_map={name: renamed[file] for one in drafts for name, file in one.weight_map.items()},
        tensors=TensorRecords.numbered(table, np.flatnonzero(listed), lanes, changed),
        checksums={name: text for one in drafts for name, text in one.checksums.items()},
        parts=tuple(Part(number, one.parts[0].segments) for number, one in enumerate(drafts)),
        chunks=tuple(
            _renamed(chunk, number, renamed) for number, one in enumerate(drafts) for chunk in one.chunks
        ),
        totals=VersionTotals(
            changed=sum(one.totals.changed for one in drafts),
            elements=table.elements,
            nbytes=table.nbytes,
            delta_bytes=sum(one.totals.delta_bytes for one in drafts),
        ),
    )
    return index, {new: old for old, new in renamed.items()}


def prefixed(draft: Index, prefix: str) -> Index:
    """With names of files that begin with `prefix`."""
    return replace(
        draft,
        files=tuple(replace(file, name=prefix + file.name) for file in draft.files),
        weight_map={name: prefix + file for name, file in draft.weight_map.items()},
        chunks=tuple(chunk._replace(file=prefix + chunk.file) for chunk in draft.chunks),
    )


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
