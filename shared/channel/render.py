"""What a version's directory shows without an index being read: which ways lead there, and how long they are.

Sizes as listed are hints for planning. What is taken is checked by the indexes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.layout import ANCHOR, base_of
from weightcast.shared.files.paths import is_link


@dataclass(frozen=True)
class Shown:
    """Bytes, indexes included: of the version's own files; of its deltas from older versions, by base
    version; of the full weights beside it. Only what has an index counts."""

    nbytes: int
    skips: Mapping[int, int] = field(default_factory=dict)
    anchor: int | None = None


def look(directory: Path) -> Shown | None:
    """None for a version without an index, or none at all. Raises OSError."""
    nbytes = _bytes_of(directory)
    if nbytes is None:
        return None
    skips: dict[int, int] = {}
    for name in _directories(directory):
        base_version = base_of(name)
        found = None if base_version is None else _bytes_of(directory / name)
        if base_version is not None and found is not None:
            skips[base_version] = found
    return Shown(nbytes, skips, _bytes_of(directory / ANCHOR))


def _directories(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as scan:
            return [entry.name for entry in scan if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _bytes_of(directory: Path) -> int | None:
    """Of the plain files. None without an index among them, for a link, or where nothing is (any longer)."""
    if is_link(directory):
        return None
    try:
        with os.scandir(directory) as scan:
            sizes = {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in scan
                if entry.is_file(follow_symlinks=False)
            }
    except (FileNotFoundError, NotADirectoryError):
        return None
    return sum(sizes.values()) if INDEX_NAME in sizes else None
