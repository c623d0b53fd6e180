"""System calls that fail below a directory, in this process: what a file system refuses, without one.

Most calls are met by an audit hook, which stays for the life of the process and does nothing outside of
`failing`. Those that Python does not audit are wrapped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_EVENTS = {
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.link": "link",
    "os.remove": "unlink",
    "os.rmdir": "rmdir",
    "os.listdir": "listdir",
    "os.scandir": "listdir",
    "os.truncate": "truncate",
    "os.chmod": "chmod",
    "fcntl.flock": "flock",
    "mmap.__new__": "mmap",
}
_BY_DESCRIPTOR = ("fsync", "write", "pwrite", "posix_fallocate")
_BY_PATH = ("stat", "lstat", "statvfs")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CALLS = ("open", "create", *dict.fromkeys(_EVENTS.values()), *_BY_DESCRIPTOR, "stat", "statvfs")


@dataclass
class Failure:
    """Of the call `name` on what lies below `directory`, the directory itself included."""

    name: str
    directory: Path
    errno: int
    met: int = 0
    """how often it was called"""
    _inside: bool = field(default=False, repr=False)

    def meet(self, name: str, *where: object) -> None:
        if name != self.name or self._inside:
            return
        self._inside = True
        try:
            hit = any(map(self._is_below, where))
        finally:
            self._inside = False
        if hit:
            self.met += 1
            paths = [os.fsdecode(one) for one in where if isinstance(one, (str, bytes, os.PathLike))]
            names = (paths[0], None, paths[1]) if len(paths) > 1 else tuple(paths)
            raise OSError(self.errno, os.strerror(self.errno), *names)

    def _is_below(self, where: object) -> bool:
        if isinstance(where, int):
            try:
                path = os.readlink(f"/proc/self/fd/{where}")
            except OSError:
                return False
        elif isinstance(where, (str, bytes, os.PathLike)):
            path = os.path.abspath(os.fsdecode(where))
        else:
            return False
        return (path + os.sep).startswith(str(self.directory) + os.sep)


_current: Failure | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _current is None:
        return
    if event == "open":
        path, _, flags = arguments
        _current.meet("create" if flags & _WRITING else "open", path)
    elif event in _EVENTS:
        two = event in ("os.rename", "os.link")
        _current.meet(_EVENTS[event], *arguments[: 1 + two])


sys.addaudithook(_audit)


def _wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    called = "stat" if name == "lstat" else name

    def call(where: Any, *arguments: Any, **more: Any) -> Any:
        if _current is not None:
            _current.meet(called, where)
        return real(where, *arguments, **more)

    return call


@contextmanager
def failing(name: str, directory: Path, errno: int) -> Iterator[Failure]:
    global _current
    with ExitStack() as stack:
        for one in (*_BY_DESCRIPTOR, *_BY_PATH):
            stack.enter_context(mock.patch.object(os, one, _wrapped(one, getattr(os, one))))
        _current = Failure(name, directory, errno)
        try:
            yield _current
        finally:
            _current = None
