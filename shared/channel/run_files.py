"""base.json: the weights of version 0, and the tensor table of the run. docs/FORMAT.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import cast

from blake3 import blake3

from weightcast.shared.base.elements import MAIN, TensorSpec, TensorTable
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.index_records import (
    FORMAT,
    SIDE_FILES,
    FileRecord,
    check_component,
    check_format,
    file_records,
    parse_lane_rows,
    run_id,
    side_records,
    write_file_records,
    write_lane_rows,
)
from weightcast.shared.digest.checksums import LanesArray, root
from weightcast.shared.files.paths import is_plain
from weightcast.shared.files.safetensors import check_nbytes, checked_dtype, naturals
from weightcast.shared.files.strict_json import MAX_INTEGER, Members, parse_object, write_object

BASE_LIMIT = 256 << 20
_BASE_WHAT = "base.json"
_NAME_LIMIT = 4096
_RANK_LIMIT = 64


@dataclass(frozen=True, eq=False)
class Base:
    """`lanes` in table order, not to be written; `files`: config and tokenizer files. `digest`: BLAKE3
    hex of the exact bytes of base.json, the parent of every delta from version 0. `side_files`: the other
    files that are not weights, subdirectories included; None where an older release wrote base.json."""

    run_id: str
    table: TensorTable
    lanes: LanesArray
    root: str
    files: tuple[FileRecord, ...]
    digest: str = ""
    side_files: tuple[FileRecord, ...] | None = None

    @property
    def all_files(self) -> tuple[FileRecord, ...]:
        return (*self.files, *(self.side_files or ()))


def write_base(base: Base) -> bytes:
    return write_object(
        {
            "format": FORMAT,
            "run_id": base.run_id,
            "component": MAIN,
            "root": base.root,
            "files": write_file_records(base.files),
            **({} if base.side_files is None else {SIDE_FILES: write_file_records(base.side_files)}),
            "tensors": [
                [spec.name, spec.dtype, spec.shape, spec.nbytes, lanes]
                for spec, lanes in zip(base.table, write_lane_rows(base.lanes), strict=True)
            ],
        }
    )


@lru_cache(maxsize=2)
def parse_base(data: bytes) -> Base:
    """Raises UnknownFormat, and DamagedFile when anything is wrong, the root included. Every step reads the
    file, which may have several 100,000 tensors and never changes: it is parsed once."""
    if len(data) > BASE_LIMIT:
        raise DamagedFile(f"{_BASE_WHAT}: {len(data)} bytes, at most {BASE_LIMIT} are read")
    members = Members(parse_object(data, _BASE_WHAT), _BASE_WHAT)
    check_format(members, _BASE_WHAT)
    check_component(members, _BASE_WHAT)
    specs, lanes = _tensors(members.array("tensors"))
    table = TensorTable(specs)
    names = [spec.name.encode() for spec in table]
    if any(later <= earlier for earlier, later in itertools.pairwise(names)):
        raise DamagedFile(f"{_BASE_WHAT}: its tensors are not sorted by name, or one is listed twice")
    stated = members.hex("root", 64)
    if root(table, lanes) != stated:
        raise DamagedFile(f"{_BASE_WHAT}: its root is not that of its tensors", remedy="restore the file")
    files = file_records(members, _BASE_WHAT)
    side = side_records(members, _BASE_WHAT) if SIDE_FILES in members else None
    return Base(run_id(members), table, lanes, stated, files, blake3(data).hexdigest(), side)


def _tensors(rows: Iterable[object]) -> tuple[tuple[TensorSpec, ...], LanesArray]:
    specs: list[TensorSpec] = []
    lanes: list[object] = []
    for row in rows:
        if type(row) is not list or len(row) != 5:
            raise DamagedFile(f"{_BASE_WHAT}: a tensor is not [name, dtype, shape, bytes, lanes]")
        specs.append(_spec(cast(list[object], row)))
        lanes.append(row[4])
    return tuple(specs), parse_lane_rows(lanes, _BASE_WHAT)


def _spec(cells: Sequence[object]) -> TensorSpec:
    name = cells[0]
    if type(name) is not str or not 0 < len(name) <= _NAME_LIMIT or not is_plain(name):
        raise DamagedFile(f"{_BASE_WHAT}: {repr(name)[:80]} is not a usable tensor name")
    where = f"{_BASE_WHAT}: tensor {name[:80]!r}"
    shape, nbytes = naturals(cells[2], _RANK_LIMIT), cells[3]
    if shape is None or type(nbytes) is not int or not 0 <= nbytes <= MAX_INTEGER:
        raise DamagedFile(f"{where}: bad shape or size")
    spec = TensorSpec(name, checked_dtype(cells[1], where), shape, nbytes)
    check_nbytes(spec, where)
    return spec


_CHANNEL_FILE_WHAT = "channel.json"
CHANNEL_FILE_LIMIT = 16 << 20


@dataclass(frozen=True)
class ChannelFile:
    run_id: str
    created: float
    """unix time on the creator's clock"""
    frozen: tuple[str, ...] = ()
    """globs of tensor names that never change"""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """names of tied tensors to the name that is published"""
    horizon: int = 0
    """lowest version whose delta is kept"""


def write_channel_file(channel: ChannelFile) -> bytes:
    return write_object({"format": FORMAT, **asdict(channel)})


def parse_channel_file(data: bytes) -> ChannelFile:
    """Raises UnknownFormat and DamagedFile."""
    members = Members(parse_object(data, _CHANNEL_FILE_WHAT), _CHANNEL_FILE_WHAT)
    check_format(members, _CHANNEL_FILE_WHAT)
    file = members.record(ChannelFile, run_id=run_id(members))
    if any(name in file.aliases for name in file.aliases.values()):
        raise DamagedFile(f"{_CHANNEL_FILE_WHAT}: an alias of an alias")
    return file
