"""A patch on its way into memory, beside an engine that serves."""

from __future__ import annotations

import threading
from pathlib import Path

from weightcast_engine.patch_file import ReadPatch, read_patch
from weightcast_engine.refusals import BadPatch


class Stage:
    """Reads and checks `name` in a thread of its own: reading and hashing leave the interpreter to others."""

    def __init__(self, directory: Path, name: str, limit: int) -> None:
        self.name = name
        self._found: ReadPatch | BadPatch | None = None
        self._thread = threading.Thread(target=self._read, args=(directory, limit), daemon=True)
        self._thread.start()

    def _read(self, directory: Path, limit: int) -> None:
        try:
            self._found = read_patch(directory, self.name, limit)
        except BadPatch as refusal:
            self._found = refusal
        except Exception as error:  # whatever it is, the order that waits for it is told
            self._found = BadPatch(f"{self.name}: {type(error).__name__}: {error}"[:500])

    def wait(self, seconds: float) -> bool:
        """Whether it is read, or refused."""
        self._thread.join(seconds)
        return self._found is not None

    def patch(self) -> ReadPatch:
        if self._found is None:
            raise BadPatch(f"{self.name} is still being read")
        if isinstance(self._found, BadPatch):
            raise self._found
        return self._found
