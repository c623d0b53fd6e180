"""A rank's part of a version before it is committed, and the version that all parts make.

A draft is written in the index's own form, so that one strict parser reads both; its `root` is the base's,
and no pointer ever leads to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightcast.publisher.publish.diff import Difference, SegmentSums
from weightcast.shared.base.elements import ChunkKey, Part, TensorTable
from weightcast.shared.base.errors import NeedsReseed
from weightcast.shared.channel.index import ChunkRecord, Encoding, FileRecord, Index, VersionTotals
from weightcast.shared.channel.index_records import TensorRecords
from weightcast.shared.checkpoint.state.state import Position, unpack_lanes
from weightcast.shared.digest.checksums import Lanes, LanesArray
from weightcast.shared.digest.root import root


@dataclass(frozen=True)
class Frame:
    """What all parts of one version share."""

    run_id: str
    version: int
    base: Position
    epoch: int
    encoding: Encoding
    step: int | None
    created: float


def draft(frame: Frame, table: TensorTable, part: Part, difference: Difference) -> Index:
    """One rank's part as an index with a single part, number 0."""
    return Index(
        run_id=frame.run_id,
        version=frame.version,
        kind="delta",
        base_version=frame.base.version,
        base_root=frame.base.root,
        root=frame.base.root,
        parent=frame.base.digest,
        epoch=frame.epoch,
        encoding=frame.encoding,
        step=frame.step,
        created=frame.created,
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


@dataclass(frozen=True)
class Assembled:
    """The version's index, and what each of its files is called in the drafts' directory."""

    index: Index
    sources: Mapping[str, str]


def assemble(
    table: TensorTable,
    base: Position,
    drafts: Sequence[Index],
    sums: Sequence[Mapping[int, SegmentSums]] = (),
) -> Assembled:
    """Joins the ranks' drafts. `sums`: of tensors that several ranks write, per rank. NeedsReseed when the
    bytes of one are not the recorded ones with these changes."""
    shards = [one.files[0] for one in drafts if one.files]
    renamed = {
        shard.name: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i, shard in enumerate(shards)
    }
    recorded = unpack_lanes(base.lanes)
    lanes, changed, listed = recorded.copy(), np.zeros(len(table), np.int64), np.zeros(len(table), np.bool_)
    for one in drafts:
        numbers = one.tensors.numbers(table)
        lanes[numbers] = one.tensors.lanes
        changed[numbers] += one.tensors.changed
        listed[numbers] = True
    for number, proven in _proven(table, recorded, sums).items():
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
    return Assembled(index, {new: old for old, new in renamed.items()})


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
                remedy="all of them are read in full before the next publication",
            )
    return {tensor: whole.full for tensor, whole in added.items()}
