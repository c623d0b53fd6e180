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
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import pairwise
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
from weightcast.shared.kernels.constants import (
    Begin,
    at_once,
    check_masks,
    exchange_at,
    places_under,
    unpack_gaps,
    unpack_many_gaps,
)
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
    index, borders = changes.index, [0, len(changes.index)]
    if len(chunk.spans) > 1:
        offsets = np.array([span.offset for span in chunk.spans], np.uint32)
        borders = [*np.searchsorted(index, offsets).tolist(), len(index)]
    spans = [span for span, (start, end) in zip(chunk.spans, pairwise(borders), strict=True) if end > start]
    bounds = sorted({0, *borders})
    heads = [
        (span.tensor, int(index[start]) + span.start - span.offset)
        for span, start in zip(spans, bounds, strict=False)
    ]
    return pack_lists(heads, index, bounds, changes.old, changes.new)


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


def pack_lists(
    heads: Sequence[tuple[int, int]], index: NDArray[np.uint32], bounds: Sequence[int], old: Words, new: Words
) -> Packed:
    """`heads`: tensor and first word of each record, which has changes bounds[n] to bounds[n + 1]."""
    if not len(index):
        return Packed((), 0, 0)
    gaps = np.empty(len(index), np.uint8)
    escapes, counts = kernels().pack_gaps(index, np.array(bounds, np.int64), gaps)
    gap_bytes, escape_bytes, old_bytes, new_bytes = map(_bytes_of, (gaps, escapes, old, new))
    buffers: list[bytes | memoryview] = []
    width, escaped, few = new.itemsize, 0, len(heads) <= _FEW
    for (tensor, first), (start, end), count in zip(heads, pairwise(bounds), counts.tolist(), strict=True):
        payload = (
            gap_bytes[start:end],
            escape_bytes[4 * escaped : 4 * (escaped + count)],
            old_bytes[width * start : width * end],
            new_bytes[width * start : width * end],
        )
        pieces = payload if few else (b"".join(payload),)
        buffers.append(_head(tensor, width, first, end - start, count, pieces))
        buffers.extend(pieces)
        escaped += count
    return _packed(buffers, len(heads), len(index))


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
_PIECE = 256 << 10
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

    def packed(self) -> Iterator[PackedRecord]:
        """Records whose headers fit the table; their payloads are left where they are."""
        offset, end = self._start, self._size - HEAD.size - len(_END)
        block, begin = b"", offset
        for _ in range(self._footer[2]):
            if offset + HEAD.size > begin + len(block):
                block, begin = os.pread(self._file.fileno(), _HEADS, offset), offset
            record = self._head(block, offset - begin, offset, end)
            yield record
            offset = record.offset + record.size
        if offset != end:
            raise self._bad("more records than the footer counts")

    def _head(self, block: bytes, at: int, offset: int, end: int) -> PackedRecord:
        if len(block) < at + HEAD.size:
            raise self._bad("ends early")
        tensor, width, first, changes, more, checksum = HEAD.unpack_from(block, at)
        forms = self._table.forms
        own_width, words = forms[tensor] if tensor < len(forms) else (0, 0)
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
        checksum ^= xxhash.xxh3_64_intdigest(block[at : at + FACTS.size])
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
        places = self._split(record, self._bytes(record.offset, record.size))
        before, after = places.ways(words.dtype, way)
        if record.whole:
            stretch = words[record.first : record.first + record.whole]
            begin(stretch, record.changes)
            change = _exchange_again if again else kernels().exchange_all
            place = change(stretch, before, after)
            return None if place is None else record.first + place
        failed: int | None
        with self._named():
            if record.masked:
                failed = kernels().exchange_masked(
                    words, record.first, record.masked, places.masks, before, after, again=again, begin=begin
                )
            else:
                failed = kernels().exchange_packed(
                    words, record.first, places.gaps, places.escapes, before, after, again=again, begin=begin
                )
        return failed

    def compare_and_swap_many(
        self,
        records: Sequence[PackedRecord],
        words: Words,
        places: Sequence[tuple[int, int]],
        way: Direction,
        *,
        again: bool,
        begin: Begin = at_once,
    ) -> tuple[PackedRecord, int] | None:
        """As `compare_and_swap`, of short lists near each other, in the order of the journal, at once: a
        model may have several 100,000 small tensors. `places`: where each record's tensor begins in `words`,
        and how many words it has. Nothing is written where a word is unexpected; returns its record and its
        number."""
        start, stop = records[0].offset, records[-1].offset + records[-1].size
        # slices of an array take longer than those of its memory
        room = self._bytes(start, stop - start).data
        found = [
            self._split(one, room[one.offset - start : one.offset - start + one.size]) for one in records
        ]
        joined = _Payload(*(np.frombuffer(b"".join(part), np.uint8) for part in zip(*found, strict=True)))
        facts = [(one.changes, one.escapes, one.first) for one in records]
        counts, escaped, firsts = np.array(facts, np.int64).T
        homes, limits = np.array(places, np.int64).T
        index = unpack_many_gaps(firsts, counts, joined.gaps, escaped, joined.escapes)
        if index is None or (index[np.cumsum(counts) - 1] >= limits).any():
            raise self._bad("record with changes out of order, or past the end")
        index += np.repeat(homes, counts)
        begin(words[index.min() : index.max() + 1], len(index))
        wrong = exchange_at(words, index, *joined.ways(words.dtype, way), again=again)
        if wrong is None:
            return None
        number = int(np.searchsorted(np.cumsum(counts), wrong, side="right"))
        return records[number], int(index[wrong] - homes[number])

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
            raise self._bad("record damaged")
        half = record.width * record.words
        places = record.size - 2 * half
        listed, words = record.changes if record.listed else places, places + half
        return _Payload(payload[:listed], payload[listed:places], payload[places:words], payload[words:])

    def records(self) -> Iterator[Record]:
        return map(self.at, self.packed())

    def at(self, record: PackedRecord) -> Record:
        """Safe in any thread."""
        spec = self._table[record.tensor]
        places = self._split(record, self._bytes(record.offset, record.size))
        old, new = places.ways(spec.kind.numpy, Direction.FORWARD)
        if record.whole:
            changed = np.flatnonzero(old != new)
            if len(changed) != record.changes:
                raise self._bad(f"record with {len(changed)} changes where {record.changes} should be")
            index = changed.astype(np.uint64) + np.uint64(record.first)
            return Record(record.tensor, index, old[changed], new[changed])
        if record.masked:
            with self._named():
                check_masks(record.masked, places.masks, record.changes)
            index = places_under(places.masks).astype(np.uint64) + np.uint64(record.first)
        else:
            reached = unpack_gaps(record.first, places.gaps, places.escapes)
            if reached is None:
                raise self._bad("record out of order, or past the end of its tensor")
            index = reached.astype(np.uint64)
        if index[-1] >= spec.words:
            raise self._bad("record out of order, or past the end of its tensor")
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


def _exchange_again(words: Words, before: Words, after: Words) -> int | None:
    """The first word that is not the expected one. By bytes: a copy that was killed may have ended within a
    word, so that any byte may be from either side; all words are hashed after it."""
    target, expected, wanted = (array.view(np.uint8) for array in (words, before, after))
    for start in range(0, len(target), _PIECE):
        here, old, new = (each[start : start + _PIECE] for each in (target, expected, wanted))
        wrong = (here != old) & (here != new)
        if not wrong.any():
            here[:] = new
            wrong = here != new
        if wrong.any():
            return (start + int(wrong.argmax())) // words.itemsize
    return None
