"""Stage: fetched versions become one journal, everything checked, nothing of the checkpoint written.

`prepare` stages while it fetches, block by block. A version's files are verified as a whole before its
journal is complete; where a file had to be read twice, staging starts over.

Checked here: each blob's checksum, S_old and S_new of each chunk, each changed tensor's lanes, the root of
every version on the way. The old words are read from the checkpoint itself.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from weightcast.shared.base.elements import Chunk, Part, TensorTable, Words, grid, whole_part
from weightcast.shared.base.errors import MEND_CHANNEL, DamagedFile, Forked
from weightcast.shared.channel.delta_reader import DeltaReader, open_delta, place_of
from weightcast.shared.channel.delta_writer import ChunkStep
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import INDEX_NAME, ForeignIndex, Index
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Position, Step, pack_lanes, unpack_lanes
from weightcast.shared.checkpoint.update.fetch import Delta, Fetcher, Incoming, check_space
from weightcast.shared.checkpoint.update.journal import JournalHeader, JournalWriter
from weightcast.shared.checkpoint.update.journal_records import Packed, pack_changes, pack_whole
from weightcast.shared.checkpoint.update.patch import drop_journal
from weightcast.shared.codec.changes import Changes
from weightcast.shared.digest.checksums import LanesArray
from weightcast.shared.digest.root import root
from weightcast.shared.digest.sums import StepSums
from weightcast.shared.files.disk_errors import disk_error
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
class Fetched:
    """A delta whose shards are in `files`, verified, or arrive there (`incoming`)."""

    index: Index | ForeignIndex
    files: Store
    incoming: Incoming = field(default_factory=lambda: Incoming(complete=True))

    @property
    def parts(self) -> tuple[Part, ...] | None:
        """None: a foreign version, whose grid is that of one whole part."""
        return None if isinstance(self.index, ForeignIndex) else self.index.parts


@dataclass(frozen=True)
class Staged:
    """A complete journal and what it leads to. `changes` counts words."""

    step: Step
    changes: int
    journal_bytes: int


@dataclass(frozen=True)
class _Folded:
    """One chunk over all versions: net changes, and the sums of each version's step."""

    chunk: Chunk
    packed: Packed
    steps: tuple[ChunkStep | None, ...]


def stage(
    local: LocalCheckpoint,
    versions: Sequence[Fetched],
    *,
    advance: Callable[[int], None] | None = None,
) -> Staged:
    """Folds `versions` (consecutive, one grid) into a journal from the local position.

    Raises Forked when they do not start at the local position, BadDelta when anything does not add up; then
    no journal is left.
    """
    base = local.state.position
    _check_start(base, versions[0].index)
    journal = secrets.token_hex(8)
    writer = JournalWriter(local.paths.journal(journal), _header(local, versions, journal), local.paths.spare)
    try:
        sums = [StepSums(len(local.table)) for _ in versions]
        readers = [_reader(local, version) for version in versions]
        numbers = [version.index.version for version in versions]
        for folded in _walk(local, readers, numbers, versions[0].parts):
            writer.write(folded.packed)
            for one, step in zip(sums, folded.steps, strict=True):
                if step is not None:
                    one.add(step.sums)
            if advance is not None:
                advance(folded.chunk.words * folded.chunk.kind.width)
        for reader, number in zip(readers, numbers, strict=True):
            with files_of(number):
                reader.finish()
        target = _settle(local, base, versions, sums)
        for version in versions:
            version.incoming.wait("", None)
        writer.close()
    except OSError as error:
        writer.abandon()
        raise disk_error(error, local.paths.room) from error
    except BaseException:
        writer.abandon()
        raise
    size = local.paths.journal(journal).stat().st_size
    return Staged(Step(journal, base, target), writer.changes, size)


def _reader(local: LocalCheckpoint, version: Fetched) -> DeltaReader:
    with files_of(version.index.version):
        return open_delta(version.index, local.table, version.files, version.incoming.wait)


def _check_start(base: Position, first: Index | ForeignIndex) -> None:
    if first.base_version != base.version:
        raise Forked(f"version {first.version} starts from {first.base_version}, not from {base.version}")
    if isinstance(first, Index) and (first.parent, first.base_root) != (base.digest, base.root):
        raise Forked(
            f"version {first.version} continues another version {base.version} than the local one",
            remedy="run `weightcast sync`: it seeds the local checkpoint again",
        )


def _header(local: LocalCheckpoint, versions: Sequence[Fetched], journal: str) -> JournalHeader:
    base, last = local.state.position, versions[-1].index
    return JournalHeader(
        run_id=local.state.run_id,
        journal=journal,
        base_version=base.version,
        base_root=base.root,
        generation=local.state.generation,
        target_version=last.version,
        target_root=last.root if isinstance(last, Index) else "",
        target_digest=last.version_digest,
    )


def _walk(
    local: LocalCheckpoint,
    readers: Sequence[DeltaReader],
    numbers: Sequence[int],
    parts: tuple[Part, ...] | None,
) -> Iterator[_Folded]:
    chunks = (
        chunk
        for part in (parts if parts is not None else (whole_part(local.table),))
        for chunk in grid(local.table, part)
        if any(reader.touches(chunk) for reader in readers)
    )
    threads = 1 if any(reader.sequential for reader in readers) else local.threads
    return ordered(lambda chunk: _fold(local, readers, numbers, chunk), chunks, threads)


def _fold(
    local: LocalCheckpoint, readers: Sequence[DeltaReader], numbers: Sequence[int], chunk: Chunk
) -> _Folded:
    old = local.chunk_words(chunk)
    words = old
    steps: list[ChunkStep | None] = []
    for reader, number in zip(readers, numbers, strict=True):
        with files_of(number):
            step = reader.step(chunk, words) if reader.touches(chunk) else None
        steps.append(step)
        if step is not None and len(readers) > 1:
            words = words.copy() if words is old else words
            step.changes.apply(words)
    return _Folded(chunk, _packed(chunk, old, words, steps), tuple(steps))


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
    return pack_changes(chunk, taken[0] if single else _net(old, words, taken))


def _net(old: Words, words: Words, taken: Sequence[Changes]) -> Changes:
    index = np.unique(np.concatenate([changes.index for changes in taken]))
    index = index[old[index] != words[index]]
    return Changes(index, old[index], words[index])


def _settle(
    local: LocalCheckpoint, base: Position, versions: Sequence[Fetched], sums: Sequence[StepSums]
) -> Position:
    lanes = unpack_lanes(base.lanes)
    found = base.root
    for version, one in zip(versions, sums, strict=True):
        lanes = one.after(lanes)
        found = root(local.table, lanes)
        if isinstance(version.index, Index):
            with files_of(version.index.version):
                _check_version(version.index, local.table, lanes, one, found)
    last = versions[-1].index
    epoch = last.epoch if isinstance(last, Index) else 0
    return Position(last.version, last.version_digest, found, epoch, pack_lanes(lanes))


def _check_version(index: Index, table: TensorTable, lanes: LanesArray, sums: StepSums, found: str) -> None:
    remedy = f"nothing was written; {MEND_CHANNEL}"
    where = f"{place_of(index)}/{INDEX_NAME}"
    records = index.tensors
    listed = records.numbers(table)
    for number in np.setxor1d(listed, sums.changed)[:1].tolist():
        raise DamagedFile(
            f"{where}: {table[number].name} changes and is not listed, or the reverse",
            remedy=remedy,
        )
    for row in np.flatnonzero((lanes[listed] != records.lanes).any(axis=1))[:1].tolist():
        raise DamagedFile(f"{where}: {records.names[row]} does not get the stated lanes", remedy=remedy)
    if found != index.root:
        raise DamagedFile(f"{where}: root {found[:16]}, stated {index.root[:16]}", remedy=remedy)


def prepare(
    local: LocalCheckpoint,
    deltas: Sequence[Delta],
    fetcher: Fetcher,
    *,
    on_phase: Callable[[str], None],
    on_misfit: Callable[[], None],
) -> Staged:
    """Fetches and stages consecutive versions into one journal. Nothing of the checkpoint is written; what
    was fetched is dropped. Raises what fetching or staging raise; `on_misfit` is called before, when verified
    shards do not fit the local words."""
    indexes = [delta.index for delta in deltas]
    check_space(local.paths, indexes)
    on_phase("fetch")
    fetched = [
        Fetched(index, DirectoryStore(fetcher.spool.directory(index)), Incoming()) for index in indexes
    ]
    try:
        with _staging(local, fetched) as staging:
            for delta, one in zip(deltas, fetched, strict=True):
                with files_of(delta.index.version):
                    fetcher.fetch(delta, one.incoming)
            on_phase("stage")
            try:
                return _staged(local, fetched, staging)
            except DamagedFile:
                on_misfit()
                raise
    finally:
        for index in indexes:
            fetcher.spool.drop(index)


@contextlib.contextmanager
def _staging(local: LocalCheckpoint, fetched: Sequence[Fetched]) -> Iterator[Future[Staged]]:
    """Stages in a thread of its own, which ends with the block."""
    with ThreadPoolExecutor(1, thread_name_prefix="stage") as pool:
        try:
            yield pool.submit(stage, local, fetched)
        except BaseException as failure:
            for one in fetched:
                one.incoming.fail(failure)
            raise


def _staged(local: LocalCheckpoint, fetched: Sequence[Fetched], staging: Future[Staged]) -> Staged:
    """Stages again where a file had to be read twice, even when the result shows no fault: only the digests
    of the index tell forged words from published ones."""
    try:
        staged = staging.result()
        if not any(one.incoming.restarted for one in fetched):
            return staged
        drop_journal(local, staged.step)
    except DamagedFile:
        if not any(one.incoming.restarted for one in fetched):
            raise
    return stage(local, fetched)
