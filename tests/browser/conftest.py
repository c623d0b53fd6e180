from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tabs import OpenTab, chromium, tabs

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE = Path(__file__).parents[2] / "publisher" / "page"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[OpenTab]:
    with tabs(browser) as opening:
        yield opening


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's folder, built anew elsewhere from what the lock file names."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here")
    place = tmp_path_factory.mktemp("built") / "page"
    shutil.copytree(PAGE, place, ignore=shutil.ignore_patterns("node_modules", "dist"))
    for command in (["npm", "ci"], ["npm", "run", "build"]):
        done = subprocess.run(command, check=False, cwd=place, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    return place
