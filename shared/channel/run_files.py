"""Records that several files of the channel hold, each checked once, here; channel.json; base.json, the
weights of version 0 and the tensor table of the run. docs/FORMAT.md."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weightcast.shared.base.elements import MAIN, TensorSpec, TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused, UnknownFormat
from weightcast.shared.digest.checksums import Lanes, LanesArray, root
from weightcast.shared.files.paths import file_name, is_plain, relative_name
from weightcast.shared.files.safetensors import check_nbytes, checked_dtype, naturals
from weightcast.shared.files.strict_json import MAX_INTEGER, Members, parse_object, write_object

FORMAT = 1
DRAFT = "draft"
"""the component of a draft model"""
SIDE_FILES, CARRIED = "side_files", "carried"
CARRIED_LIMIT = 64 << 20
_CARRIED_NAME = re.compile(r".*\.(json|txt|jinja|model|tiktoken)")
_HEX = frozenset("0123456789abcdef")
_HEX_TEXT = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True)
class FileRecord:
    """A file of a directory, as the transfer must deliver it. `name`: relative to the directory."""

    name: str
    size: int
    blake3: str


def check_format(members: Members, what: str) -> None:
    """Raises UnknownFormat unless the member `format` is known to this release."""
    found = members.integer("format")
    if found != FORMAT:
        raise UnknownFormat(
            f"{what}: format {found}, this release reads format {FORMAT}", remedy="upgrade weightcast here"
        )


def run_id(members: Members) -> str:
    found = members.text("run_id", 128)
    if not found:
        raise members.bad("run_id", "a name")
    return found


_ADAPTER_NAME = re.compile(r"adapter/[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def is_adapter(component: str) -> bool:
    return _ADAPTER_NAME.fullmatch(component) is not None


def starts_from_zeros(component: str) -> bool:
    """Whether it is a component with a channel of its own: an adapter or the draft model."""
    return component == DRAFT or is_adapter(component)


def component_of(members: Members, what: str) -> str:
    """Raises Refused, with the component's name, for a component that this release does not handle."""
    component = members.text("component", 128)
    if component != MAIN and not starts_from_zeros(component):
        raise Refused(
            f"{what}: component {component!r} is not handled by this release",
            remedy="upgrade weightcast here",
        )
    return component


def check_component(found: str, expected: str, what: str) -> None:
    """Raises Refused for the file of another component than `expected`."""
    if found != expected:
        remedy = "give the run's channel, with --component" if expected == MAIN else "restore the file"
        raise Refused(f"{what}: expected component {expected!r}, found {found!r}", remedy=remedy)


def is_hex(value: object, digits: int) -> bool:
    return type(value) is str and len(value) == digits and _HEX.issuperset(value)


def parse_lanes(texts: Sequence[object], what: str) -> list[Lanes]:
    """As `parse_lane_rows`."""
    return list(map(Lanes._make, parse_lane_rows(texts, what).tolist()))


def parse_lane_rows(texts: Sequence[object], what: str) -> LanesArray:
    """Of each 32 hex digits a row, all at once: an index may have several 100,000. Raises DamagedFile."""
    if any(type(text) is not str or len(text) != 32 for text in texts):
        raise DamagedFile(f"{what}: lanes that are not 32 hex digits")
    joined = "".join(cast(Sequence[str], texts))
    if not _HEX_TEXT.fullmatch(joined):
        raise DamagedFile(f"{what}: lanes that are not 32 hex digits")
    return np.frombuffer(bytes.fromhex(joined), ">u8").astype(np.uint64).reshape(-1, 2)


def write_lane_rows(lanes: LanesArray) -> list[bytes]:
    """Of each row 32 hex digits."""
    joined = lanes.astype(">u8").tobytes().hex().encode()
    return cast(list[bytes], np.frombuffer(joined, "S32").tolist())


def write_file_records(files: Iterable[FileRecord]) -> list[list[object]]:
    return [[file.name, file.size, file.blake3] for file in files]


def file_records(members: Members, what: str) -> tuple[FileRecord, ...]:
    """The member `files`: rows [name, bytes, BLAKE3 hex], no name twice."""
    return _records(members.array("files"), what, file_name)


def side_records(members: Members, what: str, key: str = SIDE_FILES) -> tuple[FileRecord, ...]:
    """As `file_records`, with names that may lead into subdirectories. Empty where the member is absent."""
    return _records(members.array(key) if key in members else (), what, relative_name)


def is_carriable(name: str, component: str = MAIN) -> bool:
    """Whether a version may carry a file of this name: no weights, no code, not the model's config, which a
    draft model alone has no base for."""
    plain = _CARRIED_NAME.fullmatch(name) is not None and not name.endswith(".index.json")
    return plain and (name != "config.json" or component == DRAFT)


def carried_records(members: Members, what: str, component: str = MAIN) -> tuple[FileRecord, ...]:
    """The member `carried`, if it is there."""
    records = side_records(members, what, CARRIED)
    for record in records:
        if not is_carriable(record.name, component):
            raise DamagedFile(f"{what}: {record.name[:80]!r} is not a config file that a version may carry")
    if sum(record.size for record in records) > CARRIED_LIMIT:
        raise DamagedFile(f"{what}: its config files have more than {CARRIED_LIMIT} bytes")
    return records


def _records(rows: Iterable[object], what: str, checked: Callable[[str], str]) -> tuple[FileRecord, ...]:
    files = tuple(_file_record(row, what, checked) for row in rows)
    if len({file.name for file in files}) != len(files):
        raise DamagedFile(f"{what}: a file is listed twice")
    return files


def _file_record(row: object, what: str, checked: Callable[[str], str]) -> FileRecord:
    if type(row) is not list or len(row) != 3:
        raise DamagedFile(f"{what}: a file is not [name, bytes, BLAKE3]")
    name, size, digest = cast(list[object], row)
    if (
        type(name) is not str
        or type(size) is not int
        or not 0 <= size <= MAX_INTEGER
        or not is_hex(digest, 64)
    ):
        raise DamagedFile(f"{what}: bad file record {repr(row)[:120]}")
    return FileRecord(checked(name), size, cast(str, digest))


class TensorRecord(NamedTuple):
    """A changed tensor (in an anchor: every tensor): raw lanes of its new bytes, changed elements."""

    lanes: Lanes
    changed: int


@dataclass(frozen=True, eq=False)
class TensorRecords(Mapping[str, TensorRecord]):
    """Records by name. `names` are unique; `lanes`: uint64[n, 2]; `changed`, `files`: int64[n], of the latter
    the number of the tensor's file among the index's."""

    names: tuple[str, ...]
    lanes: LanesArray
    changed: NDArray[np.int64]
    files: NDArray[np.int64]

    @classmethod
    def numbered(
        cls,
        table: TensorTable,
        numbers: NDArray[np.int64],
        lanes: LanesArray,
        changed: NDArray[np.int64],
        files: NDArray[np.int64] | None = None,
    ) -> TensorRecords:
        """Of tensors of a table by their numbers. `files`: None for a single one."""
        every = len(numbers) == len(table)
        names = table.names if every else tuple(map(table.names.__getitem__, numbers.tolist()))
        made = cls(names, lanes, changed, np.zeros(len(names), np.int64) if files is None else files)
        made._numbered[:] = [(table, numbers)]
        return made

    @cached_property
    def _numbered(self) -> list[tuple[TensorTable, NDArray[np.int64]]]:
        """The table that was asked for last, and their numbers in it."""
        return []

    @cached_property
    def _rows(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    def numbers(self, table: TensorTable) -> NDArray[np.int64]:
        """int64[n], not to be written: of each its number in the table. Raises KeyError."""
        if not self._numbered or self._numbered[0][0] is not table:
            found = np.fromiter(map(table.numbers.__getitem__, self.names), np.int64, len(self.names))
            self._numbered[:] = [(table, found)]
        return self._numbered[0][1]

    def put(self, table: TensorTable, lanes: LanesArray) -> LanesArray:
        """`lanes`, of all tensors of the table, with these in their places."""
        lanes[self.numbers(table)] = self.lanes
        return lanes

    def __getitem__(self, name: str) -> TensorRecord:
        row = self._rows[name]
        return TensorRecord(Lanes(*self.lanes[row].tolist()), int(self.changed[row]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def keys(self) -> KeysView[str]:
        return self._rows.keys()


BASE_LIMIT = 256 << 20
_BASE_WHAT = "base.json"
_NAME_LIMIT = 4096
_RANK_LIMIT = 64


@dataclass(frozen=True, eq=False)
class Base:
    """`lanes` in table order, not to be written; `files`: config and tokenizer files. `digest`: BLAKE3
    hex of the exact bytes of base.json, the parent of every delta from version 0. `side_files`: the other
    files that are not weights, subdirectories included."""

    run_id: str
    table: TensorTable
    lanes: LanesArray
    root: str
    files: tuple[FileRecord, ...]
    digest: str = ""
    side_files: tuple[FileRecord, ...] = ()

    @property
    def all_files(self) -> tuple[FileRecord, ...]:
        return (*self.files, *self.side_files)

    @property
    def component(self) -> str:
        return self.table.component

    @property
    def is_adapter(self) -> bool:
        return is_adapter(self.component)


def write_base(base: Base) -> bytes:
    return write_object(
        {
            "format": FORMAT,
            "run_id": base.run_id,
            "component": base.component,
            "root": base.root,
            "files": write_file_records(base.files),
            **({SIDE_FILES: write_file_records(base.side_files)} if base.side_files else {}),
            "tensors": [
                [spec.name, spec.dtype, spec.shape, spec.nbytes, lanes.decode()]
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
    specs, lanes = _tensors(members.array("tensors"))
    table = TensorTable(specs, component_of(members, _BASE_WHAT))
    names = [spec.name.encode() for spec in table]
    if any(later <= earlier for earlier, later in itertools.pairwise(names)):
        raise DamagedFile(f"{_BASE_WHAT}: its tensors are not sorted by name, or one is listed twice")
    stated = members.hex("root", 64)
    if root(table, lanes) != stated:
        raise DamagedFile(f"{_BASE_WHAT}: its root is not that of its tensors", remedy="restore the file")
    files = file_records(members, _BASE_WHAT)
    side = side_records(members, _BASE_WHAT)
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
