"""Copies of weights that a model keeps in plain objects, where no module tells of them: an attention's
implementation holds its sinks in float32, say. They are known by what they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from weightcast_engine.derived import live_tensors, storages_of
from weightcast_engine.piece import has_memory, storage

_DEPTH, _MOST_OBJECTS = 4, 200_000
"""how far plain objects below a module are looked through, and how many of all"""
_NOT_LOOKED_INTO = (nn.Module, type, ModuleType)
_FIRST = 64
"""elements that are compared before all are"""
_PIECE = 1 << 22
"""elements compared at once where some are no numbers"""


def copies_kept(
    model: nn.Module, reached: Collection[int], mirrored: Collection[int] = ()
) -> Mapping[int, str]:
    """Storage to reason: weights that equal a tensor which the model keeps elsewhere, in whatever dtype: in
    objects below its modules, or as a buffer that no loader fills. It would stay as it is, unless it is
    `mirrored`."""
    found, by_count = dict[int, str](), dict[int, dict[tuple[int, int], Tensor]]()
    for _, weight in live_tensors(model):
        if storage(weight) in reached and weight.numel() > 1:
            place = (storage(weight), weight.storage_offset())
            by_count.setdefault(weight.numel(), {})[place] = weight
    registered = storages_of(model).union(mirrored)
    kept = [(name, tensor) for name, tensor in _below(model) if storage(tensor) not in registered]
    followed = {*reached, *mirrored}
    kept += [(name, tensor) for name, tensor in model.named_buffers() if storage(tensor) not in followed]
    for name, tensor in kept:
        for (key, _), weight in by_count.get(tensor.numel(), {}).items():
            if key not in found and _equal(weight, tensor):
                found[key] = f"is kept a second time, below {name or 'the model'}"
    return found


def _equal(weight: Tensor, tensor: Tensor) -> bool:
    """In the order of their elements."""
    if not (tensor.is_floating_point() or tensor.dtype == weight.dtype) or tensor.device != weight.device:
        return False
    own, other = weight.detach().reshape(-1), tensor.detach().reshape(-1)
    # not every torch compares 8-bit floats
    wide = torch.float32 if other.is_floating_point() and other.element_size() == 1 else other.dtype
    return all(
        _same(own[:most].to(other.dtype).to(wide), other[:most].to(wide)) for most in (_FIRST, own.numel())
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """What is no number in both is equal."""
    return torch.equal(one, other) or all(
        bool(((mine == its) | ((mine != mine) & (its != its))).all())
        for mine, its in zip(one.split(_PIECE), other.split(_PIECE), strict=True)
    )


def _below(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in plain objects and containers that modules refer to, and the module's name. Other modules
    tell of their own. Types are asked, not objects: some of an engine's answer in their own way."""
    seen = set[int]()
    for name, module in model.named_modules():
        left = [(value, _DEPTH) for value in vars(module).values()]
        while left and len(seen) < _MOST_OBJECTS:
            value, depth = left.pop()
            kind = type(value)
            if id(value) in seen or issubclass(kind, _NOT_LOOKED_INTO):
                continue
            seen.add(id(value))
            if issubclass(kind, Tensor) and has_memory(value):
                yield name, value
            if depth > 0:
                left += [(inner, depth - 1) for inner in _held_by(value)]


def _held_by(value: Any) -> Iterable[object]:
    kind = type(value)
    if issubclass(kind, dict):
        return list(value.values())
    if issubclass(kind, list | tuple | set | frozenset | deque):
        return list(value)
    if issubclass(kind, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if issubclass(kind, MethodType):
        return [value.__self__, value.__func__]
    if issubclass(kind, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(_attributes(value, kind))


def _attributes(value: Any, kind: type) -> Iterator[object]:
    slots = [
        slot for one in kind.__mro__ for slot in vars(one).values() if type(slot) is MemberDescriptorType
    ]
    for slot in slots:
        with suppress(AttributeError):
            yield slot.__get__(value, kind)
    with suppress(AttributeError):
        yield from object.__getattribute__(value, "__dict__").values()


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
