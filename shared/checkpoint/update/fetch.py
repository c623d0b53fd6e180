"""Fetch: the shards of a version from the channel into the spool, sizes and BLAKE3 checked on the way.

No lock is held. Channel files are read, never mapped. Readers may follow block by block, before a file's
digest is known: what they decode counts only once `fetch` has returned. Missing and damaged files are read
again until a deadline; then they are errors that name the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from weightcast.shared.base.errors import DamagedFile, RetryLater, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.directory_store import directory_of, open_store
from weightcast.shared.channel.index import FileRecord, ForeignIndex, Index
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.update import buffer_reuse
from weightcast.shared.files.disk_errors import DiskError, disk_error
from weightcast.shared.files.durable import named, write_all
from weightcast.shared.files.paths import exists, matching
from weightcast.shared.files.system import nearest_directory, space_of


@dataclass(frozen=True)
class Awaited:
    """`reason` names the file and what is wrong with it. `waited`, `left`: seconds since the wait began and
    until it ends."""

    version: int
    file: str
    reason: str
    retries: int
    waited: float
    left: float


OnWait = Callable[[Awaited | None], None]
"""Called before each retry, with None once the file is right. May raise to stop."""
PreRead = Callable[[int, Path], None]
"""Called with version and channel directory before the version's files are read."""


class NotThere(RetryLater):
    """A file that an index names did not appear in time, or is gone."""

    def __init__(self, message: str, version: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy or "check the mount, and whether the version was pruned")
        self.version = version


Result = TypeVar("Result")
Failure = DamagedFile | NotThere | DiskError


@dataclass(frozen=True)
class Patience:
    """How files are waited for that are not visible yet, or damaged: up to `seconds` since `began`
    (monotonic), after which the last failure counts. `wait` sleeps and may raise to stop."""

    seconds: float = 0.0
    wait: Callable[[float], None] = time.sleep
    on_wait: OnWait = lambda awaited: None
    began: float = 0.0

    def begin(self) -> Patience:
        """For all files of a version, or all indexes of a plan."""
        return replace(self, began=time.monotonic())

    def retry(
        self,
        version: int,
        place: str,
        attempt: Callable[[], Result],
        *,
        errors: tuple[type[Failure], ...] = (DamagedFile, NotThere),
        pauses: tuple[float, float] = (0.2, 0.2),
        may_heal: Callable[[], bool] = lambda: True,
    ) -> Result:
        """What `attempt` returns, or its last error once time is up or `may_heal` says no. `pauses`: the
        first, which doubles, and the longest."""
        retries, (pause, longest) = 0, pauses
        while True:
            try:
                result = attempt()
            except errors as error:
                waited = time.monotonic() - self.began
                left = self.seconds - waited
                if left <= 0 or not may_heal():
                    raise
                retries += 1
                self.on_wait(Awaited(version, place, error.message, retries, waited, left))
            else:
                if retries:
                    self.on_wait(None)
                return result
            self.wait(min(pause, left))
            pause = min(2 * pause, longest)


class Incoming:
    """How much of each file of one version has arrived. One writer; readers wait in any thread."""

    def __init__(self, *, complete: bool = False) -> None:
        self._changed = threading.Condition()
        self._size: dict[str, int] = {}
        self._complete = complete
        self._failure: BaseException | None = None
        self.restarted = False
        """a file was read more than once: readers may have seen bytes that do not count"""

    def extend(self, name: str, size: int) -> None:
        with self._changed:
            self._size[name] = size
            self._changed.notify_all()

    def begin(self, name: str) -> None:
        with self._changed:
            self.restarted |= name in self._size
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
            while not (self._complete or (size is not None and self._size.get(name, -1) >= size)):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()


@dataclass(frozen=True)
class Delta:
    """A version's index and its files: in the channel, or in the spool, where they may still arrive."""

    index: Index | ForeignIndex
    files: Store
    incoming: Incoming = field(default_factory=lambda: Incoming(complete=True), compare=False)


_PAUSES = (0.05, 2.0)
"""seconds between attempts to copy a file: short, stale and torn reads of network file systems heal"""
JOURNAL_BYTES = 11
"""of a journal per changed word, at most: old and new word of 4 bytes, which words that stay have too where
three of four change, or the gap; a share of record heads"""
ROOM_BYTES = 1 << 20
"""for everything small"""


def check_space(paths: LocalPaths, versions: Sequence[Index | ForeignIndex]) -> None:
    """RetryLater when spool and journal of `versions` would not fit."""
    first, last = versions[0].version, versions[-1].version
    what = f"version {last}" if first == last else f"versions {first} to {last}"
    wanted = ROOM_BYTES + sum(map(staging_bytes, versions)) - buffer_reuse.spool_bytes(paths)
    buffer_reuse.make_room(paths, wanted, f"staging {what}")


def staging_room(paths: LocalPaths) -> int:
    """For the `staging_bytes` of versions. Raises OSError."""
    free = space_of(nearest_directory(paths.room)).free_bytes
    return free + buffer_reuse.spare_bytes(paths) + buffer_reuse.spool_bytes(paths) - ROOM_BYTES


def staging_bytes(index: Index | ForeignIndex) -> int:
    """Of a version's files and journal, at most. A foreign index states no sizes."""
    if not isinstance(index, Index):
        return 0
    return sum(file.size for file in index.files) + journal_bytes(index)


def journal_bytes(index: Index) -> int:
    """Of the journal of a version, at most."""
    return sum(chunk.changed for chunk in index.chunks) * JOURNAL_BYTES


class Fetcher:
    """Copies versions from the channel into the spool. What an earlier process left in it is swept when the
    checkpoint is opened."""

    def __init__(self, paths: LocalPaths, pre_read: PreRead | None) -> None:
        self._paths, self._pre_read = paths, pre_read
        self._verified: set[Path] = set()

    def directory(self, index: Index | ForeignIndex) -> Path:
        return self._paths.spool / f"{index.version}-{index.digest}"

    def drop(self, index: Index | ForeignIndex) -> None:
        self._drop(self.directory(index))

    def _drop(self, directory: Path) -> None:
        self._verified = {path for path in self._verified if path.parent != directory}
        with contextlib.suppress(OSError):
            buffer_reuse.keep_shards(self._paths, directory)
        shutil.rmtree(directory, ignore_errors=True)
        failpoint("spool.dropped", directory)

    def drop_others(self, indexes: Iterable[Index | ForeignIndex]) -> None:
        """What was fetched ahead, and is not on the way that is taken."""
        wanted = set(map(self.directory, indexes))
        for directory in matching(self._paths.spool, "*"):
            if directory not in wanted:
                self._drop(directory)

    def forget(self) -> None:
        self._verified.clear()

    def fetched(self, delta: Delta) -> Delta:
        """Its copy in the spool, which `fetch` fills."""
        return Delta(delta.index, open_store(self.directory(delta.index)), Incoming())

    def fetch(self, delta: Delta, incoming: Incoming, patience: Patience, advance: Advance | None) -> None:
        """Copies what the index names, reporting to `incoming` block by block. Raises NotThere when a file
        does not appear in time, DamagedFile when it is not what the index says, RetryLater when reading or
        writing fails."""
        index = delta.index
        if self._pre_read is not None:
            self._pre_read(index.version, directory_of(delta.files))
        target = self.directory(index)
        target.mkdir(exist_ok=True)
        patience = patience.begin()
        if isinstance(index, Index):
            records = index.files
        else:
            # no sizes and digests are stated: its tensors' digests are checked while staging
            records = tuple(FileRecord(name, -1, "") for name in sorted(set(index.weight_map.values())))
        for number, record in enumerate(records):
            path = target / record.name
            if path not in self._verified:
                spare = self._paths.spare_shard(number)
                patience.retry(
                    index.version,
                    delta.files.place(record.name),
                    partial(_copy, delta, path, record, spare, incoming, advance),
                    errors=(DamagedFile, NotThere, DiskError),
                    pauses=_PAUSES,
                    # a directory whose index was read is not late but gone: another source is planned
                    may_heal=delta.files.present,
                )
                self._verified.add(path)
            elif advance is not None:
                advance(record.size if record.size >= 0 else path.stat().st_size)
        incoming.complete()


def _copy(
    delta: Delta, target: Path, record: FileRecord, spare: Path, incoming: Incoming, advance: Advance | None
) -> None:
    """`spare`: the file that `target` is written over, where it exists."""
    place = delta.files.place(record.name)
    digest, size = blake3(), 0
    try:
        with closing(delta.files.pieces(record.name)) as pieces:
            # nothing is begun before there is such a file
            piece = next(pieces, b"")
            with named(target), _opened(target, spare) as write:
                incoming.begin(target.name)
                failpoint("fetch.begun", target)
                while piece:
                    size += len(piece)
                    if 0 <= record.size < size:
                        break
                    digest.update(piece)
                    write_all(write.fileno(), piece)
                    incoming.extend(target.name, size)
                    if advance is not None:
                        advance(len(piece))
                    piece = next(pieces, b"")
                os.ftruncate(write.fileno(), size)
        failpoint("fetch.copied", target)
    except FileNotFoundError as error:
        raise NotThere(f"{place} is missing", delta.index.version) from error
    except OSError as error:
        raise disk_error(error, place) from error
    if record.size >= 0 and (size != record.size or digest.hexdigest() != record.blake3):
        raise DamagedFile(
            f"{place}: {size} bytes with digest {digest.hexdigest()[:16]}, "
            f"the index says {record.size} bytes and {record.blake3[:16]}",
            remedy="the file is damaged or not fully visible yet; run `weightcast channel verify`",
        )


def _opened(target: Path, spare: Path) -> BufferedWriter:
    """At its start, whatever is in it."""
    if exists(target):
        return os.fdopen(os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb")
    return buffer_reuse.begin(target, spare)


_LOOK_EVERY = 0.05


class Prefetch:
    """Fetches ahead while a version is patched and engines reload. Its failures are dropped: the update that
    needs what it fetches meets them again."""

    def __init__(self, fetch: Callable[[Advance], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(fetch,), name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, fetch: Callable[[Advance], None]) -> None:
        with contextlib.suppress(WeightcastError, OSError):
            fetch(self._check)

    def _check(self, nbytes: int) -> None:
        if self._stop.is_set():
            raise RetryLater("fetching ahead was stopped")

    def finish(self, wait: Callable[[float], None]) -> None:
        """Lets it end. `wait` may raise: then it is stopped."""
        try:
            while self._thread.is_alive():
                wait(_LOOK_EVERY)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
