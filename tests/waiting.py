"""Waiting for what is about to be, until a deadline that only a fault misses, on a busy machine too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 120.0


def wait_until(
    condition: Callable[[], Any],
    seconds: float = SECONDS,
    what: str = "",
    every: float = 0.01,
    passing: tuple[type[Exception], ...] = (),
) -> Any:
    """The first true value of `condition`; AssertionError with `what` after `seconds`. `passing`: what
    it raises while the thing that it looks at is not there yet."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while True:
        try:
            found = condition()
        except passing:
            found = None
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s{': ' if what else ''}{what}")
        pause.wait(every)


def is_running(pid: int) -> bool:
    """False for one that has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
