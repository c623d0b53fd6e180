"""The spare: the file of a journal that no state names any more, written over by the next journal.

Its pages are in memory already: where a hypervisor is given back what a guest frees, new pages cost a large
step more than all its other work. It is one owner's, removed when the owner lock is released, and when space
is short.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from weightcast.shared.files.space import require_free, space_of
from weightcast.shared.local.local_checkpoint import LocalPaths

_BLOCK = 512
"""bytes in which stat counts what a file takes"""


def keep(paths: LocalPaths, journal: Path) -> None:
    """Makes the spare of `journal`, if it is there and has no other name. The one before is dropped."""
    try:
        if os.lstat(journal).st_nlink == 1:
            journal.rename(paths.spare)
        else:
            journal.unlink()
    except FileNotFoundError:
        pass


def spare_bytes(paths: LocalPaths) -> int:
    """What dropping it gives back."""
    try:
        return os.lstat(paths.spare).st_blocks * _BLOCK
    except (FileNotFoundError, NotADirectoryError):
        return 0


def drop(paths: LocalPaths) -> None:
    paths.spare.unlink(missing_ok=True)


def begin(path: Path, spare: Path, end: int) -> BinaryIO:
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


def _opened(path: Path, end: int) -> BinaryIO:
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
    """As `require_free`; the spare goes first."""
    if space_of(paths.room).free_bytes < nbytes:
        drop(paths)
    require_free(paths.room, nbytes, work)
