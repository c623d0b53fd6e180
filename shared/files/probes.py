"""What weightcast needs of a file system, tried in a scratch directory that is removed again.

A probe raises Unfit for behaviour that differs, OSError for what is refused; some return seconds. All of it
is seen from this machine alone: that two machines exclude each other cannot be tried here. Nothing here meets
a failpoint: a probe is not part of an update.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import Refused
from weightcast.shared.files.disk_errors import call_text, disk_error, is_lasting
from weightcast.shared.files.durable import TEMPORARY_PREFIX, named, sync_directory_alone
from weightcast.shared.files.paths import exists
from weightcast.shared.files.system import taken_bytes

_SCRATCH = f"{TEMPORARY_PREFIX}doctor-"
_LEFT_SECONDS = 600.0
"""after which a scratch directory counts as left by a killed process"""
_SIZE = 1 << 20
SEEN_SECONDS = 3.0
LOOK_EVERY = 0.01
_LONG_NAME = "renamed-" + "n" * 56
_NOT_A_COPY = (errno.EEXIST, errno.ENOTEMPTY)


class Unfit(Exception):
    """The file system does something else than weightcast builds on."""


@dataclass
class Scratch:
    """`left`: why something of it is still there, once it was to be removed; empty: nothing is."""

    directory: Path
    left: str = ""


@contextmanager
def scratch_in(directory: Path) -> Iterator[Scratch]:
    """In `directory` itself, which is there for as long. Raises OSError when none can be made. Removes those
    of killed processes too."""
    missing = [path for path in (directory, *directory.parents) if not exists(path)]
    with ExitStack() as undo:
        for path in reversed(missing):
            path.mkdir()
            undo.callback(_drop_empty, path)
        made = Scratch(directory / f"{_SCRATCH}{secrets.token_hex(8)}")
        with named(directory, temporary=True):
            made.directory.mkdir(mode=0o700)
        try:
            with suppress(OSError):
                _sweep(made.directory)
            yield made
        finally:
            made.left = _removed(made.directory)


def _drop_empty(directory: Path) -> None:
    # another process may have begun to use it
    with suppress(OSError):
        directory.rmdir()


def _sweep(own: Path) -> None:
    """Both times are of the file system's clock."""
    now = own.stat().st_mtime
    for name in os.listdir(own.parent):
        path = own.with_name(name)
        if name.startswith(_SCRATCH) and now - path.lstat().st_mtime > _LEFT_SECONDS:
            shutil.rmtree(path)


def _removed(directory: Path) -> str:
    """Where listings are late a directory is empty only some time after its files were removed."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            shutil.rmtree(directory)
            return ""
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline:
                return f"{directory} cannot be removed again: {call_text(error)}"
        time.sleep(LOOK_EVERY)


_NOT_OF_ITS_KIND = frozenset({errno.EACCES, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG})
"""lasting errors that another kind of file system does not cure"""


@dataclass(frozen=True)
class Need:
    """`check`: its name; `remedy`: where the file system does not meet it."""

    check: str
    probe: Callable[[Path], float | None]
    remedy: str

    def problem(self, directory: Path) -> str:
        """Empty when it is met in `directory`, which is made. Raises OSError for what says nothing of
        the file system's kind."""
        directory.mkdir()
        try:
            self.probe(directory)
        except Unfit as unfit:
            return str(unfit)
        except OSError as error:
            if not is_lasting(error) or error.errno in _NOT_OF_ITS_KIND:
                raise
            return call_text(error)
        return ""


def require(option: str, place: Path, needs: Sequence[Need]) -> None:
    """Before anything is made in `place`, which may not be there yet. Raises Refused where its file system
    does not meet a need, DiskError where nothing can be written. `option`: for the message."""
    try:
        with scratch_in(place.absolute()) as scratch:
            for number, need in enumerate(needs):
                problem = need.problem(scratch.directory / str(number))
                if problem:
                    raise Refused(f"{option} {place}: {need.check}: {problem}", remedy=need.remedy)
    except OSError as error:
        error.filename, error.filename2 = str(place), None
        raise disk_error(error, place) from error
    if scratch.left:
        raise Refused(scratch.left, remedy=f"remove it by hand, and give {option} on another file system")


def _write(path: Path, data: bytes) -> None:
    """Durably."""
    with path.open("wb") as file, named(path, "write"):
        file.write(data)
        file.flush()
        with named(path, "fsync"):
            os.fsync(file.fileno())


def rename(room: Path) -> float:
    """Seconds of a durable replacement."""
    path, new = room / "latest", room / "new"
    _write(path, b"old")
    with path.open("rb") as reader:
        began = time.monotonic()
        _write(new, b"new")
        new.rename(path)
        sync_directory_alone(room)
        seconds = time.monotonic() - began
        if reader.read() not in (b"old", b"new"):
            raise Unfit("an open file changes when its name is replaced")
    if path.read_bytes() != b"new" or os.listdir(room) != ["latest"]:
        raise Unfit("a renamed file is still there under its old name")
    return seconds


def rename_directory(room: Path) -> None:
    """A version is committed so: files move into a directory, and that to a name in the directory above, but
    not to that of another."""
    parts = room / "parts"
    made, committed = parts / "made", room / _LONG_NAME
    parts.mkdir()
    for data in (b"first", b"second"):
        made.mkdir()
        (parts / "shard").write_bytes(data)
        (parts / "shard").rename(made / "index")
        try:
            made.rename(committed)
        except OSError as error:
            if data == b"first" or error.errno not in _NOT_A_COPY:
                raise
        if (committed / "index").read_bytes() != b"first":
            raise Unfit("a directory that is renamed replaces another, or loses its files")
    if not exists(made / "index"):
        raise Unfit("a directory that may not be renamed is gone")


def exclusive(room: Path) -> None:
    """Claims, channel.json and keys are made so."""
    own, claim = room / "own", room / "claimed"
    own.write_bytes(b"first")
    try:
        os.link(own, claim)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise Unfit("the file system has no hard links") from error
        raise
    (room / "other").write_bytes(b"second")
    with suppress(FileExistsError):
        os.link(room / "other", claim)
        raise Unfit("a link replaced a file")
    with suppress(FileExistsError):
        os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        raise Unfit("exclusive create replaced an existing file")
    own.unlink()
    if claim.read_bytes() != b"first":
        raise Unfit("a refused create changed the existing file")


def lock(room: Path) -> None:
    path = room / "lock"
    path.touch()
    with path.open("rb+") as one, path.open("rb+") as two, named(path, "flock"):
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _locks(two.fileno(), fcntl.LOCK_SH):
            raise Unfit("two holders get an exclusive lock")
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(one, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not _locks(two.fileno(), fcntl.LOCK_SH):
            raise Unfit("a shared lock is not shared")


def _locks(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def map_file(room: Path) -> None:
    """A mapped file and a read one are the same, and stay the same file."""
    path = room / "mapped"
    with path.open("w+b") as file, named(path, "mmap"):
        os.ftruncate(file.fileno(), _SIZE)
        with mmap.mmap(file.fileno(), _SIZE) as mapped:
            mapped[:5] = b"first"
            if os.pread(file.fileno(), 5, 0) != b"first":
                raise Unfit("what is written to a mapping is not read from its file")
            os.pwrite(file.fileno(), b"other", _SIZE - 5)
            if mapped[-5:] != b"other":
                raise Unfit("what is written to a file is not seen in its mapping")
            mapped.flush()
        found = os.fstat(file.fileno())
        if not os.path.samestat(found, path.lstat()):
            raise Unfit("the inode number of an open file changes")
        if found.st_nlink > 1:
            raise Unfit(f"a new file has {found.st_nlink} links")


def allocate(room: Path) -> None:
    path = room / "allocated"
    with path.open("w+b") as file, named(path, "fallocate"):
        os.posix_fallocate(file.fileno(), 0, _SIZE)
        # small files lie in their inodes, compressed ones in fewer blocks
        if taken_bytes(os.fstat(file.fileno())) < _SIZE:
            raise Unfit(
                "allocated space is not reserved: on a full disk a store to a mapping kills the process"
            )


def visible(room: Path) -> float:
    """Seconds until a new file is there under the name that was looked for before."""
    path, data = room / "late", secrets.token_bytes(4096)
    if exists(path):
        raise Unfit("a file exists that was never created")
    path.write_bytes(data)
    began = time.monotonic()
    while not (_is_whole(path, data) and path.name in os.listdir(room)):
        if time.monotonic() - began > SEEN_SECONDS:
            raise Unfit(f"a file that was written is not seen whole within {SEEN_SECONDS:g} s")
        time.sleep(LOOK_EVERY)
    return time.monotonic() - began


def _is_whole(path: Path, data: bytes) -> bool:
    with suppress(FileNotFoundError):
        return path.stat().st_size == len(data) and path.read_bytes() == data
    return False


_SHARED = "keep the channel on NFS, a parallel file system or a local disk"
RENAME = Need("rename", rename, _SHARED)
RENAME_DIRECTORY = Need("directory rename", rename_directory, f"versions cannot be committed here: {_SHARED}")
EXCLUSIVE = Need("exclusive create", exclusive, f"nothing excludes a second publisher here: {_SHARED}")
VISIBLE = Need(
    "visibility", visible, "mount without attribute and name caches (NFS: lookupcache=positive, actimeo=1)"
)
COMMIT_NEEDS = (RENAME_DIRECTORY, EXCLUSIVE)
"""of who publishes, at every start: nothing waits for a disk"""
CHANNEL_NEEDS = (RENAME, *COMMIT_NEEDS, VISIBLE)
"""of who publishes, at first"""


def _mapped(remedy: str) -> tuple[Need, ...]:
    """Of a directory with files that one process maps and writes."""
    return (
        Need("rename", rename, remedy),
        Need("lock", lock, remedy),
        Need("mmap", map_file, remedy),
        Need("allocation", allocate, remedy),
        Need("visibility", visible, remedy),
    )


LOCAL_NEEDS = _mapped("put --local on a local disk (ext4, xfs) or in /dev/shm")
HAND_OVER_NEEDS = _mapped("hand over in a directory of /dev/shm")
CONSUME_NEEDS = (
    Need("directory rename", rename_directory, "watch a directory elsewhere, or leave --consume out"),
)
"""of a watched directory"""
