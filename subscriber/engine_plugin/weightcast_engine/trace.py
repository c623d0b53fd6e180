"""Where a model's own loader would put each tensor of a checkpoint, found out without writing anything.

The loader runs over meta tensors of the checkpoint's names, shapes and dtypes, while every torch call passes
through here. A copy of a narrow view of such a tensor into a live one of the same dtype is noted and not
carried out; nothing else that would change a live tensor is carried out either, and makes what it concerns
*refused*, with a reason. What is left is the exact map from the checkpoint to this rank's memory: slices of
tensor parallel ranks, fused projections, shards of the vocabulary, tied weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weightcast_engine.blocks import Block, Key, Scattered, View, blocks_of, disjoint
from weightcast_engine.words import DTYPES, INTEGERS, Form

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]
"""a model's `load_weights`"""
MOST_RUNS = 400
"""of a loader that fails, to find the tensors that it fails for"""
_SAME = frozenset({"to", "cpu", "cuda", "type_as", "contiguous", "clone"})
"""calls that change where a tensor lies, and no value unless a dtype is asked for"""


@dataclass(frozen=True)
class Piece:
    """A block of a checkpoint's tensor, and the live storage in which it lies."""

    flat: Tensor
    """the whole storage, as integers as wide as an element"""
    block: Block


@dataclass
class Map:
    """Of one rank. A tensor without pieces lies on other ranks, or nowhere."""

    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    """storages that the loader puts anything into, refused or not"""

    def refuse(self, name: str, reason: str) -> None:
        self.pieces.pop(name, None)
        self.refused.setdefault(name, reason)

    def keys(self, name: str) -> list[Key]:
        return [piece.block.key for piece in self.pieces[name]]


def trace(load: Loader, forms: Mapping[str, Form], live: Iterable[Tensor]) -> Map:
    """`live`: the model's parameters and buffers. Never raises for what a loader does."""
    found, places = Map(), {_key(tensor) for tensor in live}
    with torch.no_grad():
        records = _Runs(load, forms).all()
    for name in forms:
        copies = [copy for record in records for copy in record.copies.get(name, ())]
        reason = next((record.refused[name] for record in records if name in record.refused), None)
        if any(_key(copy.live) not in places for copy in copies):
            reason = "is gathered in a tensor that is none of the model's"
        if reason is None:
            try:
                found.pieces[name] = tuple(piece for copy in copies for piece in _pieces(copy))
            except Scattered as error:
                reason = str(error)
        if reason is not None:
            found.refuse(name, reason)
        found.reached |= {_key(copy.live) for copy in copies}
    filled = [place for record in records for place in record.filled]
    found.reached |= {_key(place) for place in filled}
    _refuse_shared_places(found, filled)
    return found


@dataclass(frozen=True)
class _Copy:
    live: Tensor
    source: View


def _pieces(copy: _Copy) -> Iterator[Piece]:
    live, width = copy.live, copy.live.element_size()
    storage = live.untyped_storage()
    flat = torch.empty(0, dtype=INTEGERS[width], device=live.device)
    flat.set_(storage, 0, (storage.nbytes() // width,), (1,))
    for block in blocks_of(copy.source, _view(live)):
        yield Piece(flat, block)


def _view(tensor: Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


class _Runs:
    """A loader that raises is run again over halves, until the tensors are alone that it raises for."""

    def __init__(self, load: Loader, forms: Mapping[str, Form]) -> None:
        self._load, self._forms, self._left = load, forms, MOST_RUNS

    def all(self) -> list[_Record]:
        return list(self._run(list(self._forms)))

    def _run(self, names: list[str]) -> Iterator[_Record]:
        self._left -= 1
        record = _Record({name: self._forms[name] for name in names})
        try:
            with record:
                self._load(iter([(name, record.sources[name]) for name in names]))
        except Exception as error:  # a loader may raise anything
            if len(names) == 1 or self._left <= 0:
                record.refuse(
                    names, f"is not taken by the model's loader: {type(error).__name__}: {error}"[:200]
                )
                yield record
            else:
                for half in (names[: len(names) // 2], names[len(names) // 2 :]):
                    yield from self._run(half)
        else:
            yield record


class _Record(TorchFunctionMode):  # type: ignore[misc]
    """What one run of a loader would do."""

    def __init__(self, forms: Mapping[str, Form]) -> None:
        super().__init__()
        self.sources = {
            name: torch.empty(form.shape, dtype=DTYPES[form.dtype], device="meta")
            for name, form in forms.items()
        }
        self.copies: dict[str, list[_Copy]] = {}
        self.refused: dict[str, str] = {}
        self.filled: list[Tensor] = []
        self._whole = {_key(tensor): name for name, tensor in self.sources.items()}
        self._derived: dict[int, set[str]] = {}
        self._kept: list[Tensor] = []
        """so that no storage takes the number of one before"""

    def refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.refused.setdefault(name, reason)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is Tensor.copy_:
            return self._copied(*args[:2])
        tensors = list(_tensors((args, kwargs)))
        if _writes(name, kwargs) and tensors:
            return self._written(name, tensors, func, args, kwargs)
        names = self._names(tensors)
        if not names:
            return func(*args, **kwargs)
        if name in _SAME and _keeps_dtype(args, kwargs):
            return args[0]
        return self._looked(func(*args, **kwargs), names)

    def _copied(self, live: Tensor, source: Tensor) -> Tensor:
        if live.device.type == "meta":
            self._derive(live, self._names([live, source]))
            return live
        name = self._whole.get(_key(source)) if source.device.type == "meta" else None
        if name is None:
            self._unknown(live, source)
        elif live.dtype != source.dtype:
            self.refuse([name], f"is converted from {source.dtype} to {live.dtype}")
        elif live.shape != source.shape:
            self.refuse([name], f"is spread from {tuple(source.shape)} to {tuple(live.shape)}")
        else:
            self.copies.setdefault(name, []).append(_Copy(live, _view(source)))
        return live

    def _unknown(self, live: Tensor, source: Tensor) -> None:
        names = self._names([source])
        self.refuse(names, "is not loaded itself, but what is computed from it")
        if not names:
            self.filled.append(live)

    def _written(self, name: str, tensors: list[Tensor], func: Any, args: Any, kwargs: Any) -> Any:
        """A call that would change its first tensor."""
        first, names = tensors[0], self._names(tensors)
        if all(tensor.device.type == "meta" for tensor in tensors):
            self._derive(first, names)
            return self._looked(func(*args, **kwargs), names)
        self.refuse(names, f"is put in its place by {name}, and not by a plain copy")
        self.filled.append(first)
        return None if name.startswith("__set") else first

    def _names(self, tensors: Iterable[Tensor]) -> set[str]:
        """Of the checkpoint's tensors that these are made of."""
        found: set[str] = set()
        for tensor in tensors:
            if tensor.device.type == "meta":
                key = _key(tensor)
                found |= {self._whole[key]} if key in self._whole else self._derived.get(key, set())
        return found

    def _looked(self, result: Any, names: set[str]) -> Any:
        for tensor in _tensors(result):
            if tensor.device.type != "meta":
                self.refuse(names, "is not loaded itself, but what is computed from it")
            elif _key(tensor) not in self._whole:
                self._derive(tensor, names)
        return result

    def _derive(self, tensor: Tensor, names: set[str]) -> None:
        self._kept.append(tensor)
        key = _key(tensor)
        if key in self._whole:
            self.refuse(names | {self._whole[key]}, "is changed by the loader before it is copied")
        else:
            self._derived[key] = self._derived.get(key, set()) | names


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("out") is not None or name in ("__set__", "__setitem__", "__delitem__"):
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in (
            "__index__",
            "__int__",
            "__invert__",
            "__iter__",
            "__init__",
        )
    return name.endswith("_")


def _keeps_dtype(args: Any, kwargs: Mapping[str, Any]) -> bool:
    wanted = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype | Tensor)]
    return all(
        (value if isinstance(value, torch.dtype) else value.dtype) == args[0].dtype for value in wanted
    )


def _refuse_shared_places(found: Map, filled: Iterable[Tensor]) -> None:
    """Two tensors in one place, or one where the loader also puts something else: which of them a reload
    leaves there is not for us to guess."""
    by_storage: dict[int, list[tuple[str, Key]]] = {}
    for name, pieces in found.pieces.items():
        for piece in pieces:
            by_storage.setdefault(_key(piece.flat), []).append((name, _place(piece.block)))
    for tensor in filled:
        by_storage.setdefault(_key(tensor), []).extend(("", place) for place in _filled(tensor))
    for places in by_storage.values():
        for name, reason in _shared(places):
            found.refuse(name, reason)


def _place(block: Block) -> Key:
    if block.target_step == block.run:
        return (block.target, 1, block.elements, block.elements)
    return (block.target, block.rows, block.target_step, block.run)


def _filled(tensor: Tensor) -> list[Key]:
    """Padding beside columns of a tensor lies between its rows, and not over them."""
    view = _view(tensor)
    try:
        return [_place(block) for block in blocks_of(view, view)]
    except Scattered:
        return [_extent(tensor)]


def _extent(tensor: Tensor) -> Key:
    if tensor.numel() == 0:
        return (tensor.storage_offset(), 1, 0, 0)
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset(), 1, last + 1, last + 1)


def _shared(places: list[tuple[str, Key]]) -> Iterator[tuple[str, str]]:
    if disjoint([place for _, place in places if place[3] > 0]):
        return
    for at, (name, place) in enumerate(places):
        for other, elsewhere in places[at + 1 :]:
            if place[3] and elsewhere[3] and not disjoint([place, elsewhere]):
                for one in {name, other} - {""}:
                    yield one, "shares its place with something else that is loaded"
