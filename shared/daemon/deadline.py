"""A deadline of a whole HTTP exchange, whatever the peer sends. Light to import: hand-overs need it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, Self


class Deadline:
    """For one exchange over a connection of its own; `with` begins its time."""

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
