"""How much a file system still takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.files.disk_errors import NoRoom
from weightcast.shared.files.entries import is_directory

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


def require_free(directory: Path, nbytes: int, work: str) -> None:
    """Before anything is written. Raises NoRoom when `work` needs more than there is, and OSError."""
    free = space_of(directory).free_bytes
    if free < nbytes:
        raise NoRoom(
            f"{directory}: {free / (1 << 20):.1f} MiB free, {work} needs {nbytes / (1 << 20):.1f} MiB",
            remedy="free space on the local disk; nothing was changed",
        )
