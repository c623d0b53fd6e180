"""Looking at what a loader would do changes nothing."""

from __future__ import annotations

import gc
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread, get_ident
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast_engine.loader.derived import live_tensors, places_of
from weightcast_engine.update.places import storage, tensors_in
from weightcast_engine.update.refusals import RELOAD_AND_TELL, InDoubt


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
            # one by one: other threads may look at a module meanwhile
            for name in own.keys() - were.keys():
                del own[name]
            for name, one in were.items():
                if own.get(name) is not one:
                    own[name] = one
        for value, copy in kept:
            _put_back(value, copy)
        if _marks(model) != before:
            raise InDoubt(
                "the model's loader changed its weights while it was looked at", remedy=RELOAD_AND_TELL
            )


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
            keys = {storage(one) for one in tensors_in(given)}.intersection(self._kept)
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


@contextmanager
def no_threads() -> Iterator[None]:
    """This one may start none, and give those of a pool nothing to do. Others of the process may."""
    with _STARTING:
        own, start, submit = get_ident(), Thread.start, ThreadPoolExecutor.submit

        def checked(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if get_ident() == own:
                    raise Unseen("it loads in threads, which cannot be followed")
                return original(*args, **kwargs)

            return call

        Thread.start, ThreadPoolExecutor.submit = checked(start), checked(submit)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Thread.start, ThreadPoolExecutor.submit = start, submit  # type: ignore[method-assign]
