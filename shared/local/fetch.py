"""Fetch: the shards of a version from the channel into the spool, sizes and BLAKE3 checked on the way.

No lock is held. Channel files are read, never mapped. What is not there yet is retried until a deadline;
what is there and wrong after that is an error that names the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from weightcast.shared.channel.index import FileRecord, ForeignIndex, Index
from weightcast.shared.errors import DamagedFile, RetryLater
from weightcast.shared.files.durable import open_regular
from weightcast.shared.local.local_checkpoint import LocalPaths
from weightcast.shared.local.stage import Fetched
from weightcast.shared.progress import Advance

_BLOCK = 4 << 20
_RETRY_FIRST, _RETRY_MOST = 0.05, 2.0
_JOURNAL_BYTES = 10
"""of a journal per changed word, at most: old and new word of 4 bytes, the gap, a share of record heads"""


def check_space(paths: LocalPaths, versions: Sequence[Index | ForeignIndex]) -> None:
    """RetryLater when spool and journal of `versions` would not fit. A foreign index states no sizes."""
    ours = [version for version in versions if isinstance(version, Index)]
    wanted = 1 << 20
    wanted += sum(file.size for version in ours for file in version.files)
    wanted += sum(chunk.changed for version in ours for chunk in version.chunks) * _JOURNAL_BYTES
    free = os.statvfs(paths.room)
    if free.f_bavail * free.f_frsize < wanted:
        raise RetryLater(
            f"{paths.room}: {free.f_bavail * free.f_frsize >> 20} MiB free, staging needs {wanted >> 20} MiB",
            remedy="free space on the local disk; nothing was changed",
        )


def fetch(
    paths: LocalPaths,
    version_dir: Path,
    index: Index | ForeignIndex,
    *,
    visible_seconds: float,
    advance: Advance | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Fetched:
    """Copies what `index` names from `version_dir`. Raises RetryLater when a file does not show within
    `visible_seconds`, DamagedFile when it does and is not what the index says."""
    target = paths.spool / f"{index.version}-{index.digest[:8]}"
    target.mkdir(exist_ok=True)
    deadline = time.monotonic() + visible_seconds
    for record in _records(index, version_dir):
        if not _have(target / record.name, record):
            _copy_until(version_dir / record.name, target / record.name, record, deadline, advance, wait)
    return Fetched(index, target)


def _records(index: Index | ForeignIndex, version_dir: Path) -> list[FileRecord]:
    """A foreign index states no sizes and digests: its tensors' digests are checked while staging."""
    if isinstance(index, Index):
        return list(index.files)
    return [FileRecord(name, -1, "") for name in sorted(set(index.weight_map.values()))]


def _have(path: Path, record: FileRecord) -> bool:
    return record.size >= 0 and path.exists() and path.stat().st_size == record.size


def _copy_until(
    source: Path,
    target: Path,
    record: FileRecord,
    deadline: float,
    advance: Advance | None,
    wait: Callable[[float], None],
) -> None:
    pause = _RETRY_FIRST
    while True:
        try:
            return _copy(source, target, record, advance)
        except FileNotFoundError as error:
            failure: Exception = RetryLater(
                f"{source} is not there", remedy="is the mount stale, or was the version pruned?"
            )
            cause: Exception = error
        except DamagedFile as error:
            failure = cause = error
        except OSError as error:
            failure = RetryLater(f"{source}: {error.strerror}", remedy="check the mount and the local disk")
            cause = error
        if time.monotonic() + pause > deadline:
            raise failure from cause
        # short, stale and torn reads of network file systems heal by themselves
        wait(pause)
        pause = min(2 * pause, _RETRY_MOST)


def _copy(source: Path, target: Path, record: FileRecord, advance: Advance | None) -> None:
    part = target.with_name(target.name + ".part")
    digest = blake3()
    size = 0
    with os.fdopen(open_regular(source), "rb", buffering=0) as read, part.open("wb") as write:
        while block := read.read(_BLOCK):
            size += len(block)
            if 0 <= record.size < size:
                break
            digest.update(block)
            write.write(block)
            if advance is not None:
                advance(len(block))
    if record.size >= 0 and (size != record.size or digest.hexdigest() != record.blake3):
        part.unlink()
        raise DamagedFile(
            f"{source}: {size} bytes with digest {digest.hexdigest()[:16]}, "
            f"the index says {record.size} bytes and {record.blake3[:16]}",
            remedy="the file is damaged or not wholly visible yet; run `weightcast channel verify`",
        )
    part.rename(target)
