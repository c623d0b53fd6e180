"""The index of a version: its manifest and its commit point. docs/FORMAT.md, Index.

Parsing and writing only. `shared/checkpoint/update/plan.py` decides which index may follow which; the reader
of the shards, which computes the chunk grid, checks the chunks against it.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, cast

import numpy as np
from annotated_types import Ge, MaxLen
from blake3 import blake3

from weightcast.shared.base.choices import Encoding as Encoding
from weightcast.shared.base.elements import (
    BLOCK_WORDS,
    CHUNK_WORDS,
    MAIN,
    ChunkKey,
    Part,
    Segment,
    TensorTable,
)
from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.run_files import CARRIED as CARRIED
from weightcast.shared.channel.run_files import FORMAT as FORMAT
from weightcast.shared.channel.run_files import (
    SIDE_FILES,
    TensorRecords,
    carried_records,
    check_component,
    check_format,
    component_of,
    file_records,
    is_hex,
    parse_lane_rows,
    parse_lanes,
    run_id,
    side_records,
    write_file_records,
    write_lane_rows,
)
from weightcast.shared.channel.run_files import FileRecord as FileRecord
from weightcast.shared.channel.store import Store
from weightcast.shared.codec.container import StepEncoding
from weightcast.shared.digest.checksums import Lanes, root
from weightcast.shared.files.durable import Piece, pieces_of
from weightcast.shared.files.paths import file_name, is_plain
from weightcast.shared.files.safetensors import naturals
from weightcast.shared.files.strict_json import MAX_INTEGER, Hex, Members, parse_object, write_object
from weightcast.shared.kernels.load import kernels


def write_parts(parts: Sequence[Part], table: TensorTable) -> list[list[list[int]]] | None:
    """None for a single part that is the whole table."""
    if tuple(parts) == (table.whole,):
        return None
    return [_rows(part, table) for part in parts]


def _rows(part: Part, table: TensorTable) -> list[list[int]]:
    rows: list[list[int]] = []
    for segment in part.segments:
        number = segment.tensor
        if (segment.start, segment.stop) != (0, table[number].words):
            rows.append([number, segment.start, segment.stop])
        elif rows and len(rows[-1]) == 2 and rows[-1][1] == number - 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return rows


def parse_parts(facts: Members, table: TensorTable, what: str) -> tuple[Part, ...]:
    """The member `parts`; `check_parts` is still to be called. Raises DamagedFile."""
    if facts.is_null("parts"):
        return (table.whole,)
    room = len(table)
    parts: list[Part] = []
    for number, rows in enumerate(facts.array("parts")):
        segments = tuple(_segments(rows, table, room, what))
        # Disjoint parts hold each whole tensor once: more would be memory spent on an index to be refused.
        room -= sum(
            segment.start == 0 and segment.stop == table[segment.tensor].words for segment in segments
        )
        parts.append(Part(number, segments))
    return tuple(parts)


def _segments(rows: object, table: TensorTable, room: int, what: str) -> Iterator[Segment]:
    if type(rows) is not list:
        raise DamagedFile(f"{what}: a part is not an array")
    for row in cast(list[object], rows):
        numbers = naturals(row, 3)
        if numbers is None or len(numbers) < 2 or max(numbers[: 4 - len(numbers)]) >= len(table):
            raise DamagedFile(f"{what}: bad row {repr(row)[:60]} in a part")
        if len(numbers) == 3:
            yield Segment(*numbers)
            continue
        first, last = numbers
        room -= last - first + 1
        if last < first or room < 0:
            raise DamagedFile(f"{what}: a part holds a tensor twice")
        for number in range(first, last + 1):
            yield Segment(number, 0, table[number].words)


def check_parts(parts: Sequence[Part], table: TensorTable, what: str) -> None:
    """Segments are within their tensors, on block borders, ascend within a part, and no two overlap. Raises
    DamagedFile."""
    if tuple(parts) == (table.whole,):
        return
    if [part.number for part in parts] != list(range(len(parts))):
        raise DamagedFile(f"{what}: parts are not numbered from 0")
    for part in parts:
        for segment in part.segments:
            number, start, stop = segment.tensor, segment.start, segment.stop
            words = table[number].words if 0 <= number < len(table) else -1
            fits = 0 <= start < stop <= words and start % BLOCK_WORDS == 0
            if not fits and (start, stop, words) != (0, 0, 0):
                raise DamagedFile(f"{what}: words {start} to {stop} of tensor {number} cannot be a part's")
        _check_ascending([(segment.tensor, segment.start) for segment in part.segments], what)
    _check_disjoint([segment for part in parts for segment in part.segments], what)


def _check_ascending(starts: Sequence[tuple[int, int]], what: str) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
        raise DamagedFile(f"{what}: segments of a part are not in table order")


def _check_disjoint(segments: Sequence[Segment], what: str) -> None:
    ordered = sorted((segment.tensor, segment.start, segment.stop) for segment in segments)
    for earlier, later in itertools.pairwise(ordered):
        if earlier[0] == later[0] and (later[1] < earlier[2] or later == earlier):
            raise DamagedFile(f"{what}: two segments of tensor {later[0]} overlap")


INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = 128 << 20

Kind = Literal["delta", "anchor"]
ForeignEncoding = Literal["xor", "overwrite", "xor_sparse"]
ChecksumFormat = Literal["xxh3-128", "blake3", "adler32"]

_OURS = "weightcast"
STEP_ENCODINGS: tuple[StepEncoding, ...] = ("fast", "small")
"""Chunks of both may be in any mode, so that one reader reads them: `step` in the index's metadata."""
_WIRE_ENCODINGS: Mapping[str, Encoding] = {"step": "fast", "xor": "xor", "overwrite": "overwrite"}
_FIELD_FORMATS = {"compression_format": "zstd", "checksum_format": "xxh3-128"}
_FOREIGN_VALUES = {
    "delta_encoding": ("xor", "overwrite", "xor_sparse"),
    "compression_format": ("zstd",),
    "checksum_format": ("xxh3-128", "blake3", "adler32"),
}
_VERSION = re.compile(r"\d{6,15}", re.ASCII)


class ChunkRecord(NamedTuple):
    """A changed chunk. `file`, `offset`, `length` place its blob (`fast`, `small`); in the field's encodings
    payloads are per tensor and `length` is 0. `changed` counts words."""

    key: ChunkKey
    file: str
    offset: int
    length: int
    changed: int
    old: Lanes
    new: Lanes


@dataclass(frozen=True)
class VersionTotals:
    """Changed elements; elements and bytes of the model; bytes of the version's files. Information only."""

    changed: int
    elements: int
    nbytes: int
    delta_bytes: int


@dataclass(frozen=True)
class Index:
    """One version. `digest` is the BLAKE3 of the exact index bytes, hex; `weight_map` names the shard of
    each changed tensor; `parts` is the split the chunk grid is computed from."""

    run_id: str
    version: int
    kind: Kind
    base_version: Annotated[int, Ge(-1)]
    """-1 for an anchor"""
    base_root: Annotated[str, MaxLen(64)]
    """root of base_version; empty for an anchor"""
    root: Annotated[str, Hex(64)]
    parent: Annotated[str, MaxLen(64)]
    """digest of the base version's index (of base.json for base_version 0); empty for an anchor"""
    epoch: int
    encoding: Encoding | None
    """None for an anchor"""
    step: int | None
    """the trainer's step: information only"""
    created: float
    """unix time on the publisher's clock"""
    weight_map: Mapping[str, str]
    files: tuple[FileRecord, ...]
    tensors: TensorRecords
    parts: tuple[Part, ...]
    chunks: tuple[ChunkRecord, ...]
    totals: VersionTotals
    checksums: Mapping[str, str] = field(default_factory=dict)
    """field encodings only: xxh3-128 hex of each changed tensor's new bytes, as in the shard's metadata"""
    main: Annotated[str, Hex(64)] = ""
    """of a multi-step delta or an anchor of a version with a delta: digest of the version's own index"""
    request: Annotated[str, Hex(16)] = ""
    """16 hex digits of whoever asked for the version, who knows it again by them; empty: nobody does"""
    main_version: int = 0
    main_root: Annotated[str, Hex(64)] = ""
    """of a component's version: version and root of the main component that it was trained on; empty in
    indexes of main, and of anchors and multi-step deltas"""
    digest: str = ""
    side_files: tuple[FileRecord, ...] = ()
    """files that are not weights and not in `files`: in an anchor those of the base, in a delta none"""

    carried: tuple[FileRecord, ...] = ()
    """config files that hosts of this version have in place of the base's, in `carried/` of its directory"""

    @property
    def all_files(self) -> tuple[FileRecord, ...]:
        """Of the directory with this index."""
        beside = () if self.main else self.carried
        carried = (FileRecord(f"{CARRIED}/{file.name}", file.size, file.blake3) for file in beside)
        return (*self.files, *self.side_files, *carried)

    @property
    def version_digest(self) -> str:
        """By which a version is known, whichever of its indexes led there."""
        return self.main or self.digest


_REMEMBERED: OrderedDict[str, tuple[TensorTable, Index]] = OrderedDict()
"""by digest"""
_MOST_REMEMBERED = 2


class Payload(NamedTuple):
    """What a manifest of SkyRL states of a tensor: `key` in `file`; shape, bytes and digest of the tensor."""

    file: str
    key: str
    shape: tuple[int, ...]
    nbytes: int
    checksum_format: str
    checksum: str


@dataclass(frozen=True)
class ForeignIndex:
    """A delta in the plain format of the field: what can be known of it. docs/FORMAT.md, Foreign channels."""

    version: int
    base_version: int
    encoding: ForeignEncoding
    checksum_format: ChecksumFormat
    weight_map: Mapping[str, str]
    digest: str
    payloads: Mapping[str, Payload] | None = None
    """of SkyRL, by tensor; None: keys are names, and shards state the digests"""

    @property
    def version_digest(self) -> str:
        return self.digest


def describe(data: bytes, top: Members | None = None) -> Literal["ours", "foreign delta", "full"]:
    """Which parser an index is for. `top`: as `read_top` gives it. Raises DamagedFile for anything else."""
    top = read_top(data) if top is None else top
    if _OURS in top:
        return "ours"
    delta = "metadata" in top and "delta_encoding" in top.object("metadata")
    return "foreign delta" if delta else "full"


_MARK = secrets.token_hex(16)
"""name of a member in place of rows of tensors while the rest is read or written: in no file"""
_WEIGHT_MAP, _AFTER = b',"weight_map":{', b'},"weightcast":{'
_TENSORS, _CHUNKS = b',"tensors":{', b'},"chunks":['
_MANY_ROWS = 1 << 20
"""bytes of an index from which its rows are worth a kernel"""


def _rows_of(data: bytes) -> tuple[slice, slice] | None:
    """Where those of `weight_map` and of `tensors` are in an index as `write_index` makes it; None where they
    are read as the rest is."""
    files, end = data.find(_WEIGHT_MAP) + len(_WEIGHT_MAP), data.find(_AFTER)
    tensors, stop = data.find(_TENSORS, end) + len(_TENSORS), data.rfind(_CHUNKS)
    fits = len(_WEIGHT_MAP) <= files < end < tensors < stop and len(data) >= _MANY_ROWS
    return (slice(files, end), slice(tensors, stop)) if fits else None


def read_top(data: bytes, what: str = INDEX_NAME, *, rows: bool = False) -> Members:
    """The members of any index, for the parser that `describe` names. `rows`: with those of tensors, also
    where `parse_index` reads them by a kernel. Raises DamagedFile."""
    if len(data) > INDEX_LIMIT:
        raise DamagedFile(f"{what}: {len(data)} bytes, at most {INDEX_LIMIT} are read")
    found = None if rows else _rows_of(data)
    if found is not None:
        one, other = found
        pieces = data[: one.start], _marked(0), data[one.stop : other.start], _marked(1), data[other.stop :]
        data = b"".join(pieces)
    return Members(parse_object(data, what), what)


def _marked(number: int) -> bytes:
    return f'"{_MARK}":{number}'.encode()


@lru_cache(maxsize=2)
def _keys(table: TensorTable) -> tuple[bytes, ...]:
    """Names as they begin a row."""
    return tuple(_text(name) + b":" for name in table.names)


def _text(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


def _read_rows(
    data: bytes, top: Members, table: TensorTable, files: Sequence[FileRecord]
) -> tuple[TensorRecords, dict[str, str]] | None:
    """Records and weight map of an index whose `top` was read without. None where the kernel cannot read
    them, or where they are not the members that they seem to be."""
    found, rows, keys = _rows_of(data), Members(top.object(_OURS), _OURS).object("tensors"), _keys(table)
    if found is None or [top.object("weight_map"), rows] != [{_MARK: 0}, {_MARK: 1}]:
        return None
    files_at, at = found
    read = kernels().read_tensors(data, at.start, at.stop, keys)
    texts, known = data[files_at].split(b',"'), {_text(file.name): file.name for file in files}
    texts[0] = texts[0][1:]
    if read is None or len(texts) != len(read[0]):
        return None
    records, pairs = TensorRecords.numbered(table, *read), zip(texts, read[0].tolist(), strict=True)
    held = [known.get(text.removeprefix(keys[number][1:])) for text, number in pairs]
    weight_map = {name: file for name, file in zip(records.names, held, strict=True) if file is not None}
    return (records, weight_map) if len(weight_map) == len(held) else None


def write_index(index: Index, table: TensorTable) -> bytes:
    """The exact bytes to commit; `index.digest` is ignored. Raises DamagedFile when its facts contradict each
    other or the table."""
    check_index(index, table, f"index of version {index.version}")
    facts = _facts(index, table, {_MARK: 1})
    data = write_object({"metadata": _metadata(index), "weight_map": {_MARK: 0}, _OURS: facts})
    for number, rows in enumerate(_written_rows(index, table)):
        before, _, after = data.partition(_marked(number))
        data = b"".join((before, b",".join(rows), after))
    return data


def _written_rows(index: Index, table: TensorTable) -> Iterator[Iterable[bytes]]:
    """Those of `weight_map` and of `tensors`, in the order of the table."""
    found, every = index.tensors, _keys(table)
    order = np.argsort(found.numbers(table))
    records = TensorRecords.numbered(
        table, found.numbers(table)[order], found.lanes[order], found.changed[order]
    )
    keys = [every[number] for number in records.numbers(table).tolist()]
    files = {file.name: _text(file.name) for file in index.files}
    yield (key + files[index.weight_map[name]] for key, name in zip(keys, records.names, strict=True))
    digests = [f',"{index.checksums[name]}"]'.encode() for name in records.names if index.checksums]
    ends = digests or [b"]"] * len(keys)
    columns = keys, write_lane_rows(records.lanes), records.changed.tolist(), ends
    yield map(b'%b["%b",%d%b'.__mod__, zip(*columns, strict=True))


def _metadata(index: Index) -> dict[str, str]:
    metadata = {"version": f"{index.version:06d}"}
    if index.encoding is None:
        return metadata
    metadata["base_version"] = f"{index.base_version:06d}"
    if index.encoding in STEP_ENCODINGS:
        return {**metadata, "delta_encoding": "step"}
    return {**metadata, "delta_encoding": index.encoding, **_FIELD_FORMATS}


def _facts(index: Index, table: TensorTable, tensors: Mapping[str, object]) -> dict[str, object]:
    totals = index.totals
    return {
        "format": FORMAT,
        "run_id": index.run_id,
        "component": table.component,
        "kind": index.kind,
        "version": index.version,
        "epoch": index.epoch,
        "base_version": index.base_version,
        "base_root": index.base_root,
        "root": index.root,
        "parent": index.parent,
        "step": index.step,
        "created": index.created,
        **({"encoding": index.encoding} if index.encoding == "small" else {}),
        **({"main": index.main} if index.main else {}),
        **({"main_version": index.main_version, "main_root": index.main_root} if index.main_root else {}),
        **({"request": index.request} if index.request else {}),
        "totals": [totals.changed, totals.elements, totals.nbytes, totals.delta_bytes],
        "files": write_file_records(index.files),
        **({CARRIED: write_file_records(index.carried)} if index.carried else {}),
        **({SIDE_FILES: write_file_records(index.side_files)} if index.side_files else {}),
        "parts": write_parts(index.parts, table),
        "tensors": tensors,
        "chunks": _chunk_rows(index),
    }


def _chunk_rows(index: Index) -> list[list[object]]:
    numbers = {file.name: number for number, file in enumerate(index.files)}
    return [
        [
            *(chunk.key.part, chunk.key.dtype, chunk.key.number),
            *(numbers[chunk.file], chunk.offset, chunk.length, chunk.changed),
            *(chunk.old.hex(), chunk.new.hex()),
        ]
        for chunk in index.chunks
    ]


def parse_index(
    data: bytes,
    table: TensorTable,
    *,
    what: str = INDEX_NAME,
    top: Members | None = None,
    run: str | None = None,
) -> Index:
    """Checks everything that can be checked without the shards. Raises DamagedFile, UnknownFormat and, for
    another component, Refused; `what` names the file; `top`: what `read_top` made of `data`; `run`: of the
    channel, whose table says nothing of another run's tensors. The last few are remembered: several read the
    index of a version, which may have several 100,000 tensors."""
    known = remembered(data, table)
    if known is not None:
        _check_run(known.run_id, run, what)
        return known
    index = _parsed(data, table, what, read_top(data, what) if top is None else top, run)
    _REMEMBERED[index.digest] = table, index
    while len(_REMEMBERED) > _MOST_REMEMBERED:
        _REMEMBERED.popitem(last=False)
    return index


def remembered(data: bytes, table: TensorTable) -> Index | None:
    """What `parse_index` gave for the same bytes and the same table not long ago."""
    known = _REMEMBERED.get(blake3(data).hexdigest())
    return known[1] if known is not None and known[0] is table else None


def _check_run(found: str, run: str | None, what: str) -> None:
    if run is not None and found != run:
        raise DamagedFile(f"{what}: it is of run {found!r}, its channel of run {run!r}")


def _parsed(data: bytes, table: TensorTable, what: str, top: Members, run: str | None) -> Index:
    facts = Members(top.object(_OURS), f"{what}: {_OURS}")
    check_format(facts, what)
    check_component(component_of(facts, what), table.component, what)
    _check_run(run_id(facts), run, what)
    files = file_records(facts, what)
    quick = _read_rows(data, top, table, files)
    if quick is None and _MARK in facts.object("tensors"):
        return _parsed(data, table, what, read_top(data, what, rows=True), run)
    rows = {} if quick is not None else facts.object("tensors")
    records, weight_map = (
        (_tensor_records(rows, what), top.text_map("weight_map")) if quick is None else quick
    )
    totals = facts.array("totals")
    if len(totals) != 4 or any(type(n) is not int or not 0 <= n <= MAX_INTEGER for n in totals):
        raise facts.bad("totals", "four numbers")
    index = facts.record(
        Index,
        absent=("main", "request", "main_version", "main_root"),
        run_id=run_id(facts),
        kind=_kind(facts, what),
        encoding=_encoding(top, facts, what),
        weight_map=weight_map,
        files=files,
        tensors=records,
        parts=parse_parts(facts, table, what),
        chunks=_chunk_records(facts.array("chunks"), files, what),
        totals=VersionTotals(*cast(list[int], totals)),
        checksums=_checksums(rows, what),
        digest=blake3(data).hexdigest(),
        carried=carried_records(facts, what, table.component),
        side_files=side_records(facts, what),
    )
    if not top.object("metadata").items() >= _metadata(index).items():
        raise DamagedFile(f"{what}: its metadata contradicts its member {_OURS!r}")
    check_index(index, table, what)
    _check_root(index, table, what)
    return index


def _kind(facts: Members, what: str) -> Kind:
    kind = facts.text("kind", 32)
    if kind not in ("delta", "anchor"):
        raise UnknownFormat(f"{what}: unknown kind {kind!r}", remedy="upgrade weightcast here")
    return cast(Kind, kind)


def _encoding(top: Members, facts: Members, what: str) -> Encoding | None:
    metadata = top.object("metadata")
    if "delta_encoding" not in metadata:
        return None
    name = metadata["delta_encoding"]
    if type(name) is not str or name not in _WIRE_ENCODINGS:
        raise _unknown(name, _WIRE_ENCODINGS, what)
    if name != "step" or "encoding" not in facts:
        return _WIRE_ENCODINGS[name]
    own = facts.text("encoding", 32)
    if own not in STEP_ENCODINGS:
        raise _unknown(own, STEP_ENCODINGS, what)
    return cast(Encoding, own)


def _unknown(value: object, known: Iterable[str], what: str) -> UnknownFormat:
    return UnknownFormat(
        f"{what}: {repr(value)[:40]} is none of {', '.join(known)}", remedy="upgrade weightcast"
    )


def _tensor_records(rows: Mapping[str, object], what: str) -> TensorRecords:
    lanes: list[object] = []
    changed: list[int] = []
    for name, row in rows.items():
        if type(row) is not list or len(row) not in (2, 3) or type(row[1]) is not int:
            raise DamagedFile(f"{what}: a tensor is not [lanes, changed] or [lanes, changed, checksum]")
        if not 0 <= row[1] <= MAX_INTEGER:
            raise DamagedFile(f"{what}: {row[1]} changes in tensor {name[:80]!r}")
        lanes.append(row[0])
        changed.append(row[1])
    return TensorRecords(tuple(rows), parse_lane_rows(lanes, what), np.array(changed, np.int64))


def _checksums(rows: Mapping[str, object], what: str) -> dict[str, str]:
    checksums = {name: row[2] for name, row in rows.items() if type(row) is list and len(row) == 3}
    if not all(is_hex(checksum, 32) for checksum in checksums.values()):
        raise DamagedFile(f"{what}: a tensor's checksum is not 32 hex digits")
    return cast(dict[str, str], checksums)


def _chunk_records(rows: Sequence[object], files: Sequence[FileRecord], what: str) -> tuple[ChunkRecord, ...]:
    for row in rows:
        _check_chunk_row(row, len(files), what)
    columns = list(zip(*cast(Sequence[Sequence[object]], rows), strict=True)) or [()] * 9
    part, dtype, number, file, offset, length, changed, old, new = columns
    names = [files[n].name for n in cast(Sequence[int], file)]
    keys = map(ChunkKey, part, dtype, number)
    sums = parse_lanes(old, what), parse_lanes(new, what)
    return tuple(map(ChunkRecord, keys, names, offset, length, changed, *sums))


def _check_chunk_row(row: object, files: int, what: str) -> None:
    if type(row) is not list or len(row) != 9 or type(row[1]) is not str:
        raise DamagedFile(f"{what}: a chunk is not a row of nine")
    for value in (row[0], *row[2:7]):
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            raise DamagedFile(f"{what}: bad number {repr(value)[:40]} in a chunk")
    if row[3] >= files:
        raise DamagedFile(f"{what}: a chunk in file {row[3]} of {files}")


def check_index(index: Index, table: TensorTable, what: str) -> None:
    """The rules that an index obeys whoever made it. Raises DamagedFile."""
    _check_lineage(index, table, what)
    _check_tensors(index, table, what)
    check_parts(index.parts, table, what)
    _check_chunks(index, table, what)
    _check_places(index, what)


def _check_lineage(index: Index, table: TensorTable, what: str) -> None:
    if index.kind == "anchor":
        fits = (index.base_version, index.base_root, index.parent, index.encoding) == (-1, "", "", None)
    else:
        fits = 0 <= index.base_version < index.version and index.encoding is not None
        fits = fits and is_hex(index.base_root, 64) and is_hex(index.parent, 64)
    fits = fits and not (index.main_root and (table.component == MAIN or index.main))
    if not fits or not is_hex(index.root, 64) or not (index.main == "" or is_hex(index.main, 64)):
        raise DamagedFile(
            f"{what}: base, parent, root, main or encoding do not fit a version of kind {index.kind!r}"
        )


def _check_tensors(index: Index, table: TensorTable, what: str) -> None:
    names = tuple(index.weight_map)
    if index.tensors.names != names and index.tensors.keys() != index.weight_map.keys():
        raise DamagedFile(f"{what}: weight_map and tensor records name different tensors")
    if index.kind == "anchor" and len(index.tensors) != len(table):
        raise DamagedFile(f"{what}: an anchor of {len(index.tensors)} tensors, the run has {len(table)}")
    if index.checksums.keys() != (set(names) if index.encoding in ("xor", "overwrite") else set()):
        raise DamagedFile(f"{what}: checksums do not fit encoding {index.encoding}")
    if not {file.name for file in index.files}.issuperset(index.weight_map.values()):
        raise DamagedFile(f"{what}: weight_map names a file that is not listed")
    records = index.tensors
    try:
        most = table.sizes[records.numbers(table)]
    except KeyError as error:
        raise DamagedFile(f"{what}: unknown tensor {error.args[0][:80]!r}") from error
    for row in np.flatnonzero((records.changed < 0) | (records.changed > most))[:1].tolist():
        name, changed = records.names[row], int(records.changed[row])
        raise DamagedFile(f"{what}: {changed} changes in tensor {name[:80]!r}")


def _check_root(index: Index, table: TensorTable, what: str) -> None:
    """Only an anchor has the lanes of all tensors; a delta's are checked when it is applied."""
    if index.kind == "delta":
        return
    lanes = index.tensors.put(table, np.zeros((len(table), 2), np.uint64))
    if root(table, lanes) != index.root:
        raise DamagedFile(f"{what}: the lanes of its tensors are not those of its root")


def _check_chunks(index: Index, table: TensorTable, what: str) -> None:
    dtypes = {spec.dtype for spec in table}
    if index.kind == "anchor" and index.chunks:
        raise DamagedFile(f"{what}: an anchor with chunks")
    if len({chunk.key for chunk in index.chunks}) != len(index.chunks):
        raise DamagedFile(f"{what}: a chunk is listed twice")
    for chunk in index.chunks:
        key = chunk.key
        if key.part >= len(index.parts) or key.dtype not in dtypes or not 0 < chunk.changed <= CHUNK_WORDS:
            raise DamagedFile(f"{what}: impossible chunk {key.part}.{key.dtype[:40]!r}.{key.number}")


def _check_places(index: Index, what: str) -> None:
    """Blobs are in listed files and do not overlap; payloads of the field's encodings have no places."""
    sizes = {file.name: file.size for file in index.files}
    end: dict[str, int] = {}
    for chunk in sorted(index.chunks, key=lambda chunk: chunk.offset):
        if chunk.file not in sizes:
            raise DamagedFile(f"{what}: a chunk in {chunk.file[:80]!r}, which is not listed")
        if index.encoding not in STEP_ENCODINGS:
            fits = chunk.offset == chunk.length == 0
        else:
            fits = end.get(chunk.file, 0) <= chunk.offset < chunk.offset + chunk.length <= sizes[chunk.file]
        if not fits:
            raise DamagedFile(f"{what}: a chunk's place in {chunk.file} is impossible")
        end[chunk.file] = chunk.offset + chunk.length


def parse_foreign(data: bytes, *, what: str = INDEX_NAME) -> ForeignIndex:
    """An index in the plain format. Raises DamagedFile, and UnknownFormat for an encoding, compression
    or checksum that the field does not have."""
    top = read_top(data, what)
    metadata = Members(top.object("metadata"), f"{what}: metadata")
    for key, known in _FOREIGN_VALUES.items():
        if metadata.text(key, 40) not in known:
            raise _unknown(metadata.text(key, 40), known, what)
    version, base_version = _version(metadata, "version"), _version(metadata, "base_version")
    if base_version >= version:
        raise DamagedFile(f"{what}: version {version} from base version {base_version}")
    weight_map = top.text_map("weight_map")
    for shard in set(weight_map.values()):
        file_name(shard)
    if not all(name and is_plain(name) for name in weight_map):
        raise DamagedFile(f"{what}: a tensor name with control characters")
    return ForeignIndex(
        version=version,
        base_version=base_version,
        encoding=cast(ForeignEncoding, metadata.text("delta_encoding")),
        checksum_format=cast(ChecksumFormat, metadata.text("checksum_format")),
        weight_map=weight_map,
        digest=blake3(data).hexdigest(),
    )


def _version(metadata: Members, key: str) -> int:
    text = metadata.text(key, 15)
    if not _VERSION.fullmatch(text):
        raise metadata.bad(key, "at least six digits")
    return int(text)


def file_record(path: Path, name: str = "") -> FileRecord:
    """Of a local file. `name`: relative to the directory that the record is for; unset: the file's own."""
    return _record(name or path.name, pieces_of(path))


def object_record(files: Store, key: str, advance: Advance | None = None) -> FileRecord:
    """Of an object, under the name `key`. Raises NotFound, DamagedFile, Unavailable."""
    with closing(files.pieces(key)) as pieces:
        return _record(key, pieces, advance)


def upload(files: Store, key: str, pieces: Iterable[Piece]) -> FileRecord:
    """Makes an object; the record of what was written. Raises AlreadyExists, Unavailable."""
    digest, size = blake3(), 0

    def seen() -> Iterator[Piece]:
        nonlocal size
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            yield piece

    files.upload(key, seen())
    return FileRecord(key, size, digest.hexdigest())


def _record(name: str, pieces: Iterable[Piece], advance: Advance | None = None) -> FileRecord:
    digest, size = blake3(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        if advance is not None:
            advance(len(piece))
    return FileRecord(name, size, digest.hexdigest())
