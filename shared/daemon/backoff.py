"""How long to wait after failures: the one rule for it, without IO."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

JITTER = 0.2
_SOURCE = random.Random()
"""of its own: a trainer may have seeded the global one, on every rank alike"""


@dataclass(frozen=True)
class Backoff:
    """Pauses after failures in a row: `first` seconds, then `factor` times as long each, up to `longest`."""

    first: float
    longest: float
    factor: float = 2.0

    def pause(self, failures: int) -> float:
        return min(self.first * self.factor ** min(failures - 1, 30), self.longest)


def jittered(seconds: float) -> float:
    """More or less of them, so that many who wait for the same do not come at once."""
    return seconds * _SOURCE.uniform(1 - JITTER, 1 + JITTER)


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
