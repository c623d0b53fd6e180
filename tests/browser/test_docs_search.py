"""Search in the built documentation, opened as files: words as code has them find their pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tabs import OpenTab

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
FIRST = {
    "--take-over": "operations.html",
    "report-to": "security.html",
    "weight-transfer": "engines.html",
    "checkpoint-engine": "comparison.html",
    "min_version": "gate.html",
    "channel.json": "FORMAT.html",
    "/v1/status": "status.html",
    "transfer": "engines.html",
    "roll back": "channel.html",
}
"""a page that is among the first results"""


def test_words_as_code_has_them_find_their_pages(open_tab: OpenTab, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True)
    tab = open_tab((tmp_path / "index.html").as_uri())
    field, results = tab.page.locator("input[name=query]"), tab.page.locator(".md-search-result__item")
    for words, page in FIRST.items():
        field.fill(words)
        field.press("End")  # it listens to keys
        found = results.locator(f"a[href*='{page}']").first
        found.wait_for(state="attached")
        places = results.locator("> a").evaluate_all("all => all.slice(0, 8).map(one => one.href)")
        assert any(page in place for place in places), (words, places)
    assert tab.origins == {"file://"}
