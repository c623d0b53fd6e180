"""Facts of the system: boot, mounts, space."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.files.paths import is_directory

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID = Path("/etc/machine-id")


def system_text(path: Path) -> str:
    """Empty where the file is unreadable."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


IN_MEMORY = ("tmpfs", "ramfs")
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
    """The kernel's name for `st_dev`; empty where unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in _mounts() if mount.device == wanted), "")


def in_memory(path: Path) -> bool:
    """Raises OSError."""
    return file_system(path.stat().st_dev) in IN_MEMORY


def mount_of(path: Path) -> Mount | None:
    """Where `path`, which exists, is mounted; None where unknown. The last of several mounts at one
    path hides the others. Raises OSError."""
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
            # blanks and backslashes are written as octal numbers
            point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
            yield Mount(Path(point), fields[2], after[0], options)


_BLOCK = 512
"""bytes in which stat counts what a file takes, whatever the file system's own blocks are"""


@dataclass(frozen=True)
class Space:
    total_bytes: int
    free_bytes: int
    free_files: int | None
    """None where the file system does not count them"""


def space_of(path: Path) -> Space:
    """Raises OSError."""
    found = os.statvfs(path)
    return Space(
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
        found.f_favail if found.f_files else None,
    )


def taken_bytes(found: os.stat_result) -> int:
    """What the file's blocks take: less than its size where it has holes."""
    return found.st_blocks * _BLOCK


def nearest_directory(path: Path) -> Path:
    """`path`, or the directory above it in which it would be made. Raises OSError."""
    path = path.absolute()
    while not is_directory(path):
        path = path.parent
    return path
