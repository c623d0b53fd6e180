"""Versions whose parts cut tensors, written by hand: publishers of one rank do not cut them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from channel_paths import Layout

from weightcast.shared.base.elements import Part, TensorTable, grid
from weightcast.shared.channel.delta import ChunkStep, ShardWriter, begin_shard
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import Index, VersionTotals, write_index
from weightcast.shared.channel.layout import INDEX_NAME, write_pointer
from weightcast.shared.channel.run_files import TensorRecords
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, gather
from weightcast.shared.checkpoint.state.state import unpack_lanes
from weightcast.shared.checkpoint.verify.seed import ReadCheckpoint
from weightcast.shared.codec.changes import changes_of
from weightcast.shared.digest.checksums import StepSums, root
from weightcast.shared.files.hf_checkpoint import open_checkpoint

Cut = Callable[[TensorTable], Sequence[Part]]


def commit_cut(channel: Path, publisher: Path, given: Path, number: int, cut: Cut) -> None:
    """Version `number` with the weights `given`, a shard for each part; pointed to, not patched in.
    `publisher`: its local checkpoint, at the version before."""
    directory = Layout(channel).version_dir(number)
    directory.mkdir()
    opened = LocalCheckpoint.open(publisher)
    assert opened is not None
    with opened as local, ReadCheckpoint(open_checkpoint(given, follow_links=False)) as new:
        assert local.state.position.version == number - 1
        index = _index(local, new, directory, number, cut(local.table))
        (directory / INDEX_NAME).write_bytes(write_index(index, local.table))
    write_pointer(open_store(channel), number)


def _index(
    local: LocalCheckpoint, new: ReadCheckpoint, directory: Path, number: int, parts: Sequence[Part]
) -> Index:
    table, base, sums = local.table, local.state.position, StepSums(len(local.table))
    shards: dict[str, str] = {}
    files, chunks = [], []
    for part in parts:
        name = f"model-{part.number:05d}-of-{len(parts):05d}.safetensors"
        count = sum(1 for _ in grid(table, part))
        writer = begin_shard("fast", open_store(directory), name, table, count)
        for step in _steps(local, new, part, writer):
            sums.add(step.sums)
            shards |= {table[tensor].name: name for tensor in step.sums.tensors.tolist()}
        written = writer.close()
        files += written.files
        chunks += written.chunks
    lanes = sums.after(unpack_lanes(base.lanes))
    return Index(
        run_id=local.state.run_id,
        version=number,
        kind="delta",
        base_version=base.version,
        base_root=base.root,
        root=root(table, lanes),
        parent=base.digest,
        epoch=base.epoch,
        encoding="fast",
        step=None,
        created=time.time(),
        weight_map=shards,
        files=tuple(files),
        tensors=TensorRecords.numbered(table, sums.changed, lanes[sums.changed], sums.words[sums.changed]),
        parts=tuple(parts),
        chunks=tuple(chunks),
        totals=VersionTotals(0, table.elements, table.nbytes, sum(file.size for file in files)),
    )


def _steps(
    local: LocalCheckpoint, new: ReadCheckpoint, part: Part, writer: ShardWriter
) -> Iterator[ChunkStep]:
    for chunk in grid(local.table, part):
        old, words = local.chunk_words(chunk), gather(chunk, new.words_in)
        changes, sums = changes_of(chunk, old, words)
        if len(changes):
            step = ChunkStep(changes, sums)
            prepared = writer.prepare(chunk, old, words, changes)
            writer.append(chunk, prepared, words, step)
            yield step
