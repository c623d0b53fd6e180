"""The store of a channel: the only way in which code above this room reads or writes a channel's objects.

Keys are relative POSIX names (`weight_v000007/model.safetensors.index.json`). `DirectoryStore` is a mounted
directory, `ObjectStore` a bucket; docs/stores-interface.md says what each verb promises, what the
commit point of each store is, and what a killed writer leaves behind.

StoreError (also an OSError)         a step fails and is tried again; `exit_code` 3 where that cannot help
├── NotFound       (FileNotFoundError)   no object has this key, or none can be seen yet
├── AlreadyExists  (FileExistsError)     the key is taken; what is there is untouched
├── Changed                              the object is not the expected one any more
└── Unavailable                          the store fails, refuses access or cannot be reached

DamagedFile: a key that leads out of the channel, an object above the size limit, a link or special file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import DamagedFile, on_error
from weightcast.shared.files.disk_errors import DiskError, disk_remedy, disk_text, is_lasting
from weightcast.shared.files.durable import Piece
from weightcast.shared.files.paths import file_name

TRASH = ".trash"
"""below it is what nobody sees any more"""
POLLED_BYTES = 64
"""of an object that is remembered, and asked for by its tag: a pointer or a tag"""
_DEPTH = 16
"""directories within directories"""

Kind = Literal["file", "directory", "other"]
"""other: a link or a special file; nothing reads it"""


class StoreError(DiskError, OSError):
    """An OSError too, with `errno` and `filename`: one handler serves a channel and a local disk."""

    def __init__(self, message: str, code: int, place: str, *, remedy: str, lasting: bool = False) -> None:
        super().__init__(message, remedy=remedy, lasting=lasting)
        self.errno, self.strerror, self.filename = code, os.strerror(code), place


class NotFound(StoreError, FileNotFoundError):
    @classmethod
    def at(cls, place: str) -> NotFound:
        remedy = "check that the channel is mounted; `weightcast channel verify` lists missing files"
        return cls(f"{place} does not exist", errno.ENOENT, place, remedy=remedy)


class AlreadyExists(StoreError, FileExistsError):
    @classmethod
    def at(cls, place: str) -> AlreadyExists:
        remedy = "remove it, or stop the other writer of this channel"
        return cls(f"{place} already exists", errno.EEXIST, place, remedy=remedy, lasting=True)


class Changed(StoreError):
    @classmethod
    def at(cls, place: str) -> Changed:
        remedy = "stop the other writer of this channel; the next attempt reads it again"
        return cls(f"{place} was changed by another writer", errno.EBUSY, place, remedy=remedy)


class Unavailable(StoreError):
    pass


def store_error(error: OSError, place: str) -> StoreError:
    """What a call on the file system that holds `place` means to the caller of a store."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFound.at(place)
    if isinstance(error, FileExistsError):
        return AlreadyExists.at(place)
    return unavailable(error, place)


def unavailable(error: OSError, place: str) -> Unavailable:
    kept = Unavailable(
        disk_text(error, place),
        error.errno or errno.EIO,
        error.filename or place,
        remedy=disk_remedy(error),
        lasting=is_lasting(error),
    )
    for note in getattr(error, "__notes__", ()):
        kept.add_note(note)
    return kept


def denied(place: str, remedy: str, request: str = "") -> Unavailable:
    """`request`: its method, or the reason."""
    text = f"access to {place} was denied{f' ({request})' if request else ''}"
    return Unavailable(text, errno.EACCES, place, remedy=remedy, lasting=True)


def failed(place: str, reason: str, remedy: str, *, lasting: bool = False) -> Unavailable:
    return Unavailable(f"{place}: {reason}", errno.EIO, place, remedy=remedy, lasting=lasting)


def too_large(place: str, limit: int) -> DamagedFile:
    return DamagedFile(f"{place} exceeds the {limit}-byte limit", remedy="restore it, or remove it")


def check_head(place: str, head: bytes, reserve: int) -> None:
    """Raises DamagedFile for a head that does not fill the room that was reserved."""
    if len(head) != reserve:
        raise DamagedFile(f"{place}: header of {len(head)} bytes, {reserve} are reserved")


def bad_certificate(place: str, reason: str) -> Unavailable:
    return Unavailable(
        f"{place}: the server's certificate is not valid{reason}",
        errno.EACCES,
        place,
        remedy="set SSL_CERT_FILE to the CA's certificates; use a name that the certificate has",
        lasting=True,
    )


@dataclass(frozen=True)
class Stat:
    """`size` in bytes; `written_ns`: unix time in nanoseconds by the store's clock; `tag` changes with the
    object."""

    size: int
    written_ns: int
    tag: str

    @property
    def written(self) -> float:
        """Unix time in seconds."""
        return self.written_ns / 1e9


@dataclass(frozen=True)
class Entry:
    """One name below a prefix. `stat`: of a file, else None."""

    name: str
    kind: Kind
    stat: Stat | None = None


Pieces = Generator[Piece, None, None]


class Writer(Protocol):
    """A large object that is being written. It counts once `finish` returned; `discard` leaves nothing."""

    def write(self, data: Piece) -> None:
        """Appends, after the room that was reserved at the beginning."""

    def write_head(self, head: bytes) -> None:
        """Fills the reserved room: exactly as many bytes."""

    def finish(self) -> None:
        """Makes the object durable, unless it was begun without `sync`."""

    def discard(self) -> None: ...


@runtime_checkable
class Store(Protocol):
    """Objects of a channel, or of a directory within it. Safe for several threads. A store makes the
    directories that its keys need, never its own: nothing is written where a mount or an attempt is gone.
    Stores at one place are equal."""

    component: str = MAIN
    """of the run whose channel is here, as `component_store` sets it"""
    renames: bool = False
    """Whether `commit` renames what is below a draft. Otherwise the files of a version are written where they
    stay, under names that no other attempt has, and become visible with their index."""
    is_static: bool = False
    """Whether only objects of known names can be read, as over plain HTTP: listing, writing raise Refused."""

    was_opened: bool = False
    """Whether this process has seen the run's channel here."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place()!r})"

    def __str__(self) -> str:
        return self.place()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and other.place() == self.place()

    def __hash__(self) -> int:
        return hash(self.place())

    def place(self, key: str = "") -> str:
        """Where the object is, for messages: a path or a URL."""

    def within(self, prefix: str) -> Store:
        """The same objects, with keys relative to `prefix`."""

    def present(self) -> bool:
        """Whether anything can be there: False for a directory that is not mounted or not made yet. Raises
        Refused for a file in its place."""
        return True

    def names(self, prefix: str = "") -> list[str]:
        """One level below `prefix`, unsorted; empty where nothing is. A listing may be incomplete: nothing
        that matters is decided by a name that is absent."""
        return [entry.name for entry in self.list(prefix)]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """As `names`, with the facts of each."""

    def stat(self, key: str) -> Stat | None:
        """None where no file has this key."""

    def read(self, key: str, limit: int) -> bytes:
        """A whole object of at most `limit` bytes. Raises NotFound, DamagedFile, Unavailable, and RetryLater
        for an object whose size keeps changing."""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on, fewer only at the end of the object."""

    def pieces(self, key: str) -> Pieces:
        """Streams a large object, in order. Raises NotFound, DamagedFile, Unavailable; for a missing object
        when the first piece is asked for."""

    def create(self, key: str, data: bytes) -> None:
        """Makes a small object, durable, at once. Exactly one of several creators succeeds; the others get
        AlreadyExists."""

    def replace(
        self,
        key: str,
        data: bytes,
        *,
        expected: bytes | None = None,
        allowed: Callable[[], None] | None = None,
        sync: bool = True,
    ) -> None:
        """Makes or replaces a small object at once: readers see the old bytes or the new ones. `expected`:
        raises Changed unless the object has these bytes. `allowed` is called last, and may raise. `sync`:
        waits until it is durable."""

    def write(self, key: str, *, reserve: int = 0, sync: bool = True) -> Writer:
        """Begins a large object at a key that is not taken. `reserve`: bytes at its beginning that are
        written last; `sync`: whether `finish` waits until it is durable."""

    def upload(self, key: str, pieces: Iterable[Piece]) -> None:
        """Makes a large object, durable, at a key that is not taken. What `pieces` raises leaves nothing."""
        writer = self.write(key)
        with on_error(writer.discard):
            for piece in pieces:
                writer.write(piece)
            writer.finish()

    def begin(self, draft: str) -> Store:
        """A prefix for objects that nobody sees before `commit`. Leftovers are found by their name.
        Raises AlreadyExists where the name is taken, NotFound where the directory that it is in is gone."""

    def move(self, source: str, target: str, *, sync: bool = False) -> None:
        """Gives an object, or everything below a prefix, another key, in place of an object that has it.
        `sync`: waits until it is durable. Raises NotFound where nothing is."""

    def copy(self, source: str, target: str) -> None:
        """Keeps the bytes of an object below a second key that is free, as cheaply as the store can. Raises
        NotFound and AlreadyExists."""

    def commit(
        self,
        draft: str,
        name: str,
        index: str,
        data: bytes,
        allowed: Callable[[], None] | None = None,
    ) -> None:
        """Everything below `draft`, and `data` as its object `index`, becomes visible below `name`, at once,
        durable. A store that does not rename only creates the index. `allowed` is called last, and may raise.
        Raises AlreadyExists where `name` has an `index` with other bytes; a commit whose answer was lost may
        be repeated."""

    def discard(self, prefix: str) -> None:
        """Deletes everything below `prefix`, out of sight first: nobody finds half of it."""

    def delete(self, key: str) -> bool:
        """Deletes an object, durable, or a directory that is empty. False where there is none."""

    def ignored(self) -> str:
        """Which condition of a write this store ignores, tried with an object that is removed again; empty:
        none. Two publishers are not kept apart there. File systems are tried before they are used."""
        return ""

    def now(self, prefix: str = "") -> float:
        """Unix time by the clock that dates objects. Raises StoreError where no clock can be read."""


def check_key(key: str) -> str:
    """`key`, if it names something below a store's root. Raises DamagedFile."""
    parts = key.split("/")
    if len(parts) > _DEPTH:
        raise DamagedFile(
            f"key {key[:80]!r} has more than {_DEPTH} levels",
            remedy="restore the file that contains it; nothing was read through it",
        )
    for part in parts:
        file_name(part)
    return key


def read_if_there(store: Store, key: str, limit: int) -> bytes | None:
    """As `Store.read`; None where no object has the key."""
    try:
        return store.read(key, limit)
    except NotFound:
        return None


def joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
