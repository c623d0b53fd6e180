"""The table of settings is the code's; links and named files of the documents exist."""

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
    page = (ROOT / "docs" / "settings.md").read_text()
    assert made == page, "run: python docs/make_settings.py > docs/settings.md"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


DOCUMENTS = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md")
FOLDERS = "benchmarks|deploy|docs|examples|publisher|shared|subscriber|tests"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]++)(?!\*)", document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for path, _, anchor in re.findall(r"\]\(([^)#:\s]*)(#([\w-]+))?\)", document.read_text()):
            there = document.parent / path if path else document
            assert there.exists(), f"{document.name}: {path}"
            assert not anchor or anchor in anchors(there), f"{document.name}: {path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of titles."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_list_of_pages_has_every_page() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    pages = [
        path.name
        for path in (ROOT / "docs").glob("*.md")
        if not path.name.startswith(("README", "benchmarks-"))
    ]
    assert [name for name in pages if f"({name})" not in listed] == []


def test_the_text_for_package_indexes_links_nowhere_relative() -> None:
    links = re.findall(r"\]\(([^)]*)\)", (ROOT / "deploy" / "package.md").read_text())
    assert [link for link in links if not link.startswith("https://")] == []
