"""Deltas from older versions: a host far behind reads one of them instead of every step.

Composed from kept journals: first old and last new word of whatever differs, encoded on the version's own
grid with the words of the base version. What was written is decoded again before its index is linked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from weightcast.publisher.maintenance.replay_log import ReplayLog
from weightcast.publisher.publish.commit import commit, discard, new_beside, verify_files
from weightcast.publisher.publish.diff import changed_elements
from weightcast.shared.base.elements import Chunk, TensorTable, Words, grid
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.delta_reader import open_delta
from weightcast.shared.channel.delta_writer import ChunkStep, PartFiles, ShardWriter, open_shard_writer
from weightcast.shared.channel.index import INDEX_NAME, Index, VersionTotals, parse_index, write_index
from weightcast.shared.channel.index_records import TensorRecords
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.signing import PrivateKey
from weightcast.shared.checkpoint.state.state import Position, unpack_lanes
from weightcast.shared.codec.changes import Changes, compare
from weightcast.shared.codec.container import StepEncoding
from weightcast.shared.digest.checksums import LanesArray, StepSums, span_sums
from weightcast.shared.digest.root import root
from weightcast.shared.files import durable
from weightcast.shared.files.paths import exists

_SHARD = "model-00000-of-00001.safetensors"


def due_multi_step(
    at: int, oldest: int, exists: Iterable[tuple[int, int]], most_span: int
) -> list[tuple[int, int]]:
    """Deltas to make, as (version, base version), the widest first, then the newest: from v - 2^k where 2^k
    divides v, as far as versions from `oldest` to `at` can be read."""
    known = set(exists)
    due = []
    span = 2
    while span <= most_span:
        first = -(-(oldest + span) // span) * span
        due += [(v, v - span) for v in range(first, at + 1, span) if (v, v - span) not in known]
        span *= 2
    return sorted(due, key=lambda skip: (skip[1] - skip[0], -skip[0]))


def existing_multi_step(layout: Layout, versions: Iterable[int], most_span: int) -> set[tuple[int, int]]:
    spans = [1 << k for k in range(1, most_span.bit_length())]
    wanted = ((v, v - span) for v in versions for span in spans if v % span == 0)
    return {(v, base) for v, base in wanted if exists(layout.from_dir(v, base) / INDEX_NAME)}


def write_multi_step(
    layout: Layout,
    log: ReplayLog,
    main: Index,
    base: Position,
    claim: Claim,
    encoding: StepEncoding,
    key: PrivateKey | None = None,
) -> None:
    """Makes the delta from `base` to the version that `main` is the index of; it appears through its index
    alone. Raises DamagedFile when kept journals do not add up to it; nothing is left then."""
    directory = layout.from_dir(main.version, base.version)
    made = new_beside(directory, claim.epoch)
    failpoint("skip.begun", made)
    try:
        data = _written(made, log, main, base, encoding)
        index = parse_index(data, log.table)
        _prove(made, log, index, base)
        durable.sync_directory(made)
        failpoint("skip.written", made)
        commit(layout, made, directory, index, data, claim, key)
    except FileExistsError:
        discard(layout, made)
    except BaseException:
        discard(layout, made)
        raise
    failpoint("skip.committed", directory)


class _Accumulator:
    """What the tensors of a delta add up to. `elements`: int64[tensors], changed ones."""

    def __init__(self, table: TensorTable) -> None:
        self.table, self.step = table, StepSums(len(table))
        self.elements = np.zeros(len(table), np.int64)

    def add(self, chunk: Chunk, step: ChunkStep) -> None:
        self.step.add(step.sums)
        counts = changed_elements(self.table, chunk, step.changes, step.sums)
        np.add.at(self.elements, step.sums.tensors, counts)

    def check(self, base: Position, expected: str) -> LanesArray:
        """Lanes of every tensor, if they were those of `base` before."""
        lanes = self.step.after(unpack_lanes(base.lanes))
        if root(self.table, lanes) != expected:
            raise DamagedFile(
                f"kept journals from version {base.version} do not lead to root {expected[:16]}",
                remedy="nothing to do: hosts read the single steps instead",
            )
        return lanes


def _chunks(log: ReplayLog, main: Index, base: Position) -> Iterator[tuple[Chunk, Words, Words]]:
    """Each chunk that may differ, with its words at the base and at the version."""
    for part in main.parts:
        for chunk in grid(log.table, part):
            if log.touches(chunk, main.version, base.version):
                new = log.chunk_at(chunk, main.version)
                old = new.copy()
                log.undo_chunk(chunk, old, main.version, base.version)
                yield chunk, old, new


def _written(directory: Path, log: ReplayLog, main: Index, base: Position, encoding: StepEncoding) -> bytes:
    """The shard; returns the index."""
    table = log.table
    count = sum(1 for part in main.parts for _ in grid(table, part))
    writer = open_shard_writer(encoding, directory / _SHARD, table, count)
    totals = _Accumulator(table)
    try:
        for chunk, old, new in _chunks(log, main, base):
            changes = compare(old, new)
            if len(changes):
                totals.add(chunk, _append(writer, chunk, old, new, changes))
        files = writer.close()
    except BaseException:
        writer.abandon()
        raise
    lanes = totals.check(base, main.root)
    return write_index(_index(main, base, encoding, files, totals, lanes), table)


def _append(writer: ShardWriter, chunk: Chunk, old: Words, new: Words, changes: Changes) -> ChunkStep:
    step = ChunkStep(changes, span_sums(chunk, old, changes))
    writer.append(chunk, writer.prepare(chunk, old, lambda: new, changes), lambda: new, step)
    return step


def _index(
    main: Index,
    base: Position,
    encoding: StepEncoding,
    files: PartFiles,
    totals: _Accumulator,
    lanes: LanesArray,
) -> Index:
    table = totals.table
    tensors = TensorRecords.numbered(table, totals.step.changed, lanes, totals.elements)
    nbytes = sum(file.size for file in files.files)
    return Index(
        run_id=main.run_id,
        version=main.version,
        kind="delta",
        base_version=base.version,
        base_root=base.root,
        root=main.root,
        parent=base.digest,
        epoch=main.epoch,
        encoding=encoding,
        step=main.step,
        created=time.time(),
        weight_map=dict.fromkeys(tensors.names, _SHARD),
        files=files.files,
        tensors=tensors,
        parts=main.parts,
        chunks=files.chunks,
        totals=VersionTotals(int(tensors.changed.sum()), table.elements, table.nbytes, nbytes),
        main=main.digest,
        carried=main.carried,
    )


def _prove(directory: Path, log: ReplayLog, index: Index, base: Position) -> None:
    """Decodes what lies there as a host would, from the base version's words."""
    verify_files(directory, index)
    reader, totals = open_delta(index, log.table, directory), _Accumulator(log.table)
    for chunk, old, _ in _chunks(log, index, base):
        if reader.touches(chunk):
            totals.add(chunk, reader.step(chunk, old))
    reader.finish()
    totals.check(base, index.root)
