"""The spool: where a version's shards lie between channel and journal, and how far they have come."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.failpoints import failpoint
from weightcast.shared.files.entries import is_directory
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.local.spare import keep_shards


class Incoming:
    """How much of each file of one version has arrived. One writer; readers wait in any thread."""

    def __init__(self, *, complete: bool = False) -> None:
        self._changed = threading.Condition()
        self._size: dict[str, int] = {}
        self._complete = complete
        self._failure: BaseException | None = None
        self.restarted = False
        """a file was fetched more than once: readers may have seen bytes that were none"""

    def extend(self, name: str, size: int) -> None:
        with self._changed:
            self._size[name] = size
            self._changed.notify_all()

    def restart(self, name: str) -> None:
        with self._changed:
            self.restarted = True
            self._size[name] = 0

    def complete(self) -> None:
        """Everything is there and verified."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Wakes all readers; what is missing will not come."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def wait(self, name: str, size: int | None) -> None:
        """Until the first `size` bytes of a file are there; None: until all files are verified. Raises what
        the writer failed with."""
        with self._changed:
            while not self._has(name, size):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()

    def _has(self, name: str, size: int | None) -> bool:
        return self._complete or (size is not None and self._size.get(name, -1) >= size)


class Spool:
    """What this process has fetched. Leftovers of an earlier one are swept when the checkpoint is opened."""

    def __init__(self, paths: LocalPaths) -> None:
        self._paths = paths
        self._verified: set[Path] = set()

    def directory(self, index: Index | ForeignIndex) -> Path:
        return self._paths.spool / f"{index.version}-{index.digest}"

    def spare(self, number: int) -> Path:
        """What the version's file of this number is written over, where it is there."""
        return self._paths.spare_shard(number)

    def has(self, path: Path) -> bool:
        return path in self._verified

    def verified(self, path: Path) -> None:
        self._verified.add(path)

    def drop(self, index: Index | ForeignIndex) -> None:
        self._drop(self.directory(index))

    def _drop(self, directory: Path) -> None:
        self._verified = {path for path in self._verified if path.parent != directory}
        with contextlib.suppress(OSError):
            keep_shards(self._paths, directory)
        shutil.rmtree(directory, ignore_errors=True)
        failpoint("spool.dropped", directory)

    def drop_others(self, indexes: Sequence[Index | ForeignIndex]) -> None:
        """What was fetched ahead, and is not on the way that is taken."""
        wanted = {self.directory(index) for index in indexes}
        there = list(self._paths.spool.iterdir()) if is_directory(self._paths.spool) else []
        for directory in there:
            if directory not in wanted:
                self._drop(directory)

    def forget(self) -> None:
        self._verified.clear()
