"""How long to wait after failures: the one rule for it, without IO."""

from __future__ import annotations

import random
from dataclasses import dataclass

JITTER = 0.2


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
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)
