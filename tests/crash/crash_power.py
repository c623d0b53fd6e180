"""Loss of power: what was never synced may be gone, in any mixture.

What this models: a file has the bytes of its last fsync, or those at the loss, or zeros, or a mixture of them
in pages; a file that was never synced may be empty. A directory has the names of its last fsync, or those at
the loss, each name by itself. Renames and links are whole: a name leads to the old file or the new one. What
was fsynced is there. Writes through a mapping count as unsynced.
What it does not: a disk that loses what it called durable, and metadata that a file system orders by itself
(this model forgets more than ext4 or XFS would).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PAGE = 512
"""smaller than a real one, since the files are"""


@dataclass
class Durable:
    """By inode: bytes of files and names in directories as they were synced last."""

    files: dict[int, bytes] = field(default_factory=dict)
    directories: dict[int, Mapping[str, int]] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    """descriptors that keep inodes from being given to other files"""

    @classmethod
    def of(cls, *roots: Path) -> Durable:
        """Everything below counts as synced."""
        found = cls()
        for root in roots:
            for path in (root, *sorted(root.rglob("*"))):
                found.held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
                inode = path.lstat().st_ino
                if path.is_dir():
                    found.directories[inode] = _names(path)
                else:
                    found.files[inode] = path.read_bytes()
        return found

    def close(self) -> None:
        while self.held:
            os.close(self.held.pop())

    def learn(self, record: Path) -> None:
        """What a process synced, as `record_syncs` wrote it down."""
        for line in (record / "log").read_text().splitlines():
            kind, inode, what = json.loads(line)
            if kind == "file":
                self.files[inode] = (record / what).read_bytes()
            else:
                self.directories[inode] = what


def _names(directory: Path) -> dict[str, int]:
    """Name to inode, negative for a directory: what is deleted later can no longer be asked."""
    with os.scandir(directory) as scan:
        return {entry.name: -entry.inode() if entry.is_dir() else entry.inode() for entry in scan}


def record_syncs(record: Path) -> None:
    """In a child, before its work: from now on every fsync is written down in `record`."""
    record.mkdir()
    log = os.open(record / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sync, lock, held = os.fsync, threading.Lock(), []

    def recorded(fd: int) -> None:
        sync(fd)
        with lock:
            held.append(os.dup(fd))
            os.write(log, json.dumps(_synced(fd, record, len(held))).encode() + b"\n")

    os.fsync = recorded


def _synced(fd: int, record: Path, number: int) -> tuple[str, int, object]:
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        return "directory", found.st_ino, _names(Path(f"/proc/self/fd/{fd}"))
    name = f"file-{number}"
    (record / name).write_bytes(Path(f"/proc/self/fd/{fd}").read_bytes())
    return "file", found.st_ino, name


@dataclass
class Loss:
    """One outcome of a loss of power. `strict`: everything unsynced is gone."""

    durable: Durable
    rng: random.Random
    strict: bool

    def strike(self, root: Path) -> None:
        """Puts what is left of `root` in its place."""
        found = {path.lstat().st_ino: path for path in (root, *root.rglob("*"))}
        image = root.with_name(f"{root.name}.image")
        self._directory(root.stat().st_ino, found, image)
        shutil.rmtree(root)
        image.rename(root)

    def _directory(self, inode: int, found: Mapping[int, Path], target: Path) -> None:
        target.mkdir()
        for name, child in self._names(inode, found).items():
            if child < 0:
                self._directory(-child, found, target / name)
            else:
                (target / name).write_bytes(self._bytes(child, found.get(child)))

    def _names(self, inode: int, found: Mapping[int, Path]) -> dict[str, int]:
        path = found.get(inode)
        now = {} if path is None else _names(path)
        old = self.durable.directories.get(inode, {})
        if self.strict:
            return dict(old)
        chosen = {name: (old if self.rng.random() < 0.5 else now).get(name) for name in {**old, **now}}
        return {name: child for name, child in sorted(chosen.items()) if child is not None}

    def _bytes(self, inode: int, path: Path | None) -> bytes:
        old = self.durable.files.get(inode, b"")
        if path is None or self.strict:
            return old
        now = path.read_bytes()
        return now if now == old else self._mixed(old, now)

    def _mixed(self, old: bytes, now: bytes) -> bytes:
        zeros = bytes(len(now))
        whole = self.rng.choice((old, now, zeros, None))
        if whole is not None:
            return whole
        padded = old[: len(now)].ljust(len(now), b"\0")
        pages = range(0, len(now), _PAGE)
        return b"".join(self.rng.choice((padded, now, zeros))[at : at + _PAGE] for at in pages)


def another_boot(local: Path) -> None:
    """The state was written before the machine started again."""
    path = local / ".weightcast" / "state.json"
    if path.exists():
        state = json.loads(path.read_bytes())
        path.write_text(json.dumps({**state, "boot_id": "before the loss"}))
