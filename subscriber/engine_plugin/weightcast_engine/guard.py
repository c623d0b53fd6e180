"""Looking at what a loader would do changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Thread, get_ident
from typing import Any

from torch import nn

from weightcast_engine.derived import live_tensors, places_of
from weightcast_engine.refusals import RELOAD_AND_TELL, InDoubt

_STARTING = Lock()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers that a loader replaces are put back. Raises InDoubt where it wrote into them all
    the same, in a way that is not seen while it happens."""
    kept = [
        (tensors, dict(tensors))
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
    ]
    before = _marks(model)
    try:
        yield
    finally:
        for tensors, were in kept:
            _put_back(tensors, were)
        if _marks(model) != before:
            raise InDoubt(
                "the model's loader changed its weights while it was looked at", remedy=RELOAD_AND_TELL
            )


def _put_back(tensors: dict[str, Any], were: dict[str, Any]) -> None:
    if len(tensors) != len(were) or any(tensors.get(name) is not one for name, one in were.items()):
        tensors.clear()
        tensors.update(were)


def _marks(model: nn.Module) -> list[tuple[object, ...]]:
    """Differ when something was written into a parameter or buffer, as far as torch counts that."""
    tensors = [tensor for _, tensor in live_tensors(model)]
    counted = [(tensor.device, 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
    return [*places_of(model), *counted]


class Unseen(RuntimeError):
    """What a loader does in another thread does not pass through here: it would be carried out."""


@contextmanager
def no_threads() -> Iterator[None]:
    """This one may start none. Others of the process may."""
    with _STARTING:
        own, start = get_ident(), Thread.start

        def checked(self: Thread) -> None:
            if get_ident() == own:
                raise Unseen("it loads in threads, which cannot be followed")
            start(self)

        Thread.start = checked  # type: ignore[method-assign]
        try:
            yield
        finally:
            Thread.start = start  # type: ignore[method-assign]
