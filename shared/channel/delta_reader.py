"""Reads the shards of a delta chunk by chunk, and proves each chunk by the sums that its index states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np

from weightcast.shared.base.elements import ByteArray, Chunk, ChunkKey, TensorTable, Words
from weightcast.shared.base.errors import MEND_CHANNEL, DamagedFile, UnknownFormat
from weightcast.shared.channel.delta_writer import ChunkStep, bytes_of, chunk_entry_name
from weightcast.shared.channel.index import (
    INDEX_NAME,
    STEP_ENCODINGS,
    ChunkRecord,
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

PayloadEncoding = Literal["xor", "overwrite", "xor_sparse"]


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


class DeltaReader(Protocol):
    """Steps of one version. `changes` is called at most once per chunk, in grid order."""

    sequential: bool
    """True: chunks must be asked for in order, each that `touches` names."""

    def touches(self, chunk: Chunk) -> bool: ...

    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        """Decoded and checked: DamagedFile when anything does not fit. `old` is not changed."""

    def finish(self) -> None:
        """Raises DamagedFile when something of the version was not used up or does not add up."""


Arrived = Callable[[str, int | None], None]
"""Returns once the first so many bytes of a shard are there, None: once all of the version is there."""


@dataclass(frozen=True)
class _ShardFiles:
    """The version's shards, opened for each read: a host far behind reads more than a process may hold
    open. `place`: of the shards in the channel, for messages."""

    files: Store
    place: str
    arrived: Arrived | None

    def read(self, name: str, offset: int, length: int) -> bytes:
        if self.arrived is not None:
            self.arrived(name, offset + length)
        return read_exactly(self.files, name, offset, length, f"{self.place}/{name}")

    def header(self, name: str) -> Header:
        if self.arrived is not None:
            self.arrived(name, None)
        try:
            return read_shard_header(self.files, name)
        except DamagedFile as error:
            remedy = error.remedy or MEND_CHANNEL
            raise DamagedFile(f"{self.place}/{name}: {error.message}", remedy=remedy) from error


def _check_sums(record: ChunkRecord, sums: SpanSums, where: str) -> None:
    """S_old proves that the touched words are the ones the publisher had, S_new what they become."""
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


def _check_used(records: Mapping[ChunkKey, ChunkRecord], used: set[ChunkKey], place: str) -> None:
    """The index may list only chunks of the grid that its parts make."""
    if len(used) != len(records):
        key = min(records.keys() - used)
        raise DamagedFile(
            f"{place}/{INDEX_NAME}: {chunk_entry_name(key)} is listed, and no such chunk changes",
            remedy=MEND_CHANNEL,
        )


class BlobReader:
    """Encodings `fast` and `small`: each blob says how it is to be read."""

    sequential = False

    def __init__(self, index: Index, files: Store, arrived: Arrived | None = None) -> None:
        self._records = {record.key: record for record in index.chunks}
        self._place = place_of(index)
        self._files = _ShardFiles(files, self._place, arrived)
        self._used: set[ChunkKey] = set()

    def touches(self, chunk: Chunk) -> bool:
        return chunk.key in self._records

    def step(self, chunk: Chunk, old: Words) -> ChunkStep:
        record = self._records[chunk.key]
        blob = self._files.read(record.file, record.offset, record.length)
        where = f"{self._place}/{record.file}, {chunk_entry_name(chunk.key)}"
        try:
            changes, sums = decode_step(blob, chunk, old)
        except DamagedFile as error:
            raise DamagedFile(f"{where}: {error.message}", remedy=MEND_CHANNEL) from error
        except UnknownFormat as error:
            raise UnknownFormat(f"{where}: {error.message}", remedy=error.remedy) from error
        _check_sums(record, sums, where)
        self._used.add(chunk.key)
        return ChunkStep(changes, sums)

    def finish(self) -> None:
        _check_used(self._records, self._used, self._place)


def place_of(index: Index | ForeignIndex) -> str:
    """The directory of a delta's shards in its channel: for messages, as they are read from a copy."""
    main = version_name(index.version)
    is_beside = isinstance(index, Index) and index.main != ""
    return f"{main}/{from_name(index.base_version)}" if is_beside else main


def payload_encoding(index: Index | ForeignIndex) -> PayloadEncoding:
    if index.encoding is None or index.encoding == "fast" or index.encoding == "small":
        raise DamagedFile(
            f"{place_of(index)}/{INDEX_NAME}: encoding {index.encoding} has no payloads per tensor",
            remedy=MEND_CHANNEL,
        )
    return index.encoding


class FieldReader:
    """Encodings `xor`, `overwrite` and (foreign only) `xor_sparse`: payloads are streams, one per tensor."""

    sequential = True

    def __init__(
        self,
        index: Index | ForeignIndex,
        table: TensorTable,
        files: Store,
        arrived: Arrived | None = None,
    ) -> None:
        self._table = table
        self._place = place_of(index)
        self._files = _ShardFiles(files, self._place, arrived)
        self._weight_map = index.weight_map
        self._encoding = payload_encoding(index)
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
        if self._records is None:
            return
        where = f"{self._place}, {chunk_entry_name(chunk.key)}"
        record = self._records.get(chunk.key)
        if record is None and len(sums):
            raise DamagedFile(f"{where}: changes that the index does not list", remedy=MEND_CHANNEL)
        if record is not None:
            _check_sums(record, sums, where)
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
        where = f"{self._place}/{shard}, {spec.name}"
        if entry is None or entry.dtype != "U8" or len(entry.shape) != 1:
            raise DamagedFile(f"{where}: no payload in the shard that the index names", remedy=MEND_CHANNEL)
        begin = header.data_start + entry.begin
        payload = open_payload(
            self._encoding,
            lambda offset, length: self._files.read(shard, begin + offset, length),
            entry.end - entry.begin,
            spec.nbytes,
            name=where,
        )
        return _TensorStream(where, payload, self._checksum_format, header.metadata.get(spec.name))

    def _finish_tensor(self, number: int) -> None:
        self._open.pop(number).finish()
        self._done.add(self._table[number].name)

    def finish(self) -> None:
        missing = {name for name in self._weight_map if self._table.named(name).nbytes} - self._done
        if missing:
            raise DamagedFile(
                f"{self._place}: {sorted(missing)[0]} was not read to its end", remedy=MEND_CHANNEL
            )
        if self._records is not None:
            _check_used(self._records, self._used, self._place)


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
