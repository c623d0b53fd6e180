"""The journal of one step: absolute old and new words. docs/FORMAT.md, Journal.

It is complete only with its footer, and counts only while the state names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash
from numpy.typing import NDArray

from weightcast.shared.errors import DamagedFile
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.durable import open_regular
from weightcast.shared.files.strict_json import Members, parse_object
from weightcast.shared.words import TensorTable, Words

_MAGIC = b"wcjrnl1\n"
_END = b"wcjend1\n"
_HEADER_LIMIT = 64 << 10
_RECORD = struct.Struct("<IIQIIQ")
"""tensor, word width, first word, changes, escapes, xxh3-64 of the payload"""
_FOOTER_TENSOR = 0xFFFFFFFF
_ESCAPE = 255


@dataclass(frozen=True)
class JournalHeader:
    run_id: str
    journal: str
    base_version: int
    base_root: str
    generation: int
    target_version: int
    target_root: str
    target_digest: str


@dataclass(frozen=True)
class Record:
    """Changes of one tensor: `index` uint64[k], words in strictly increasing order; `old`, `new` word[k]."""

    tensor: int
    index: NDArray[np.uint64]
    old: Words
    new: Words


@dataclass(frozen=True)
class Place:
    """Where a record lies: its tensor, first changed word, offset in the file."""

    tensor: int
    first: int
    offset: int


class JournalWriter:
    def __init__(self, path: Path, header: JournalHeader) -> None:
        self._file = path.open("xb")
        self._records = 0
        self.changes = 0
        self._file.write(_prefix(header))
        failpoint("journal.begun", path)

    def add(self, record: Record) -> None:
        gaps = np.diff(record.index, prepend=record.index[:1])
        escapes = gaps[gaps >= _ESCAPE].astype("<u4")
        payload = b"".join(
            (
                np.minimum(gaps, _ESCAPE).astype(np.uint8).tobytes(),
                escapes.tobytes(),
                np.ascontiguousarray(record.old).tobytes(),
                np.ascontiguousarray(record.new).tobytes(),
            )
        )
        checksum = xxhash.xxh3_64_intdigest(payload)
        width, count = record.new.dtype.itemsize, len(record.index)
        self._file.write(
            _RECORD.pack(record.tensor, width, int(record.index[0]), count, len(escapes), checksum)
        )
        self._file.write(payload)
        self._records += 1
        self.changes += count
        failpoint("journal.record", Path(self._file.name))

    def close(self) -> None:
        self._file.write(_RECORD.pack(_FOOTER_TENSOR, 0, self._records, 0, 0, 0) + _END)
        self._file.close()
        failpoint("journal.complete", Path(self._file.name))

    def abandon(self) -> None:
        # on a full disk closing fails like the write before it
        with contextlib.suppress(OSError):
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def _prefix(header: JournalHeader) -> bytes:
    text = json.dumps(asdict(header)).encode()
    return _MAGIC + struct.pack("<I", len(text)) + text


class JournalReader:
    """Raises DamagedFile for anything that is not a complete journal of this table."""

    def __init__(self, path: Path, table: TensorTable) -> None:
        self.path = path
        self._table = table
        try:
            self._file = os.fdopen(open_regular(path), "rb")
        except FileNotFoundError as error:
            raise DamagedFile(f"{path}: the journal is gone") from error
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header()
            self._start = self._file.tell()
            self._check_footer()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def _bad(self, why: str) -> DamagedFile:
        return DamagedFile(
            f"{self.path}: {why}", remedy="the journal is discarded; the checkpoint is re-hashed"
        )

    def _read(self, size: int) -> bytes:
        data = self._file.read(size) if size <= self._size else b""
        if len(data) != size:
            raise self._bad("ends early")
        return data

    def _read_header(self) -> JournalHeader:
        if self._read(len(_MAGIC)) != _MAGIC:
            raise self._bad("not a journal")
        (length,) = struct.unpack("<I", self._read(4))
        if length > _HEADER_LIMIT:
            raise self._bad("header too long")
        members = Members(parse_object(self._read(length), str(self.path)), str(self.path))
        return JournalHeader(
            run_id=members.text("run_id"),
            journal=members.text("journal"),
            base_version=members.integer("base_version"),
            base_root=members.text("base_root"),
            generation=members.integer("generation"),
            target_version=members.integer("target_version"),
            target_root=members.text("target_root"),
            target_digest=members.text("target_digest"),
        )

    def _check_footer(self) -> None:
        tail = _RECORD.size + len(_END)
        if self._size - self._start < tail:
            raise self._bad("incomplete")
        self._file.seek(self._size - tail)
        self._footer = _RECORD.unpack(self._read(_RECORD.size))
        if self._footer[0] != _FOOTER_TENSOR or self._read(len(_END)) != _END:
            raise self._bad("incomplete")

    def records(self) -> Iterator[Record]:
        self._file.seek(self._start)
        for _ in range(self._footer[2]):
            yield self._record()
        if self._file.tell() != self._size - _RECORD.size - len(_END):
            raise self._bad("more records than the footer counts")

    def places(self) -> Iterator[Place]:
        """Of all records; their payloads are not read."""
        self._file.seek(self._start)
        for _ in range(self._footer[2]):
            offset = self._file.tell()
            tensor, width, first, count, escapes, _ = self._record_head()
            yield Place(tensor, first, offset)
            self._file.seek(count + 4 * escapes + 2 * width * count, os.SEEK_CUR)

    def at(self, place: Place) -> Record:
        self._file.seek(place.offset)
        return self._record()

    def _record_head(self) -> tuple[int, int, int, int, int, int]:
        """As `_RECORD` has them."""
        tensor, width, first, count, escapes, checksum = _RECORD.unpack(self._read(_RECORD.size))
        if tensor >= len(self._table) or width != self._table[tensor].kind.width or count == 0:
            raise self._bad("record of no tensor")
        if count > self._table[tensor].words or escapes > count:
            raise self._bad("record longer than its tensor")
        return tensor, width, first, count, escapes, checksum

    def _record(self) -> Record:
        tensor, width, first, count, escapes, checksum = self._record_head()
        payload = self._read(count + 4 * escapes + 2 * width * count)
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            raise self._bad("record damaged")
        dtype = self._table[tensor].kind.numpy
        gaps = np.frombuffer(payload, np.uint8, count).astype(np.uint64)
        escaped = np.flatnonzero(gaps == _ESCAPE)
        if len(escaped) != escapes:
            raise self._bad("record damaged")
        gaps[escaped] = np.frombuffer(payload, "<u4", escapes, count)
        if gaps[0] != 0 or not gaps[1:].all():
            raise self._bad("record out of order")
        index = np.cumsum(gaps) + np.uint64(first)
        if first >= self._table[tensor].words or int(index[-1]) >= self._table[tensor].words:
            raise self._bad("record past the end of its tensor")
        begin = count + 4 * escapes
        old = np.frombuffer(payload, dtype, count, begin)
        return Record(tensor, index, old, np.frombuffer(payload, dtype, count, begin + width * count))
