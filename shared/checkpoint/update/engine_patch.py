"""A patch file for running engines: absolute words from one version to another. docs/FORMAT.md, Engine patch.

It is made from the journals of the steps between, before the last of them is written or after. Memory: the
changes of one tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import TensorSpec, Words
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.channel.run_files import write_lane_rows
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.state.state import Step, unpack_lanes
from weightcast.shared.checkpoint.update.journal import JournalReader, PackedRecord, Record
from weightcast.shared.files import durable
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
        tensors = _changed(local, steps, stack)
        nbytes = 0
        for one in tensors:
            nbytes = one.place(nbytes)
        if nbytes > max(MOST_SHARE * local.table.nbytes, ALWAYS_BYTES):
            raise NoPatch(f"a patch of {nbytes} bytes is not faster than a reload")
        path = local.paths.engine / name_of(target.version, target.digest)
        _write(path, _content(local, _head(local, steps, base_version, tensors), tensors))
    return EnginePatch(
        path.name,
        base_version,
        steps[0].base.root,
        target.version,
        target.root,
        tuple(one.spec.name for one in tensors),
        sum(one.changes for one in tensors),
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


class _Source(NamedTuple):
    """The records of one tensor in one journal. `pending`: its new words are not in the checkpoint yet."""

    journal: JournalReader
    records: list[PackedRecord]
    pending: bool


class _Tensor:
    """A changed tensor, and its place in the file. `sources`: of each journal that changes it."""

    def __init__(self, spec: TensorSpec, number: int) -> None:
        self.spec, self.number = spec, number
        self.sources: list[_Source] = []
        self.index_width = 4 if spec.elements <= 1 << 32 else 8
        self.width, rest = divmod(spec.nbytes, spec.elements) if spec.elements else (0, 0)
        if rest or self.width not in _ELEMENT_WIDTHS:
            raise NoPatch(f"{spec.name}: an element of {spec.dtype} is not a whole number of bytes")
        self.ratio = self.width // spec.kind.width
        """words per element"""
        self.changes = self.offset = 0

    def place(self, offset: int) -> int:
        """Returns where its bytes end that begin at `offset`."""
        self.offset = offset
        if len(self.sources) == 1 and self.ratio == 1:
            self.changes = sum(record.changes for record in self.sources[0].records)
        else:
            self.changes = len(self._touched(self._records()))
        return offset + _padded(self.changes * self.index_width) + _padded(self.changes * self.width)

    def _records(self) -> list[list[Record]]:
        return [[one.journal.at(record) for record in one.records] for one in self.sources]

    def _touched(self, records: list[list[Record]]) -> NDArray[np.uint64]:
        """Elements with changed words, ascending, each once."""
        index = _joined([record.index for its in records for record in its])
        if len(records) == 1 and self.ratio == 1:
            return index
        return np.unique(index // np.uint64(self.ratio))

    def changed(self, whole: Words) -> tuple[NDArray[np.uint64], Words]:
        """Touched elements, and their words as they are in the target. `whole`: the tensor's here."""
        records = self._records()
        index = self._touched(records)
        pending = [
            record for its, one in zip(records, self.sources, strict=True) if one.pending for record in its
        ]
        if self.ratio == 1 and pending and len(records) == 1:
            return index, _joined([record.new for record in pending])
        words: Words = whole.reshape(-1, self.ratio)[index].reshape(-1)
        for record in pending:
            element, part = np.divmod(record.index, np.uint64(self.ratio))
            words[np.searchsorted(index, element) * self.ratio + part.astype(np.int64)] = record.new
        return index, words


def _changed(local: LocalCheckpoint, steps: Sequence[Step], stack: ExitStack) -> list[_Tensor]:
    found: dict[int, _Tensor] = {}
    for step in steps:
        journal = stack.enter_context(JournalReader(local.paths.journal(step.journal), local.table))
        journal.require(local.state.run_id, step)
        pending = step is steps[-1] and local.state.position.digest != step.target.digest
        packed = sorted(journal.packed(), key=lambda record: (record.tensor, record.first))
        for number, its in groupby(packed, key=lambda record: record.tensor):
            if number not in found:
                found[number] = _Tensor(local.table[number], number)
            found[number].sources.append(_Source(journal, list(its), pending))
    return [found[number] for number in sorted(found)]


def _joined(arrays: Sequence[Words]) -> Words:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _head(
    local: LocalCheckpoint, steps: Sequence[Step], base_version: int, changed: Sequence[_Tensor]
) -> bytes:
    first, target = steps[0].base, steps[-1].target
    numbers = [one.number for one in changed]
    old, new = (write_lane_rows(unpack_lanes(at.lanes)[numbers]) for at in (first, target))
    tensors = [
        {
            "name": one.spec.name,
            "dtype": one.spec.dtype,
            "shape": list(one.spec.shape),
            "changes": one.changes,
            "index_width": one.index_width,
            "offset": one.offset,
            "lanes_old": before.decode(),
            "lanes_new": after.decode(),
        }
        for one, before, after in zip(changed, old, new, strict=True)
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


def _content(local: LocalCheckpoint, head: bytes, changed: Sequence[_Tensor]) -> Iterator[bytes]:
    yield head
    for one in changed:
        index, words = one.changed(local.words(one.number))
        if len(index) != one.changes or not (index[:-1] < index[1:]).all():
            raise DamagedFile(f"{one.spec.name}: its journal names a word twice")
        columns = (index.astype(f"<u{one.index_width}").tobytes(), words.tobytes())
        yield b"".join(column.ljust(_padded(len(column)), b"\0") for column in columns)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PIECE_ALIGN) * _PIECE_ALIGN


def _write(path: Path, content: Iterator[bytes]) -> None:
    """Not synced: a patch that is lost with its host is of no use to anybody."""
    if is_link(path.parent):
        raise _linked(path.parent)
    path.parent.mkdir(exist_ok=True)
    digest = hashlib.sha256()

    def signed() -> Iterator[bytes]:
        for piece in content:
            digest.update(piece)
            yield piece
        yield digest.digest()

    durable.replace(path, signed(), sync=False)
