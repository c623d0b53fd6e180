"""The only way in which weightcast makes a small file appear: whole, durable, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.paths import exists, is_link

Piece = bytes | memoryview
"""of a file's bytes"""
TEMPORARY_PREFIX = ".weightcast-tmp-"
_BLOCK = 1 << 20
_READ_ATTEMPTS = 3


def is_temporary(name: str) -> bool:
    """Whether a file of this name is what `replace` or `create` leave behind when they are killed."""
    return name.startswith(TEMPORARY_PREFIX)


def replace(
    path: Path,
    data: bytes | Iterable[Piece],
    allowed: Callable[[], None] | None = None,
    *,
    sync: bool = True,
) -> None:
    """Puts `data`, whole or in pieces, at `path` by rename, right before which `allowed` may raise. Raises
    OSError and what the pieces raise; `path` then holds what it held before. Without `sync` nothing waits for
    a disk, for what is soon written again anyway: after a power failure `path` may hold the old bytes, or
    none."""
    with _temporary(path, data, sync=sync) as temporary:
        if allowed is not None:
            allowed()
        temporary.rename(path)
        failpoint("file.renamed", path)
    if sync:
        sync_directory(path.parent)


def create(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Puts `data` at `path` by link, with `mode` less the umask. Raises FileExistsError when something is
    there, which is then untouched, and Refused on a file system without hard links."""
    with _temporary(path, data, mode) as temporary:
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            # An NFS server whose reply was lost reports our own success as a conflict.
            if temporary.stat().st_nlink != 2:
                raise
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise Refused(
                    f"{path}: the file system has no hard links, which exclude a second publisher",
                    remedy="keep the channel on a file system with hard links",
                ) from error
            raise
        failpoint("file.linked", path)
    sync_directory(path.parent)


def file_system_time(directory: Path) -> float:
    """Unix time now by the clock of the file system that holds `directory`: that of a file created there and
    removed again. Raises OSError."""
    with _temporary(directory / "clock", b"", sync=False) as temporary:
        return temporary.lstat().st_mtime


@contextmanager
def _temporary(
    target: Path, data: bytes | Iterable[Piece], mode: int = 0o666, *, sync: bool = True
) -> Iterator[Path]:
    failpoint("file.begun", target)
    path = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    # Not mkstemp: its 0600 would hide channel files from hosts that run as other users.
    with named(target, temporary=True):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            for piece in (data,) if isinstance(data, bytes) else data:
                with named(target, "write"):
                    write_all(fd, piece)
            with named(target):
                failpoint("file.written", target)
                if sync:
                    with named(target, "fsync"):
                        os.fsync(fd)
        finally:
            os.close(fd)
        failpoint("file.synced", target)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def named(path: Path, call: str = "", *, temporary: bool = False) -> Iterator[None]:
    """Calls by a descriptor raise errors that name no file: here they name `path`, and the call. `temporary`:
    they name a file that nobody knows."""
    try:
        yield
    except OSError as error:
        if error.filename is None or temporary:
            error.filename = str(path)
            if call:
                error.add_note(call)
        raise


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fills `buffer` from `offset` of a file. Returns how many bytes: fewer only at its end."""
    done = 0
    while done < len(buffer) and (got := os.preadv(fd, [buffer[done:]], offset + done)):
        done += got
    return done


def sync_directory(path: Path) -> None:
    sync_directory_alone(path)
    failpoint("directory.synced", path)


def sync_directory_alone(path: Path) -> None:
    """Without a failpoint."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named(path, "fsync"):
            os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what bucket mounts answer: they have no directories to sync
            raise
    finally:
        os.close(fd)


def within(directory: Path, name: str) -> Path:
    """Where the file `name` of `directory` is. Raises DamagedFile when a link leads there."""
    path = directory
    for part in name.split("/")[:-1]:
        path /= part
        if is_link(path):
            raise DamagedFile(f"{path} is a symbolic link", remedy="replace it with a directory")
    return directory / name


def make_within(directory: Path, name: str) -> Path:
    """As `within`; the subdirectories are there afterwards, durable."""
    path = within(directory, name)
    missing = [each for each in path.parents if each.is_relative_to(directory) and not exists(each)]
    for each in reversed(missing):
        each.mkdir()
        sync_directory(each.parent)
    return path


def pieces_of(path: Path, *, follow_links: bool = True, block_bytes: int = _BLOCK) -> Iterator[bytes]:
    """The bytes of a regular file. Raises OSError and DamagedFile, both with its name."""
    with named(path), os.fdopen(open_regular(path, follow_links=follow_links), "rb", buffering=0) as file:
        while block := file.read(block_bytes):
            yield block


def read_file(path: Path, limit: int, *, follow_links: bool = False) -> bytes:
    """All bytes of a regular file. Raises FileNotFoundError; DamagedFile when it is a link (unless
    `follow_links`), no regular file, or above `limit` bytes; RetryLater when it keeps changing its size."""
    for _ in range(_READ_ATTEMPTS):
        fd, data = open_regular(path, follow_links=follow_links), bytearray()
        try:
            while block := os.read(fd, min(_BLOCK, limit + 1 - len(data))):
                data += block
            if len(data) > limit:
                raise DamagedFile(f"{path} exceeds the {limit}-byte limit", remedy="restore or remove it")
            # else the size is stale, or moves
            if len(data) == os.fstat(fd).st_size:
                return bytes(data)
        finally:
            os.close(fd)
    raise RetryLater(f"{path} changes while it is read", remedy="stop whatever writes it")


def open_regular(path: Path, *, follow_links: bool = False) -> int:
    """A descriptor for reading. Raises FileNotFoundError; DamagedFile for links and irregular files;
    RetryLater at the limit of open files."""
    # O_NONBLOCK: opening a FIFO put in the file's place must not hang the daemon.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _irregular(path) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise disk_error(error, path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path)
    return fd


def _irregular(path: Path) -> DamagedFile:
    return DamagedFile(f"{path} is not a regular file", remedy="replace it with a regular file")
