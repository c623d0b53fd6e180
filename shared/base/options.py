"""Options that are given in Python, checked by their annotations where they are made: a value of another kind
would be found late, or pass for a default."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from weightcast.shared.base.errors import Refused

_NAMED = {bool: "True or False", NoneType: "None", str: "text"}


def require_option(name: str, value: object, kind: Any, least: float = 0) -> None:
    """Raises Refused. `least`: of numbers."""
    if not _fits(value, kind, least):
        raise Refused(f"{name} is {value!r}", remedy=f"give {_named(kind, least)}")


def check_options(options: Any, **least: float) -> None:
    """All fields of a dataclass. `least`: of numbers that must be more than 0."""
    kinds = get_type_hints(type(options))
    for each in fields(options):
        require_option(each.name, getattr(options, each.name), kinds[each.name], least.get(each.name, 0))


def _fits(value: object, kind: Any, least: float) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each, least) for each in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return not isinstance(value, bool) and isinstance(value, number) and float(value) >= least
    # text is a sequence of letters, never one of options
    return isinstance(value, origin or kind) and not (origin and isinstance(value, str))


def _named(kind: Any, least: float) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        *others, last = (f'"{each}"' for each in get_args(kind))
        return f"{', '.join(others)} or {last}"
    if origin in (Union, UnionType):
        return " or ".join(_named(each, least) for each in get_args(kind))
    if kind in (int, float):
        return f"{'an integer' if kind is int else 'a number'} >= {least}"
    return _NAMED.get(kind) or f"a {(origin or kind).__name__}"
