"""Records that several files of the channel hold, each checked once, here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import MAIN, TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused, UnknownFormat
from weightcast.shared.digest.checksums import Lanes, LanesArray
from weightcast.shared.files.paths import file_name, relative_name
from weightcast.shared.files.strict_json import MAX_INTEGER, Members

FORMAT = 1
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


def check_component(members: Members, what: str) -> None:
    """Raises Refused, with the component's name, for a component that this release does not handle."""
    component = members.text("component", 128)
    if component != MAIN:
        raise Refused(
            f"{what}: component {component!r} is not handled by this release",
            remedy="upgrade weightcast here",
        )


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


def write_lane_rows(lanes: LanesArray) -> list[str]:
    """Of each row 32 hex digits."""
    joined = lanes.astype(">u8").tobytes().hex()
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]


def write_file_records(files: Iterable[FileRecord]) -> list[list[object]]:
    return [[file.name, file.size, file.blake3] for file in files]


def file_records(members: Members, what: str) -> tuple[FileRecord, ...]:
    """The member `files`: rows [name, bytes, BLAKE3 hex], no name twice."""
    return _records(members.array("files"), what, file_name)


def side_records(members: Members, what: str, key: str = SIDE_FILES) -> tuple[FileRecord, ...]:
    """As `file_records`, with names that may lead into subdirectories. Empty where the member is absent."""
    return _records(members.array(key) if key in members else (), what, relative_name)


def is_carriable(name: str) -> bool:
    """Whether a version may carry a file of this name: no weights, no code, not the model's config."""
    plain = _CARRIED_NAME.fullmatch(name) is not None
    return plain and name != "config.json" and not name.endswith(".index.json")


def carried_records(members: Members, what: str) -> tuple[FileRecord, ...]:
    """The member `carried`, if it is there."""
    records = side_records(members, what, CARRIED)
    for record in records:
        if not is_carriable(record.name):
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
    """Records by name. `names` are unique; `lanes`: uint64[n, 2]; `changed`: int64[n]."""

    names: tuple[str, ...]
    lanes: LanesArray
    changed: NDArray[np.int64]

    @classmethod
    def numbered(
        cls, table: TensorTable, numbers: NDArray[np.int64], lanes: LanesArray, changed: NDArray[np.int64]
    ) -> TensorRecords:
        """Of some tensors of a table. `lanes`, `changed`: of all of its tensors."""
        names = tuple(table[number].name for number in numbers.tolist())
        return cls(names, lanes[numbers], changed[numbers])

    @cached_property
    def _rows(self) -> Mapping[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    def numbers(self, table: TensorTable) -> NDArray[np.int64]:
        """int64[n]: of each its number in the table. Raises KeyError."""
        return np.fromiter(map(table.numbers.__getitem__, self.names), np.int64, len(self.names))

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
