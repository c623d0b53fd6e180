"""How far the running publication is: counted by many threads, read by any."""

from __future__ import annotations

import threading
import time

from weightcast.publisher.daemon.status import Progress


class Meter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: Progress | None = None

    def get(self) -> Progress | None:
        return self._now

    def begin(self, source: str, total_bytes: int) -> None:
        with self._lock:
            self._now = Progress(source=source, phase="start", total_bytes=total_bytes, since=time.time())

    def end(self) -> None:
        with self._lock:
            self._now = None

    def phase(self, name: str) -> None:
        with self._lock:
            if self._now is not None:
                self._now = self._now.model_copy(update={"phase": name, "done_bytes": 0})

    def advance(self, nbytes: int) -> None:
        with self._lock:
            if self._now is not None:
                self._now = self._now.model_copy(update={"done_bytes": self._now.done_bytes + nbytes})
