"""The README's table of settings and its links are those of the code and the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_settings_table_is_the_codes() -> None:
    made = subprocess.run(
        [sys.executable, "docs/make_settings.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert made.count("| `--") > 20
    assert made in (ROOT / "README.md").read_text(), "run python docs/make_settings.py and paste its output"


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
