"""Rates of bytes: whoever moves bytes of large objects waits until they are due.

A rate holds within 5% over 10 seconds: pieces and what is saved up while nothing moves are half a second's
bytes together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from weightcast.shared.base.options import require_option

_PIECE_SECONDS = 0.2
_SAVED_SECONDS = 0.2
"""of bytes that did not move in time, and may follow at once"""
_Bytes = TypeVar("_Bytes", bytes, memoryview)


class Rate:
    """Bytes per second of all threads and stores that share it; 0: no limit. `wait` sleeps and may raise to
    stop; `clock`: monotonic, in seconds."""

    def __init__(
        self,
        bytes_per_second: int = 0,
        wait: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_option("bytes_per_second", bytes_per_second, int)
        self.limits = bytes_per_second > 0
        self.piece = max(1, int(bytes_per_second * _PIECE_SECONDS)) if self.limits else 1 << 62
        """bytes to move at a time, at most"""
        self._rate, self._wait, self._clock = bytes_per_second, wait, clock
        self._lock = threading.Lock()
        self._due = clock()
        """when all bytes so far are due"""

    def take(self, nbytes: int) -> None:
        """Waits until so many bytes more may have moved. Raises what `wait` raises."""
        if not self.limits:
            return
        with self._lock:
            now = self._clock()
            self._due = max(self._due, now - _SAVED_SECONDS) + nbytes / self._rate
            left = self._due - now
        if left > 0:
            self._wait(left)

    def pieces(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """Of `data`, each when it is due."""
        view = memoryview(data)
        return self.paced(view[at : at + self.piece] for at in range(0, len(view), self.piece))

    def paced(self, pieces: Iterable[_Bytes]) -> Iterator[_Bytes]:
        """The same, each when it is due. Raises what `wait` raises."""
        for piece in pieces:
            self.take(len(piece))
            yield piece


NO_RATE = Rate()


@dataclass(frozen=True)
class Rates:
    """Of large objects that a process reads from a channel, and of those that it writes to it. Small ones
    (pointer, claims, reports, indexes) never wait."""

    fetch: Rate = NO_RATE
    publish: Rate = NO_RATE


NO_RATES = Rates()
