"""Deltas from older versions: a host far behind reads one of them instead of every step.

Composed from kept journals: first old and last new word of whatever differs, encoded on the version's own
grid with the words of the base version. What was written is decoded again before its index is linked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from weightcast.publisher.maintenance.replay_log import ReplayLog
from weightcast.publisher.publish.commit import Files, begin_beside, commit_draft, verify_files
from weightcast.publisher.publish.diff import changed_elements, totals_of
from weightcast.shared.base.elements import Chunk, TensorTable, Words, grid
from weightcast.shared.base.errors import DamagedFile, on_error
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.delta import ChunkStep, PartFiles, ShardWriter, begin_shard, open_delta
from weightcast.shared.channel.index import Index, parse_index, write_index
from weightcast.shared.channel.layout import multi_step_bases, multi_step_key
from weightcast.shared.channel.run_files import TensorRecords
from weightcast.shared.channel.signing import PrivateKey
from weightcast.shared.channel.store import AlreadyExists, Store
from weightcast.shared.checkpoint.state.state import Position, unpack_lanes
from weightcast.shared.codec.changes import changes_of
from weightcast.shared.codec.container import StepEncoding
from weightcast.shared.digest.checksums import LanesArray, StepSums, root

_SHARD = "model-00000-of-00001.safetensors"


def multi_step_deltas(at: int, oldest: int, most_span: int) -> list[tuple[int, int]]:
    """Those that there should be, as (version, base version), the widest first, then the newest: from v - 2^k
    where 2^k divides v, as far as versions from `oldest` to `at` can be read."""
    found = [
        (version, base_version)
        for version in range(oldest, at + 1)
        for base_version in multi_step_bases(version, max(oldest, version - most_span))
    ]
    return sorted(found, key=lambda skip: (skip[1] - skip[0], -skip[0]))


def write_multi_step(
    log: ReplayLog,
    main: Index,
    base: Position,
    claim: Claim,
    encoding: StepEncoding,
    key: PrivateKey | None = None,
) -> None:
    """Makes the delta from `base` to the version that `main` is the index of; it appears through its index
    alone. Raises DamagedFile when kept journals do not add up to it; nothing is left then."""
    store, name = claim.store, multi_step_key(main.version, base.version)
    draft, delta = begin_beside(claim, name), _MultiStep(log, main, base, encoding)
    failpoint("skip.begun", store.place(draft.key))
    with contextlib.suppress(AlreadyExists), on_error(draft.discard):
        data = delta.written(draft)
        index = parse_index(data, log.table)
        delta.prove(draft.directory, index)
        failpoint("skip.written", store.place(draft.key))
        commit_draft(claim, draft.key, name, index, data, key)
    failpoint("skip.committed", store.place(name))


def write_steps(
    writer: ShardWriter,
    steps: Iterable[tuple[Chunk, Words, Words]],
    add: Callable[[Chunk, ChunkStep], None] = lambda chunk, step: None,
) -> PartFiles:
    """Encodes chunks from their old words and their new ones; `add` is called with what changes. Leaves
    nothing behind when it raises."""
    with on_error(writer.abandon):
        for chunk, old, new in steps:
            changes, sums = changes_of(chunk, old, new)
            if not len(changes):
                writer.append(chunk, b"", new, None)
                continue
            step = ChunkStep(changes, sums)
            add(chunk, step)
            writer.append(chunk, writer.prepare(chunk, old, new, changes), new, step)
        return writer.close()


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


@dataclass(frozen=True)
class _MultiStep:
    """The delta from `base` to the version that `main` is the index of."""

    log: ReplayLog
    main: Index
    base: Position
    encoding: StepEncoding

    def _chunks(self) -> Iterator[tuple[Chunk, Words, Words]]:
        """Each chunk that may differ, with its words at the base and at the version."""
        log, between = self.log, (self.main.version, self.base.version)
        for part in self.main.parts:
            for chunk in grid(log.table, part):
                if log.touches(chunk, *between):
                    yield chunk, *log.step(chunk, *between)

    def written(self, draft: Files) -> bytes:
        """Writes the shard; returns the index."""
        table = self.log.table
        count = sum(1 for part in self.main.parts for _ in grid(table, part))
        writer = begin_shard(self.encoding, draft.directory, draft.prefix + _SHARD, table, count)
        totals = _Accumulator(table)
        files = write_steps(writer, self._chunks(), totals.add)
        lanes = totals.check(self.base, self.main.root)
        moved = totals.step.changed
        tensors = TensorRecords.numbered(table, moved, lanes[moved], totals.elements[moved])
        index = Index(
            run_id=self.main.run_id,
            version=self.main.version,
            kind="delta",
            base_version=self.base.version,
            base_root=self.base.root,
            root=self.main.root,
            parent=self.base.digest,
            epoch=self.main.epoch,
            encoding=self.encoding,
            step=self.main.step,
            created=time.time(),
            weight_map={name: file.name for file in files.files for name in tensors.names},
            files=files.files,
            tensors=tensors,
            parts=self.main.parts,
            chunks=files.chunks,
            totals=totals_of(table, tensors, files.files),
            main=self.main.digest,
            carried=self.main.carried,
        )
        return write_index(index, table)

    def prove(self, files: Store, index: Index) -> None:
        """Decodes what was written as a host would, from the base version's words."""
        verify_files(files, index)
        table = self.log.table
        reader, totals = open_delta(index, table, files), _Accumulator(table)
        for chunk, old, _ in self._chunks():
            if reader.touches(chunk):
                totals.add(chunk, reader.step(chunk, old))
        reader.finish()
        totals.check(self.base, index.root)
