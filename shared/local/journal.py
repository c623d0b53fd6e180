"""The journal of one step: absolute old and new words. docs/FORMAT.md, Journal.

It is complete only with its footer, and counts only while the state names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from weightcast.shared.codec.changes import Changes
from weightcast.shared.codec.kernels import kernels
from weightcast.shared.codec.plain import ESCAPED_GAP, unpack_gaps
from weightcast.shared.codec.scratch import scratch
from weightcast.shared.errors import DamagedFile
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.durable import open_regular
from weightcast.shared.files.strict_json import Members, parse_object
from weightcast.shared.local.spare import begin
from weightcast.shared.words import Chunk, TensorTable, Words

_MAGIC = b"wcjrnl1\n"
_END = b"wcjend1\n"
_HEADER_LIMIT = 64 << 10
_RECORD = struct.Struct("<IIQIIQ")
"""tensor, word width, first word, changes, escapes, xxh3-64 of the payload"""
_FOOTER_TENSOR = 0xFFFFFFFF
_FEW = 16
"""records whose buffers are written as they are; more are joined first"""


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


class Way(Enum):
    FORWARD = "forward"
    BACK = "back"


@dataclass(frozen=True)
class PackedRecord:
    """A record's header; its payload lies at `offset` of the journal."""

    tensor: int
    width: int
    first: int
    count: int
    escapes: int
    checksum: int
    offset: int

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.count + 4 * self.escapes + 2 * self.width * self.count


@dataclass(frozen=True)
class _Payload:
    gaps: NDArray[np.uint8]
    escapes: NDArray[np.uint32]
    old: Words
    new: Words

    @property
    def reach(self) -> int:
        """Words from the first change to the last, both counted."""
        near = int(self.gaps.sum(dtype=np.int64)) - ESCAPED_GAP * len(self.escapes)
        return 1 + near + int(self.escapes.sum(dtype=np.int64))


Begin = Callable[[Words, int], None]
"""Called with a stretch of words and how many of them will be written."""


def _at_once(words: Words, changes: int) -> None:
    """For words in memory: nothing is to be made ready."""


@dataclass(frozen=True)
class Packed:
    """Records as they lie in a journal. `buffers` follow each other; `changes`: of all records."""

    buffers: Sequence[bytes | memoryview]
    records: int
    changes: int


def pack_record(record: Record) -> Packed:
    near = (record.index - record.index[0]).astype(np.uint32)
    bounds = [0, len(near)]
    return _pack([(record.tensor, int(record.index[0]))], near, bounds, record.old, record.new)


def pack_changes(chunk: Chunk, changes: Changes) -> Packed:
    """A record for each span with changes. Safe in any thread; `changes` must stay as they are until they are
    written."""
    index = changes.index
    offsets = np.array([span.offset for span in chunk.spans], np.uint32)
    borders = [*np.searchsorted(index, offsets).tolist(), len(index)]
    spans = [span for span, (start, end) in zip(chunk.spans, pairwise(borders), strict=True) if end > start]
    bounds = sorted({0, *borders})
    heads = [
        (span.tensor, int(index[start]) + span.start - span.offset)
        for span, start in zip(spans, bounds, strict=False)
    ]
    return _pack(heads, index, bounds, changes.old, changes.new)


def _pack(
    heads: Sequence[tuple[int, int]], index: NDArray[np.uint32], bounds: Sequence[int], old: Words, new: Words
) -> Packed:
    """`heads`: tensor and first word of each record, which has changes bounds[n] to bounds[n + 1]."""
    if not len(index):
        return Packed((), 0, 0)
    gaps = np.empty(len(index), np.uint8)
    escapes, counts = kernels().pack_gaps(index, np.array(bounds, np.int64), gaps)
    gap_bytes, escape_bytes, old_bytes, new_bytes = map(_bytes_of, (gaps, escapes, old, new))
    buffers: list[bytes | memoryview] = []
    width, escaped = new.itemsize, 0
    for (tensor, first), (start, end), count in zip(heads, pairwise(bounds), counts.tolist(), strict=True):
        payload = (
            gap_bytes[start:end],
            escape_bytes[4 * escaped : 4 * (escaped + count)],
            old_bytes[width * start : width * end],
            new_bytes[width * start : width * end],
        )
        buffers.append(_RECORD.pack(tensor, width, first, end - start, count, _checksum(payload)))
        buffers.extend(payload)
        escaped += count
    return Packed(buffers if len(heads) <= _FEW else [b"".join(buffers)], len(heads), len(index))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _checksum(pieces: Iterable[memoryview]) -> int:
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest())


class JournalWriter:
    """`spare`: a file to be written over where there is one (spare.py). FileExistsError where `path` is."""

    def __init__(self, path: Path, header: JournalHeader, spare: Path | None = None) -> None:
        self._path = path
        self._file = path.open("xb") if spare is None else begin(path, spare, len(_END))
        self._records = 0
        self.changes = 0
        try:
            self._file.write(_prefix(header))
            failpoint("journal.begun", path)
        except BaseException:
            self.abandon()
            raise

    def add(self, record: Record) -> None:
        self.write(pack_record(record))

    def write(self, packed: Packed) -> None:
        self._file.flush()
        self._write(packed.buffers)
        self._records += packed.records
        self.changes += packed.changes
        failpoint("journal.record", self._path)

    def _write(self, buffers: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            done = os.writev(self._file.fileno(), left)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]

    def close(self) -> None:
        self._file.flush()
        self._file.truncate(os.lseek(self._file.fileno(), 0, os.SEEK_CUR))
        self._file.write(_RECORD.pack(_FOOTER_TENSOR, 0, self._records, 0, 0, 0) + _END)
        self._file.close()
        failpoint("journal.complete", self._path)

    def abandon(self) -> None:
        # on a full disk closing fails like the write before it
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


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

    def packed(self) -> Iterator[PackedRecord]:
        """Records whose headers fit the table; their payloads are left where they are."""
        offset, end = self._start, self._size - _RECORD.size - len(_END)
        for _ in range(self._footer[2]):
            record = self._head(offset, end)
            yield record
            offset = record.offset + record.size
        if offset != end:
            raise self._bad("more records than the footer counts")

    def _head(self, offset: int, end: int) -> PackedRecord:
        head = os.pread(self._file.fileno(), _RECORD.size, offset)
        if len(head) != _RECORD.size:
            raise self._bad("ends early")
        tensor, width, first, count, escapes, checksum = _RECORD.unpack(head)
        if tensor >= len(self._table) or width != self._table[tensor].kind.width or count == 0:
            raise self._bad("record of no tensor")
        if count > self._table[tensor].words or escapes > count:
            raise self._bad("record longer than its tensor")
        if first >= self._table[tensor].words:
            raise self._bad("record past the end of its tensor")
        record = PackedRecord(tensor, width, first, count, escapes, checksum, offset + _RECORD.size)
        if record.offset + record.size > end:
            raise self._bad("ends early")
        return record

    def exchange(
        self, record: PackedRecord, words: Words, way: Way, *, again: bool, begin: Begin = _at_once
    ) -> int | None:
        """Writes new words over old ones of the record's tensor, or the way back, and reads them back.
        `begin` is called with the stretch of `words` that the record covers, and how many of it will change.
        Returns the first word that is none of those expected (`again`: or already written); some before it
        are written then. Raises DamagedFile with nothing of the record written. Safe in any thread."""
        payload = self._payload(record)
        begin(words[record.first : record.first + payload.reach], record.count)
        before, after = (payload.old, payload.new) if way is Way.FORWARD else (payload.new, payload.old)
        try:
            failed: int | None = kernels().exchange_packed(
                words, record.first, payload.gaps, payload.escapes, before, after, again=again
            )
        except ValueError as error:
            raise self._bad(f"record with {error}") from error
        return failed

    def _payload(self, record: PackedRecord) -> _Payload:
        """In this thread's scratch."""
        room = scratch().take("journal", np.uint8, record.size)
        if os.preadv(self._file.fileno(), [room.data], record.offset) != record.size:
            raise self._bad("ends early")
        if xxhash.xxh3_64_intdigest(room.data) != record.checksum:
            raise self._bad("record damaged")
        dtype, count = self._table[record.tensor].kind.numpy, record.count
        begin = count + 4 * record.escapes
        return _Payload(
            room[:count],
            np.frombuffer(room, "<u4", record.escapes, count),
            np.frombuffer(room, dtype, count, begin),
            np.frombuffer(room, dtype, count, begin + record.width * count),
        )

    def records(self) -> Iterator[Record]:
        return map(self.at, self.packed())

    def at(self, record: PackedRecord) -> Record:
        """Safe in any thread."""
        payload = self._payload(record)
        index = unpack_gaps(record.first, payload.gaps, payload.escapes)
        if index is None or index[-1] >= self._table[record.tensor].words:
            raise self._bad("record out of order, or past the end of its tensor")
        return Record(record.tensor, index.astype(np.uint64), payload.old.copy(), payload.new.copy())
