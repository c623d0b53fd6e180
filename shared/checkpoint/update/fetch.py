"""Fetch: the shards of a version from the channel into the spool, sizes and BLAKE3 checked on the way.

No lock is held. Channel files are read, never mapped. Readers may follow block by block, before a file's
digest is known: what they decode counts only once `fetch` has returned. What is not there yet is retried
until a deadline; what is there and wrong after that is an error that names the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path

from blake3 import blake3

from weightcast.shared.base.errors import DamagedFile, RetryLater, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.index import FileRecord, ForeignIndex, Index
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.update.buffer_reuse import begin, keep_shards, make_room
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.durable import named, write_all
from weightcast.shared.files.paths import exists, is_directory


@dataclass(frozen=True)
class Awaited:
    """`reason` names the file and says what is wrong with it. `waited`, `left`: seconds since the wait began
    and until it is given up."""

    version: int
    file: str
    reason: str
    retries: int
    waited: float
    left: float


OnWait = Callable[[Awaited | None], None]
"""Called before each retry, with None once the file is right. May raise to give up."""


def ignore(awaited: Awaited | None) -> None:
    pass


@dataclass(frozen=True)
class Patience:
    """How long the files of a version are waited for: `seconds` from `began` (monotonic) on."""

    version: int
    seconds: float
    wait: Callable[[float], None]
    on_wait: OnWait = ignore
    began: float = field(default_factory=time.monotonic)


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


_BLOCK = 4 << 20
_RETRY_FIRST, _RETRY_MOST = 0.05, 2.0
JOURNAL_BYTES = 11
"""of a journal per changed word, at most: old and new word of 4 bytes, which words that stay have too where
three of four change, or the gap; a share of record heads"""
ROOM_BYTES = 1 << 20
"""for everything small"""


class NotThere(RetryLater):
    """A file that an index names did not show in time, or is gone."""

    def __init__(self, place: str, version: int) -> None:
        super().__init__(f"{place} is not there", remedy="is the mount stale, or was the version pruned?")
        self.version = version


def check_space(paths: LocalPaths, versions: Sequence[Index | ForeignIndex]) -> None:
    """RetryLater when spool and journal of `versions` would not fit. A foreign index states no sizes."""
    ours = [version for version in versions if isinstance(version, Index)]
    wanted = ROOM_BYTES
    wanted += sum(file.size for version in ours for file in version.files)
    wanted += sum(map(journal_bytes, ours))
    make_room(paths, wanted, "staging")


def journal_bytes(index: Index) -> int:
    """Of the journal of a version, at most."""
    return sum(chunk.changed for chunk in index.chunks) * JOURNAL_BYTES


def fetch(
    spool: Spool,
    files: Store,
    index: Index | ForeignIndex,
    incoming: Incoming,
    *,
    visible_seconds: float,
    advance: Advance | None = None,
    wait: Callable[[float], None] = time.sleep,
    on_wait: OnWait = ignore,
) -> None:
    """Copies what `index` names from `files`, telling `incoming` block by block. Raises NotThere when
    a file does not show within `visible_seconds`, DamagedFile when it does and is not what the index says,
    RetryLater when reading or writing fails."""
    target = spool.directory(index)
    target.mkdir(exist_ok=True)
    copy = _Copy(index.version, incoming, time.monotonic(), visible_seconds, advance, wait, on_wait)
    for number, record in enumerate(_records(index)):
        path = target / record.name
        if not spool.has(path):
            copy.run(files, path, record, spool.spare(number))
            spool.verified(path)
        elif advance is not None:
            advance(record.size if record.size >= 0 else path.stat().st_size)
    incoming.complete()


def _records(index: Index | ForeignIndex) -> list[FileRecord]:
    """A foreign index states no sizes and digests: its tensors' digests are checked while staging."""
    if isinstance(index, Index):
        return list(index.files)
    return [FileRecord(name, -1, "") for name in sorted(set(index.weight_map.values()))]


@dataclass(frozen=True)
class _Copy:
    """Into the spool, again and again until a file is right or the deadline has passed."""

    version: int
    incoming: Incoming
    began: float
    seconds: float
    advance: Advance | None
    wait: Callable[[float], None]
    on_wait: OnWait

    def run(self, files: Store, target: Path, record: FileRecord, spare: Path) -> None:
        """`spare`: what `target` is written over, where it is there."""
        source = files.place(record.name)
        pause, retries = _RETRY_FIRST, 0
        while True:
            try:
                self._once(files, target, record, spare)
                return self.on_wait(None) if retries else None
            except FileNotFoundError as error:
                failure: WeightcastError = NotThere(source, self.version)
                cause: Exception = error
            except DamagedFile as error:
                failure = cause = error
            except OSError as error:
                failure = disk_error(error, source)
                cause = error
            # a directory whose index was read is no longer late but gone: another way is planned
            waited = time.monotonic() - self.began
            if waited + pause > self.seconds or not files.present():
                raise failure from cause
            # short, stale and torn reads of network file systems heal by themselves
            self.incoming.restart(target.name)
            left, retries = self.seconds - waited, retries + 1
            self.on_wait(Awaited(self.version, source, failure.message, retries, waited, left))
            self.wait(pause)
            pause = min(2 * pause, _RETRY_MOST)

    def _once(self, files: Store, target: Path, record: FileRecord, spare: Path) -> None:
        digest, room = blake3(), memoryview(bytearray(_BLOCK))
        size = 0
        with files.open(record.name) as body, named(target), _opened(target, spare) as write:
            failpoint("fetch.begun", target)
            while count := body.readinto(room):
                block = room[:count]
                size += count
                if 0 <= record.size < size:
                    break
                digest.update(block)
                write_all(write.fileno(), block)
                self.incoming.extend(target.name, size)
                if self.advance is not None:
                    self.advance(count)
            os.ftruncate(write.fileno(), size)
        failpoint("fetch.copied", target)
        if record.size >= 0 and (size != record.size or digest.hexdigest() != record.blake3):
            raise DamagedFile(
                f"{files.place(record.name)}: {size} bytes with digest {digest.hexdigest()[:16]}, "
                f"the index says {record.size} bytes and {record.blake3[:16]}",
                remedy="the file is damaged or not wholly visible yet; run `weightcast channel verify`",
            )


def _opened(target: Path, spare: Path) -> BufferedWriter:
    """At its start, whatever is in it."""
    if exists(target):
        return os.fdopen(os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb")
    return begin(target, spare)
