"""Files of committed versions that are lost or damaged, made again from what the publisher keeps: its own
local checkpoint, the journals of its last steps, and copies of their indexes.

An index's digest fixes the bytes of its version, and the publisher's own history fixes the index: only what
is byte for byte what was committed gets into the channel. Signatures stay valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from weightcast.publisher.care.history import History
from weightcast.publisher.care.past import Past
from weightcast.publisher.care.prune import put_link_away
from weightcast.publisher.version.anchors import write_weights
from weightcast.publisher.version.commit import drop_attempt, new_parts_dir
from weightcast.shared.channel.chain import check_files
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.delta_writer import ChunkStep, ShardWriter, open_shard_writer
from weightcast.shared.channel.index import CARRIED, INDEX_LIMIT, INDEX_NAME, FileRecord, Index, parse_index
from weightcast.shared.channel.layout import Layout, version_name
from weightcast.shared.channel.signing import signature_path
from weightcast.shared.codec.changes import compare
from weightcast.shared.digest.step_sums import span_sums
from weightcast.shared.errors import DamagedFile, WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.entries import is_directory
from weightcast.shared.local.carried import Carried
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.local.state import Position
from weightcast.shared.words import Chunk, Part, Words, grid


@dataclass(frozen=True)
class Remake:
    """Of one channel, under a claim. `there`: versions that must be in it; others may be gone on purpose, or
    were never announced."""

    layout: Layout
    past: Past
    history: History
    claim: Claim
    there: range
    only: int | None = None
    lost: list[str] = field(default_factory=list)
    """what could not be made, and why"""

    def versions(self) -> Iterator[str]:
        """Makes what can be made again, version by version; says what was."""
        for version, position in sorted(self.past.positions().items()):
            if self.only not in (None, version):
                continue
            if version in self.there or (version > 0 and is_directory(self.layout.version_dir(version))):
                yield from self._version(position)

    def _version(self, position: Position) -> Iterator[str]:
        directory = self.layout.version_dir(position.version)
        data, lost = self._index(directory, position)
        if data is None:
            return
        index = parse_index(data, self.past.table)
        bad = [record for record in index.all_files if any(check_files(directory, [record]))]
        if not bad and not lost:
            return
        self.claim.check()
        directory.mkdir(exist_ok=True)
        try:
            yield from self._files(directory, index, bad)
        except (WeightcastError, OSError) as error:
            self.lost.append(f"version {index.version} cannot be made again: {error}")
            return
        if lost:
            self._restore_index(directory, position.version, data)
            yield f"{directory.name}/{INDEX_NAME} is restored, byte for byte"

    def _index(self, directory: Path, position: Position) -> tuple[bytes | None, bool]:
        """What was committed, and whether the channel lost it. None where nobody knows it."""
        with contextlib.suppress(WeightcastError, OSError):
            data = durable.read_file(directory / INDEX_NAME, INDEX_LIMIT)
            if blake3(data).hexdigest() == position.digest:
                return data, False
        return self.history.index(position), True

    def _files(self, directory: Path, index: Index, bad: list[FileRecord]) -> Iterator[str]:
        if not bad:
            return
        scratch = new_parts_dir(self.layout, index.version, self.claim.epoch)
        try:
            for name in sorted(self._made(scratch, index, bad)):
                self.claim.check()
                _put(self.layout, scratch / name, durable.make_within(directory, name))
                yield f"{directory.name}/{name} is made again, byte for byte"
        finally:
            drop_attempt(self.layout, scratch)

    def _made(self, scratch: Path, index: Index, bad: list[FileRecord]) -> list[str]:
        """Names of the files in `scratch` that are what the index says. Raises DamagedFile for one that is
        not."""
        wanted = {record.name: record for record in bad}
        for record in index.carried:
            kept = Carried(self.history.paths).path(record)
            if kept is not None:
                durable.replace(
                    durable.make_within(scratch, f"{CARRIED}/{record.name}"), durable.pieces_of(kept)
                )
        if index.kind == "anchor":
            words = self.past.words_at(index.version)
            write_weights(scratch, self.past.table, words, self.past.files_beside)
        else:
            for part in index.parts:
                name = _shard_of(index, part)
                if name in wanted:
                    _write_part(scratch / name, self.past, index, part)
        for name, record in wanted.items():
            if any(check_files(scratch, [record])):
                raise DamagedFile(
                    f"{version_name(index.version)}/{name} comes out with other bytes than were committed",
                    remedy="another release, or another library for compression, wrote it",
                )
        return list(wanted)

    def _restore_index(self, directory: Path, version: int, data: bytes) -> None:
        path, signature = directory / INDEX_NAME, self.history.signature(version)
        put_link_away(self.layout, path)
        if signature is not None:
            durable.replace(signature_path(path), signature)
        durable.replace(path, data)
        durable.sync_directory(self.layout.channel)


def _shard_of(index: Index, part: Part) -> str:
    """The file that a part's chunks lie in: each part has one."""
    return next((record.file for record in index.chunks if record.key.part == part.number), "")


def _write_part(path: Path, past: Past, index: Index, part: Part) -> None:
    """As it was published: the words of both versions, encoded once more."""
    if index.encoding is None:
        raise DamagedFile(f"version {index.version} has no encoding")
    # a rank knows of one part, its own
    part = Part(0, part.segments)
    count = sum(1 for _ in grid(past.table, part))
    writer = open_shard_writer(index.encoding, path, past.table, count)
    try:
        for chunk in grid(past.table, part):
            new = past.chunk_at(chunk, index.version)
            old = new.copy()
            past.undo_chunk(chunk, old, index.version, index.base_version)
            _append(writer, chunk, old, new)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _append(writer: ShardWriter, chunk: Chunk, old: Words, new: Words) -> None:
    changes = compare(old, new)
    if len(changes):
        prepared = writer.prepare(chunk, old, lambda: new, changes)
        writer.append(chunk, prepared, lambda: new, ChunkStep(changes, span_sums(chunk, old, changes)))
    else:
        writer.append(chunk, b"", lambda: new, None)


def _put(layout: Layout, made: Path, target: Path) -> None:
    put_link_away(layout, target)
    made.rename(target)
    durable.sync_directory(target.parent)


def remake(
    layout: Layout, local: Path, claim: Claim, there: range, *, only: int | None = None
) -> tuple[list[str], list[str]]:
    """What was made, and what could not be. `only`: the one version to look at. Raises RetryLater and
    NeedsReseed when the local checkpoint cannot be read now."""
    with Past(local) as past:
        run = Remake(layout, past, History(LocalPaths(local)), claim, there, only)
        return list(run.versions()), run.lost
