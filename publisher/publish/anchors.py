"""Anchors: the full weights of a version, as an ordinary checkpoint directory with an index of its own.

Beside a version (`weight_v000032/anchor/`) they let hosts join without a base; as a version of its own one
starts a new chain where no delta can be made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightcast.publisher.publish.commit import Files, begin_beside, commit_draft, put
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, on_error
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.claims import Claim
from weightcast.shared.channel.index import (
    INDEX_NAME,
    FileRecord,
    Index,
    VersionTotals,
    upload,
    write_index,
)
from weightcast.shared.channel.layout import anchor_key
from weightcast.shared.channel.run_files import Base, TensorRecords, is_adapter
from weightcast.shared.channel.signing import PrivateKey
from weightcast.shared.channel.store import AlreadyExists
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, WordsIn
from weightcast.shared.checkpoint.state.state import Position, lanes_list
from weightcast.shared.digest.checksums import Lanes, hash_bytes, root
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import ADAPTER_MODEL
from weightcast.shared.files.safetensors import Entry, pack_header

SHARD_BYTES = 4 << 30
"""an adapter is always one file"""
_PIECE_BYTES = 8 << 20


def write_weights(
    made: Files,
    table: TensorTable,
    words_in: WordsIn,
    beside: Mapping[str, Path],
    advance: Advance | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[tuple[FileRecord, ...], Sequence[int], list[Lanes]]:
    """Shards and the files `beside` them, into a draft; how many tensors each shard has, in table order; raw
    lanes of what was written. `check`: as of `put`."""
    files = made.directory
    lanes = [Lanes()] * len(table)
    records: list[FileRecord] = []

    def shard(place: str, tensors: Sequence[int]) -> Iterator[bytes | memoryview]:
        entries, end = [], 0
        for tensor in tensors:
            spec = table[tensor]
            entries.append(Entry(spec.name, spec.dtype, spec.shape, end, end + spec.nbytes))
            end += spec.nbytes
        yield pack_header(entries, {"format": "pt"})
        for tensor in tensors:
            for start, piece in _pieces(table, tensor, words_in):
                yield piece
                lanes[tensor] = lanes[tensor].plus(hash_bytes(np.frombuffer(piece, np.uint8), start // 8))
                if advance is not None:
                    advance(len(piece))
        failpoint("anchor.copied", place)

    shards = list(_shards(table))
    for number, tensors in enumerate(shards):
        own = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = made.prefix + (ADAPTER_MODEL if is_adapter(table.component) else own)
        records.append(upload(files, name, shard(files.place(name), tensors)))
        failpoint("anchor.synced", files.place(name))
    records += [put(files, name, durable.pieces_of(path), check) for name, path in beside.items()]
    return tuple(records), [len(tensors) for tensors in shards], lanes


def _shards(table: TensorTable) -> Iterator[list[int]]:
    shard: list[int] = []
    size = 0
    for number, spec in enumerate(table):
        if shard and size + spec.nbytes > SHARD_BYTES and not is_adapter(table.component):
            yield shard
            shard, size = [], 0
        shard.append(number)
        size += spec.nbytes
    if shard:
        yield shard


def _pieces(table: TensorTable, tensor: int, words_in: WordsIn) -> Iterator[tuple[int, memoryview]]:
    spec = table[tensor]
    step = _PIECE_BYTES // spec.kind.width
    for start in range(0, spec.words, step):
        words = words_in(tensor, start, min(start + step, spec.words))
        yield start * spec.kind.width, memoryview(words.view(np.uint8))  # type: ignore[arg-type]


def anchor_index(
    version: int,
    epoch: int,
    step: int | None,
    base: Base,
    written: tuple[tuple[FileRecord, ...], Sequence[int], list[Lanes]],
    main: str = "",
) -> Index:
    """`base`: tells which files are side files; `main`: digest of the version's own index, whose anchor this
    is."""
    records, shards, lanes = written
    table, known = base.table, {record.name for record in (*base.files, *records[: len(shards)])}
    files = tuple(record for record in records if record.name in known)
    return Index(
        run_id=base.run_id,
        version=version,
        kind="anchor",
        base_version=-1,
        base_root="",
        root=root(table, lanes),
        parent="",
        epoch=epoch,
        encoding=None,
        step=step,
        created=time.time(),
        files=files,
        tensors=TensorRecords(
            table.names,
            np.array(lanes, np.uint64).reshape(-1, 2),
            np.zeros(len(table), np.int64),
            np.repeat(np.arange(len(shards)), shards),
        ),
        parts=(table.whole,),
        chunks=(),
        totals=VersionTotals(0, table.elements, table.nbytes, sum(file.size for file in records)),
        side_files=tuple(record for record in records if record.name not in known),
        main=main,
    )


@dataclass(frozen=True)
class Full:
    """The full weights of a version, wherever they are read from. `beside`: files beside them, by name."""

    position: Position
    base: Base
    words_in: WordsIn
    beside: Mapping[str, Path]


def write_anchor_beside(local: LocalCheckpoint, claim: Claim, key: PrivateKey | None = None) -> bool:
    """The anchor of the version that the local checkpoint holds. False when it exists already."""
    with local.reading():
        full = Full(local.state.position, local.base, local.words_in, local.side_files)
        return write_anchor(full, claim, key)


def write_anchor(full: Full, claim: Claim, key: PrivateKey | None = None) -> bool:
    """The anchor beside a version. False when it exists already. Its digests must equal the version's before
    its index is written; it appears through its index alone."""
    store, position, base = claim.store, full.position, full.base
    name = anchor_key(position.version)
    if store.stat(f"{name}/{INDEX_NAME}") is not None:
        return False
    made = begin_beside(claim, name)
    failpoint("anchor.begun", store.place(made.key))
    try:
        # not to fill a disk that is full already
        with on_error(made.discard):
            written = write_weights(made, base.table, full.words_in, full.beside, check=claim.check)
            if written[2] != lanes_list(position.lanes):
                raise DamagedFile(
                    f"the publisher's local checkpoint does not hold version {position.version}; no anchor "
                    "was written",
                    remedy="run `weightcast local verify`",
                )
            index = anchor_index(position.version, claim.epoch, None, base, written, main=position.digest)
            failpoint("anchor.written", made.directory.place())
            commit_draft(claim, made.key, name, index, write_index(index, base.table), key)
    except AlreadyExists:
        return False
    failpoint("anchor.committed", store.place(name))
    return True
