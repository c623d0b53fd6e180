"""Where a model's own loader would put each tensor of a checkpoint, found out without writing anything.

The loader runs over meta tensors of the checkpoint's names, shapes and dtypes, while every torch call passes
through here. A copy of a narrow view of such a tensor into a live one of the same dtype is noted and not
carried out; nothing else that would change a live tensor is carried out either, and makes what it concerns
*refused*, with a reason. What is left is the exact map from the checkpoint to this rank's memory: slices of
tensor parallel ranks, fused projections, shards of the vocabulary, tied weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from weightcast_engine.loader.guard import NoWrites, Unseen, no_threads
from weightcast_engine.loader.mirrors import Mirror, Storages, is_whole, with_mirrors
from weightcast_engine.update.elements import DTYPES, Form
from weightcast_engine.update.places import (
    Key,
    Piece,
    Scattered,
    View,
    blocks_of,
    disjoint,
    flat_of,
    has_memory,
    storage,
    tensors_in,
    view_of,
)

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]
"""a model's `load_weights`"""
MOST_RUNS = 400
"""of a loader that fails, to find the tensors that it fails for"""
_EARLY = "is copied elsewhere before it is loaded"
_COMPUTED = "is also part of what the model's loader computes for another tensor"
_LEAVES_TORCH = frozenset(
    {
        *("item", "tolist", "numpy", "__array__", "__dlpack__"),
        *("untyped_storage", "storage", "_typed_storage"),
        *("__float__", "__int__", "__complex__", "__index__"),
        *("__bool__", "is_nonzero", "equal", "allclose", "__contains__"),
    }
)
"""calls that make of a tensor what can be followed no further, a decision too"""
_SAME = frozenset({"to", "cpu", "cuda", "type_as", "contiguous", "clone"})
"""calls that change a tensor's place, and no value unless a dtype is asked for"""


@dataclass(frozen=True)
class _Copy:
    live: Tensor
    source: View


def trace(load: Loader, forms: Mapping[str, Form], live: Iterable[Tensor], own: Iterable[Tensor] = ()) -> Map:
    """`live`: the model's parameters and buffers; `own`: what else its modules keep. Never raises for
    what a loader does."""
    weights = {storage(tensor) for tensor in live}
    runs = _Runs(load, forms, weights | {storage(tensor) for tensor in own})
    with torch.no_grad():
        return Map(forms, runs.all(), weights, runs.unfilled)


class Map:
    """Of one rank. A tensor without pieces is on other ranks, or nowhere."""

    def __init__(
        self,
        names: Iterable[str],
        records: Sequence[_Record],
        weights: Collection[int],
        unfilled: Sequence[StorageWeakRef],
    ) -> None:
        self.pieces: dict[str, tuple[Piece, ...]] = {}
        self.refused: dict[str, str] = {}
        self.reached: set[int] = set()
        """storages that the loader puts anything into, refused or not"""
        self.mirrored: set[int] = set()
        """storages that hold copies of pieces, and nothing else"""
        self.unfilled = unfilled
        """what the loader made and did not get to fill: none of it may be left"""
        for name in names:
            self._find(name, records, weights)
        filled = [place for record in records for place in record.filled]
        filled += self._mirror(records)
        # where the loader puts refused tensors others are not patched either
        filled += [
            copy.live
            for record in records
            for name, own in record.copies.items()
            for copy in own
            if name not in self.pieces and storage(copy.live) in weights
        ]
        self.reached |= {storage(place) for place in filled}
        self._refuse_shared_places(filled)

    def refuse(self, name: str, reason: str) -> None:
        self.pieces.pop(name, None)
        self.refused.setdefault(name, reason)

    def keys(self, name: str) -> list[Key]:
        return [piece.block.key for piece in self.pieces[name]]

    def _find(self, name: str, records: Sequence[_Record], weights: Collection[int]) -> None:
        copies = [copy for record in records for copy in record.copies.get(name, ())]
        reason = next((record.refused[name] for record in records if name in record.refused), None)
        if any(storage(copy.live) not in weights for copy in copies):
            reason = "is gathered in a tensor that is none of the model's"
        if reason is None:
            try:
                self.pieces[name] = tuple(
                    Piece(flat, block)
                    for copy in copies
                    for flat in [flat_of(copy.live)]
                    for block in blocks_of(copy.source, view_of(copy.live))
                )
            except Scattered as error:
                reason = str(error)
        if reason is not None:
            self.refuse(name, reason)
        self.reached |= {storage(copy.live) for copy in copies}

    def _mirror(self, records: Sequence[_Record]) -> list[Tensor]:
        """Pieces of what is kept elsewhere too; refused where that can't be followed. What was copied to from
        there is given back."""
        lie: dict[int, list[str]] = {}
        for name, pieces in self.pieces.items():
            for key in {storage(piece.flat) for piece in pieces}:
                lie.setdefault(key, []).append(name)
        # a loader that is run again makes them again
        mirrors = list({mirror.place: mirror for record in records for mirror in record.mirrors}.values())
        by_weight: dict[int, list[Mirror]] = {}
        for mirror in mirrors:
            by_weight.setdefault(storage(mirror.weight), []).append(mirror)
        refused = {key: _COMPUTED for record in records for key in record.computed}
        refused |= {key: _EARLY for record in records for key in record.early()}
        for key, some in by_weight.items():
            names = [name for name in lie.get(key, []) if name in self.pieces]
            try:
                self._mirror_one(names, key, some)
            except Scattered as error:
                refused.setdefault(key, str(error))
        for key, reason in _with_sources(refused, mirrors).items():
            for name in lie.get(key, []):
                self.refuse(name, reason)
        return [mirror.live for key in refused for mirror in by_weight.get(key, [])]

    def _mirror_one(self, names: Sequence[str], key: int, mirrors: Sequence[Mirror]) -> None:
        """`names`: of the tensors in the storage `key` whose parts have these mirrors."""
        inside = [
            (name, piece) for name in names for piece in self.pieces[name] if storage(piece.flat) == key
        ]
        cut = list(with_mirrors([piece for _, piece in inside], mirrors))
        beside: dict[int, list[Piece]] = {}
        for name in names:
            self.pieces[name] = tuple(piece for piece in self.pieces[name] if storage(piece.flat) != key)
        for (name, _), pieces in zip(inside, cut, strict=True):
            self.pieces[name] += pieces
            for piece in pieces:
                beside.setdefault(storage(piece.flat), []).append(piece)
        self.mirrored |= {other for other, pieces in beside.items() if other != key and is_whole(pieces)}

    def _refuse_shared_places(self, filled: Iterable[Tensor]) -> None:
        """Two tensors in one place, or one where the loader also puts something else: which of them a reload
        leaves there is not for us to guess."""
        by_storage: dict[int, list[tuple[str, Key]]] = {}
        for name, pieces in self.pieces.items():
            for piece in pieces:
                by_storage.setdefault(storage(piece.flat), []).append((name, piece.block.place))
        for tensor in filled:
            by_storage.setdefault(storage(tensor), []).extend(("", place) for place in _filled(tensor))
        for places in by_storage.values():
            for name in _sharing(places):
                self.refuse(name, "shares its place with something else that is loaded")


def _with_sources(refused: Mapping[int, str], mirrors: Sequence[Mirror]) -> dict[int, str]:
    """Storage to reason, and the same for those that something in it is a copy of."""
    found, left = dict(refused), list(refused)
    while left:
        key = left.pop()
        for mirror in mirrors:
            source = storage(mirror.weight)
            if storage(mirror.live) == key and source not in found:
                found[source] = found[key]
                left.append(source)
    return found


def _filled(tensor: Tensor) -> list[Key]:
    """Padding of columns is between a tensor's rows, and not over them."""
    view = view_of(tensor)
    try:
        return [block.place for block in blocks_of(view, view)]
    except Scattered:
        return [_extent(view)]


def _extent(view: View) -> Key:
    if 0 in view.shape:
        return (view.offset, 1, 0, 0)
    last = sum((length - 1) * step for length, step in zip(view.shape, view.strides, strict=True))
    return (view.offset, 1, last + 1, last + 1)


def _sharing(places: list[tuple[str, Key]]) -> set[str]:
    """Names of tensors with a place that overlaps another one; the name is empty of what is no tensor's."""
    places = [(name, place) for name, place in places if place[3] > 0]
    if disjoint([place for _, place in places]):
        return set()
    overlaps = (
        {name, other}
        for at, (name, place) in enumerate(places)
        for other, elsewhere in places[at + 1 :]
        if not disjoint([place, elsewhere])
    )
    return set[str]().union(*overlaps) - {""}


class _Runs:
    """A loader that raises is run again over halves, until the tensors are alone that it raises for; then
    over all others at once, for it may do something only when several have come."""

    def __init__(self, load: Loader, forms: Mapping[str, Form], kept: Collection[int]) -> None:
        self._load, self._forms, self._kept, self._left = load, forms, kept, MOST_RUNS
        self.unfilled: list[StorageWeakRef] = []

    def all(self) -> list[_Record]:
        names = list(self._forms)
        whole, failed = self._run(names), list[_Record]()
        if whole.failure is not None:
            failed = list(self._failed(whole, names))
            refused = {name for record in failed for name in record.sources}
            whole = self._run([name for name in names if name not in refused])
        for record in (*failed, whole):
            if record.failure is not None:
                reason = f"is not taken by the model's loader: {record.failure}"
                record.refuse(record.sources, reason[:240])
        whole.ended()
        return [*failed, whole]

    def _failed(self, record: _Record, names: list[str]) -> Iterator[_Record]:
        """`record`: of the run over these names, which failed."""
        if len(names) == 1 or self._left <= 0 or record.is_hopeless:
            yield record
            return
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            record = self._run(half)
            if record.failure is not None:
                yield from self._failed(record, half)

    def _run(self, names: list[str]) -> _Record:
        self._left -= 1
        record = _Record({name: self._forms[name] for name in names}, self._kept)
        try:
            with no_threads(), NoWrites(self._kept, record.computed), record:
                self._load(iter([(name, record.sources[name]) for name in names]))
        except Exception as error:  # a loader may raise anything
            record.failed(error)
        self.unfilled += record.made.unfilled()
        return record


class _Record(TorchFunctionMode):  # type: ignore[misc]
    """What one run of a loader would do."""

    def __init__(self, forms: Mapping[str, Form], kept: Collection[int]) -> None:
        super().__init__()
        self._kept, self.made = kept, Storages(kept)
        self.sources = {
            name: torch.empty(form.shape, dtype=DTYPES[form.dtype], device="meta")
            for name, form in forms.items()
        }
        self.made.came("empty", [], list(self.sources.values()))
        self.copies: dict[str, list[_Copy]] = {}
        self.failure: str | None = None
        """what the loader raised"""
        self.is_hopeless = False
        """it does so whatever it loads"""
        self.refused: dict[str, str] = {}
        self.filled: list[Tensor] = []
        self.mirrors: list[Mirror] = []
        self.computed: set[int] = set()
        """storages of weights with a kept derived value"""
        self._loads: dict[int, list[tuple[int, Key]]] = {}
        """by storage: the number of each copy of a checkpoint's tensor there, and its place"""
        self._whole = {storage(tensor): name for name, tensor in self.sources.items()}
        self._derived: dict[int, set[str]] = {}
        self._made_here: list[Tensor] = []
        """so that no storage takes the number of one before"""

    def refuse(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self.refused.setdefault(name, reason)

    def failed(self, error: Exception) -> None:
        self.failure, self.is_hopeless = f"{type(error).__name__}: {error}", isinstance(error, Unseen)

    def ended(self) -> None:
        """The loader is done: what it computed from weights and still lives is kept by somebody."""
        self.computed |= self.made.outlived()

    def early(self) -> Iterator[int]:
        """Storages with a part copied elsewhere before it was loaded, and not again after it."""
        for mirror in {mirror.place: mirror for mirror in self.mirrors}.values():
            key, seen = storage(mirror.weight), _extent(mirror.source)
            if any(at > mirror.loads and not disjoint([seen, one]) for at, one in self._loads.get(key, ())):
                yield key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and torch._C._is_torch_function_enabled():
            # a tensor of a class of its own may do something else; what it comes to passes through here again
            with self:
                return self._as_its_class(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if func is Tensor.copy_:
            return self._copied(*args[:2])
        tensors = list(tensors_in((args, kwargs)))
        written = list(_written_by(func, name, args, kwargs))
        if written:
            return self._written(name, written, func, args, kwargs)
        if name in _LEAVES_TORCH:
            if self.made.is_unfilled(tensor for tensor in tensors if not tensor.is_meta):
                raise RuntimeError(f"{name} of what is not loaded yet")
            # what becomes of it nobody sees; and numpy would write into live memory
            self.computed |= self.made.of(tensors)
            left = func(args[0].clone(), *args[1:], **kwargs)
            self.refuse(self._names(tensors), "is looked into by the loader")
            return left
        names = self._names(tensors)
        if name == "as_strided":
            self.refuse(names, "is seen by places in memory, and not by its form")
        if names and name in _SAME and _keeps_dtype(args, kwargs):
            return args[0]
        result = func(*args, **kwargs)
        self.made.came(name, tensors, list(tensors_in(result)))
        return self._looked(result, names) if names else result

    @staticmethod
    def _as_its_class(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        for kind in types:
            result = kind.__torch_function__(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        raise TypeError(f"no class of {[kind.__name__ for kind in types]} takes {func}")

    def _copied(self, live: Tensor, source: Tensor) -> Tensor:
        if live.device.type == "meta":
            self.made.changed(live, [source])
            self._derive(live, self._names([live, source]))
            return live
        if self.made.takes([live], [source]):
            live.copy_(source)
        name = self._whole.get(storage(source)) if source.device.type == "meta" else None
        if name is None:
            self._unknown(live, source)
        elif not has_memory(live):
            self.refuse([name], f"is put into a {type(live).__name__}, which keeps its elements elsewhere")
        elif live.dtype != source.dtype:
            self.refuse([name], f"is converted from {source.dtype} to {live.dtype}")
            self._fill(live, [])
        elif _is_turned(live) or _is_turned(source):
            self.refuse([name], "is put in its place with another sign")
            self._fill(live, [])
        elif source.element_size() != self.sources[name].element_size():
            self.refuse([name], "is seen as elements of another width")
            self._fill(live, [])
        elif live.shape != source.shape:
            self.refuse([name], f"is spread from {tuple(source.shape)} to {tuple(live.shape)}")
            self._fill(live, [])
        else:
            self.copies.setdefault(name, []).append(_Copy(live, view_of(source)))
            self._loads.setdefault(storage(live), []).append((self.made.loaded(), _extent(view_of(live))))
        return live

    def _unknown(self, live: Tensor, source: Tensor) -> None:
        names = self._names([source])
        self.refuse(names, "is not loaded itself, but what is computed from it")
        seen = None if names or _is_turned(live) or _is_turned(source) else self.made.mirror(live, source)
        if seen is None or live.dtype != source.dtype or live.shape != source.shape:
            self._fill(live, [source])
        elif storage(live) not in self._kept:
            self.made.changed(live, [source])
        elif (storage(live), view_of(live)) != (storage(seen.weight), seen.source):
            self.mirrors.append(seen)

    def _fill(self, live: Tensor, others: Sequence[Tensor]) -> None:
        """With a value from outside the checkpoint that may be made of the weights in `others`."""
        if storage(live) in self._kept:
            self.filled.append(live)
            self.computed |= self.made.of(others) - {storage(live)}
        else:
            self.made.changed(live, others)

    def _written(self, name: str, written: Sequence[Tensor], func: Any, args: Any, kwargs: Any) -> Any:
        """A call that would change these of its tensors."""
        tensors = list(tensors_in((args, kwargs)))
        names = self._names(tensors)
        if all(tensor.device.type == "meta" for tensor in tensors):
            for one in written:
                self.made.changed(one, tensors)
                self._derive(one, names)
            result = func(*args, **kwargs)
            self.made.came(name, tensors, list(tensors_in(result)))
            return self._looked(result, names)
        self.refuse(names, f"is put in its place by {name}, and not by a plain copy")
        for one in written:
            self._fill(one, [tensor for tensor in tensors if tensor is not one])
        if self.made.takes(written, tensors):
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            return kwargs["out"]
        return None if name.startswith("__set") else written[0]

    def _names(self, tensors: Iterable[Tensor]) -> set[str]:
        """Of the checkpoint's tensors that these are made of."""
        found: set[str] = set()
        for tensor in tensors:
            if tensor.device.type == "meta":
                key = storage(tensor)
                found |= {self._whole[key]} if key in self._whole else self._derived.get(key, set())
        return found

    def _looked(self, result: Any, names: set[str]) -> Any:
        for tensor in tensors_in(result):
            if tensor.device.type != "meta":
                self.refuse(names, "is not loaded itself, but what is computed from it")
            elif storage(tensor) not in self._whole:
                self._derive(tensor, names)
        return result

    def _derive(self, tensor: Tensor, names: set[str]) -> None:
        self._made_here.append(tensor)
        key = storage(tensor)
        if key in self._whole:
            self.refuse(names | {self._whole[key]}, "is changed by the loader before it is copied")
        else:
            self._derived[key] = self._derived.get(key, set()) | names


def _is_turned(tensor: Tensor) -> bool:
    """Whether its elements are its memory's with another sign."""
    return bool(tensor.is_neg() or tensor.is_conj())


def _written_by(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """Those of the tensors of a call that it may change. An operator says by its schema that it does; which
    of them is not asked. A list that comes first is written as a whole."""
    if kwargs.get("out") is not None:
        return tensors_in(kwargs["out"])
    forms = [func] if isinstance(func, torch._ops.OpOverload) else []
    if isinstance(func, torch._ops.OpOverloadPacket):
        forms = [getattr(func, form) for form in func.overloads()]
    if forms:
        return tensors_in((args, kwargs)) if any(form._schema.is_mutable for form in forms) else ()
    if _writes(name) or kwargs.get("inplace") is True:
        return tensors_in(args[:1] if args else kwargs)
    return ()


def _writes(name: str) -> bool:
    if name in ("__set__", "__setitem__", "__delitem__"):
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
    """A dtype may be asked for by Python's own types too."""
    given = (*args[1:], *kwargs.values())
    wanted = [value for value in given if isinstance(value, torch.dtype | Tensor)]
    return not any(isinstance(value, type) for value in given) and all(
        (value if isinstance(value, torch.dtype) else value.dtype) == args[0].dtype for value in wanted
    )
