"""A channel in a mounted directory: small objects by link or rename, a version by renaming its directory.

The order of writes, and the failpoints between them, are part of docs/FORMAT.md (Writers MUST).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, Refused
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.awaited import awaited
from weightcast.shared.channel.rate import NO_RATES, Rate, Rates
from weightcast.shared.channel.store import (
    TRASH,
    AlreadyExists,
    Changed,
    Entry,
    Pieces,
    Stat,
    Store,
    StoreError,
    check_head,
    check_key,
    store_error,
    unavailable,
)
from weightcast.shared.files import durable
from weightcast.shared.files.paths import (
    ChannelAddress,
    channel_address,
    exists,
    is_directory,
    is_own_directory,
    require_directory,
)

_PIECE = 1 << 20
"""bytes that are read at a time"""
_SEND_BYTES = 4 << 20
_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of sync_file_range(2)"""
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_COMPARING = threading.Lock()
"""held from a comparison to its rename: no rename compares by itself"""


def open_store(channel: ChannelAddress | Store, rates: Rates = NO_RATES, *, stitch: bool = False) -> Store:
    """The store of a channel, as a command line or a caller of the API names it; an open store keeps its
    rates. `stitch`: what is written in S3 gets the checks that Stitch reads. Raises Refused for a URL that
    nothing here can open."""
    if not isinstance(channel, str | Path):
        return channel
    address = channel_address(channel)
    if isinstance(address, Path):
        return DirectoryStore(address, rates=rates)
    if address.startswith("hf://"):
        from weightcast.shared.channel.hf_store import open_hf_store

        return open_hf_store(address, rates)
    # their clients take a tenth of a second to import
    if address.startswith(("http://", "https://")):
        from weightcast.shared.channel.http_store import open_http_store

        return open_http_store(address, rates)
    from weightcast.shared.channel.object_store import open_object_store

    return open_object_store(address, rates, stitch=stitch)


def mounted(store: Store) -> Path | None:
    """The directory that a store is in, for checks that concern mounts alone; None for other stores."""
    return store.directory if isinstance(store, DirectoryStore) else None


def may_map(store: Store) -> bool:
    """Whether files may be mapped where they are: what reads a mapping cannot wait for a rate."""
    return isinstance(store, DirectoryStore) and not store.rates.fetch.limits


def directory_of(store: Store) -> Path:
    """Where the files of a store are, for code that maps them. Raises Refused for a store that is not in a
    directory."""
    if isinstance(store, DirectoryStore):
        return store.directory
    raise Refused(f"{store.place()} is not in a directory", remedy="mount the channel as a directory")


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise store_error(error, str(path)) from error


class DirectoryStore(Store):
    """`root`: the channel's directory, where this one is within it. A root may be a symbolic link; below it
    no link is followed."""

    def __init__(self, directory: Path, root: Path | None = None, rates: Rates = NO_RATES) -> None:
        self.directory, self.rates = directory, rates
        self._root = directory if root is None else root

    renames = True

    def place(self, key: str = "") -> str:
        return str(self.directory / key)

    def within(self, prefix: str) -> DirectoryStore:
        if not prefix:
            return self
        return DirectoryStore(self.directory / check_key(prefix), self._root, self.rates)

    def present(self) -> bool:
        with _mapped(self.directory):
            require_directory("the channel", self.directory)
            return is_directory(self.directory)

    def names(self, prefix: str = "") -> list[str]:
        path = self._path(prefix)
        with _mapped(path):
            try:
                return [name for name in os.listdir(path) if not durable.is_temporary(name)]
            except FileNotFoundError:
                return []
            except NotADirectoryError as error:
                raise unavailable(error, str(path)) from error

    def list(self, prefix: str = "") -> Iterator[Entry]:
        path = self._path(prefix)
        with _mapped(path):
            try:
                scan = os.scandir(path)
            except FileNotFoundError:
                return
            except NotADirectoryError as error:
                raise unavailable(error, str(path)) from error
            with scan:
                for entry in scan:
                    if not durable.is_temporary(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            yield _entry(entry)

    def stat(self, key: str) -> Stat | None:
        path = self._path(key)
        with _mapped(path):
            try:
                found = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _stat(found) if stat.S_ISREG(found.st_mode) else None

    def read(self, key: str, limit: int) -> bytes:
        path = self._path(key)
        with _mapped(path), awaited(str(path)):
            return durable.read_file(path, limit)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        path = self._path(key)
        with _mapped(path):
            fd = durable.open_regular(path)
            try:
                data = os.pread(fd, length, offset)
                while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
                    data += more
                self.rates.fetch.take(len(data))
                return data
            finally:
                os.close(fd)

    def pieces(self, key: str) -> Pieces:
        path, rate = self._path(key), self.rates.fetch
        with _mapped(path):
            read = durable.pieces_of(path, follow_links=False, block_bytes=min(_PIECE, rate.piece))
            yield from rate.paced(read)

    def create(self, key: str, data: bytes) -> None:
        with self._made(key) as path:
            durable.create(path, data)

    def replace(
        self,
        key: str,
        data: bytes,
        *,
        expected: bytes | None = None,
        allowed: Callable[[], None] | None = None,
        sync: bool = True,
    ) -> None:
        path = self._path(key)
        with _mapped(path), contextlib.nullcontext() if expected is None else _COMPARING:
            if expected is None:
                self._make_parents(path)
            elif not _has(path, expected):
                raise Changed.at(str(path))
            durable.replace(path, data, allowed, sync=sync)

    def write(self, key: str, *, reserve: int = 0, sync: bool = True) -> _FileWriter:
        with self._made(key) as path:
            nested = path.parent != self.directory
            return _FileWriter(path, reserve, sync, self.rates.publish, is_nested=nested)

    def begin(self, draft: str) -> DirectoryStore:
        path = self._path(draft)
        with _mapped(path):
            path.mkdir()
        return self.within(draft)

    def move(self, source: str, target: str, *, sync: bool = False) -> None:
        path = self._there(source)
        with self._made(target) as to:
            path.rename(to)
            for directory in dict.fromkeys((to.parent, path.parent)) if sync else ():
                durable.sync_directory(directory)

    def copy(self, source: str, target: str) -> None:
        path = self._there(source)
        with self._made(target) as to:
            os.link(path, to, follow_symlinks=False)

    def _there(self, key: str) -> Path:
        path = self._path(key)
        with _mapped(path):
            path.lstat()
        return path

    def commit(
        self,
        draft: str,
        name: str,
        index: str,
        data: bytes,
        allowed: Callable[[], None] | None = None,
    ) -> None:
        made, directory = self._path(draft), self._path(name)
        with _mapped(directory):
            if _has(directory / index, data):
                return
            durable.create(made / index, data)
            if allowed is not None:
                allowed()
            self._take_name(made, directory, index, data)
            durable.sync_directory(directory.parent)

    def _take_name(self, made: Path, directory: Path, index: str, data: bytes) -> None:
        """A rename fails where the directory exists and is not empty."""
        try:
            made.rename(directory)
        except OSError as error:
            if _has(directory / index, data):
                return  # an NFS server whose answer was lost reports our own success as a conflict
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if exists(directory / index):
                raise AlreadyExists.at(str(directory)) from error
            # without an index it belongs to nobody: copied there by hand, or by a release that wrote in place
            self._discard(directory)
            made.rename(directory)

    def discard(self, prefix: str) -> None:
        path = self._path(prefix)
        with _mapped(path):
            self._discard(path)

    def _discard(self, path: Path) -> None:
        trash = self._root / TRASH
        trash.mkdir(exist_ok=True)
        grave = path if path.parent == trash else trash / f"{path.name}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            if grave != path:
                path.rename(grave)
                failpoint("trash.moved", path)
            shutil.rmtree(grave)
            failpoint("trash.deleted", path)

    def delete(self, key: str) -> bool:
        path = self._path(key)
        with _mapped(path):
            try:
                if is_own_directory(path):
                    path.rmdir()
                    return True
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return False
            durable.sync_directory(path.parent)
            return True

    def now(self, prefix: str = "") -> float:
        path = self._path(prefix)
        with _mapped(path):
            return durable.file_system_time(path)

    def _path(self, key: str) -> Path:
        if not key:
            return self.directory
        return durable.within(self.directory, check_key(key))

    @contextlib.contextmanager
    def _made(self, key: str) -> Iterator[Path]:
        """Where an object is made: its directory is there."""
        path = self._path(key)
        with _mapped(path):
            self._make_parents(path)
            yield path

    def _make_parents(self, path: Path) -> None:
        """Never the store's own directory: it may be a mount point, or an attempt that was cleared away."""
        between = path.relative_to(self.directory).parents[:-1]
        for directory in [self.directory / each for each in reversed(between)]:
            if not exists(directory):
                directory.mkdir(exist_ok=True)
                durable.sync_directory(directory.parent)


def _entry(entry: os.DirEntry[str]) -> Entry:
    if entry.is_file(follow_symlinks=False):
        return Entry(entry.name, "file", _stat(entry.stat(follow_symlinks=False)))
    return Entry(entry.name, "directory" if entry.is_dir(follow_symlinks=False) else "other")


def _stat(found: os.stat_result) -> Stat:
    tag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return Stat(found.st_size, found.st_mtime_ns, tag)


def _has(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError, DamagedFile):
        return durable.read_file(path, len(data)) == data
    return False


class _FileWriter:
    def __init__(self, path: Path, reserve: int, sync: bool, rate: Rate, *, is_nested: bool) -> None:
        """`is_nested`: in a subdirectory of its draft; `commit` does not make names there durable."""
        self._path, self._reserve, self._sync, self._is_nested = path, reserve, sync, is_nested
        self._rate = rate
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._end = reserve
        self._sent = reserve
        """bytes up to here are on their way to the disk"""

    def write(self, data: durable.Piece) -> None:
        for piece in self._rate.pieces(data):
            self._put(piece, self._end)
            self._end += len(piece)
        if self._sync and self._end - self._sent >= _SEND_BYTES:
            # goes to the disk meanwhile: the fsync at the end has less to wait for
            _sync_file_range(self._fd, self._sent, self._end - self._sent, _WRITE)
            self._sent = self._end

    def write_head(self, head: bytes) -> None:
        check_head(str(self._path), head, self._reserve)
        self._put(head, 0)

    def _put(self, data: durable.Piece, offset: int) -> None:
        view = memoryview(data)
        while view:
            with _mapped(self._path), durable.named(self._path):
                done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def finish(self) -> None:
        if self._sync:
            with _mapped(self._path), durable.named(self._path):
                os.fsync(self._fd)
        self._close()
        if self._is_nested and self._sync:
            with _mapped(self._path):
                durable.sync_directory(self._path.parent)

    def discard(self) -> None:
        self._close()
        with _mapped(self._path):
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
