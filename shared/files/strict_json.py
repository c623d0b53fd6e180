"""JSON from disk and network: one meaning or an error."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le, MaxLen

from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.files.paths import is_plain

MAX_INTEGER = (1 << 63) - 1
MOST_VALUES = 8 << 20
"""in one file: an index of 150,000 tensors, all of them changed, has 3 million"""
_HEX = frozenset("0123456789abcdef")
MOST_DEPTH = 64
"""objects and arrays in each other: what is much deeper can be read, and neither copied nor written again"""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_INNERMOST = re.compile(rb"\[\]|\{\}")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NO_BRACKETS_OR_QUOTES = bytes(byte for byte in _NO_BRACKETS if byte not in b'"')


def parse_object(
    data: bytes, what: str, twice: list[str] | None = None, constant: Callable[[str], object] | None = None
) -> dict[str, object]:
    """The JSON object in `data`. Raises DamagedFile, with `what` naming the file, for anything else, for
    duplicate keys at any depth, NaN and infinities, strings that are not Unicode text, and more than
    `MOST_DEPTH` values in each other; before anything is built of it for more than `MOST_VALUES` values.
    `twice`: collects duplicate keys, whose last value counts, instead of an error; `constant`:
    makes a value of NaN and infinities."""
    # values are separated by commas or opened by brackets; those in strings count too
    if data.count(b",") + data.count(b"[") + data.count(b"{") >= MOST_VALUES:
        raise DamagedFile(f"{what}: more than {MOST_VALUES} values")

    def members(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            if twice is None:
                raise ValueError("duplicate key in an object")
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=members,
            parse_constant=constant or _no_constant,
            parse_float=_finite,
        )
        if _is_deep(data):
            raise ValueError(f"more than {MOST_DEPTH} values in each other")
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{what}: not valid JSON: {error}") from error
    if type(value) is not dict:
        raise DamagedFile(f"{what}: not a JSON object")
    return cast(dict[str, object], value)


def _is_deep(data: bytes) -> bool:
    """Of valid JSON: whether brackets remain when the innermost ones were taken away so many times."""
    if data.count(b"[") + data.count(b"{") <= MOST_DEPTH:
        return False
    if b"\\" in data:
        brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    else:
        # most strings are empty now, and gone at once
        brackets = _STRING.sub(b"", data.translate(None, _NO_BRACKETS_OR_QUOTES).replace(b'""', b""))
    for _ in range(MOST_DEPTH):
        if not brackets:
            break
        brackets = _INNERMOST.sub(b"", brackets)
    return bool(brackets)


def write_object(value: Mapping[str, object]) -> bytes:
    """Compact UTF-8; the same bytes for the same members in the same order."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is beyond what a number holds")
    return number


Value = TypeVar("Value")
Record = TypeVar("Record")


@dataclass(frozen=True)
class Hex:
    """Of an annotated text: so many lowercase hex digits."""

    digits: int


@lru_cache
def _fields(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)


class Members:
    """The members of one JSON object, each checked as it is taken. Every method raises DamagedFile."""

    def __init__(self, value: object, what: str) -> None:
        """`what` names the object in errors."""
        if type(value) is not dict:
            raise DamagedFile(f"{what}: not a JSON object")
        self._members = cast(dict[str, object], value)
        self._what = what

    def __contains__(self, key: str) -> bool:
        return key in self._members

    def is_null(self, key: str) -> bool:
        return self._members.get(key, ...) is None

    def absent(self, key: str) -> bool:
        """Not there, or null."""
        return self._members.get(key) is None

    def bad(self, key: str, wanted: str) -> DamagedFile:
        shown = repr(self._members.get(key))
        return DamagedFile(f"{self._what}: {key!r} must be {wanted}, not {shown[:80]}")

    def record(self, cls: Callable[..., Record], absent: Collection[str] = (), **given: object) -> Record:
        """A dataclass of the members that its fields name, each within its annotation's bounds. `absent`:
        fields with a default that may not be there; `given`: those that are made otherwise."""
        for key, kind in _fields(cls).items():
            if key not in given and (key in self or key not in absent):
                given[key] = self._field(key, kind)
        return cls(**given)

    def _field(self, key: str, kind: Any) -> object:
        kinds = get_args(kind)
        if type(None) in kinds:
            return None if self.absent(key) else self._field(key, kinds[0])
        bounds = {type(bound): bound for bound in getattr(kind, "__metadata__", ())}
        if Hex in bounds:
            return self.hex(key, bounds[Hex].digits)
        if MaxLen in bounds:
            return self.text(key, bounds[MaxLen].max_length)
        if Ge in bounds:
            return self.integer(key, bounds[Ge].ge, bounds[Le].le if Le in bounds else MAX_INTEGER)
        return _READ[get_origin(kind) or kind](self, key)

    def _checked(self, key: str, wanted: str, kind: type[Value], fits: Callable[[Value], bool]) -> Value:
        value = self._members.get(key)
        if type(value) is not kind or not fits(value):
            raise self.bad(key, wanted)
        return value

    def text(self, key: str, limit: int = 1024) -> str:
        """Without control characters, at most `limit` characters."""
        wanted = f"text of at most {limit} characters"
        return self._checked(key, wanted, str, lambda text: len(text) <= limit and is_plain(text))

    def hex(self, key: str, digits: int) -> str:
        wanted = f"{digits} lowercase hex digits"
        return self._checked(key, wanted, str, lambda text: len(text) == digits and _HEX.issuperset(text))

    def integer(self, key: str, low: int = 0, high: int = MAX_INTEGER) -> int:
        wanted = f"an integer from {low} to {high}"
        return self._checked(key, wanted, int, lambda number: low <= number <= high)

    def number(self, key: str) -> float:
        value = self._members.get(key)
        if type(value) is int and abs(value) <= MAX_INTEGER:
            return float(value)
        return self._checked(key, "a finite number", float, math.isfinite)

    def boolean(self, key: str) -> bool:
        return self._checked(key, "true or false", bool, lambda value: True)

    def array(self, key: str) -> list[object]:
        return self._checked(key, "an array", list, lambda value: True)

    def object(self, key: str) -> dict[str, object]:
        return self._checked(key, "an object", dict, lambda value: True)

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of strings."""
        values = self.array(key)
        if any(type(value) is not str or not is_plain(value) for value in values):
            raise self.bad(key, "an array of text")
        return tuple(cast(list[str], values))

    def text_map(self, key: str) -> dict[str, str]:
        """An object whose values are strings; keys are not checked beyond being text."""
        values = self.object(key)
        if any(type(value) is not str for value in values.values()):
            raise self.bad(key, "an object of strings")
        return cast(dict[str, str], values)


_READ: Mapping[Any, Callable[[Members, str], object]] = {
    bool: Members.boolean,
    int: Members.integer,
    float: Members.number,
    str: Members.text,
    tuple: Members.texts,
    Mapping: Members.text_map,
}
"""members of a record, by the types of its fields"""
