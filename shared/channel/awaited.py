"""Requests that a channel's store has not answered yet: a server that takes connections and stays silent, or
a mount that hangs, raises no error for a minute or more."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("weightcast.channel")
SECONDS = 10.0
"""of a request until it is named"""
_pending: dict[object, tuple[float, str]] = {}
"""when each request began, and its object"""
_watch = threading.Thread()
os.register_at_fork(after_in_child=_pending.clear)


@contextmanager
def awaited(place: str) -> Iterator[None]:
    """Around one request for the object at `place`."""
    global _watch
    request = object()
    _pending[request] = time.monotonic(), place
    if not _watch.is_alive():
        _watch = threading.Thread(target=_run, name="weightcast-channel", daemon=True)
        _watch.start()
    try:
        yield
    finally:
        _pending.pop(request, None)


def unanswered() -> str:
    """Which object has been awaited the longest, for status and log; empty while nothing hangs."""
    now = time.monotonic()
    began, place = min([*_pending.values()], default=(now, ""))
    return f"{place} has not answered for {now - began:.0f} s" if now - began >= SECONDS else ""


def _run() -> None:
    """Logs each such wait once; commands show it on stderr."""
    said = False
    while True:
        time.sleep(1.0)
        before, said = said, bool(text := unanswered())
        if said and not before:
            # an error: `sync` shows nothing less
            _log.error("%s: check the server and the network", text)
