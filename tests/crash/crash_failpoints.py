"""The register of failpoints: the table in their document. tests/publisher/test_mirror.py kills at those of
mirrors."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "failpoints.md"
FAILPOINTS = tuple(re.findall(r"^\| `([a-z-]+\.[a-z-]+)` \| .+ \|$", _PAGE.read_text(), re.MULTILINE))

_OF_OBJECT_STORES = ("object.", "index.deleted")
_OF_DIRECTORIES = ("version.", "trash.", "prune.moved", "prune.emptying", "prune.deleted", "file.linked")
_APART = ("mirror.", "draft.", "engine.sent")
"""killed at by tests of their own"""


def failpoints_of(channel: str) -> tuple[str, ...]:
    """Those that are passed with a channel in an object store, or in a directory where `channel` is empty."""
    others = (*_APART, *(_OF_DIRECTORIES if channel else _OF_OBJECT_STORES))
    return tuple(name for name in FAILPOINTS if not name.startswith(others))
