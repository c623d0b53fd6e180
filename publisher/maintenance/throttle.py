"""Work beside the versions gives way to publications: while one runs, it is worked on a tenth of the time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from weightcast.shared.channel.render import Shown

_REST = 9
"""times as long as a piece of work took"""
_MOST_SECONDS = 1.0
"""of rest after a piece: what is due gets done under a trainer that never waits, too"""


class GiveWay:
    """`publishing` is for the thread that publishes, `begin` and `rest` for the one that gives way. `most`:
    seconds of rest after a piece of work."""

    def __init__(self, most: float = _MOST_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = threading.Event()
        self._free.set()
        self._most, self._clock = most, clock
        self._worked_since = clock()

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def begin(self) -> None:
        """Work begins after a time in which nothing was to do."""
        self._worked_since = self._clock()

    def rest(self) -> None:
        """Called between pieces of work, with no lock held. Returns at once where nothing is published."""
        worked = self._clock() - self._worked_since
        self._free.wait(min(_REST * worked, self._most))
        self._worked_since = self._clock()


_FADING = 0.9
"""of what was measured, per version"""


class Pace:
    """Seconds per byte of delta, over the last ten versions or so."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._first = True

    def measured(self, nbytes: int, seconds: float) -> None:
        if self._first:
            # kernels may have been compiled meanwhile
            self._first = False
            return
        self._bytes = _FADING * self._bytes + nbytes
        self._seconds = _FADING * self._seconds + seconds

    def seconds_for(self, nbytes: int) -> float:
        """0 until something was measured."""
        return nbytes * self._seconds / self._bytes if self._bytes else 0.0


def fewest_bytes(shown: Mapping[int, Shown], start: int, target: int) -> int | None:
    """Of deltas that lead from version `start` to `target`; None when none do."""
    best = {start: 0}
    for version in sorted(version for version in shown if start < version <= target):
        hops = {version - 1: shown[version].nbytes, **shown[version].skips}
        ways = [best[base] + nbytes for base, nbytes in hops.items() if base in best]
        if ways:
            best[version] = min(ways)
    return best.get(target)
