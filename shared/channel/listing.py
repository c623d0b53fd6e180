"""What a listing of a version's directory shows: which ways lead to the version, and their sizes.

Listed sizes are hints for planning; what is read is checked against the indexes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.channel.layout import ANCHOR, base_of
from weightcast.shared.channel.store import Store


@dataclass(frozen=True)
class Shown:
    """Bytes, indexes included: of the version's own files; of its deltas from older versions, by base
    version; of the anchor. Only directories with an index count."""

    nbytes: int
    skips: Mapping[int, int] = field(default_factory=dict)
    anchor: int | None = None


def look(files: Store) -> Shown | None:
    """Of a version's directory; None where it has no index. Raises StoreError."""
    nbytes, directories = _bytes_of(files)
    if nbytes is None:
        return None
    skips: dict[int, int] = {}
    for name in directories:
        base_version = base_of(name)
        found = None if base_version is None else _bytes_of(files.within(name))[0]
        if base_version is not None and found is not None:
            skips[base_version] = found
    return Shown(nbytes, skips, _bytes_of(files.within(ANCHOR))[0] if ANCHOR in directories else None)


def _bytes_of(files: Store) -> tuple[int | None, list[str]]:
    """Of the files, None without an index among them; and the names of the directories."""
    entries = list(files.list())
    sizes = {entry.name: entry.stat.size for entry in entries if entry.stat is not None}
    directories = [entry.name for entry in entries if entry.kind == "directory"]
    return sum(sizes.values()) if INDEX_NAME in sizes else None, directories
