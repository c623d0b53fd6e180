"""Named places at which a test stops, disturbs or merely counts a process.

Nothing happens there unless code inside the process called `watch`. No module of weightcast does, and no
environment variable, setting or file leads to it (a test reads every module), so that a daemon in service
passes each place at the price of one comparison. tests/crash is who calls.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Watcher = Callable[[str, Path | None], None]
"""Called with the name of a failpoint, in the thread that passes it, and the file or directory concerned."""

_watcher: Watcher | None = None


def failpoint(name: str, where: Path | str | None = None) -> None:
    """Marks a place; docs/failpoints.md lists `name`. Raises what a test has asked for, normally nothing."""
    if _watcher is not None:
        _watcher(name, None if where is None else Path(where))


def watch(watcher: Watcher | None) -> None:
    """Only for tests: from now on `watcher` is called at every failpoint of this process."""
    global _watcher
    _watcher = watcher
