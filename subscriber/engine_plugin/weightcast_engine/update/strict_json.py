"""JSON from a file or a request: one meaning, or ValueError."""

from __future__ import annotations

import json
from typing import cast

_HEX = frozenset("0123456789abcdef")
NAME_LIMIT = 4096
RANK_LIMIT = 64
MOST = 1 << 62


def json_object(data: bytes) -> dict[str, object]:
    """Raises ValueError for anything but an object, for keys that stand twice, NaN and infinities."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if type(value) is not dict:
        raise ValueError("not a JSON object")
    return cast("dict[str, object]", value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate key in one object")
    return members


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def members(value: object, keys: set[str], what: str) -> dict[str, object]:
    """An object with exactly these members."""
    if type(value) is not dict or value.keys() != keys:
        raise ValueError(f"{what}: members other than {', '.join(sorted(keys))}")
    return cast("dict[str, object]", value)


def text(value: object, what: str, limit: int = NAME_LIMIT) -> str:
    if type(value) is not str or len(value) > limit or not value.isprintable():
        raise ValueError(f"{what}: not printable text of at most {limit} characters")
    return value


def hexadecimal(value: object, what: str, digits: int) -> str:
    if type(value) is not str or len(value) != digits or not _HEX.issuperset(value):
        raise ValueError(f"{what}: not {digits} lowercase hex digits")
    return value


def natural(value: object, what: str, most: int = MOST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what}: not an integer from 0 to {most}")
    return value


def shape(value: object, what: str) -> tuple[int, ...]:
    if type(value) is not list or len(value) > RANK_LIMIT:
        raise ValueError(f"{what}: not an array of at most {RANK_LIMIT} integers")
    return tuple(natural(length, what) for length in value)
