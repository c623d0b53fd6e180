"""The register of failpoints: the table in their document."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "failpoints.md"
FAILPOINTS = tuple(re.findall(r"^\| `([a-z-]+\.[a-z-]+)` \| .+ \|$", _PAGE.read_text(), re.MULTILINE))
