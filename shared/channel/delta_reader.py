"""Reads the shards of a delta chunk by chunk, and proves each chunk by the sums that its index states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np

from weightcast.shared.base.elements import ByteArray, Chunk, ChunkKey, TensorTable, Words
from weightcast.shared.base.errors import MEND_CHANNEL, DamagedFile, UnknownFormat
from weightcast.shared.channel.delta_writer import ChunkStep, bytes_of, chunk_entry_name
from weightcast.shared.channel.index import (
    INDEX_NAME,
    STEP_ENCODINGS,
    ChunkRecord,
    ForeignEncoding,
    ForeignIndex,
    Index,
)
from weightcast.shared.channel.layout import from_name, version_name
from weightcast.shared.channel.store import NotFound, Store
from weightcast.shared.codec.changes import changes_of
from weightcast.shared.codec.container import decode_step
from weightcast.shared.codec.slime import PayloadReader, digest_stream, open_payload
from weightcast.shared.digest.checksums import SpanSums
from weightcast.shared.files.safetensors import Header, header_from


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
        self._headers: dict[str, Header] = {}
        self._open: dict[int, _TensorStream] = {}
        self._done: set[str] = set()
        unknown = sorted(set(self._weight_map) - set(table.numbers))
        if unknown:
            raise DamagedFile(
                f"{self._place}/{INDEX_NAME}: unknown tensors {', '.join(unknown[:5])}", remedy=MEND_CHANNEL
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
                    self._finish_tensor(span.tensor)
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
        entry = header.entries.get(spec.name)
        where = f"{self._place}/{shard}, {spec.name}"
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
        return _TensorStream(where, payload, self._checksum_format, header.metadata.get(spec.name))

    def _header(self, shard: str) -> Header:
        if self._arrived is not None:
            self._arrived(shard, None)
        try:
            return read_shard_header(self._shards, shard)
        except DamagedFile as error:
            remedy = error.remedy or MEND_CHANNEL
            raise DamagedFile(f"{self._place}/{shard}: {error.message}", remedy=remedy) from error

    def _finish_tensor(self, number: int) -> None:
        self._open.pop(number).finish()
        self._done.add(self._table[number].name)

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
                f"{self._where}: the new bytes do not have the digest that the shard states",
                remedy="the shard or the local checkpoint is damaged; nothing was written",
            )


def open_delta(
    index: Index | ForeignIndex, table: TensorTable, files: Store, arrived: Arrived | None = None
) -> DeltaReader:
    """`files`: the version's shards; those that `arrived` waits for may still be on their way there. Their
    digests are checked by the fetch."""
    if isinstance(index, Index) and index.encoding in STEP_ENCODINGS:
        return BlobReader(index, files, arrived)
    return FieldReader(index, table, files, arrived)
