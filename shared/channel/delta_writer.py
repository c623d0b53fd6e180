"""Writes the shard of a delta chunk by chunk, in grid order.

Encodings `fast` and `small` store one blob per changed chunk, the field's encodings one zstd frame per
changed tensor. All carry, per changed chunk, the sums over its touched 8-byte words (docs/FORMAT.md, Chunks).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weightcast.shared.base.elements import ByteArray, Chunk, ChunkKey, TensorSpec, TensorTable, Words
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.index import ChunkRecord, Encoding, FileRecord, object_record
from weightcast.shared.channel.store import Store
from weightcast.shared.codec.changes import Changes
from weightcast.shared.codec.container import FetchWords, StepEncoding, encode_chunk
from weightcast.shared.codec.slime import PayloadWriter, digest_stream
from weightcast.shared.digest.checksums import SpanSums
from weightcast.shared.files.safetensors import Entry, pack_header


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
    def prepare(self, chunk: Chunk, old: Words, new: FetchWords, changes: Changes) -> bytes:
        """The chunk's encoded form; called from several threads at once."""

    @abstractmethod
    def append(self, chunk: Chunk, prepared: bytes, new: FetchWords, step: ChunkStep | None) -> None:
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

    def prepare(self, chunk: Chunk, old: Words, new: FetchWords, changes: Changes) -> bytes:
        return encode_chunk(chunk, old, new, changes, self._encoding)

    def append(self, chunk: Chunk, prepared: bytes, new: FetchWords, step: ChunkStep | None) -> None:
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

    def prepare(self, chunk: Chunk, old: Words, new: FetchWords, changes: Changes) -> bytes:
        return b""

    def append(self, chunk: Chunk, prepared: bytes, new: FetchWords, step: ChunkStep | None) -> None:
        after = new()
        old = after
        touched: set[int] = set()
        if step is not None:
            old = after.copy()
            old[step.changes.index] = step.changes.old
            touched = set(step.sums.tensors.tolist())
            self._add_record(chunk, 0, 0, step)
        for span in chunk.spans:
            place = slice(span.offset, span.offset + span.words)
            tensor = self._tensor(span.tensor)
            tensor.step(bytes_of(old[place]), bytes_of(after[place]), span.tensor in touched)

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
