"""An order that is carried out in steps, with the engine at work between them: for engines whose ranks can
only be reached from within, one call at a time.

All ranks of such an engine take the same steps: what they go by is what all of them were told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@coroutine
def end_of_step(seconds: float = 0.0) -> Generator[float, None, None]:
    """Awaited where an order may rest. `seconds`: how long there is nothing to do."""
    yield seconds


class OrderSteps(Generic[_T]):
    """Of one order at a time, which is known by its text."""

    def __init__(self) -> None:
        self._order = ""
        self._left: Coroutine[Any, Any, _T] | None = None

    @property
    def order(self) -> str:
        """What was begun and has not ended; empty: nothing."""
        return self._order

    def step(self, order: str, begin: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[float, _T | None]:
        """Goes on with an order, or begins it: seconds to wait, and what it came to when it has ended."""
        if self._left is None:
            self._order, self._left = order, begin()
        try:
            return float(self._left.send(None)), None
        except StopIteration as ended:
            self._order, self._left = "", None
            return 0.0, ended.value
        except BaseException:
            self._order, self._left = "", None
            raise

    def give_up(self) -> None:
        if self._left is not None:
            self._left.close()
        self._order, self._left = "", None


def at_once(acting: Coroutine[Any, Any, _T]) -> _T:
    """All of an order, without a pause between its steps."""
    try:
        while True:
            time.sleep(acting.send(None))
    except StopIteration as ended:
        result: _T = ended.value
        return result
