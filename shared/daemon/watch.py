"""File events as a hint: they shorten a poll and decide nothing (inotify sees nothing of other hosts)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.loop import Wakeup
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import is_directory

# Without the events of reading: a daemon that polls would wake itself.
_WRITES: list[type[FileSystemEvent]] = [
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileDeletedEvent,
    FileClosedEvent,
    DirCreatedEvent,
    DirMovedEvent,
]
_JOIN_SECONDS = 2.0
_START_SECONDS = 1.0
"""A mount that hangs is watched once it answers."""

log = get_log("watch")


class Watcher:
    """Context manager: sets `wakeup` when something is written in the directory `path` (not below it).
    `on_renamed` is called first, in a thread of its own, with the new name of what is renamed in it.
    A directory that does not exist yet is watched once it does. Where watching is not possible it says so in
    the log, once, and the poll goes on."""

    def __init__(
        self, path: Path, wakeup: Wakeup, on_renamed: Callable[[str], None] = lambda name: None
    ) -> None:
        self._path = path
        self._hint = _Hint(wakeup, on_renamed)
        self._observer = Observer()
        self._ended = threading.Event()
        self._starting = threading.Thread(target=self._start, name="watch", daemon=True)

    def __enter__(self) -> Watcher:
        self._starting.start()
        self._starting.join(_START_SECONDS)
        return self

    def _start(self) -> None:
        try:
            while not is_directory(self._path):
                if self._ended.wait(_START_SECONDS):
                    return
            self._observer.schedule(self._hint, str(self._path), event_filter=_WRITES)
            self._observer.start()
        except OSError as error:
            log.warning(
                "directory cannot be watched: changes are seen at the next poll",
                path=str(self._path),
                reason=disk_text(error, self._path),
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._observer.is_alive():
            self._observer.stop()
            self._observer.join(_JOIN_SECONDS)


class _Hint(FileSystemEventHandler):
    def __init__(self, wakeup: Wakeup, on_renamed: Callable[[str], None]) -> None:
        self._wakeup = wakeup
        self._on_renamed = on_renamed

    def on_any_event(self, event: FileSystemEvent) -> None:
        if isinstance(event, FileMovedEvent | DirMovedEvent) and event.dest_path:
            self._on_renamed(Path(os.fsdecode(event.dest_path)).name)
        self._wakeup.set()
