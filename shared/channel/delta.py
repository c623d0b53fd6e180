"""The shards of a delta, written and read chunk by chunk, in grid order.

Encodings `fast` and `small` store one blob per changed chunk, the field's encodings one zstd frame per
changed tensor. All carry, per changed chunk, the sums over its touched 8-byte words, which prove it
(docs/FORMAT.md, Chunks).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from weightcast.shared.base.elements import ByteArray, Chunk, ChunkKey, TensorSpec, TensorTable, Words
from weightcast.shared.base.errors import MEND_CHANNEL, DamagedFile, UnknownFormat
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.index import (
    INDEX_NAME,
    STEP_ENCODINGS,
    ChunkRecord,
    Encoding,
    FileRecord,
    ForeignEncoding,
    ForeignIndex,
    Index,
    object_record,
)
from weightcast.shared.channel.layout import delta_name, from_name, version_name
from weightcast.shared.channel.store import NotFound, Store
from weightcast.shared.codec.changes import Changes, changes_of
from weightcast.shared.codec.container import StepEncoding, decode_step, encode_chunk
from weightcast.shared.codec.slime import PayloadReader, PayloadWriter, digest_stream, open_payload
from weightcast.shared.digest.checksums import SpanSums
from weightcast.shared.files.safetensors import Entry, Header, header_from, pack_header


@dataclass(frozen=True)
class ChunkStep:
    """One chunk's step: what changes, and the sums per span that prove it."""

    changes: Changes
    sums: SpanSums


def chunk_entry_name(key: ChunkKey) -> str:
    return f"chunk.{key.part}.{key.dtype}.{key.number}"


def bytes_of(words: Words) -> ByteArray:
    return np.ascontiguousarray(words).view(np.uint8)


FieldEncoding = Literal["xor", "overwrite"]

_ENTRY_ROOM = 128
"""bytes of shard header reserved per possible entry, without its name"""


@dataclass(frozen=True)
class PartFiles:
    """What one writer of a version wrote. `checksums` is filled by the field's encodings only."""

    files: tuple[FileRecord, ...]
    chunks: tuple[ChunkRecord, ...]
    checksums: dict[str, str]


def begin_shard(
    encoding: Encoding, files: Store, name: str, table: TensorTable, chunks: int, *, sync: bool = True
) -> ShardWriter:
    """`chunks`: how many chunks the part has at most. `sync`: whether `close` waits until it is durable."""
    if encoding == "fast" or encoding == "small":
        return _BlobShard(files, name, 64 + chunks * (_ENTRY_ROOM + 32), sync, encoding)
    room = sum(2 * len(json.dumps(spec.name).encode()) + _ENTRY_ROOM + 48 for spec in table)
    return _FieldShard(files, name, 64 + room, sync, table, encoding)


class ShardWriter(ABC):
    """A safetensors file whose header is written last, into room reserved for it."""

    def __init__(self, files: Store, name: str, reserve: int, sync: bool) -> None:
        self._files, self._name = files, name
        self._data_start = -(-(reserve + 8) // 8) * 8
        self._writer = files.write(name, reserve=self._data_start, sync=sync)
        self._entries: list[Entry] = []
        self._records: list[ChunkRecord] = []
        self._checksums: dict[str, str] = {}
        self.end = 0
        """bytes of data written"""

    @abstractmethod
    def prepare(self, chunk: Chunk, old: Words, new: Words, changes: Changes) -> bytes:
        """The chunk's encoded form; called from several threads at once."""

    @abstractmethod
    def append(self, chunk: Chunk, prepared: bytes, new: Words, step: ChunkStep | None) -> None:
        """Called once for every chunk of the part, changed or not, in grid order."""

    def write(self, data: bytes) -> None:
        self._writer.write(data)
        self.end += len(data)

    def _add_record(self, chunk: Chunk, offset: int, length: int, step: ChunkStep) -> None:
        sums, changed = step.sums.total(), len(step.changes)
        self._records.append(ChunkRecord(chunk.key, self._name, offset, length, changed, sums.old, sums.new))

    def close(self) -> PartFiles:
        """Makes the shard durable. No change: no shard."""
        if not self._entries:
            self.abandon()
            return PartFiles((), (), {})
        metadata = self._checksums or {"format": "weightcast"}
        self._writer.write_head(pack_header(self._entries, metadata, reserve=self._data_start))
        failpoint("shard.written", self._files.place(self._name))
        self._writer.finish()
        failpoint("shard.synced", self._files.place(self._name))
        record = object_record(self._files, self._name)
        return PartFiles((record,), tuple(self._records), self._checksums)

    def abandon(self) -> None:
        self._writer.discard()


class _BlobShard(ShardWriter):
    def __init__(self, files: Store, name: str, reserve: int, sync: bool, encoding: StepEncoding) -> None:
        super().__init__(files, name, reserve, sync)
        self._encoding = encoding

    def prepare(self, chunk: Chunk, old: Words, new: Words, changes: Changes) -> bytes:
        return encode_chunk(chunk, old, new, changes, self._encoding)

    def append(self, chunk: Chunk, prepared: bytes, new: Words, step: ChunkStep | None) -> None:
        if step is None:
            return
        begin, length = self.end, len(prepared)
        self.write(prepared)
        self._entries.append(Entry(chunk_entry_name(chunk.key), "U8", (length,), begin, self.end))
        self._add_record(chunk, self._data_start + begin, length, step)


class _OpenTensor:
    """The tensor whose payload is being written: starts at its first change, catching up with zeros."""

    def __init__(self, number: int, spec: TensorSpec, encoding: FieldEncoding, shard: ShardWriter) -> None:
        self.number, self._spec, self._encoding, self._shard = number, spec, encoding, shard
        self._digest = digest_stream("xxh3-128")
        self._seen = 0
        self._writer: PayloadWriter | None = None
        self._begin = 0

    def step(self, old: ByteArray, new: ByteArray, changed: bool) -> None:
        self._digest.update(new.tobytes())
        if changed and self._writer is None:
            self._begin = self._shard.end
            self._writer = PayloadWriter(self._encoding, self._spec.nbytes, self._shard.write)
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
        return Entry(self._spec.name, "U8", (length,), self._begin, self._shard.end), self._digest.hexdigest()

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _FieldShard(ShardWriter):
    def __init__(
        self, files: Store, name: str, reserve: int, sync: bool, table: TensorTable, encoding: FieldEncoding
    ) -> None:
        super().__init__(files, name, reserve, sync)
        self._table, self._encoding = table, encoding
        self._open: _OpenTensor | None = None

    def prepare(self, chunk: Chunk, old: Words, new: Words, changes: Changes) -> bytes:
        return b""

    def append(self, chunk: Chunk, prepared: bytes, new: Words, step: ChunkStep | None) -> None:
        old = new
        touched: set[int] = set()
        if step is not None:
            old = new.copy()
            old[step.changes.index] = step.changes.old
            touched = set(step.sums.tensors.tolist())
            self._add_record(chunk, 0, 0, step)
        for span in chunk.spans:
            place = slice(span.offset, span.offset + span.words)
            tensor = self._tensor(span.tensor)
            tensor.step(bytes_of(old[place]), bytes_of(new[place]), span.tensor in touched)

    def _tensor(self, number: int) -> _OpenTensor:
        if self._open is None or self._open.number != number:
            self._close_tensor()
            self._open = _OpenTensor(number, self._table[number], self._encoding, self)
        return self._open

    def _close_tensor(self) -> None:
        closed = self._open.close() if self._open is not None else None
        if closed is not None:
            entry, checksum = closed
            self._entries.append(entry)
            self._checksums[entry.name] = checksum

    def close(self) -> PartFiles:
        self._close_tensor()
        self._open = None
        return super().close()

    def abandon(self) -> None:
        if self._open is not None:
            self._open.abandon()
        super().abandon()


def read_exactly(files: Store, name: str, offset: int, length: int, place: str) -> bytes:
    """Raises DamagedFile, which names `place`, when the file ends before that."""
    data = files.read_range(name, offset, length)
    if len(data) < length:
        raise DamagedFile(f"{place} ends {length - len(data)} bytes early", remedy=MEND_CHANNEL)
    return data


def read_shard_header(files: Store, name: str) -> Header:
    """Raises NotFound and DamagedFile."""
    found, place = files.stat(name), files.place(name)
    if found is None:
        raise NotFound.at(place)
    return header_from(partial(files.read_range, name, 0), found.size, place)


Arrived = Callable[[str, int | None], None]
"""Returns once the first so many bytes of a shard are there, None: once all of the version is there."""


class DeltaReader(ABC):
    """Steps of one version: at most one for each chunk, in grid order. Shards are opened for each read: a
    host far behind reads more than a process may hold open."""

    sequential = False
    """True: chunks must be asked for in order, each that `touches` names."""

    def __init__(self, index: Index | ForeignIndex, files: Store, arrived: Arrived | None) -> None:
        self._shards, self._arrived = files, arrived
        self._place = place_of(index)
        self._records = {record.key: record for record in index.chunks} if isinstance(index, Index) else {}
        self._used: set[ChunkKey] = set()

    @abstractmethod
    def touches(self, chunk: Chunk) -> bool: ...

    @abstractmethod
    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        """Decoded and checked: DamagedFile when anything does not fit. `old` is not changed."""

    def finish(self) -> None:
        """Raises DamagedFile when something of the version was not used up or does not add up."""
        if len(self._used) != len(self._records):
            # the index may list only chunks of the grid that its parts make
            key = min(self._records.keys() - self._used)
            raise DamagedFile(
                f"{self._place}/{INDEX_NAME}: {chunk_entry_name(key)} is listed, and no such chunk changes",
                remedy=MEND_CHANNEL,
            )

    def _read(self, shard: str, offset: int, length: int) -> bytes:
        if self._arrived is not None:
            self._arrived(shard, offset + length)
        return read_exactly(self._shards, shard, offset, length, f"{self._place}/{shard}")

    def _use(self, record: ChunkRecord, sums: SpanSums, where: str) -> None:
        """The old sums prove that the touched words are the ones the publisher had, the new ones what they
        become."""
        got = sums.total()
        if got.old != record.old:
            raise DamagedFile(
                f"{where}: the words it touches are not those it was made from",
                remedy="the local checkpoint or the delta is damaged: run `weightcast local verify`",
            )
        if got.new != record.new or got.changed != record.changed:
            raise DamagedFile(
                f"{where}: decodes to other words than the publisher wrote",
                remedy=MEND_CHANNEL,
            )
        self._used.add(record.key)


class BlobReader(DeltaReader):
    """Encodings `fast` and `small`: each blob says how it is to be read."""

    def touches(self, chunk: Chunk) -> bool:
        return chunk.key in self._records

    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        record = self._records[chunk.key]
        blob = self._read(record.file, record.offset, record.length)
        where = f"{self._place}/{record.file}, {chunk_entry_name(chunk.key)}"
        try:
            changes, sums = decode_step(blob, chunk, old)
        except DamagedFile as error:
            raise DamagedFile(f"{where}: {error.message}", remedy=MEND_CHANNEL) from error
        except UnknownFormat as error:
            raise UnknownFormat(f"{where}: {error.message}", remedy=error.remedy) from error
        self._use(record, sums, where)
        return ChunkStep(changes, sums)


def place_of(index: Index | ForeignIndex) -> str:
    """The directory of a delta's shards in its channel: for messages, as they are read from a copy."""
    if isinstance(index, ForeignIndex) and index.payloads is not None:
        return delta_name(index.version)
    main = version_name(index.version)
    is_beside = isinstance(index, Index) and index.main != ""
    return f"{main}/{from_name(index.base_version)}" if is_beside else main


def payload_encoding(index: Index | ForeignIndex) -> ForeignEncoding:
    if index.encoding is None or index.encoding == "fast" or index.encoding == "small":
        raise DamagedFile(
            f"{place_of(index)}/{INDEX_NAME}: encoding {index.encoding} has no payloads per tensor",
            remedy=MEND_CHANNEL,
        )
    return index.encoding


class FieldReader(DeltaReader):
    """Encodings `xor`, `overwrite` and (foreign only) `xor_sparse`: payloads are streams, one per tensor."""

    sequential = True

    def __init__(
        self, index: Index | ForeignIndex, table: TensorTable, files: Store, arrived: Arrived | None = None
    ) -> None:
        super().__init__(index, files, arrived)
        self._table = table
        self._weight_map = index.weight_map
        self._encoding = payload_encoding(index)
        self._is_foreign = isinstance(index, ForeignIndex)
        self._checksum_format = index.checksum_format if isinstance(index, ForeignIndex) else "xxh3-128"
        self._payloads = (index.payloads if isinstance(index, ForeignIndex) else None) or {}
        self._headers: dict[str, Header] = {}
        self._open: dict[int, _TensorStream] = {}
        self._done: set[str] = set()
        unknown = sorted(set(self._weight_map) - set(table.numbers))
        if unknown:
            raise DamagedFile(
                f"{self._place}: unknown tensors {', '.join(unknown[:5])}",
                remedy="give the checkpoint that the trainer started from as --base"
                if self._is_foreign
                else MEND_CHANNEL,
            )

    def touches(self, chunk: Chunk) -> bool:
        return any(self._table[span.tensor].name in self._weight_map for span in chunk.spans)

    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        new = old.copy()
        for span in chunk.spans:
            spec = self._table[span.tensor]
            if spec.name in self._weight_map:
                place = slice(span.offset, span.offset + span.words)
                decoded = self._stream(span.tensor).step(bytes_of(old[place]), span.stop == spec.words)
                new[place] = np.frombuffer(decoded, new.dtype)
                if span.stop == spec.words:
                    self._open.pop(span.tensor).finish()
                    self._done.add(self._table[span.tensor].name)
        changes, sums = changes_of(chunk, old, new)
        self._check(chunk, sums)
        return ChunkStep(changes, sums)

    def _check(self, chunk: Chunk, sums: SpanSums) -> None:
        if self._is_foreign:
            return
        where = f"{self._place}, {chunk_entry_name(chunk.key)}"
        record = self._records.get(chunk.key)
        if record is None and len(sums):
            raise DamagedFile(f"{where}: changes that the index does not list", remedy=MEND_CHANNEL)
        if record is not None:
            self._use(record, sums, where)

    def _stream(self, number: int) -> _TensorStream:
        if number not in self._open:
            self._open[number] = self._open_stream(number)
        return self._open[number]

    def _open_stream(self, number: int) -> _TensorStream:
        spec = self._table[number]
        shard = self._weight_map[spec.name]
        if shard not in self._headers:
            self._headers[shard] = self._header(shard)
        header = self._headers[shard]
        stated = self._payloads.get(spec.name)
        entry = header.entries.get(spec.name if stated is None else stated.key)
        where = f"{self._place}/{shard}, {spec.name}"
        if stated is not None and (stated.shape, stated.nbytes) != (spec.shape, spec.nbytes):
            raise DamagedFile(
                f"{where}: {stated.nbytes} bytes of shape {list(stated.shape)}, "
                f"expected {spec.nbytes} of shape {list(spec.shape)}",
                remedy="give the checkpoint that the trainer started from as --base",
            )
        if entry is None or entry.dtype != "U8" or len(entry.shape) != 1:
            raise DamagedFile(f"{where}: no payload in the shard that the index names", remedy=MEND_CHANNEL)
        begin = header.data_start + entry.begin
        payload = open_payload(
            self._encoding,
            lambda offset, length: self._read(shard, begin + offset, length),
            entry.end - entry.begin,
            spec.nbytes,
            name=where,
        )
        if stated is not None:
            return _TensorStream(where, payload, stated.checksum_format, stated.checksum)
        return _TensorStream(where, payload, self._checksum_format, header.metadata.get(spec.name))

    def _header(self, shard: str) -> Header:
        if self._arrived is not None:
            self._arrived(shard, None)
        try:
            return read_shard_header(self._shards, shard)
        except DamagedFile as error:
            remedy = error.remedy or MEND_CHANNEL
            raise DamagedFile(f"{self._place}/{shard}: {error.message}", remedy=remedy) from error

    def finish(self) -> None:
        missing = {name for name in self._weight_map if self._table.named(name).nbytes} - self._done
        if missing:
            raise DamagedFile(
                f"{self._place}: {sorted(missing)[0]} was not read to its end", remedy=MEND_CHANNEL
            )
        super().finish()


class _TensorStream:
    def __init__(self, where: str, payload: PayloadReader, checksum_format: str, expected: str | None):
        self._where, self._payload, self._expected = where, payload, expected
        self._digest = digest_stream(checksum_format)
        if expected is None:
            raise DamagedFile(f"{where}: its shard states no checksum of it", remedy=MEND_CHANNEL)

    def step(self, old: ByteArray, last: bool) -> ByteArray:
        new = self._payload.step(old)
        self._digest.update(new.tobytes())
        return new

    def finish(self) -> None:
        self._payload.finish()
        if self._digest.hexdigest() != self._expected:
            raise DamagedFile(
                f"{self._where}: the new bytes do not have the digest that was published",
                remedy="the shard or the local checkpoint is damaged; nothing was written",
            )


def stated_digests(index: ForeignIndex, files: Store) -> Iterator[tuple[str, str, str]]:
    """Of the new bytes of each changed tensor: name, format and digest."""
    for name, payload in (index.payloads or {}).items():
        yield name, payload.checksum_format, payload.checksum
    for shard in () if index.payloads is not None else sorted(set(index.weight_map.values())):
        for name, stated in read_shard_header(files, shard).metadata.items():
            yield name, index.checksum_format, stated


def open_delta(
    index: Index | ForeignIndex, table: TensorTable, files: Store, arrived: Arrived | None = None
) -> DeltaReader:
    """`files`: the version's shards; those that `arrived` waits for may still be on their way there. Their
    digests are checked by the fetch."""
    if isinstance(index, Index) and index.encoding in STEP_ENCODINGS:
        return BlobReader(index, files, arrived)
    return FieldReader(index, table, files, arrived)
