"""Debian's chromium, driven by Playwright: a fresh profile per test, and nothing may go wrong unseen."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

PAGE = Path(__file__).parents[2] / "publisher" / "page"
CHROMIUM = os.environ.get("WEIGHTCAST_CHROMIUM", "chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    found = shutil.which(CHROMIUM)
    if found is None:
        pytest.fail("chromium is missing: apt install chromium, or name it in WEIGHTCAST_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Tab:
    """A browser's window, and what it did that a reader would not see."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """errors and warnings of the console, exceptions"""
    requested: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        self.requested.append(request.url)

    def forgive(self, *texts: str) -> None:
        """Complaints that the test brought about."""
        self.complaints = [each for each in self.complaints if not any(text in each for text in texts)]

    @property
    def origins(self) -> set[str]:
        return {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, self.requested)}


OpenTab = Callable[..., Tab]


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[OpenTab]:
    """`open_tab(url, **context)`: a window of its own profile on that address. In the end none may have
    complained, or have asked anybody else for anything."""
    opened: list[tuple[BrowserContext, Tab]] = []

    def open_it(url: str, **options: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(30_000)
        tab = Tab(context.new_page())
        opened.append((context, tab))
        tab.listen()
        tab.page.goto(url)
        return tab

    yield open_it
    for context, _ in opened:
        context.close()
    for _, tab in opened:
        assert tab.complaints == []
        assert len(tab.origins) == 1, tab.origins


@pytest.fixture
def pictures() -> Path | None:
    """Where pictures for the README are written, if anywhere."""
    named = os.environ.get("WEIGHTCAST_PICTURES")
    return None if named is None else Path(named)


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
