"""A patch file for running engines: absolute words from one version to another. docs/FORMAT.md, Engine patch.

It is made from the journals of the steps between, before the last of them is written or after. Memory: the
changes of one tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import TensorSpec, Words
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.channel.index_records import write_lane_rows
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.state.state import Step, unpack_lanes
from weightcast.shared.checkpoint.update.journal import JournalReader
from weightcast.shared.checkpoint.update.journal_records import PackedRecord, Record
from weightcast.shared.files.paths import is_directory, is_link

MAGIC = b"wcpatch1"
FORMAT = 1
NAME = re.compile(r"[0-9]+-[0-9a-f]{8}\.patch")
_ALIGN, _PIECE_ALIGN = 64, 8
_ELEMENT_WIDTHS = (1, 2, 4, 8)
MOST_SHARE = 0.5
"""of the weights' bytes; beyond, a reload is as fast"""
ALWAYS_BYTES = 1 << 20


class NoPatch(Refused):
    """No patch can be made of these steps; engines reload from disk."""


@dataclass(frozen=True)
class EnginePatch:
    """A complete file `name` in the engines' directory. It leads from `base_version` with `base_root`."""

    name: str
    base_version: int
    base_root: str
    version: int
    root: str
    tensors: tuple[str, ...]
    changes: int
    nbytes: int


@dataclass(frozen=True)
class _Source:
    """The records of one tensor in one journal. `pending`: its new words are not in the checkpoint yet."""

    journal: JournalReader
    records: Sequence[PackedRecord]
    pending: bool

    def read(self) -> Sequence[Record]:
        return [self.journal.at(record) for record in self.records]


@dataclass(frozen=True)
class _Piece:
    """A changed tensor's place in the file."""

    number: int
    sources: Sequence[_Source]
    changes: int
    index_width: int
    offset: int

    def end(self, width: int) -> int:
        return self.offset + _padded(self.changes * self.index_width) + _padded(self.changes * width)


def name_of(version: int, digest: str) -> str:
    return f"{version}-{digest[:8]}.patch"


def write_engine_patch(local: LocalCheckpoint, steps: Sequence[Step], base_version: int) -> EnginePatch:
    """`steps` follow each other; the last one is written to the checkpoint or is to be, those before are.
    `base_version`: the number by which engines know the bytes that `steps` begin with.

    Raises NoPatch when a dtype has no whole elements or the file would be too large, DamagedFile for a
    journal that is none of these steps', OSError. No file is left then.
    """
    target = steps[-1].target
    with ExitStack() as stack:
        pieces = list(_pieces(local, _sources(local, steps, stack)))
        nbytes = pieces[-1].end(_width(local.table[pieces[-1].number])) if pieces else 0
        if nbytes > max(MOST_SHARE * local.table.nbytes, ALWAYS_BYTES):
            raise NoPatch(f"a patch of {nbytes} bytes is not faster than a reload")
        head = _head(local, steps, base_version, pieces)
        path = local.paths.engine / name_of(target.version, target.digest)
        _write(path, _content(local, head, pieces))
    return EnginePatch(
        path.name,
        base_version,
        steps[0].base.root,
        target.version,
        target.root,
        tuple(local.table[piece.number].name for piece in pieces),
        sum(piece.changes for piece in pieces),
        path.stat().st_size,
    )


def drop_engine_patches(paths: LocalPaths) -> None:
    """Removes all patches. Engines that still read one keep it open."""
    directory = paths.engine
    if is_link(directory):
        raise _linked(directory)
    for path in directory.iterdir() if is_directory(directory) else ():
        path.unlink(missing_ok=True)


def _linked(directory: Path) -> RetryLater:
    return RetryLater(f"{directory} is a symbolic link", remedy="remove it; links are refused here")


def _sources(local: LocalCheckpoint, steps: Sequence[Step], stack: ExitStack) -> dict[int, list[_Source]]:
    found: dict[int, list[_Source]] = {}
    for step in steps:
        journal = stack.enter_context(JournalReader(local.paths.journal(step.journal), local.table))
        named = (journal.header.run_id, journal.header.journal, journal.header.target_digest)
        if named != (local.state.run_id, step.journal, step.target.digest):
            raise DamagedFile(f"{journal.path}: belongs to another run or version")
        pending = step is steps[-1] and local.state.position.digest != step.target.digest
        records: dict[int, list[PackedRecord]] = {}
        for record in journal.packed():
            records.setdefault(record.tensor, []).append(record)
        for tensor, its in records.items():
            its.sort(key=lambda record: record.first)
            found.setdefault(tensor, []).append(_Source(journal, its, pending))
    return found


def _pieces(local: LocalCheckpoint, sources: dict[int, list[_Source]]) -> Iterator[_Piece]:
    offset = 0
    for number in sorted(sources):
        spec, its = local.table[number], sources[number]
        width = _width(spec)
        if len(its) == 1 and width == spec.kind.width:
            changes = sum(record.changes for record in its[0].records)
        else:
            changes = len(_touched(spec, [source.read() for source in its]))
        piece = _Piece(number, its, changes, 4 if spec.elements <= 1 << 32 else 8, offset)
        yield piece
        offset = piece.end(width)


def _width(spec: TensorSpec) -> int:
    """Bytes of an element."""
    width, rest = divmod(spec.nbytes, spec.elements) if spec.elements else (0, 0)
    if rest or width not in _ELEMENT_WIDTHS:
        raise NoPatch(f"{spec.name}: an element of {spec.dtype} is not a whole number of bytes")
    return width


def _touched(spec: TensorSpec, records: Sequence[Sequence[Record]]) -> NDArray[np.uint64]:
    """Elements with changed words, ascending, each once. `records`: of each journal."""
    index = _joined([record.index for its in records for record in its])
    ratio = _width(spec) // spec.kind.width
    if ratio > 1:
        index = index // np.uint64(ratio)
    return index if len(records) == 1 and ratio == 1 else np.unique(index)


def _joined(arrays: Sequence[Words]) -> Words:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _gathered(whole: Words, ratio: int, index: NDArray[np.uint64], pending: Sequence[Record]) -> Words:
    """word[len(index) * ratio], so many words per element: those of `whole` with what is not there yet."""
    words: Words = whole.reshape(-1, ratio)[index].reshape(-1)
    for record in pending:
        element, part = np.divmod(record.index, np.uint64(ratio))
        words[np.searchsorted(index, element) * ratio + part.astype(np.int64)] = record.new
    return words


def _head(
    local: LocalCheckpoint, steps: Sequence[Step], base_version: int, pieces: Sequence[_Piece]
) -> bytes:
    first, target = steps[0].base, steps[-1].target
    old, new = _hex(first.lanes, pieces), _hex(target.lanes, pieces)
    tensors = [
        {
            "name": (spec := local.table[piece.number]).name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "changes": piece.changes,
            "index_width": piece.index_width,
            "offset": piece.offset,
            "lanes_old": before,
            "lanes_new": after,
        }
        for piece, before, after in zip(pieces, old, new, strict=True)
    ]
    header = {
        "format": FORMAT,
        "run_id": local.state.run_id,
        "base": {"version": base_version, "root": first.root},
        "target": {"version": target.version, "root": target.root, "digest": target.digest},
        "tensors": tensors,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    return head + bytes(-len(head) % _ALIGN)


def _hex(packed: bytes, pieces: Sequence[_Piece]) -> list[str]:
    return write_lane_rows(unpack_lanes(packed)[[piece.number for piece in pieces]])


def _content(local: LocalCheckpoint, head: bytes, pieces: Sequence[_Piece]) -> Iterator[bytes | memoryview]:
    yield head
    for piece in pieces:
        index, words = _changes(local, piece)
        if len(index) != piece.changes or not (index[:-1] < index[1:]).all():
            raise DamagedFile(f"{local.table[piece.number].name}: its journal names a word twice")
        yield from _padded_bytes(index.astype(f"<u{piece.index_width}"))
        yield from _padded_bytes(words)


def _changes(local: LocalCheckpoint, piece: _Piece) -> tuple[NDArray[np.uint64], Words]:
    """Touched elements, and their words as they are in the target."""
    spec = local.table[piece.number]
    ratio = _width(spec) // spec.kind.width
    records = [source.read() for source in piece.sources]
    index = _touched(spec, records)
    if ratio == 1 and [source.pending for source in piece.sources] == [True]:
        return index, _joined([record.new for record in records[0]])
    pending = [r for its, source in zip(records, piece.sources, strict=True) if source.pending for r in its]
    return index, _gathered(local.words(piece.number), ratio, index, pending)


def _padded_bytes(array: NDArray[np.unsignedinteger]) -> Iterator[bytes | memoryview]:
    yield array.view(np.uint8).data
    yield bytes(-array.nbytes % _PIECE_ALIGN)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PIECE_ALIGN) * _PIECE_ALIGN


def _write(path: Path, content: Iterator[bytes | memoryview]) -> None:
    """Not synced: a patch that is lost with its host is of no use to anybody."""
    if is_link(path.parent):
        raise _linked(path.parent)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    digest = hashlib.sha256()
    try:
        # the journals' mode: whoever may load the weights may read what changes in them
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb") as file:
            for buffer in content:
                digest.update(buffer)
                file.write(buffer)
            file.write(digest.digest())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
