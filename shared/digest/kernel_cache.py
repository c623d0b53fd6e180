"""Where compiled kernels are kept: a private directory per release, sources and CPU.

What lies there is code that will run, so a directory is used only if it belongs to this user and nobody else
may write to it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightcast.shared.files.entries import exists

CACHE_VARIABLE = "WEIGHTCAST_CACHE"
COMPLETE = "complete"
"""lies there when everything that warming up needs was kept"""
_SOURCES = (
    "digest/*native*.py",
    "digest/compiled.py",
    "digest/lanes.py",
    "codec/*native*.py",
    "codec/contexts.py",
    "codec/rice.py",
)


def cache_directory(environment: Mapping[str, str], cpu: str) -> Path | None:
    """The first place that can be used, made if need be: $WEIGHTCAST_CACHE, $XDG_CACHE_HOME/weightcast,
    ~/.cache/weightcast, a directory of this user in the temporary directory. None: there is no such place.
    What lacks nothing need not be writable, as in an image that is mounted read-only. `cpu`: name and
    features."""
    for place in _places(environment):
        try:
            found = _private(place / f"kernels-{key(cpu)}")
        except OSError:
            continue
        if found is not None:
            return found
    return None


def key(cpu: str) -> str:
    """Changes with every source of a kernel: numba itself looks only at the file that holds the function, not
    at what that calls."""
    room = Path(__file__).parent.parent
    text = hashlib.blake2b(cpu.encode(), digest_size=8)
    for pattern in _SOURCES:
        for source in sorted(room.glob(pattern)):
            text.update(source.name.encode() + b"\0" + source.read_bytes())
    return text.hexdigest()


def _places(environment: Mapping[str, str]) -> Iterator[Path]:
    if environment.get(CACHE_VARIABLE):
        yield Path(environment[CACHE_VARIABLE])
    if environment.get("XDG_CACHE_HOME"):
        yield Path(environment["XDG_CACHE_HOME"]) / "weightcast"
    if environment.get("HOME"):
        yield Path(environment["HOME"]) / ".cache" / "weightcast"
    yield Path(tempfile.gettempdir()) / f"weightcast-{os.getuid()}"


def _private(directory: Path) -> Path | None:
    """Both the directory and the one above it: whoever may write there could put another in its place."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in (directory.parent, directory):
        found = one.lstat()
        foreign = found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if foreign or not stat.S_ISDIR(found.st_mode):
            return None
    if os.access(directory, os.W_OK | os.X_OK):
        return directory
    return directory if exists(directory / COMPLETE) else None
