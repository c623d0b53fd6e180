"""Writes the shard of a delta chunk by chunk, in grid order.

Encodings `fast` and `small` store one blob per changed chunk, the field's encodings one zstd frame per
changed tensor. All carry, per changed chunk, the sums over its touched 8-byte words (docs/FORMAT.md, Chunks).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from weightcast.shared.base.elements import ByteArray, Chunk, ChunkKey, TensorTable, Words
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


class ShardWriter(Protocol):
    def prepare(self, chunk: Chunk, old: Words, new: FetchWords, changes: Changes) -> bytes:
        """The chunk's encoded form; called from several threads at once."""

    def append(self, chunk: Chunk, prepared: bytes, new: FetchWords, step: ChunkStep | None) -> None:
        """Called once for every chunk of the part, changed or not, in grid order."""

    def close(self) -> PartFiles:
        """Makes the shard durable. No change: no shard."""

    def abandon(self) -> None: ...


def begin_shard(
    encoding: Encoding, files: Store, name: str, table: TensorTable, chunks: int, *, sync: bool = True
) -> ShardWriter:
    """`chunks`: how many chunks the part has at most. `sync`: whether `close` waits until it is durable."""
    if encoding == "fast" or encoding == "small":
        return _BlobShard(_Shard(files, name, 64 + chunks * (_ENTRY_ROOM + 32), sync), encoding)
    room = sum(2 * len(json.dumps(spec.name).encode()) + _ENTRY_ROOM + 48 for spec in table)
    return _FieldShard(_Shard(files, name, 64 + room, sync), table, encoding)


def _record(chunk: Chunk, file: str, offset: int, length: int, step: ChunkStep) -> ChunkRecord:
    sums = step.sums.total()
    return ChunkRecord(chunk.key, file, offset, length, len(step.changes), sums.old, sums.new)


class _Shard:
    """A safetensors file whose header is written last, into room reserved for it."""

    def __init__(self, files: Store, name: str, reserve: int, sync: bool) -> None:
        self._files, self.name = files, name
        self.data_start = -(-(reserve + 8) // 8) * 8
        self._writer = files.write(name, reserve=self.data_start, sync=sync)
        self.end = 0
        """bytes of data written"""

    def write(self, data: bytes) -> None:
        self._writer.write(data)
        self.end += len(data)

    def finish(self, entries: Sequence[Entry], metadata: dict[str, str]) -> FileRecord:
        self._writer.write_head(pack_header(entries, metadata, reserve=self.data_start))
        failpoint("shard.written", self._files.place(self.name))
        self._writer.finish()
        failpoint("shard.synced", self._files.place(self.name))
        return object_record(self._files, self.name)

    def discard(self) -> None:
        self._writer.discard()


class _BlobShard:
    def __init__(self, shard: _Shard, encoding: StepEncoding) -> None:
        self._shard, self._encoding = shard, encoding
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
        self._records.append(_record(chunk, self._shard.name, begin, len(prepared), step))

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
    def __init__(self, shard: _Shard, table: TensorTable, encoding: FieldEncoding) -> None:
        self._shard, self._table, self._encoding = shard, table, encoding
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
            touched = set(step.sums.tensors.tolist())
            self._records.append(_record(chunk, self._shard.name, 0, 0, step))
        for span in chunk.spans:
            place = slice(span.offset, span.offset + span.words)
            tensor = self._tensor(span.tensor)
            tensor.step(bytes_of(old[place]), bytes_of(after[place]), span.tensor in touched)

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
