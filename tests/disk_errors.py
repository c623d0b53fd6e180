"""A disk that fails at chosen failpoints, for processes that go on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.shared.base import failpoints


@dataclass
class Disk:
    """Fails at the `number`-th failpoint that touches it (from 1) and at `lasting` more behind that."""

    number: int
    lasting: int
    elsewhere: tuple[str, ...]
    """how the failpoints begin that no disk has a part in"""
    code: int = errno.EIO
    passed: int = 0
    failed_at: list[str] = field(default_factory=list)

    def __call__(self, name: str, where: Path | None) -> None:
        if name.startswith(self.elsewhere):
            return
        self.passed += 1
        if self.number <= self.passed <= self.number + self.lasting:
            self.failed_at.append(name if where is None else f"{name} {where.name}")
            raise OSError(self.code, "the disk failed")


@contextmanager
def watched(watcher: failpoints.Watcher) -> Iterator[None]:
    failpoints.watch(watcher)
    try:
        yield
    finally:
        failpoints.watch(None)
