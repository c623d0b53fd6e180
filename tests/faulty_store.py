"""A store that misbehaves as real ones do: for tests of what reads and writes through it."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from weightcast.shared.channel.store import (
    Changed,
    Entry,
    NotFound,
    Pieces,
    Stat,
    Store,
    Unavailable,
    Writer,
    joined,
)

Fault = Literal[
    "late",  # an object that exists cannot be seen yet
    "stale",  # the object as it was before it was last replaced
    "torn",  # a listing lacks its newest half
    "changed",  # another writer was faster
    "unavailable",  # the request fails
    "slow",  # it takes `seconds`
    "cut",  # the body ends early
    "lost",  # it is done, and the answer never arrives
    "wrong",  # one byte of the body is another
]
_T = TypeVar("_T")


@dataclass
class _Script:
    """What all views of one store share."""

    faults: dict[tuple[str, str], deque[Fault]] = field(default_factory=dict)
    """by verb and key; each is used once"""
    before: dict[str, bytes] = field(default_factory=dict)
    """objects before they were last replaced, by key"""


class FaultyStore(Store):
    def __init__(
        self,
        inner: Store,
        prefix: str = "",
        script: _Script | None = None,
        *,
        seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner, self._prefix, self.component = inner, prefix, inner.component
        self.renames, self.is_static = inner.renames, inner.is_static
        self._script = _Script() if script is None else script
        self._seconds, self._sleep = seconds, sleep

    def fail(self, verb: str, key: str, *faults: Fault) -> None:
        """The next calls of `verb` for `key`, one fault each; `key`: relative to the whole channel, with `*`
        for what is random in it."""
        self._script.faults.setdefault((verb, key), deque()).extend(faults)

    @property
    def unused(self) -> bool:
        """Whether a fault was never met."""
        return any(self._script.faults.values())

    def _fault(self, verb: str, key: str) -> Fault | None:
        whole = joined(self._prefix, key) if key else self._prefix
        fitting = (
            faults
            for (called, pattern), faults in self._script.faults.items()
            if called == verb and faults and fnmatchcase(whole, pattern)
        )
        waiting = next(fitting, None)
        fault = waiting.popleft() if waiting else None
        if fault == "slow":
            self._sleep(self._seconds)
        if fault == "unavailable":
            raise self._unavailable(key)
        if fault == "late":
            raise NotFound.at(self.place(key))
        if fault == "changed":
            raise Changed.at(self.place(key))
        return fault

    def _unavailable(self, key: str) -> Unavailable:
        place = self.place(key)
        return Unavailable(f"{place}: 503 slow down", errno.EIO, place, remedy="try again later")

    def _done(self, fault: Fault | None, key: str, result: _T) -> _T:
        if fault == "lost":
            raise self._unavailable(key)
        return result

    def _body(self, fault: Fault | None, key: str, data: bytes) -> bytes:
        if fault == "stale":
            return self._script.before.get(joined(self._prefix, key), data)
        if fault == "cut":
            return data[: len(data) // 2]
        if fault == "wrong":
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    def place(self, key: str = "") -> str:
        return self._inner.place(key)

    def within(self, prefix: str) -> FaultyStore:
        inner = self._inner.within(prefix)
        place = joined(self._prefix, prefix) if prefix else self._prefix
        return FaultyStore(inner, place, self._script, seconds=self._seconds, sleep=self._sleep)

    def present(self) -> bool:
        self._fault("present", "")
        return self._inner.present()

    def names(self, prefix: str = "") -> list[str]:
        fault, names = self._fault("names", prefix), sorted(self._inner.names(prefix))
        return names[: len(names) // 2] if fault == "torn" else names

    def list(self, prefix: str = "") -> Iterator[Entry]:
        fault = self._fault("list", prefix)
        entries = sorted(self._inner.list(prefix), key=lambda entry: entry.name)
        return iter(entries[: len(entries) // 2] if fault == "torn" else entries)

    def stat(self, key: str) -> Stat | None:
        try:
            self._fault("stat", key)
        except NotFound:
            return None
        return self._inner.stat(key)

    def read(self, key: str, limit: int) -> bytes:
        return self._body(self._fault("read", key), key, self._inner.read(key, limit))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        return self._body(self._fault("read_range", key), key, self._inner.read_range(key, offset, length))

    def pieces(self, key: str) -> Pieces:
        fault = self._fault("pieces", key)
        if fault is None:
            yield from self._inner.pieces(key)
        else:
            yield self._body(fault, key, _all(self._inner, key))

    def create(self, key: str, data: bytes) -> None:
        fault = self._fault("create", key)
        self._done(fault, key, self._inner.create(key, data))

    def replace(
        self,
        key: str,
        data: bytes,
        *,
        expected: bytes | None = None,
        allowed: Callable[[], None] | None = None,
        sync: bool = True,
    ) -> None:
        fault = self._fault("replace", key)
        if self._inner.stat(key) is not None:
            self._script.before[joined(self._prefix, key)] = _all(self._inner, key)
        self._done(fault, key, self._inner.replace(key, data, expected=expected, allowed=allowed, sync=sync))

    def write(self, key: str, *, reserve: int = 0, sync: bool = True) -> Writer:
        self._fault("write", key)
        return self._inner.write(key, reserve=reserve, sync=sync)

    def upload(self, key: str, pieces: Iterable[bytes | memoryview]) -> None:
        fault = self._fault("upload", key)
        self._done(fault, key, self._inner.upload(key, pieces))

    def begin(self, draft: str) -> Store:
        fault = self._fault("begin", draft)
        return self._done(fault, draft, self._inner.begin(draft))

    def move(self, source: str, target: str, *, sync: bool = False) -> None:
        fault = self._fault("move", source)
        self._done(fault, source, self._inner.move(source, target, sync=sync))

    def copy(self, source: str, target: str) -> None:
        fault = self._fault("copy", source)
        self._done(fault, source, self._inner.copy(source, target))

    def commit(
        self,
        draft: str,
        name: str,
        index: str,
        data: bytes,
        allowed: Callable[[], None] | None = None,
    ) -> None:
        fault = self._fault("commit", name)
        self._done(fault, name, self._inner.commit(draft, name, index, data, allowed))

    def discard(self, prefix: str) -> None:
        fault = self._fault("discard", prefix)
        self._done(fault, prefix, self._inner.discard(prefix))

    def delete(self, key: str) -> bool:
        fault = self._fault("delete", key)
        return self._done(fault, key, self._inner.delete(key))

    def ignored(self) -> str:
        return self._inner.ignored()

    def now(self, prefix: str = "") -> float:
        self._fault("now", prefix)
        return self._inner.now(prefix)


def _all(store: Store, key: str) -> bytes:
    return b"".join(store.pieces(key))
