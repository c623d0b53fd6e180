"""Work beside the versions gives way to publications: while one runs, it is worked on a tenth of the time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

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
