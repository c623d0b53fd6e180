"""Whether something has a name, and what it is.

Path.exists and its like answer "no" from Python 3.14 on where a file system fails, Path.glob from 3.13 on.
These raise the error: a disk that fails is never taken for a file that is missing.
"""

from __future__ import annotations

import os
import stat
from errno import EBADF, ELOOP, ENOENT, ENOTDIR
from fnmatch import fnmatchcase
from pathlib import Path

_MISSING = frozenset({ENOENT, ENOTDIR, EBADF, ELOOP})


def exists(path: Path) -> bool:
    """A link counts as what it leads to. Raises OSError, as all of these do."""
    return _mode(path) is not None


def is_directory(path: Path) -> bool:
    """A directory, or a link to one."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_own_directory(path: Path) -> bool:
    """A directory, and no link to one."""
    mode = _mode(path, follow_symlinks=False)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: Path) -> bool:
    """A regular file, or a link to one."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_link(path: Path) -> bool:
    """A symbolic link, whether or not it leads anywhere."""
    mode = _mode(path, follow_symlinks=False)
    return mode is not None and stat.S_ISLNK(mode)


def matching(directory: Path, pattern: str) -> list[Path]:
    """Entries whose names match a shell's `pattern`, sorted; none where there is no directory."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in sorted(names) if fnmatchcase(name, pattern)]


def _mode(path: Path, follow_symlinks: bool = True) -> int | None:
    try:
        return os.stat(path, follow_symlinks=follow_symlinks).st_mode
    except ValueError:
        return None  # a name that no file can have
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise
