"""Spares: files of a journal that no state names any more, and of shards that are staged, written over by the
next ones.

Their pages are in memory already: where a hypervisor is given back what a guest frees, new pages cost a large
step more than all its other work. They are one owner's, removed when the owner lock is released, and when
space is short; there are none on tmpfs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

from weightcast.shared.files.mounts import file_system
from weightcast.shared.files.space import require_free, space_of, taken_bytes
from weightcast.shared.local.local_checkpoint import LocalPaths


def keep_journal(paths: LocalPaths, journal: Path) -> None:
    """Makes the spare of `journal`, if it is there and has no other name. The one before is dropped."""
    with contextlib.suppress(FileNotFoundError):
        _keep(journal, paths.spare, in_memory=_in_memory(journal))


def keep_shards(paths: LocalPaths, directory: Path) -> None:
    """Makes spares of the files in `directory`. Those of other shards are dropped."""
    files = sorted(directory.iterdir()) if directory.is_dir() else []
    spares = [paths.spare_shard(number) for number in range(len(files))]
    in_memory = bool(files) and _in_memory(files[0])
    for file, spare in zip(files, spares, strict=True):
        _keep(file, spare, in_memory=in_memory)
    for spare in set(_shards(paths)) - set(spares):
        spare.unlink(missing_ok=True)


def _in_memory(file: Path) -> bool:
    return file_system(os.lstat(file).st_dev) == "tmpfs"


def _keep(file: Path, spare: Path, *, in_memory: bool) -> None:
    found = os.lstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not in_memory:
        file.rename(spare)
    else:
        file.unlink()


def _shards(paths: LocalPaths) -> Iterator[Path]:
    return (path for path in paths.room.glob("spare.*") if path.suffix[1:].isdecimal())


def _all(paths: LocalPaths) -> Iterator[Path]:
    yield paths.spare
    yield from _shards(paths)


def spare_bytes(paths: LocalPaths) -> int:
    """What dropping them gives back."""
    return sum(map(_taken, _all(paths)))


def _taken(spare: Path) -> int:
    try:
        return taken_bytes(os.lstat(spare))
    except (FileNotFoundError, NotADirectoryError):
        return 0


def drop(paths: LocalPaths) -> None:
    for spare in _all(paths):
        spare.unlink(missing_ok=True)


def begin(path: Path, spare: Path, end: int = 0) -> BufferedWriter:
    """A new file at `path`, to be written from its start and cut where that ends: the spare, its last `end`
    bytes zeroed, or an empty one where there is none. FileExistsError where `path` is taken."""
    file = path.open("xb")
    try:
        spare.rename(path)
    except OSError:  # none, or nothing that could be one
        return file
    file.close()
    try:
        return _opened(path, end)
    except OSError:
        path.unlink()
        return path.open("xb")


def _opened(path: Path, end: int) -> BufferedWriter:
    """Raises OSError for what is not a file of one name."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(f"{path} is no spare")
        os.pwrite(fd, bytes(min(end, found.st_size)), max(0, found.st_size - end))
        return os.fdopen(fd, "wb")
    except BaseException:
        os.close(fd)
        raise


def make_room(paths: LocalPaths, nbytes: int, work: str) -> None:
    """As `require_free`; spares go first."""
    if space_of(paths.room).free_bytes < nbytes:
        drop(paths)
    require_free(paths.room, nbytes, work)
