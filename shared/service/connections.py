"""How many connections the HTTP side holds, and for how long without a request: whoever reaches the port may
open them, with no token."""

from __future__ import annotations

import asyncio
import resource
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 256
BACKLOG = 128
"""that wait to be accepted; so many may be accepted at once"""
REQUEST_SECONDS = 20.0
"""until a request is here with its body; counted from the connection's first moment or the answer before"""
UNREAD_SECONDS = 60.0
"""that a peer may leave an answer unread"""


def most_connections() -> int:
    """A quarter of the files that this process may open: with those that are accepted at once, and those
    that are being closed, half are left for its work."""
    return min(MOST, _open_files() // 4)


def backlog() -> int:
    return max(1, min(BACKLOG, _open_files() // 16))


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST * 16 if soft == resource.RLIM_INFINITY else soft


def drop_unread(listener: socket.socket) -> None:
    """Connections of `listener` end when their peer does not take what was sent."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_SECONDS * 1000))


class Connection(H11Protocol):
    """One that does not bring its request in time is closed. Where there are too many, the one that has been
    waited for longest makes room for the newest: a health check comes through a crowd of idle ones. When all
    have a request under way, the newest is answered with 503 (uvicorn's `limit_concurrency`)."""

    _deadline: asyncio.TimerHandle | None = None
    """None: the request is here, and is being answered"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._await_request()
        else:
            self._stop_waiting()

    def _await_request(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        waiting = {
            other._deadline.when(): other
            for other in self.connections
            if isinstance(other, Connection) and other._deadline is not None and other is not self
        }
        if waiting:
            waiting[min(waiting)]._close()

    def _close(self) -> None:
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()
