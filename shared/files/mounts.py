"""What kind of file system a file lies on. Fields of mountinfo: proc(5)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """`kind`: the kernel's name (`ext4`, `tmpfs`, `nfs4`); `options`: of the mount and of its file system."""

    point: Path
    device: str
    """major:minor"""
    kind: str
    options: frozenset[str]


def file_system(device: int) -> str:
    """The kernel's name for `st_dev`; empty where it cannot be told."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in _mounts() if mount.device == wanted), "")


def mount_of(path: Path) -> Mount | None:
    """Where `path`, which exists, is mounted; None where it cannot be told. Of mounts at one place the last
    one hides the others. Raises OSError."""
    place = path.resolve(strict=True)
    over = [mount for mount in _mounts() if place.is_relative_to(mount.point)]
    deepest = max((len(mount.point.parts) for mount in over), default=0)
    return next((mount for mount in reversed(over) if len(mount.point.parts) == deepest), None)


def _mounts() -> Iterator[Mount]:
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if "-" not in fields[6:]:
            continue
        after = fields[fields.index("-", 6) + 1 :]
        if len(after) >= 2:
            options = frozenset(fields[5].split(",")) | frozenset((after[2:] or [""])[0].split(","))
            yield Mount(Path(_plain(fields[4])), fields[2], after[0], options)


def _plain(field: str) -> str:
    """Blanks and backslashes stand as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
