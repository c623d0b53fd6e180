"""Free space where a daemon writes, as metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from weightcast.shared.files.space import nearest_directory, space_of
from weightcast.shared.service.due import Due
from weightcast.shared.service.metrics import Metrics, byte_size

EVERY_SECONDS = 5.0
PLACES = ("channel", "local")


class DiskFigures:
    """`places`: a directory for each of PLACES; one that is not there yet is judged by where it will be."""

    def __init__(
        self, registry: Metrics, places: Mapping[str, Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        place = {"place": PLACES}
        self._free = byte_size(registry, "disk_free", "Free space on the file system.", place)
        self._size = byte_size(registry, "disk_size", "Size of the file system.", place)
        self._places = dict(places)
        self._due = Due(EVERY_SECONDS, clock)

    def show(self) -> None:
        """Called by the thread that reads these places anyway: a mount may hang."""
        if not self._due.take():
            return
        for name, directory in self._places.items():
            with contextlib.suppress(OSError):
                space = space_of(nearest_directory(directory))
                self._free.labels(name).set(space.free_bytes)
                self._size.labels(name).set(space.total_bytes)
