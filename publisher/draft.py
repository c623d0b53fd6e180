"""A rank's part of a version before it is committed, and the version that all parts make.

A draft is written in the index's own form, so that one strict parser reads both; its `root` is the base's,
and no pointer ever leads to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weightcast.publisher.diff import Difference
from weightcast.shared.channel.index import (
    ChunkRecord,
    Encoding,
    FileRecord,
    Index,
    TensorRecord,
    Totals,
)
from weightcast.shared.digest.root import root
from weightcast.shared.errors import Refused
from weightcast.shared.local.state import Position, lanes_list
from weightcast.shared.words import ChunkKey, Part, TensorTable


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
    names = {tensor: table[tensor].name for tensor in difference.lanes}
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
        weight_map={name: file.name for file in difference.files.files for name in names.values()},
        files=difference.files.files,
        tensors={
            name: TensorRecord(difference.lanes[tensor], difference.changed[tensor])
            for tensor, name in names.items()
        },
        parts=(part,),
        chunks=difference.files.chunks,
        totals=_totals(table, difference),
        checksums=difference.files.checksums,
    )


def _totals(table: TensorTable, difference: Difference) -> Totals:
    return Totals(
        changed=sum(difference.changed.values()),
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
    table: TensorTable, base: Position, drafts: Sequence[Index], frozen: frozenset[int]
) -> Assembled:
    """Joins the ranks' drafts. Refused when a tensor has no writer or two."""
    _check_cover(table, drafts, frozen)
    shards = [one.files[0] for one in drafts if one.files]
    renamed = {
        shard.name: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i, shard in enumerate(shards)
    }
    lanes = lanes_list(base.lanes)
    for one in drafts:
        for name, record in one.tensors.items():
            lanes[table.numbers[name]] = record.lanes
    first = drafts[0]
    index = replace(
        first,
        root=root(table, lanes),
        files=tuple(FileRecord(renamed[s.name], s.size, s.blake3) for s in shards),
        weight_map={name: renamed[file] for one in drafts for name, file in sorted(one.weight_map.items())},
        tensors={name: record for one in drafts for name, record in one.tensors.items()},
        checksums={name: text for one in drafts for name, text in one.checksums.items()},
        parts=tuple(Part(number, one.parts[0].segments) for number, one in enumerate(drafts)),
        chunks=tuple(
            _renamed(chunk, number, renamed) for number, one in enumerate(drafts) for chunk in one.chunks
        ),
        totals=Totals(
            changed=sum(one.totals.changed for one in drafts),
            elements=table.elements,
            nbytes=table.nbytes,
            delta_bytes=sum(one.totals.delta_bytes for one in drafts),
        ),
    )
    return Assembled(index, {new: old for old, new in renamed.items()})


def _renamed(chunk: ChunkRecord, part: int, renamed: Mapping[str, str]) -> ChunkRecord:
    return replace(chunk, key=ChunkKey(part, chunk.key.dtype, chunk.key.number), file=renamed[chunk.file])


def _check_cover(table: TensorTable, drafts: Sequence[Index], frozen: frozenset[int]) -> None:
    writers: dict[int, int] = {}
    problems: list[str] = []
    for number, one in enumerate(drafts):
        for segment in one.parts[0].segments:
            if segment.tensor in writers:
                problems.append(
                    f"{table[segment.tensor].name} came from part {writers[segment.tensor]} and part {number}"
                )
            writers[segment.tensor] = number
    problems.extend(
        f"{spec.name} came from no rank"
        for number, spec in enumerate(table)
        if number not in writers and number not in frozen
    )
    if problems:
        raise Refused(
            f"the ranks' tensors do not make the model: {'; '.join(problems[:20])}",
            remedy="each tensor is published by exactly one rank",
        )
