"""A channel in the memory of one process: the twin of the other stores, for tests."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO

from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.store import (
    AlreadyExists,
    Changed,
    Entry,
    NotFound,
    Stat,
    check_key,
    joined,
)


@dataclass
class _Objects:
    """What all views of one store share."""

    address: str
    lock: threading.RLock = field(default_factory=threading.RLock)
    data: dict[str, tuple[bytes, Stat]] = field(default_factory=dict)
    serial: Iterator[int] = field(default_factory=itertools.count)

    def put(self, key: str, data: bytes) -> None:
        if any(taken.startswith(f"{key}/") for taken in self.data) or any(map(self.data.get, _above(key))):
            raise AlreadyExists.at(f"{self.address}/{key}")
        self.data[key] = data, Stat(len(data), time.time_ns(), str(next(self.serial)))


def _above(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


class MemoryStore:
    def __init__(self, address: str = "memory:", prefix: str = "", shared: _Objects | None = None) -> None:
        self._objects = _Objects(address) if shared is None else shared
        self._prefix = prefix

    def place(self, key: str = "") -> str:
        return "/".join(filter(None, (self._objects.address, self._prefix, key)))

    def within(self, prefix: str) -> MemoryStore:
        return MemoryStore("", self._key(prefix), self._objects) if prefix else self

    def present(self) -> bool:
        return not self._prefix or bool(self.names())

    def names(self, prefix: str = "") -> list[str]:
        return [entry.name for entry in self.list(prefix)]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        below = self._key(prefix)
        below = f"{below}/" if below else ""
        with self._objects.lock:
            found = {
                key[len(below) :]: stat
                for key, (_, stat) in self._objects.data.items()
                if key.startswith(below)
            }
        names = {name.partition("/")[0]: found.get(name.partition("/")[0]) for name in found}
        yield from (
            Entry(name, "directory" if stat is None else "file", stat) for name, stat in names.items()
        )

    def stat(self, key: str) -> Stat | None:
        found = self._objects.data.get(self._key(key))
        return None if found is None else found[1]

    def _read(self, key: str) -> bytes:
        found = self._objects.data.get(self._key(key))
        if found is None:
            raise NotFound.at(self.place(key))
        return found[0]

    def read(self, key: str, limit: int) -> bytes:
        data = self._read(key)
        if len(data) > limit:
            raise DamagedFile(
                f"{self.place(key)} exceeds the {limit}-byte limit", remedy="restore it, or remove it"
            )
        return data

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        return self._read(key)[offset : offset + length]

    def open(self, key: str) -> BytesIO:
        return BytesIO(self._read(key))

    def create(self, key: str, data: bytes) -> None:
        with self._objects.lock:
            if self._key(key) in self._objects.data:
                raise AlreadyExists.at(self.place(key))
            self._objects.put(self._key(key), data)

    def replace(
        self,
        key: str,
        data: bytes,
        *,
        expected: bytes | None = None,
        allowed: Callable[[], None] | None = None,
        sync: bool = True,
    ) -> None:
        with self._objects.lock:
            found = self._objects.data.get(self._key(key))
            if expected is not None and (found is None or found[0] != expected):
                raise Changed.at(self.place(key))
            if allowed is not None:
                allowed()
            self._objects.put(self._key(key), data)

    def write(self, key: str, *, reserve: int = 0, sync: bool = True) -> _MemoryWriter:
        if self.stat(key) is not None:
            raise AlreadyExists.at(self.place(key))
        return _MemoryWriter(self, key, reserve)

    def begin(self, draft: str) -> MemoryStore:
        if self.names(draft) or self.stat(draft) is not None:
            raise AlreadyExists.at(self.place(draft))
        return self.within(draft)

    def move(self, source: str, target: str, *, sync: bool = False) -> None:
        with self._objects.lock:
            at, found = self._key(source), self._below(source)
            if not found:
                raise NotFound.at(self.place(source))
            for key in found:
                self._objects.put(self._key(target) + key[len(at) :], self._objects.data[key][0])
                del self._objects.data[key]

    def copy(self, source: str, target: str) -> None:
        with self._objects.lock:
            self.create(target, self._read(source))

    def commit(
        self,
        draft: str,
        name: str,
        index: str,
        data: bytes,
        allowed: Callable[[], None] | None = None,
    ) -> None:
        with self._objects.lock:
            there = self._objects.data.get(self._key(joined(name, index)))
            if there is not None and there[0] == data:
                return
            self.create(joined(draft, index), data)
            if allowed is not None:
                allowed()
            if there is not None:
                raise AlreadyExists.at(self.place(name))
            self.discard(name)
            self.move(draft, name)

    def discard(self, prefix: str) -> None:
        with self._objects.lock:
            for key in self._below(prefix):
                del self._objects.data[key]

    def _below(self, prefix: str) -> Sequence[str]:
        """Keys in the whole store of an object, or of all below a prefix."""
        at = self._key(prefix)
        return [key for key in self._objects.data if key == at or key.startswith(f"{at}/")]

    def delete(self, key: str) -> bool:
        with contextlib.suppress(KeyError):
            del self._objects.data[self._key(key)]
            return True
        return False

    def now(self, prefix: str = "") -> float:
        return time.time()

    def _key(self, key: str) -> str:
        return joined(self._prefix, check_key(key)) if key else self._prefix


class _MemoryWriter:
    def __init__(self, store: MemoryStore, key: str, reserve: int) -> None:
        self._store, self._key, self._reserve = store, key, reserve
        self._data = bytearray(reserve)

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def write_head(self, head: bytes) -> None:
        if len(head) != self._reserve:
            raise DamagedFile(
                f"{self._store.place(self._key)}: header of {len(head)} bytes, {self._reserve} are reserved"
            )
        self._data[: len(head)] = head

    def finish(self) -> None:
        self._store.create(self._key, bytes(self._data))

    def discard(self) -> None:
        self._store.delete(self._key)
