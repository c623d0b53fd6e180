"""Stage: fetched versions become one journal, everything checked, nothing of the checkpoint written.

Staging may begin while files are fetched, block by block. A version's files are verified as a whole before
its journal is complete; where a file had to be read twice, staging starts over.

Checked here: each blob's checksum, S_old and S_new of each chunk, each changed tensor's lanes, the root of
every version on the way. The old words are read from the checkpoint itself.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightcast.shared.base.elements import Chunk, TensorTable, Words, grid
from weightcast.shared.base.errors import MEND_CHANNEL, DamagedFile, Forked
from weightcast.shared.channel.delta import ChunkStep, open_delta, place_of
from weightcast.shared.channel.index import INDEX_NAME, ForeignIndex, Index
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Position, Step, pack_lanes, unpack_lanes
from weightcast.shared.checkpoint.update.fetch import Delta
from weightcast.shared.checkpoint.update.journal import (
    JournalHeader,
    JournalWriter,
    Packed,
    pack_changes,
    pack_whole,
)
from weightcast.shared.codec.changes import Changes
from weightcast.shared.digest.checksums import LanesArray, StepSums, root
from weightcast.shared.files.disk_errors import disk_errors
from weightcast.shared.kernels.parallel import ordered


class BadDelta(DamagedFile):
    """The files of one version's delta are damaged, or do not lead where its index says."""

    def __init__(self, error: DamagedFile, version: int) -> None:
        super().__init__(error.message, remedy=error.remedy)
        self.version = version


@contextlib.contextmanager
def files_of(version: int) -> Iterator[None]:
    try:
        yield
    except DamagedFile as error:
        raise BadDelta(error, version) from error


@dataclass(frozen=True)
class Staged:
    """A complete journal and what it leads to. `changes` counts words."""

    step: Step
    changes: int
    journal_bytes: int


_Steps = list[ChunkStep | None]


class _Version:
    """One of the versions that are folded."""

    def __init__(self, local: LocalCheckpoint, delta: Delta) -> None:
        self.index, self.sums = delta.index, StepSums(len(local.table))
        with self.named():
            self.reader = open_delta(delta.index, local.table, delta.files, delta.incoming.wait)

    def named(self) -> contextlib.AbstractContextManager[None]:
        return files_of(self.index.version)


def stage(local: LocalCheckpoint, deltas: Sequence[Delta]) -> Staged:
    """Folds `deltas` (consecutive, one grid) into a journal from the local position.

    Raises Forked when they do not start at the local position, BadDelta when anything does not add up; then
    no journal is left.
    """
    base = local.state.position
    _check_start(base, deltas[0].index)
    header = _header(local, deltas[-1].index)
    path = local.paths.journal(header.journal)
    writer = JournalWriter(path, header, local.paths.spare)
    try:
        with disk_errors(local.paths.room):
            versions = [_Version(local, delta) for delta in deltas]
            for packed, steps in _walk(local, versions):
                writer.write(packed)
                for version, step in zip(versions, steps, strict=True):
                    if step is not None:
                        version.sums.add(step.sums)
            for version in versions:
                with version.named():
                    version.reader.finish()
            target = _settle(local, versions)
            for delta in deltas:
                delta.incoming.wait("", None)
            writer.close()
    except BaseException:
        writer.abandon()
        raise
    return Staged(Step(header.journal, base, target), writer.changes, path.stat().st_size)


def _check_start(base: Position, first: Index | ForeignIndex) -> None:
    if first.base_version != base.version:
        raise Forked(f"version {first.version} starts from {first.base_version}, not from {base.version}")
    if isinstance(first, Index) and (first.parent, first.base_root) != (base.digest, base.root):
        raise Forked(
            f"version {first.version} continues another version {base.version} than the local one",
            remedy="run `weightcast sync`: it seeds the local checkpoint again",
        )


def _header(local: LocalCheckpoint, last: Index | ForeignIndex) -> JournalHeader:
    base = local.state.position
    return JournalHeader(
        run_id=local.state.run_id,
        journal=secrets.token_hex(8),
        base_version=base.version,
        base_root=base.root,
        generation=local.state.generation,
        target_version=last.version,
        target_root=last.root if isinstance(last, Index) else "",
        target_digest=last.version_digest,
    )


def _walk(local: LocalCheckpoint, versions: Sequence[_Version]) -> Iterator[tuple[Packed, _Steps]]:
    first, table = versions[0].index, local.table
    chunks = (
        chunk
        for part in (first.parts if isinstance(first, Index) else (table.whole,))
        for chunk in grid(table, part)
        if any(version.reader.touches(chunk) for version in versions)
    )
    threads = 1 if any(version.reader.sequential for version in versions) else local.threads
    return ordered(lambda chunk: _fold(local, versions, chunk), chunks, threads)


def _fold(local: LocalCheckpoint, versions: Sequence[_Version], chunk: Chunk) -> tuple[Packed, _Steps]:
    """Net changes over all versions, and the step of each."""
    old = local.chunk_words(chunk)
    words = old
    steps: _Steps = []
    for version in versions:
        with version.named():
            step = version.reader.step(chunk, words) if version.reader.touches(chunk) else None
        steps.append(step)
        if step is not None and len(versions) > 1:
            words = words.copy() if words is old else words
            step.changes.apply(words)
    return _packed(chunk, old, words, steps), steps


def _packed(chunk: Chunk, old: Words, words: Words, steps: Sequence[ChunkStep | None]) -> Packed:
    """First old and last new word wherever they differ, or all. `words` is the last version where several
    fold."""
    there = [step for step in steps if step is not None]
    taken, single = [step.changes for step in there], len(steps) == 1
    new = taken[0].whole if single else words
    if new is not None and any(changes.all_shown for changes in taken):
        sums = there[0].sums
        known = single and len(sums) == len(chunk.spans)
        return pack_whole(chunk, old, new, sums.changed.tolist() if known else None)
    if single:
        return pack_changes(chunk, taken[0])
    index = np.unique(np.concatenate([changes.index for changes in taken]))
    index = index[old[index] != words[index]]
    return pack_changes(chunk, Changes(index, old[index], words[index]))


def _settle(local: LocalCheckpoint, versions: Sequence[_Version]) -> Position:
    lanes, found = unpack_lanes(local.state.position.lanes), ""
    for version in versions:
        lanes = version.sums.after(lanes)
        found = root(local.table, lanes)
        if isinstance(version.index, Index):
            with version.named():
                _check_version(version.index, local.table, lanes, version.sums, found)
    last = versions[-1].index
    epoch = last.epoch if isinstance(last, Index) else 0
    return Position(last.version, last.version_digest, found, epoch, pack_lanes(lanes))


def _check_version(index: Index, table: TensorTable, lanes: LanesArray, sums: StepSums, found: str) -> None:
    remedy = f"nothing was written; {MEND_CHANNEL}"
    where = f"{place_of(index)}/{INDEX_NAME}"
    records = index.tensors
    listed = records.numbers(table)
    changed = sums.changed
    unlisted = [] if np.array_equal(listed, changed) else np.setxor1d(listed, changed)[:1].tolist()
    for number in unlisted:
        raise DamagedFile(
            f"{where}: {table[number].name} changes and is not listed, or the reverse", remedy=remedy
        )
    for row in np.flatnonzero((lanes[listed] != records.lanes).any(axis=1))[:1].tolist():
        raise DamagedFile(f"{where}: {records.names[row]} does not get the stated lanes", remedy=remedy)
    if found != index.root:
        raise DamagedFile(f"{where}: root {found[:16]}, stated {index.root[:16]}", remedy=remedy)
