"""The shards of a delta: written chunk by chunk in grid order, read chunk by chunk.

Encodings `fast` and `small` store one blob per changed chunk, the field's encodings one zstd frame per
changed tensor. All carry, per changed chunk, the sums over its touched 8-byte words (docs/FORMAT.md, Chunks).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from blake3 import blake3

from weightcast.shared.channel.index import (
    STEP_ENCODINGS,
    ChunkRecord,
    Encoding,
    FileRecord,
    ForeignIndex,
    Index,
)
from weightcast.shared.codec.changes import Changes, compare
from weightcast.shared.codec.choose import FetchWords, StepEncoding
from weightcast.shared.codec.container import decode_step, encode_chunk
from weightcast.shared.codec.field import PayloadReader, PayloadWriter, digest_stream, open_payload
from weightcast.shared.digest.touched import SpanSums, span_sums, total
from weightcast.shared.errors import DamagedFile
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.durable import open_regular
from weightcast.shared.files.safetensors import Entry, Header, pack_header, read_header
from weightcast.shared.words import ByteArray, Chunk, ChunkKey, TensorTable, Words

FieldEncoding = Literal["xor", "overwrite"]
PayloadEncoding = Literal["xor", "overwrite", "xor_sparse"]

_COPY = 8 << 20
_ENTRY_ROOM = 128
"""bytes of shard header reserved per possible entry, beside its name"""


@dataclass(frozen=True)
class ChunkStep:
    """One chunk's step: what changes, and the sums per span that prove it."""

    changes: Changes
    sums: Sequence[SpanSums]


@dataclass(frozen=True)
class PartFiles:
    """What one writer of a version wrote. `checksums` is filled by the field's encodings only."""

    files: tuple[FileRecord, ...]
    chunks: tuple[ChunkRecord, ...]
    checksums: dict[str, str]


class ShardWriter(Protocol):
    def prepare(self, chunk: Chunk, old: Words, new: FetchWords, changes: Changes) -> bytes:
        """The chunk's encoded form; called from several threads at once."""

    def append(self, chunk: Chunk, prepared: bytes, new: FetchWords, step: ChunkStep | None) -> None:
        """Called once for every chunk of the part, changed or not, in grid order."""

    def close(self) -> PartFiles:
        """Makes the shard durable. No change: no shard."""

    def abandon(self) -> None: ...


def open_shard_writer(
    encoding: Encoding, path: Path, table: TensorTable, chunks: int, *, durable: bool = True
) -> ShardWriter:
    """`chunks`: how many chunks the part has at most. `durable`: whether `close` waits for the disk."""
    if encoding == "fast" or encoding == "small":
        return _BlobShard(path, encoding, chunks, durable)
    return _FieldShard(path, table, encoding, durable)


def _record(chunk: Chunk, file: str, offset: int, length: int, step: ChunkStep) -> ChunkRecord:
    sums = total(step.sums)
    return ChunkRecord(chunk.key, file, offset, length, len(step.changes), sums.old, sums.new)


def chunk_entry_name(key: ChunkKey) -> str:
    return f"chunk.{key.part}.{key.dtype}.{key.number}"


class _Shard:
    """A safetensors file whose header is written last, into room reserved for it."""

    def __init__(self, path: Path, reserve: int, durable: bool) -> None:
        self.path, self._durable = path, durable
        self.data_start = -(-(reserve + 8) // 8) * 8
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.end = 0
        """bytes of data written"""

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, self.data_start + self.end)
            self.end += done
            view = view[done:]

    def finish(self, entries: Sequence[Entry], metadata: dict[str, str]) -> FileRecord:
        header = pack_header(entries, metadata, reserve=self.data_start)
        if len(header) != self.data_start:
            raise DamagedFile(f"{self.path}: header of {len(header)} bytes outgrew {self.data_start}")
        os.pwrite(self._fd, header, 0)
        failpoint("shard.written", self.path)
        if self._durable:
            os.fsync(self._fd)
        self._close()
        failpoint("shard.synced", self.path)
        return file_record(self.path)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def discard(self) -> None:
        self._close()
        self.path.unlink(missing_ok=True)


def file_record(path: Path) -> FileRecord:
    digest = blake3()
    size = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_COPY):
            digest.update(block)
            size += len(block)
    return FileRecord(path.name, size, digest.hexdigest())


class _BlobShard:
    def __init__(self, path: Path, encoding: StepEncoding, chunks: int, durable: bool) -> None:
        self._encoding = encoding
        self._shard = _Shard(path, 64 + chunks * (_ENTRY_ROOM + 32), durable)
        self._entries: list[Entry] = []
        self._records: list[ChunkRecord] = []

    def prepare(self, chunk: Chunk, old: Words, new: FetchWords, changes: Changes) -> bytes:
        return encode_chunk(chunk, old, new, changes, self._encoding)

    def append(self, chunk: Chunk, prepared: bytes, new: FetchWords, step: ChunkStep | None) -> None:
        if step is None:
            return
        begin = self._shard.end
        self._shard.write(prepared)
        self._entries.append(
            Entry(chunk_entry_name(chunk.key), "U8", (len(prepared),), begin, begin + len(prepared))
        )
        self._records.append(_record(chunk, self._shard.path.name, begin, len(prepared), step))

    def close(self) -> PartFiles:
        if not self._entries:
            self._shard.discard()
            return PartFiles((), (), {})
        data_start = self._shard.data_start
        record = self._shard.finish(self._entries, {"format": "weightcast"})
        placed = tuple(
            ChunkRecord(r.key, r.file, data_start + r.offset, r.length, r.changed, r.old, r.new)
            for r in self._records
        )
        return PartFiles((record,), placed, {})

    def abandon(self) -> None:
        self._shard.discard()


class _OpenTensor:
    """The tensor whose payload is being written: starts at its first change, catching up with zeros."""

    def __init__(self, name: str, nbytes: int, encoding: FieldEncoding, shard: _Shard) -> None:
        self.name, self._nbytes, self._encoding, self._shard = name, nbytes, encoding, shard
        self._digest = digest_stream("xxh3-128")
        self._seen = 0
        self._writer: PayloadWriter | None = None
        self._begin = 0

    def step(self, old: ByteArray, new: ByteArray, changed: bool) -> None:
        self._digest.update(new.tobytes())
        if changed and self._writer is None:
            self._begin = self._shard.end
            self._writer = PayloadWriter(self._encoding, self._nbytes, self._shard.write)
            self._skip(self._seen)
        if self._writer is not None:
            self._writer.step(old, new)
        self._seen += len(new)

    def _skip(self, nbytes: int) -> None:
        zeros = np.zeros(min(nbytes, 1 << 20), np.uint8)
        writer = self._writer
        while nbytes and writer is not None:
            take = min(nbytes, len(zeros))
            writer.step(zeros[:take], zeros[:take])
            nbytes -= take

    def close(self) -> tuple[Entry, str] | None:
        if self._writer is None:
            return None
        self._writer.finish()
        length = self._shard.end - self._begin
        return Entry(self.name, "U8", (length,), self._begin, self._shard.end), self._digest.hexdigest()

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _FieldShard:
    def __init__(self, path: Path, table: TensorTable, encoding: FieldEncoding, durable: bool) -> None:
        room = sum(2 * len(json.dumps(spec.name).encode()) + _ENTRY_ROOM + 48 for spec in table)
        self._shard = _Shard(path, 64 + room, durable)
        self._table, self._encoding = table, encoding
        self._open: tuple[int, _OpenTensor] | None = None
        self._entries: list[Entry] = []
        self._checksums: dict[str, str] = {}
        self._records: list[ChunkRecord] = []

    def prepare(self, chunk: Chunk, old: Words, new: FetchWords, changes: Changes) -> bytes:
        return b""

    def append(self, chunk: Chunk, prepared: bytes, new: FetchWords, step: ChunkStep | None) -> None:
        after = new()
        old = after
        touched: set[int] = set()
        if step is not None:
            old = after.copy()
            old[step.changes.index] = step.changes.old
            touched = {sums.tensor for sums in step.sums}
            self._records.append(_record(chunk, self._shard.path.name, 0, 0, step))
        for span in chunk.spans:
            place = slice(span.offset, span.offset + span.words)
            tensor = self._tensor(span.tensor)
            tensor.step(_bytes(old[place]), _bytes(after[place]), span.tensor in touched)

    def _tensor(self, number: int) -> _OpenTensor:
        if self._open is None or self._open[0] != number:
            self._close_tensor()
            spec = self._table[number]
            self._open = (number, _OpenTensor(spec.name, spec.nbytes, self._encoding, self._shard))
        return self._open[1]

    def _close_tensor(self) -> None:
        closed = self._open[1].close() if self._open is not None else None
        if closed is not None:
            entry, checksum = closed
            self._entries.append(entry)
            self._checksums[entry.name] = checksum

    def close(self) -> PartFiles:
        self._close_tensor()
        self._open = None
        if not self._entries:
            self._shard.discard()
            return PartFiles((), (), {})
        record = self._shard.finish(self._entries, self._checksums)
        return PartFiles((record,), tuple(self._records), self._checksums)

    def abandon(self) -> None:
        if self._open is not None:
            self._open[1].abandon()
        self._shard.discard()


def _bytes(words: Words) -> ByteArray:
    return np.ascontiguousarray(words).view(np.uint8)


class DeltaReader(Protocol):
    """Steps of one version. `changes` is called at most once per chunk, in grid order."""

    sequential: bool
    """True: chunks must be asked for one after the other, every one that `touches` names."""

    def touches(self, chunk: Chunk) -> bool: ...

    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        """Decoded and checked: DamagedFile when anything does not fit. `old` is not changed."""

    def finish(self) -> None:
        """Raises DamagedFile when something of the version was not used up or does not add up."""


Arrived = Callable[[str, int | None], None]
"""Returns once the first so many bytes of a shard are there, None: once all of the version is there."""


class _ShardFiles:
    """The version's shards; read with pread, never mapped. Opened for each read: a host far behind folds more
    of them than a process may hold open."""

    def __init__(self, directory: Path, arrived: Arrived | None) -> None:
        self._directory, self._arrived = directory, arrived

    def read(self, name: str, offset: int, length: int) -> bytes:
        if self._arrived is not None:
            self._arrived(name, offset + length)
        fd = open_regular(self._directory / name)
        try:
            return self._read(fd, name, offset, length)
        finally:
            os.close(fd)

    def _read(self, fd: int, name: str, offset: int, length: int) -> bytes:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                raise DamagedFile(f"{self._directory / name}: ends {length - len(data)} bytes early")
            data += more
        return data

    def header(self, name: str) -> Header:
        if self._arrived is not None:
            self._arrived(name, None)
        return read_header(self._directory / name)


def _check_sums(record: ChunkRecord, sums: Sequence[SpanSums], changes: Changes, where: str) -> None:
    """S_old proves that the touched words are the ones the publisher had, S_new what they become."""
    got = total(sums)
    if got.old != record.old:
        raise DamagedFile(
            f"{where}: the words it touches are not those it was made from",
            remedy="the local checkpoint or the delta is damaged: run `weightcast local verify`",
        )
    if got.new != record.new or len(changes) != record.changed:
        raise DamagedFile(
            f"{where}: decodes to other words than the publisher wrote",
            remedy="the delta is damaged: run `weightcast channel verify`",
        )


def _check_used(records: Mapping[ChunkKey, ChunkRecord], used: set[ChunkKey], version: int) -> None:
    """The index may list only chunks of the grid that its parts make."""
    if len(used) != len(records):
        key = min(records.keys() - used)
        raise DamagedFile(
            f"version {version}: {chunk_entry_name(key)} is listed, and no such chunk changes",
            remedy="the index is damaged: run `weightcast channel verify`",
        )


class BlobReader:
    """Encodings `fast` and `small`: each blob says how it is to be read."""

    sequential = False

    def __init__(self, index: Index, directory: Path, arrived: Arrived | None = None) -> None:
        self._records = {record.key: record for record in index.chunks}
        self._files = _ShardFiles(directory, arrived)
        self._version = index.version
        self._used: set[ChunkKey] = set()

    def touches(self, chunk: Chunk) -> bool:
        return chunk.key in self._records

    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        record = self._records[chunk.key]
        blob = self._files.read(record.file, record.offset, record.length)
        where = f"{record.file} of version {self._version}, {chunk_entry_name(chunk.key)}"
        try:
            changes, sums = decode_step(blob, chunk, old)
        except DamagedFile as error:
            raise DamagedFile(f"{where}: {error.message}", remedy=error.remedy) from error
        _check_sums(record, sums, changes, where)
        self._used.add(chunk.key)
        return ChunkStep(changes, sums)

    def finish(self) -> None:
        _check_used(self._records, self._used, self._version)


def payload_encoding(index: Index | ForeignIndex) -> PayloadEncoding:
    if index.encoding is None or index.encoding == "fast" or index.encoding == "small":
        raise DamagedFile(f"version {index.version}: encoding {index.encoding} has no payloads per tensor")
    return index.encoding


class FieldReader:
    """Encodings `xor`, `overwrite` and (foreign only) `xor_sparse`: payloads are streams, one per tensor."""

    sequential = True

    def __init__(
        self,
        index: Index | ForeignIndex,
        table: TensorTable,
        directory: Path,
        arrived: Arrived | None = None,
    ) -> None:
        self._table = table
        self._files = _ShardFiles(directory, arrived)
        self._weight_map = index.weight_map
        self._encoding = payload_encoding(index)
        self._version = index.version
        self._checksum_format = "xxh3-128"
        self._records: dict[ChunkKey, ChunkRecord] | None = None
        if isinstance(index, ForeignIndex):
            self._checksum_format = index.checksum_format
        else:
            self._records = {record.key: record for record in index.chunks}
        self._headers: dict[str, Header] = {}
        self._open: dict[int, _TensorStream] = {}
        self._used: set[ChunkKey] = set()
        self._done: set[str] = set()
        unknown = sorted(set(self._weight_map) - set(table.numbers))
        if unknown:
            raise DamagedFile(f"version {self._version}: unknown tensors {', '.join(unknown[:5])}")

    def touches(self, chunk: Chunk) -> bool:
        return any(self._table[span.tensor].name in self._weight_map for span in chunk.spans)

    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        new = old.copy()
        for span in chunk.spans:
            spec = self._table[span.tensor]
            if spec.name in self._weight_map:
                place = slice(span.offset, span.offset + span.words)
                decoded = self._stream(span.tensor).step(_bytes(old[place]), span.stop == spec.words)
                new[place] = np.frombuffer(decoded, new.dtype)
                if span.stop == spec.words:
                    self._finish_tensor(span.tensor)
        changes = compare(old, new)
        sums = span_sums(chunk, old, changes)
        self._check(chunk, sums, changes)
        return ChunkStep(changes, sums)

    def _check(self, chunk: Chunk, sums: Sequence[SpanSums], changes: Changes) -> None:
        if self._records is None:
            return
        where = f"version {self._version}, {chunk_entry_name(chunk.key)}"
        record = self._records.get(chunk.key)
        if record is None and len(changes):
            raise DamagedFile(f"{where}: changes that the index does not list")
        if record is not None:
            _check_sums(record, sums, changes, where)
            self._used.add(chunk.key)

    def _stream(self, number: int) -> _TensorStream:
        if number not in self._open:
            self._open[number] = self._open_stream(number)
        return self._open[number]

    def _open_stream(self, number: int) -> _TensorStream:
        spec = self._table[number]
        shard = self._weight_map[spec.name]
        if shard not in self._headers:
            self._headers[shard] = self._files.header(shard)
        header = self._headers[shard]
        entry = header.entries.get(spec.name)
        where = f"{shard} of version {self._version}, {spec.name}"
        if entry is None or entry.dtype != "U8" or len(entry.shape) != 1:
            raise DamagedFile(f"{where}: no payload in the shard that the index names")
        begin = header.data_start + entry.begin
        payload = open_payload(
            self._encoding,
            lambda offset, length: self._files.read(shard, begin + offset, length),
            entry.end - entry.begin,
            spec.nbytes,
        )
        return _TensorStream(where, payload, self._checksum_format, header.metadata.get(spec.name))

    def _finish_tensor(self, number: int) -> None:
        self._open.pop(number).finish()
        self._done.add(self._table[number].name)

    def finish(self) -> None:
        missing = {
            name for name in self._weight_map if self._table[self._table.numbers[name]].nbytes
        } - self._done
        if missing:
            raise DamagedFile(f"version {self._version}: {sorted(missing)[0]} was not read to its end")
        if self._records is not None:
            _check_used(self._records, self._used, self._version)


class _TensorStream:
    def __init__(self, where: str, payload: PayloadReader, checksum_format: str, expected: str | None):
        self._where, self._payload, self._expected = where, payload, expected
        self._digest = digest_stream(checksum_format)
        if expected is None:
            raise DamagedFile(f"{where}: its shard names no checksum")

    def step(self, old: ByteArray, last: bool) -> ByteArray:
        new = self._payload.step(old)
        self._digest.update(new.tobytes())
        return new

    def finish(self) -> None:
        self._payload.finish()
        if self._digest.hexdigest() != self._expected:
            raise DamagedFile(
                f"{self._where}: the new bytes do not have the digest that the shard states",
                remedy="the shard or the local checkpoint is damaged; nothing was written",
            )


def open_delta(
    index: Index | ForeignIndex, table: TensorTable, directory: Path, arrived: Arrived | None = None
) -> DeltaReader:
    """`directory` holds the version's shards; what `arrived` waits for is on its way there. Their digests are
    checked by who fetches them."""
    if isinstance(index, Index) and index.encoding in STEP_ENCODINGS:
        return BlobReader(index, directory, arrived)
    return FieldReader(index, table, directory, arrived)
