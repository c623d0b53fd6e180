"""Errors of file systems as messages: what failed, on which file, and what to do.

Every OSError that ends a command or a daemon's step goes through `disk_error`.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from weightcast.shared.base.errors import Refused, RetryLater, WeightcastError


class DiskError(RetryLater):
    """A file system fails. A daemon that runs tries again; a command, or a daemon that starts, ends with
    `exit_code`: 3 where the error lasts until somebody acts, else 75."""

    def __init__(self, message: str, *, remedy: str = "", lasting: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        if lasting:
            self.exit_code = Refused.exit_code


class NoRoom(DiskError):
    """A file system takes no more."""


GROW_TMPFS = "make it larger: `mount -o remount,size=`, --shm-size, or an emptyDir's sizeLimit"
_RIGHTS = "grant user {user} access: check owner, mode and mount options"
_UNFIT = "the file system lacks this operation: use another one (ext4, xfs, NFS); see `weightcast doctor`"
_NO_PATH = "check the path, and that its file system is mounted"
_SERVER = "check the disk or its server, and the kernel log; remount it if the error stays"
_LASTING = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHTS),
    **dict.fromkeys((errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EINVAL), _UNFIT),
    **dict.fromkeys((errno.EXDEV, errno.EMLINK, errno.ENODEV), _UNFIT),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), _NO_PATH),
    errno.EROFS: "mount the file system read-write, or give a directory on another one",
    errno.ENOLCK: "use a file system with locks: a local disk, or NFS mounted with its lock service",
    errno.ENOTEMPTY: "remove what it holds; if it is empty, run `weightcast doctor` on its file system",
    errno.EEXIST: "remove it, or give another path",
    errno.ELOOP: "remove the symbolic links, or give the path that they lead to",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), or use a file system for larger files",
    errno.E2BIG: "shorten the arguments or the environment",
}
"""by errno: remedies of errors that last until somebody acts"""
_PASSING = {
    errno.EMFILE: "raise it above three times the number of shards: `ulimit -n`, LimitNOFILE= of the unit",
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "free space, or raise the quota",
    **dict.fromkeys((errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN), _SERVER),
    errno.ENFILE: "raise the sysctl fs.file-max, or close other programs",
    errno.ENOMEM: "free memory, or raise the memory limit",
}


def lacks_room(error: BaseException) -> bool:
    return isinstance(error, NoRoom) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    )


def disk_text(error: OSError, where: object) -> str:
    """For messages: the file that the system names, else `where`, and what is the matter with it."""
    if isinstance(error, WeightcastError):
        return error.message
    name = error.filename if error.filename2 is None else f"{error.filename} -> {error.filename2}"
    return f"{name or where}: {call_text(error)}"


def call_text(error: OSError) -> str:
    """The call that failed, where a note names it, and the reason."""
    text = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"too many open files, the limit is {soft:,} (hard limit {hard:,})"
    return "".join(f"{note} failed: " for note in getattr(error, "__notes__", ())) + text


def disk_remedy(error: OSError) -> str:
    code = error.errno or 0
    remedy = _LASTING.get(code) or _PASSING.get(code) or "check the disk and its mount"
    return remedy.format(user=os.geteuid())


def is_lasting(error: OSError) -> bool:
    """Whether it stays until somebody acts."""
    return error.errno in _LASTING


def disk_error(error: OSError, where: object) -> DiskError:
    """`error` itself where it is of a store, which knows its remedy."""
    if isinstance(error, DiskError) and not lacks_room(error):
        return error
    kind = NoRoom if lacks_room(error) else DiskError
    return kind(disk_text(error, where), remedy=disk_remedy(error), lasting=is_lasting(error))


@contextmanager
def disk_errors(where: object) -> Iterator[None]:
    """Raises DiskError for an OSError."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, where) from error


def error_text(error: BaseException, where: object = "a file") -> str:
    """What is wrong, without the remedy."""
    if isinstance(error, WeightcastError):
        return error.message
    return disk_text(error, where) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
