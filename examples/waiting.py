"""Waiting with a deadline, and files that appear whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.05


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Returns as soon as `condition` holds; TimeoutError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)
