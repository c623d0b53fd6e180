"""Pauses after failures, things that are due, and the deadline of a whole HTTP exchange. Light to import:
hand-overs need it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

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


class Deadline:
    """For one HTTP exchange over a connection of its own, whatever the peer sends; `with` begins its time."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        """what was read since may be cut short"""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._socket is not None:
            self._socket.close()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """The `trace` extension of an httpx request."""
        if event == "connection.connect_tcp.complete":
            self.watch(info["return_value"].get_extra_info("socket"))

    def watch(self, connection: socket.socket) -> None:
        """As soon as it is connected. It may be wrapped by TLS afterwards."""
        with self._lock:
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))
            if self.passed:
                self._shut_down()

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            # the peer may have gone meanwhile
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
