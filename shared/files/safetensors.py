"""Headers of safetensors files, read strictly and written so that any reader takes them.

Checkpoints that others wrote are read as the safetensors library reads them (`tolerant`): it takes a null
`__metadata__`, unknown members of a tensor, a name given twice and leading white space.

A file is 8 bytes of header length (little-endian), the header (a JSON object, padded with spaces), and the
tensors' bytes without holes. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

from weightcast.shared.base.elements import DTYPES, TensorSpec
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.files.durable import open_regular, read_at
from weightcast.shared.files.paths import is_plain
from weightcast.shared.files.strict_json import parse_object, write_object

HEADER_LIMIT = 100_000_000
"""bytes, as in the reference implementation"""
_METADATA = "__metadata__"
_MEMBERS = {"dtype", "shape", "data_offsets"}
_NAME_LIMIT = 4096
_RANK_LIMIT = 64
_OFFSET_LIMIT = 1 << 62
_CUT = "copy, download or save it again, and wait until that has ended"


class Entry(NamedTuple):
    """A tensor's bytes [begin, end), counted from the header's `data_start`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """`entries` in the order of the header; `data_start`: the file offset of the first tensor byte; `notes`:
    the small faults that were tolerated."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int
    notes: tuple[str, ...] = ()

    def __hash__(self) -> int:
        """What is laid out by headers is remembered by them; there are few, and they are long."""
        return hash((len(self.entries), self.data_start))


def tensor_spec(entry: Entry) -> TensorSpec:
    return TensorSpec(entry.name, entry.dtype, entry.shape, entry.nbytes)


def read_header_of(path: Path, *, follow_links: bool = False, tolerant: bool = False) -> Header:
    """Reads the header alone. Raises FileNotFoundError and DamagedFile."""
    fd = open_regular(path, follow_links=follow_links)

    def start(length: int) -> bytes:
        data = bytearray(length)
        return bytes(data[: read_at(fd, memoryview(data), 0)])

    try:
        return header_from(start, os.fstat(fd).st_size, str(path), tolerant)
    finally:
        os.close(fd)


def header_from(read: Callable[[int], bytes], size: int, what: str, tolerant: bool = False) -> Header:
    """As `parse_header`. `read`: the file's first so many bytes."""
    length = 8 + int.from_bytes(read(8), "little")
    wanted = length if length <= 8 + HEADER_LIMIT else 0
    return parse_header(read(min(size, max(START, wanted))), size, what=what, tolerant=tolerant)


def _header_length(prefix: bytes, file_size: int, what: str) -> int:
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) >= 8 and 2 <= length <= HEADER_LIMIT and 8 + length <= file_size:
        return length
    check_kind(prefix, what)
    if len(prefix) >= 8 and 2 <= length <= HEADER_LIMIT:
        raise DamagedFile(
            f"{what} is cut short: {file_size} bytes, its header alone needs {8 + length}", remedy=_CUT
        )
    text = prefix[:60].strip()
    if text.isascii() and text.decode("ascii").replace("\n", " ").isprintable():
        kind, remedy = (
            f"text ({text.decode('ascii')!r})",
            "download it again; check its address and the access token",
        )
    else:
        kind, remedy = f"{file_size} bytes, header length {length}", "give the file with the weights"
    raise DamagedFile(f"{what} is not a safetensors file: {kind}", remedy=remedy)


def parse_header(
    prefix: bytes, file_size: int, *, what: str = "safetensors file", tolerant: bool = False
) -> Header:
    """`prefix`: at least the length field and the header; `file_size` in bytes. Raises DamagedFile, with
    `what` naming the file, unless the tensors fill the rest of the file exactly."""
    length = _header_length(prefix, file_size, what)
    text = prefix[8 : 8 + length]
    if len(prefix) < 8 + length or (text.lstrip() if tolerant else text)[:1] != b"{":
        raise DamagedFile(f"{what}: its safetensors header is not a JSON object")
    try:
        return _parsed(text, file_size, tolerant)
    except DamagedFile as error:
        raise DamagedFile(f"{what}: {error.message}", remedy=error.remedy) from error


@lru_cache(maxsize=256)
def _parsed(text: bytes, file_size: int, tolerant: bool) -> Header:
    """Remembered by its bytes: a run's checkpoints have the same headers version after version, of several
    100,000 tensors."""
    twice: list[str] | None = [] if tolerant else None
    members = parse_object(text, "header", twice)
    for name in twice or ():
        if name == _METADATA or name in _MEMBERS:
            raise DamagedFile(f"header: {name!r} is given twice in one object")
    notes = [f"{name!r} is given twice" for name in twice or ()]
    if tolerant and members.get(_METADATA, ...) is None:
        members[_METADATA] = {}
        notes.append(f"{_METADATA} is null")
    metadata = members.pop(_METADATA, {})
    if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
        raise DamagedFile(f"{_METADATA} is not an object of strings")
    if tolerant and (extra := _drop_unknown(members)):
        notes.append(f"unknown members: {', '.join(sorted(extra))[:80]}")
    entries = {name: _entry(name, value) for name, value in members.items()}
    _check_filled(entries.values(), 8 + len(text), file_size)
    return Header(entries, cast(dict[str, str], metadata), 8 + len(text), tuple(notes))


def _drop_unknown(members: dict[str, object]) -> set[str]:
    """Takes away what the format does not know from the tensors' entries; its names."""
    extra: set[str] = set()
    for name, value in members.items():
        if isinstance(value, dict) and not value.keys() <= _MEMBERS:
            extra.update(value.keys() - _MEMBERS)
            members[name] = {key: value[key] for key in value if key in _MEMBERS}
    return extra


def _entry(name: str, value: object) -> Entry:
    if not name or len(name) > _NAME_LIMIT or not is_plain(name):
        raise DamagedFile(
            f"tensor {name[:80]!r}: not a usable name",
            remedy=f"rename it: 1 to {_NAME_LIMIT:,} characters, none of them a control character",
        )
    if type(value) is not dict or value.keys() != _MEMBERS:
        raise DamagedFile(f"tensor {name[:80]!r}: members other than {', '.join(sorted(_MEMBERS))}")
    members = cast(dict[str, object], value)
    shape = naturals(members["shape"], _RANK_LIMIT)
    offsets = naturals(members["data_offsets"], 2)
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DamagedFile(f"tensor {name[:80]!r}: bad shape or offsets")
    where = f"tensor {name[:80]!r}"
    entry = Entry(name, checked_dtype(members["dtype"], where), shape, *offsets)
    check_nbytes(tensor_spec(entry), where)
    return entry


def naturals(value: object, most: int) -> tuple[int, ...] | None:
    """A JSON array of at most `most` integers from 0 to 2^62, or None."""
    if type(value) is not list or len(value) > most:
        return None
    for number in value:
        if type(number) is not int or not 0 <= number <= _OFFSET_LIMIT:
            return None
    return tuple(value)


def checked_dtype(value: object, where: str) -> str:
    """A known dtype, or an unknown one of at most 32 ASCII characters. Raises DamagedFile."""
    if type(value) is str and 0 < len(value) <= 32 and value.isascii() and is_plain(value):
        return value
    raise DamagedFile(f"{where}: bad dtype {repr(value)[:80]}")


def check_nbytes(spec: TensorSpec, where: str) -> None:
    """Raises DamagedFile unless shape and dtype need exactly `spec.nbytes`. Tensors of an unknown dtype are
    taken as that many bytes."""
    if spec.dtype in DTYPES and spec.nbytes != math.prod(spec.shape) * DTYPES[spec.dtype][0]:
        raise DamagedFile(f"{where}: {spec.dtype} {list(spec.shape)} does not have {spec.nbytes} bytes")


def _check_filled(entries: Iterable[Entry], data_start: int, file_size: int) -> None:
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            problem = "overlaps another tensor" if entry.begin < end else "leaves a hole before it"
            raise DamagedFile(f"tensor {entry.name!r} {problem}")
        end = entry.end
    expected = data_start + end
    if expected > file_size:
        raise DamagedFile(f"cut short: {file_size} bytes, its header describes {expected}", remedy=_CUT)
    if expected < file_size:
        raise DamagedFile(
            f"longer than its header says: {file_size} bytes, the last tensor ends at {expected}",
            remedy=f"engines refuse it too: save it again, or cut it to {expected} bytes if padding follows",
        )


def pack_header(entries: Iterable[Entry], metadata: Mapping[str, str], reserve: int = 0) -> bytes:
    """Length field and header, padded with spaces to a multiple of 8 and to at least `reserve` bytes."""
    members: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        members[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    header = write_object(members)
    length = -(-max(8 + len(header), reserve) // 8) * 8 - 8
    return length.to_bytes(8, "little") + header.ljust(length)


START = 512
"""bytes from the beginning of a file by which its kind is recognised"""
_SAVE = "save it with safetensors (`save_pretrained`)"
_KINDS = (
    (
        (b"version https://git-lfs", b"version https://hawser"),
        "a Git LFS pointer, not the file",
        "run `git lfs pull` in its repository, or download the file",
    ),
    (b"<", "an HTML or XML page, not the file", "download it again; check the address and the access token"),
    (b"/annex/objects/", "a git-annex pointer, not the file", "run `git annex get` in its repository"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes", _SAVE),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a torch or pickle file", _SAVE),
    (b"GGUF", "a GGUF file", "give the safetensors checkpoint that it was made from"),
    (b"\x89HDF", "an HDF5 file", _SAVE),
    (b"\x93NUMPY", "a NumPy file", _SAVE),
    ((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"), "a compressed file", "decompress it"),
)
"""first bytes, kind, remedy"""


def check_kind(start: bytes, what: str | Path) -> None:
    """`start`: the first bytes of the file `what`, all of them where there are fewer than `START`. Raises
    DamagedFile that names the kind of a well-known other file."""
    for magic, kind, remedy in _KINDS:
        if start.lstrip(b" \t\r\n" if magic == b"<" else b"").startswith(magic):
            raise DamagedFile(f"{what} is {kind}", remedy=remedy)
    if start[257:262] == b"ustar":
        raise DamagedFile(f"{what} is a tar archive", remedy="unpack it")
    if not start.strip(b"\0"):
        kind = "begins with zeros" if start else "is empty"
        raise DamagedFile(f"{what} {kind}: it was not written", remedy="copy, download or save it again")
