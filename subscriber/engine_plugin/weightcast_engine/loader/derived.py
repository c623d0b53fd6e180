"""What a model computes with besides its registered weights: a patch of a weight would not reach it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from weightcast_engine.update.places import has_memory, storage, tensors_in

NOT_WEIGHTS = frozenset({"kv_cache"})
"""attributes that hold no weights"""
_OF_TORCH = frozenset(vars(nn.Module()))
"""attributes of every module, what is registered among them"""
_PACKED, _BITS = (torch.int8, torch.uint8, torch.int16, torch.int32), (2, 4, 8)
"""integers that may hold a weight in so many bits an element; others are indices and flags"""


def live_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


WeightPlace = tuple[str, int, torch.Size, tuple[int, ...], torch.dtype]
"""of a weight: its name in its module, address, shape, strides, dtype"""


def places_of(model: nn.Module) -> list[WeightPlace]:
    """Differ when a parameter or buffer moved. Asked in a pause: without what torch's own
    iterators, and engines' subclasses of tensors, take for each weight."""
    found: list[WeightPlace] = []
    seen, left = {model}, [model]
    with torch._C.DisableTorchFunctionSubclass():
        while left:
            module = left.pop()
            for tensors in (module._parameters, module._buffers):
                found += (
                    (name, one.data_ptr(), one.shape, one.stride(), one.dtype)
                    for name, one in tensors.items()
                    if one is not None
                )
            below = [one for one in module._modules.values() if one is not None and one not in seen]
            seen.update(below)
            left += below
    return found


def storages_of(model: nn.Module) -> set[int]:
    return {storage(tensor) for _, tensor in live_tensors(model)}


@dataclass(frozen=True)
class OwnTensor:
    """A tensor that a module keeps besides its registered ones."""

    name: str
    """of the module"""
    module: nn.Module
    attribute: str
    tensor: Tensor
    address: int
    listed: bool
    """in a list, tuple or dict"""
    deep: bool
    """in a dict, or one of these in another: of weights of the module's own alone"""

    @property
    def stands(self) -> bool:
        """Where it lay, for as long as the module keeps it there."""
        kept = getattr(self.module, self.attribute, None)
        return kept is self.tensor and kept.data_ptr() == self.address


def own_tensors(model: nn.Module) -> Iterator[OwnTensor]:
    registered = storages_of(model)
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in NOT_WEIGHTS or attribute in _OF_TORCH:
                continue
            flat = [value] if isinstance(value, Tensor) else value if isinstance(value, list | tuple) else []
            for tensor in tensors_in(value, 3):
                deep = not any(tensor is one for one in flat)
                if _is_own(tensor, registered, module, recurse=not deep):
                    yield OwnTensor(
                        name, module, attribute, tensor, tensor.data_ptr(), tensor is not value, deep
                    )


def private_copies(own: Iterable[OwnTensor], mirrored: Collection[int] = ()) -> Mapping[int, str]:
    """Storage to reason: weights of modules that keep a tensor of their own, as MLA does with parts of
    kv_b_proj. Which weights it is made of can't be seen, unless it is `mirrored`: all of the module's are
    taken."""
    found = dict[int, str]()
    for one in own:
        if storage(one.tensor) not in mirrored or one.listed:
            name = one.name or "the model"
            reason = f"{name} computes with a tensor {one.attribute} that may be made of it"
            weights = _weights_of(one.module, recurse=not one.deep)
            found = {storage(weight): reason for weight in weights} | found
    return found


def late_copies(model: nn.Module, known: Iterable[OwnTensor]) -> Mapping[int, str]:
    """As `private_copies`, of those that came after `known` was listed, such as in a first forward."""
    before = {(one.name, one.attribute) for one in known}
    return private_copies(one for one in own_tensors(model) if (one.name, one.attribute) not in before)


def unloaded(model: nn.Module, reached: Collection[int]) -> Mapping[int, str]:
    """Storage to reason: weights of modules with a registered weight that no loader fills. It may be made of
    the others when a model is loaded, and would stay as it is when they are patched. A buffer is taken to be
    made of its own module's weights only. `reached`: the storages that the loader puts anything into."""
    found = dict[int, str]()
    for name, module in model.named_modules():
        for recurse, registered in ((True, module._parameters), (False, module._buffers)):
            for own, weight in registered.items():
                if weight is not None and _is_own(weight, reached, module, recurse=recurse):
                    where = name or "the model"
                    reason = f"{where} computes with {own}, which is not loaded but may be made of it"
                    found |= {storage(other): reason for other in _weights_of(module, recurse=recurse)}
    return found


def memory_shared(model: nn.Module) -> Mapping[int, str]:
    """Storage to reason: weights whose memory another storage holds too, as two arrays over one buffer do.
    What is loaded last is in both."""
    held = {storage(weight): weight for _, weight in live_tensors(model) if has_memory(weight)}
    spans = []
    for key, weight in held.items():
        memory = weight.untyped_storage()
        if memory.nbytes() and not weight.is_meta:
            spans.append((str(weight.device), memory.data_ptr(), memory.data_ptr() + memory.nbytes(), key))
    found, widest = dict[int, str](), ("", 0, 0, 0)
    for span in sorted(spans):
        if span[0] == widest[0] and span[1] < widest[2]:
            found |= dict.fromkeys((span[3], widest[3]), "shares its memory with another weight")
        if span[0] != widest[0] or span[2] > widest[2]:
            widest = span
    return found


def _weights_of(module: nn.Module, *, recurse: bool) -> list[Tensor]:
    return [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)]


def _is_own(tensor: Tensor, registered: Collection[int], module: nn.Module, *, recurse: bool) -> bool:
    """`module`: of whose weights it may be made."""
    # a single number is a scale or a flag
    if tensor.numel() < 2 or not has_memory(tensor) or storage(tensor) in registered:
        return False
    if tensor.dtype not in _PACKED:
        return bool(tensor.is_floating_point() or tensor.is_complex())
    counts = {8 * tensor.nbytes // bits for bits in _BITS}
    weights = _weights_of(module, recurse=recurse)
    return any(weight.numel() in counts for weight in weights if weight is not tensor)


_DEPTH, _MOST_OBJECTS = 4, 200_000
"""how far plain objects below a module are looked through, and how many of all"""
_NOT_LOOKED_INTO = (nn.Module, type, ModuleType)
_FIRST = 64
"""elements that are compared before all are"""
_PIECE = 1 << 22
"""elements compared at once where some are NaN"""


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
    """NaN in both is equal."""
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
