"""The engine patch, read strictly: docs/FORMAT.md, Engine patch. A file is right as a whole or refused."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from weightcast_engine.update.checksums import Lanes
from weightcast_engine.update.elements import DTYPES, INTEGERS, Form, open_regular
from weightcast_engine.update.refusals import RELOAD, BadPatch
from weightcast_engine.update.strict_json import hexadecimal, json_object, members, natural, shape, text

MAGIC = b"wcpatch1"
NAME = re.compile(r"[0-9]{1,18}-[0-9a-f]{8}\.patch")
HEADER_LIMIT = 64 << 20
LIMIT = 4 << 30
"""bytes of a file, unless the engine's environment says otherwise"""
_ALIGNMENT, _DIGEST = 64, 32
_MEMBERS = {"format", "run_id", "base", "target", "tensors"}
_TENSOR = {"name", "dtype", "shape", "changes", "index_width", "offset", "lanes_old", "lanes_new"}

Index = NDArray[np.uint32] | NDArray[np.uint64]


@dataclass(frozen=True)
class Stand:
    """What an engine holds, or is to hold."""

    version: int
    root: str


@dataclass(frozen=True)
class Change:
    """Of one tensor: `index` elements, ascending, and `words`, integers as wide as an element."""

    name: str
    form: Form
    index: Index
    words: torch.Tensor
    old: Lanes
    new: Lanes
    """of the whole tensor, before and after"""

    def __len__(self) -> int:
        return len(self.index)

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Which changes touch elements [start, stop), a range of at least one."""
        kind = self.index.dtype.type
        low = np.searchsorted(self.index, kind(start))
        return int(low), int(np.searchsorted(self.index, kind(stop - 1), "right"))

    def elements(self, low: int, high: int, device: torch.device) -> torch.Tensor:
        """int64: the elements of changes [low, high)."""
        width = self.index.itemsize
        near = torch.from_numpy(self.index[low:high].view(f"<i{width}")).to(device)
        return near.to(torch.int64).bitwise_and_(0xFFFFFFFF) if width == 4 else near


@dataclass(frozen=True)
class ReadPatch:
    name: str
    base: Stand
    target: Stand
    changes: tuple[Change, ...]
    nbytes: int

    @property
    def count(self) -> int:
        return sum(len(change) for change in self.changes)


def read_patch(directory: Path, name: str, limit: int = LIMIT) -> ReadPatch:
    """Raises BadPatch for a file that is missing, too large, of another digest or wrong in any part."""
    if not NAME.fullmatch(name):
        raise BadPatch(
            f"{name[:80]!r} is not the name of a patch",
            remedy="it is <version>-<8 hex>.patch, without a path",
        )
    try:
        return parse_patch(name, _content(directory, name, limit))
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise BadPatch(f"{name}: {error}", remedy=RELOAD) from error


def _content(directory: Path, name: str, limit: int) -> bytearray:
    fd = open_regular(directory, name)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if not len(MAGIC) + 8 + _DIGEST <= size <= limit:
            raise ValueError(f"{size} bytes; a patch has at most {limit} here (WEIGHTCAST_PATCH_LIMIT)")
        data = bytearray(size)
        got = file.readinto(data)
    if got < size:
        raise ValueError(f"ends after {got} of {size} bytes")
    return data


def parse_patch(name: str, data: bytearray) -> ReadPatch:
    """Raises ValueError. The tensors of the result share `data`."""
    end = len(data) - _DIGEST
    if end < len(MAGIC) + 8 or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not an engine patch")
    with memoryview(data) as view:
        if hashlib.sha256(view[:end]).digest() != view[end:]:
            raise ValueError("its digest is not that of its bytes")
    length = int.from_bytes(data[8:16], "little")
    start = -(-(16 + length) // _ALIGNMENT) * _ALIGNMENT
    if length > HEADER_LIMIT or start > end or any(data[16 + length : start]):
        raise ValueError("its header does not fit")
    header = members(json_object(bytes(data[16 : 16 + length])), _MEMBERS, "header")
    if header["format"] != 1 or type(header["format"]) is not int:
        raise ValueError(f"format {header['format']!r} is not read by this release")
    text(header["run_id"], "run_id")
    changes = tuple(_changes(header["tensors"], data, start, end))
    base, target = _stand(header["base"], set(), "base"), _stand(header["target"], {"digest"}, "target")
    return ReadPatch(name, base, target, changes, len(data))


def _stand(value: object, more: set[str], what: str) -> Stand:
    found = members(value, {"version", "root"} | more, what)
    if more and found["digest"] != "":
        hexadecimal(found["digest"], what, 64)
    return Stand(natural(found["version"], what), hexadecimal(found["root"], what, 64))


def _changes(rows: object, data: bytearray, start: int, end: int) -> Iterator[Change]:
    if type(rows) is not list:
        raise ValueError("tensors: not an array")
    place, names = start, set[str]()
    for row in rows:
        found = members(row, _TENSOR, "tensor")
        name = text(found["name"], "name")
        if not name or name in names:
            raise ValueError(f"tensor {name!r} is listed twice, or has no name")
        names.add(name)
        if natural(found["offset"], name) != place - start:
            raise ValueError(f"{name}: its words begin elsewhere than the tensor before ends")
        change, place = _change(name, found, data, place, end)
        yield change
    if place != end:
        raise ValueError(f"{end - place} bytes belong to no tensor")


def _change(name: str, row: dict[str, object], data: bytearray, place: int, end: int) -> tuple[Change, int]:
    dtype = row["dtype"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"{name}: dtype {str(dtype)[:40]!r} can't be patched")
    form = Form(dtype, shape(row["shape"], name))
    count = natural(row["changes"], name, form.elements)
    width = 4 if form.elements <= 1 << 32 else 8
    if count == 0 or type(row["index_width"]) is not int or row["index_width"] != width:
        raise ValueError(f"{name}: no changes, or an index of other than {width} bytes")
    words_at = place + _padded(count * width)
    stop = words_at + _padded(count * form.width)
    if (
        stop > end
        or any(data[place + count * width : words_at])
        or any(data[words_at + count * form.width : stop])
    ):
        raise ValueError(f"{name}: {count} changes do not fit into the file, or its padding is not zero")
    index: Index = np.frombuffer(data, f"<u{width}", count, place)
    words = torch.frombuffer(data, dtype=INTEGERS[form.width], count=count, offset=words_at)
    if int(index[-1]) >= form.elements or not bool((index[1:] > index[:-1]).all()):
        raise ValueError(f"{name}: indices that do not ascend, or beyond its {form.elements} elements")
    _check_finite(name, form, words)
    lanes = (Lanes.from_hex(hexadecimal(row[key], name, 32)) for key in ("lanes_old", "lanes_new"))
    return Change(name, form, index, words, *lanes), stop


def _check_finite(name: str, form: Form, words: torch.Tensor) -> None:
    dtype = DTYPES[form.dtype]
    if not (dtype.is_floating_point or dtype.is_complex):
        return
    for piece in words.split(1 << 20):
        values = piece.view(dtype)
        if not bool(torch.isfinite(values if form.width > 1 else values.to(torch.float32)).all()):
            raise ValueError(f"{name}: a new value that is not finite")


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
