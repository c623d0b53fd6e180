"""The journal of one step: absolute old and new words. docs/FORMAT.md, Journal.

It is complete only with its footer, and counts only while the state names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, Chunk, TensorTable, Words
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.state.state import Step
from weightcast.shared.checkpoint.update import buffer_reuse as spares
from weightcast.shared.codec.changes import Changes, worth_masks
from weightcast.shared.files.durable import named, open_regular
from weightcast.shared.files.strict_json import Members, parse_object
from weightcast.shared.kernels.constants import DAMAGED, Begin, at_once, check_masks, places_under
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import scratch

Pieces = Sequence[bytes | memoryview]

HEAD = struct.Struct("<IIQIIQ")
"""tensor, word width, first word, changes, escapes or `WHOLE` or `MASKED` and a length, checksum"""
FACTS = struct.Struct("<IIQII")
"""a head without its checksum: xxh3-64 of the payload, xor that of these bytes"""
WHOLE = 1 << 31
MASKED = 3 << 30
_WORTH_MASKS = 1 << 12
"""words per span, on the average of a chunk, from which its changes stay under masks: short lists are
exchanged many at once"""
_FEW = 16
"""records whose buffers are written as they are; more are joined first"""
_BATCH = 256 << 10
"""bytes of short records that a thread takes at once"""


@dataclass(frozen=True)
class Record:
    """Changes of one tensor: `index` uint64[k], words in strictly increasing order; `old`, `new` word[k]."""

    tensor: int
    index: NDArray[np.uint64]
    old: Words
    new: Words


@dataclass(frozen=True)
class Packed:
    """Records as they lie in a journal. `buffers` follow each other; `changes`: of all records."""

    buffers: Pieces
    records: int
    changes: int


class PackedRecord(NamedTuple):
    """A record's head; its payload is at `offset` of the journal. `whole`: so many words are there, those
    that stay among them; `masked`: it tells by a bit each which of so many change; both 0: `changes` are
    listed. `checksum`: xxh3-64 of the payload, if the head is what was written."""

    tensor: int
    width: int
    first: int
    changes: int
    escapes: int
    whole: int
    masked: int
    checksum: int
    offset: int
    size: int
    """bytes of the payload"""

    @property
    def listed(self) -> bool:
        return not self.whole and not self.masked

    @property
    def words(self) -> int:
        """Old ones, and as many new ones, at the payload's end."""
        return self.whole or self.changes


@dataclass(frozen=True)
class Lists:
    """Short records of listed changes. `rows`: as `read_lists` found them in `block`, which is at `offset`
    of the journal."""

    block: ByteArray
    rows: NDArray[np.int64]
    offset: int

    def only(self, kept: NDArray[np.bool_]) -> Lists:
        return replace(self, rows=self.rows[kept])


_CHANGES, _PLACE, _SIZE = 2, 4, 5
"""columns of its rows"""


def _mask_bytes(words: int) -> int:
    return -(-words // 64) * 8


def pack_changes(chunk: Chunk, changes: Changes) -> Packed:
    """A record for each span with changes. Safe in any thread; `changes` must stay as they are until they are
    written."""
    long = chunk.words >= _WORTH_MASKS * len(chunk.spans)
    if long and worth_masks(len(changes), chunk.words):
        masks = changes.masks
        if masks is None:
            masks = kernels().masks_of(changes.index, chunk.words)
        return _pack_masked(chunk, masks, changes)
    index = changes.index
    if not len(index):
        return Packed((), 0, 0)
    borders = np.append(np.searchsorted(index, chunk.places[:, 0].astype(np.uint32)), len(index))
    kept = np.flatnonzero(np.diff(borders))
    starts = borders[kept]
    heads = np.stack([chunk.tensors[kept], index[starts] + chunk.shifts[kept]], 1)
    bounds = np.append(starts, len(index))
    data = kernels().pack_lists(heads, index, bounds, changes.old, changes.new).data
    return Packed((data,), len(heads), len(index))


def _pack_masked(chunk: Chunk, masks: NDArray[np.uint64], changes: Changes) -> Packed:
    def pieces() -> Iterator[tuple[int, Pieces]]:
        found = 0
        for span in chunk.spans:
            bits = masks[span.offset >> 6 :][: _mask_bytes(span.words) >> 3]
            count = len(changes) if len(chunk.spans) == 1 else int(np.bitwise_count(bits).sum())
            here = slice(found, found + count)
            yield count, (_bytes_of(bits), _bytes_of(changes.old[here]), _bytes_of(changes.new[here]))
            found += count

    return _stretches(chunk, MASKED, pieces())


def pack_whole(chunk: Chunk, old: Words, new: Words, counts: Sequence[int] | None = None) -> Packed:
    """As `pack_changes`, for where few words stay. `old`, `new`: word[chunk.words], not to be changed until
    they are written. `counts`: changes of each span, where they are known."""
    heres = [slice(span.offset, span.offset + span.words) for span in chunk.spans]
    if counts is None:
        counts = [int(np.count_nonzero(old[here] != new[here])) for here in heres]
    pieces = [(_bytes_of(old[here]), _bytes_of(new[here])) for here in heres]
    return _stretches(chunk, WHOLE, zip(counts, pieces, strict=True))


def _stretches(chunk: Chunk, form: int, spans: Iterable[tuple[int, Pieces]]) -> Packed:
    """A record of all of each span with changes. `spans`: how many, and its payload."""
    buffers: list[bytes | memoryview] = []
    changes = records = 0
    for span, (count, payload) in zip(chunk.spans, spans, strict=True):
        if count:
            length = form | span.words
            buffers.append(_head(span.tensor, chunk.kind.width, span.start, count, length, payload))
            buffers.extend(payload)
            changes += count
            records += 1
    return _packed(buffers, records, changes)


def _packed(buffers: Pieces, records: int, changes: int) -> Packed:
    return Packed(buffers if records <= _FEW else [b"".join(buffers)], records, changes)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _head(tensor: int, width: int, first: int, changes: int, more: int, payload: Pieces) -> bytes:
    facts = FACTS.pack(tensor, width, first, changes, more)
    checksum = _checksum(payload) ^ xxhash.xxh3_64_intdigest(facts)
    return facts + checksum.to_bytes(8, "little")


def _checksum(pieces: Pieces) -> int:
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest())


_MAGIC = b"wcjrnl1\n"
_END = b"wcjend1\n"
_HEADER_LIMIT = 64 << 10
_FOOTER_TENSOR = 0xFFFFFFFF
_HEADS = 16 << 10
"""bytes that are read for a head: those of the next short records lie in them"""
_PIECE = 64 << 10
"""bytes of a stretch that are compared, written and read back while a core's cache holds them"""


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


class Direction(Enum):
    FORWARD = "forward"
    BACK = "back"


class JournalWriter:
    """`spare`: a file to be written over where there is one. FileExistsError where `path` is."""

    def __init__(self, path: Path, header: JournalHeader, spare: Path | None = None) -> None:
        self._path = path
        self._file = path.open("xb") if spare is None else spares.begin(path, spare, len(_END))
        self._records = 0
        self.changes = 0
        try:
            text = json.dumps(asdict(header)).encode()
            self._file.write(_MAGIC + struct.pack("<I", len(text)) + text)
            failpoint("journal.begun", path)
        except BaseException:
            self.abandon()
            raise

    def write(self, packed: Packed) -> None:
        with named(self._path):
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
        with named(self._path):
            self._file.flush()
            self._file.truncate(os.lseek(self._file.fileno(), 0, os.SEEK_CUR))
            self._file.write(HEAD.pack(_FOOTER_TENSOR, 0, self._records, 0, 0, 0) + _END)
            self._file.close()
        failpoint("journal.complete", self._path)

    def abandon(self) -> None:
        # on a full disk closing fails like the write before it
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


class JournalReader:
    """Raises DamagedFile for anything that is not a complete journal of this table. Its file is not written
    over until `close`."""

    def __init__(self, path: Path, table: TensorTable) -> None:
        self.path = path
        self._table = table
        try:
            self._file = os.fdopen(open_regular(path), "rb")
        except FileNotFoundError as error:
            raise DamagedFile(f"{path}: the journal is gone") from error
        try:
            self._lock()
            self._size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header()
            self._start = self._file.tell()
            tail = HEAD.size + len(_END)
            if self._size - self._start < tail:
                raise self._bad("incomplete")
            self._file.seek(self._size - tail)
            self._footer = HEAD.unpack(self._read(HEAD.size))
            if self._footer[0] != _FOOTER_TENSOR or self._read(len(_END)) != _END:
                raise self._bad("incomplete")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def require(self, run_id: str, step: Step) -> None:
        """Raises DamagedFile unless it is the journal of that step."""
        head, base, target = self.header, step.base, step.target
        named = (head.run_id, head.journal, head.base_version, head.base_root, head.target_digest)
        if named != (run_id, step.journal, base.version, base.root, target.digest):
            raise DamagedFile(f"{self.path}: belongs to another run or version")

    def _lock(self) -> None:
        """Against being written over (buffer_reuse.py), which begins with another name."""
        fd = self._file.fileno()
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.lstat(self.path)):
                return
        raise self._bad("the journal is gone")

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
        return members.record(JournalHeader)

    def batches(self) -> Iterator[PackedRecord | Lists]:
        """Records whose headers fit the table: listed short ones together, of others the payloads are left
        where they are."""
        offset, end, size = self._start, self._size - HEAD.size - len(_END), _HEADS
        left = self._footer[2]
        while left:
            data = os.pread(self._file.fileno(), min(size, end - offset), offset)
            block = np.frombuffer(data, np.uint8)
            rows = kernels().read_lists(block, left, self._table.forms)
            left -= len(rows) or 1
            if len(rows):
                yield Lists(block, rows, offset)
                offset, size = offset + int(rows[-1, _PLACE] + rows[-1, _SIZE]), _BATCH
            else:
                record = self._head(data, offset, end)
                yield record
                offset, size = record.offset + record.size, _HEADS
        if offset != end:
            raise self._bad("more records than the footer counts")

    def packed(self) -> Iterator[PackedRecord]:
        """Each record of the batches."""
        for batch in self.batches():
            if isinstance(batch, PackedRecord):
                yield batch
                continue
            for row in batch.rows[:, _PLACE].tolist():
                head = batch.block[row - HEAD.size : row].tobytes()
                yield self._head(head, batch.offset + row - HEAD.size, self._size)

    def _head(self, head: bytes, offset: int, end: int) -> PackedRecord:
        if len(head) < HEAD.size:
            raise self._bad("ends early")
        tensor, width, first, changes, more, checksum = HEAD.unpack_from(head)
        forms = self._table.forms
        own_width, words = forms[tensor].tolist() if tensor < len(forms) else (0, 0)
        if width != own_width or changes == 0:
            raise self._bad("record of no tensor")
        masked = more - MASKED if more >= MASKED else 0
        whole = more - WHOLE if MASKED > more >= WHOLE else 0
        escapes = more if more < WHOLE else 0
        stretch = whole or masked
        if first >= words or stretch > words - first:
            raise self._bad("record past the end of its tensor")
        if changes > (stretch if more >= WHOLE else words) or escapes > changes:
            raise self._bad("record longer than its tensor")
        checksum ^= xxhash.xxh3_64_intdigest(head[: FACTS.size])
        at = offset + HEAD.size
        places = _mask_bytes(masked) if masked else 0 if whole else changes + 4 * escapes
        size = places + 2 * width * (whole or changes)
        if at + size > end:
            raise self._bad("ends early")
        return PackedRecord(tensor, width, first, changes, escapes, whole, masked, checksum, at, size)

    def compare_and_swap(
        self, record: PackedRecord, words: Words, way: Direction, *, again: bool, begin: Begin = at_once
    ) -> int | None:
        """Writes new words over old ones of the record's tensor, or the way back, and reads them back.
        `begin` is called with the stretch of `words` that the record covers, and how many of it will change.
        Returns the first word that is none of those expected (`again`: or already written); some before it
        are written then. Raises DamagedFile with nothing of the record written. Safe in any thread."""
        if record.listed:
            wrong = self.compare_and_swap_many(
                *self._alone(record), words=words, way=way, again=again, begin=begin
            )
            return None if wrong is None else wrong[1]
        places = self._split(record, self._bytes(record.offset, record.size))
        before, after = places.ways(words.dtype, way)
        if record.whole:
            stretch = words[record.first : record.first + record.whole]
            begin(stretch, record.changes)
            place = _exchange_all(stretch, before, after, again)
            return None if place is None else record.first + place
        with self._named():
            failed: int | None = kernels().exchange_masked(
                words, record.first, record.masked, places.masks, before, after, again=again, begin=begin
            )
        return failed

    def _alone(self, record: PackedRecord) -> tuple[Lists, NDArray[np.int64]]:
        """One of listed changes, and how many words its tensor has, as the only one of `words`."""
        block = self._bytes(record.offset - HEAD.size, HEAD.size + record.size)
        rows = kernels().read_lists(block, 1, self._table.forms)
        if not len(rows):
            raise self._bad("record of no tensor")
        return Lists(block, rows, record.offset), np.array([[0, self._table[record.tensor].words]])

    def compare_and_swap_many(
        self,
        lists: Lists,
        homes: NDArray[np.int64],
        words: Words,
        way: Direction,
        *,
        again: bool,
        begin: Begin = at_once,
    ) -> tuple[int, int] | None:
        """As `compare_and_swap`, of short lists, in the order of the journal, at once: a model may have
        several 100,000 small tensors. `homes`: int64[n, 2], where each record's tensor begins in `words`, and
        how many words it has. Nothing is written where a word is unexpected; returns its tensor and
        number."""
        rows = lists.rows
        with self._named():
            index, old, new = kernels().unpack_lists(lists.block, rows, homes, words.dtype)
        before, after = (new, old) if way is Direction.BACK else (old, new)
        begin(words[index.min() : index.max() + 1], len(index))
        wrong = kernels().exchange_at(words, index, before, after, again=again)
        if wrong is None:
            return None
        row = int(np.searchsorted(np.cumsum(rows[:, _CHANGES]), wrong, side="right"))
        return int(rows[row, 0]), int(index[wrong] - homes[row, 0])

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """For kernels, which say what is wrong with a record."""
        try:
            yield
        except ValueError as error:
            raise self._bad(f"record with {error}") from error

    def _bytes(self, offset: int, size: int) -> ByteArray:
        """In this thread's scratch."""
        room = scratch().take("journal", np.uint8, size)
        if os.preadv(self._file.fileno(), [room.data], offset) != size:
            raise self._bad("ends early")
        return room

    def _split(self, record: PackedRecord, payload: Any) -> _Payload:
        """`payload`: an array, or the memory of one, as are the parts."""
        if xxhash.xxh3_64_intdigest(payload) != record.checksum:
            raise self._bad(f"record with {DAMAGED}")
        half = record.width * record.words
        places = record.size - 2 * half
        listed, words = record.changes if record.listed else places, places + half
        return _Payload(payload[:listed], payload[listed:places], payload[places:words], payload[words:])

    def records(self) -> Iterator[Record]:
        return map(self.at, self.packed())

    def at(self, record: PackedRecord) -> Record:
        """Safe in any thread."""
        spec = self._table[record.tensor]
        if record.listed:
            lists, homes = self._alone(record)
            with self._named():
                reached, *both = kernels().unpack_lists(lists.block, lists.rows, homes, spec.kind.numpy)
            return Record(record.tensor, reached.astype(np.uint64), *both)
        places = self._split(record, self._bytes(record.offset, record.size))
        old, new = places.ways(spec.kind.numpy, Direction.FORWARD)
        if record.whole:
            changed = np.flatnonzero(old != new)
            if len(changed) != record.changes:
                raise self._bad(f"record with {len(changed)} changes where {record.changes} should be")
            index = changed.astype(np.uint64) + np.uint64(record.first)
            return Record(record.tensor, index, old[changed], new[changed])
        with self._named():
            check_masks(record.masked, places.masks, record.changes)
        index = places_under(places.masks).astype(np.uint64) + np.uint64(record.first)
        return Record(record.tensor, index, old.copy(), new.copy())


class _Payload(NamedTuple):
    """Bytes of a record: what says where its words are, then its words."""

    gaps: ByteArray
    """of a list"""
    escape_bytes: ByteArray
    old: ByteArray
    new: ByteArray

    @property
    def escapes(self) -> NDArray[np.uint32]:
        return self.escape_bytes.view("<u4")

    @property
    def masks(self) -> NDArray[np.uint64]:
        """In place of gaps."""
        return self.gaps.view("<u8")

    def ways(self, kind: np.dtype[Any], way: Direction) -> tuple[Words, Words]:
        """What is expected, and what is written."""
        old, new = self.old.view(kind), self.new.view(kind)
        return (new, old) if way is Direction.BACK else (old, new)


def _exchange_all(words: Words, before: Words, after: Words, again: bool) -> int | None:
    """The first word that is not the expected one. By bytes: a copy that was killed may have ended within a
    word, so that (`again`) any byte may be from either side; all words are hashed after it."""
    target, expected, wanted = (array.view(np.uint8) for array in (words, before, after))
    for start in range(0, len(target), _PIECE):
        here, old, new = (each[start : start + _PIECE] for each in (target, expected, wanted))
        wrong = (here != old) & (here != new) if again else here != old
        if not wrong.any():
            here[:] = new
            wrong = here != new
        if wrong.any():
            return (start + int(wrong.argmax())) // words.itemsize
    return None
