"""The README's table of settings and its links are those of the code and the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_settings_table_is_the_codes() -> None:
    made = subprocess.run(
        [sys.executable, "docs/make_settings.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert made.count("| `--") > 20
    assert made in (ROOT / "README.md").read_text(), "run python docs/make_settings.py and paste its output"


DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md")
FOLDERS = "benchmarks|deploy|docs|examples|publisher|shared|subscriber|tests"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)", document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
