"""Looking at what a loader would do changes nothing."""

from __future__ import annotations

import gc
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread, get_ident
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast_engine.loader.derived import live_tensors, places_of
from weightcast_engine.update.places import storage
from weightcast_engine.update.refusals import RELOAD_AND_TELL, InDoubt

_EMPTY = frozenset({"empty", "zeros", "ones", "full", "empty_strided"})
"""calls that make memory of nothing; of what else comes from nothing, others may know the memory too"""


class Made:
    """Storages of one run. An unfilled one lacks what a load would have put there, a tensor on `meta` always.
    `kept`: those of the model."""

    def __init__(self, kept: Collection[int]) -> None:
        self._kept = kept
        self._own: dict[int, StorageWeakRef] = {}
        """the references keep the numbers from being given again"""
        self._unfilled: dict[int, StorageWeakRef] = {}

    def came(self, call: str, given: Sequence[Tensor], results: Iterable[Tensor]) -> None:
        """`results` were computed from `given`."""
        if not given and call not in _EMPTY:
            return
        lie = {storage(tensor) for tensor in given}
        unfilled = self.is_unfilled(given)
        for result in results:
            key = storage(result)
            if key not in lie and key not in self._kept:
                self._own[key] = StorageWeakRef(result.untyped_storage())
                if unfilled or result.is_meta:
                    self._unfilled[key] = self._own[key]

    def takes(self, written: Iterable[Tensor], given: Iterable[Tensor]) -> bool:
        """Whether a call that writes into these may be carried out. What stays unwritten is unfilled."""
        keys = {storage(tensor) for tensor in written}
        if keys <= self._own.keys() and not self.is_unfilled(given):
            return True
        self._unfilled |= {key: self._own[key] for key in keys & self._own.keys()}
        return False

    def is_unfilled(self, tensors: Iterable[Tensor]) -> bool:
        return any(tensor.is_meta or storage(tensor) in self._unfilled for tensor in tensors)

    def unfilled(self) -> list[StorageWeakRef]:
        return list(self._unfilled.values())


def are_left(references: Iterable[StorageWeakRef]) -> bool:
    """Whether any of these storages outlived the run."""
    if all(one.expired() for one in references):
        return False
    gc.collect()  # what only refers to itself is nobody's
    return not all(one.expired() for one in references)


_STARTING = Lock()
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Parameters, buffers and whatever else a loader replaces in the model's modules are put back, and in
    dicts, lists and sets there. Raises InDoubt where it wrote into weights all the same, in a way that is not
    seen while it happens."""
    modules = [(vars(module), dict(vars(module))) for module in model.modules()]
    kept = [
        (value, value.copy()) for _, own in modules for value in own.values() if type(value) in _CONTAINERS
    ]
    before = _marks(model)
    try:
        yield
    finally:
        for own, were in modules:
            _put_back_each(own, were)
        for value, copy in kept:
            _put_back(value, copy)
        if _marks(model) != before:
            raise InDoubt(
                "the model's loader changed its weights while it was looked at", remedy=RELOAD_AND_TELL
            )


def _put_back_each(own: dict[str, Any], were: dict[str, Any]) -> None:
    """Other threads may look at a module meanwhile."""
    for name in own.keys() - were.keys():
        del own[name]
    for name, one in were.items():
        if own.get(name) is not one:
            own[name] = one


def _put_back(value: Any, were: Any) -> None:
    if isinstance(value, dict):
        same = value.keys() == were.keys() and all(value[name] is one for name, one in were.items())
    else:
        same = len(value) == len(were) and all(map(operator.is_, value, were))
    if not same:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(were)


def _marks(model: nn.Module) -> list[tuple[object, ...]]:
    """Differ when something was written into a parameter or buffer, as far as torch counts that."""
    tensors = [tensor for _, tensor in live_tensors(model)]
    counted = [(tensor.device, 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
    return [*places_of(model), *counted]


class Unseen(RuntimeError):
    """What a loader does in another thread does not pass through here: it would be carried out."""


class NoWrites(TorchDispatchMode):  # type: ignore[misc]
    """Whatever of a loader reaches torch's operators in another way than its calls may write into none of
    the storages `kept`: what it would have written to is added to `written`."""

    def __init__(self, kept: Collection[int], written: set[int]) -> None:
        super().__init__()
        self._kept, self._written = kept, written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written_by(func)
        if written:
            given = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
            keys = {storage(one) for one in _tensors(given)}.intersection(self._kept)
            if keys:
                self._written |= keys
                raise Unseen(f"{func} would change weights in a way that cannot be followed")
        return func(*args, **kwargs)


@cache
def _written_by(func: Any) -> list[tuple[int, str]]:
    """Number and name of each argument that an operator writes to."""
    schema = getattr(func, "_schema", None)  # operators of a higher order have none
    arguments = enumerate(() if schema is None else schema.arguments)
    return [(place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif value is not None:
            yield value


@contextmanager
def no_threads() -> Iterator[None]:
    """This one may start none, and give those of a pool nothing to do. Others of the process may."""
    with _STARTING:
        own, start, submit = get_ident(), Thread.start, ThreadPoolExecutor.submit

        def check() -> None:
            if get_ident() == own:
                raise Unseen("it loads in threads, which cannot be followed")

        def checked_start(self: Thread) -> None:
            check()
            start(self)

        def checked_submit(self: ThreadPoolExecutor, /, *args: Any, **kwargs: Any) -> Any:
            check()
            return submit(self, *args, **kwargs)

        Thread.start = checked_start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = checked_submit  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Thread.start = start  # type: ignore[method-assign]
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
