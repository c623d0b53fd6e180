"""Spares: files of a journal that no state names any more, and of shards that are staged, written over by the
next ones.

Their pages are in memory already: where a hypervisor is given back what a guest frees, new pages cost a large
step more than all its other work. They are one owner's, removed when the owner lock is released, and when
space is short; there are none on tmpfs. A journal that somebody reads is locked, and not written over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from io import BufferedWriter
from pathlib import Path

from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.files.disk_errors import GROW_TMPFS, NoRoom
from weightcast.shared.files.paths import exists, matching
from weightcast.shared.files.system import file_system, in_memory, space_of, taken_bytes

_LOOKS = 16
"""places at which a file is asked for, to see whether it is in memory"""
_MOST_READY = 1 << 30
"""bytes of a spare that is made: what does not stay in memory would be written to the disk twice"""
_PIECE = 1 << 20


def keep_journal(paths: LocalPaths, journal: Path) -> None:
    """Makes the spare of `journal`, if it is there and has no other name. The one before is dropped."""
    with contextlib.suppress(FileNotFoundError):
        _keep(journal, paths.spare)


def keep_shards(paths: LocalPaths, directory: Path) -> None:
    """Makes spares of the files in `directory`. Those of other shards are dropped."""
    files = matching(directory, "*")
    spares = [paths.spare_shard(number) for number in range(len(files))]
    for file, spare in zip(files, spares, strict=True):
        _keep(file, spare)
    for spare in set(matching(paths.room, "spare.[0-9]*")) - set(spares):
        spare.unlink(missing_ok=True)


def _keep(file: Path, spare: Path) -> None:
    found = os.lstat(file)
    alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
    if alone and file_system(found.st_dev) != "tmpfs" and _is_cached(file):
        file.rename(spare)
    else:
        file.unlink()


def _is_cached(file: Path) -> bool:
    """Whether its pages seem to be in memory: over others nothing is written sooner than into a new file."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        for place in range(0, size, max(size // _LOOKS, 1)):
            os.preadv(fd, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # cannot be asked here
        return True
    finally:
        os.close(fd)
    return True


def make_ready(paths: LocalPaths, nbytes: int, between: Callable[[], None]) -> None:
    """Makes a spare for a journal of `nbytes`, where there is none. `between` is called between pieces of the
    work, and may raise to give it up. Raises OSError."""
    size = min(nbytes, _MOST_READY)
    if not size or exists(paths.spare) or file_system(os.stat(paths.room).st_dev) == "tmpfs":
        return
    if space_of(paths.room).free_bytes < 2 * nbytes:
        return
    zeros = bytes(_PIECE)
    try:
        with paths.unready_spare.open("wb", buffering=0) as file:
            for start in range(0, size, _PIECE):
                between()
                file.write(memoryview(zeros)[: size - start])
        paths.unready_spare.rename(paths.spare)
    finally:
        paths.unready_spare.unlink(missing_ok=True)


def _all(paths: LocalPaths) -> list[Path]:
    return matching(paths.room, "spare*")


def spare_bytes(paths: LocalPaths) -> int:
    """What dropping them gives back."""
    return _taken(_all(paths))


def spool_bytes(paths: LocalPaths) -> int:
    """What fetched files take. They are dropped, or written over by the same ones."""
    return _taken(file for version in matching(paths.spool, "*") for file in matching(version, "*"))


def _taken(files: Iterable[Path]) -> int:
    found = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found += taken_bytes(os.lstat(file))
    return found


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
    fd = -1
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(f"{path} is not a spare")
        # readers find it by another name no more: who has no lock by now gets none
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.pwrite(fd, bytes(min(end, found.st_size)), max(0, found.st_size - end))
        return os.fdopen(fd, "wb")
    except OSError:  # not a file of one name, or read by somebody
        if fd >= 0:
            os.close(fd)
        path.unlink()
        return path.open("xb")


def make_room(paths: LocalPaths, nbytes: int, work: str) -> None:
    """Before anything is written. Spares go first. Raises NoRoom when `work` needs more than there is, and
    OSError."""
    if space_of(paths.room).free_bytes < nbytes:
        drop(paths)
    free = space_of(paths.room).free_bytes
    if free < nbytes:
        raise NoRoom(
            f"{paths.room}: {free / (1 << 20):.1f} MiB free, {work} needs {nbytes / (1 << 20):.1f} MiB",
            remedy=GROW_TMPFS if in_memory(paths.room) else "free space on the local disk",
        )
