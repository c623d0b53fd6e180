"""What is looked at now and then, by a loop that turns more often."""

from __future__ import annotations

import time
from collections.abc import Callable


class Due:
    """Due at first, and again `seconds` after it was taken. Used by one thread."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._taken: float | None = None

    def take(self) -> bool:
        now = self._clock()
        if self._taken is not None and now - self._taken < self._seconds:
            return False
        self._taken = now
        return True

    def at_once(self) -> None:
        self._taken = None
