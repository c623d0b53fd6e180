"""Debian's chromium, driven by Playwright, for fixtures of any room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

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
WAIT_MS = 30_000


@contextmanager
def chromium() -> Iterator[Browser]:
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


@contextmanager
def tabs(browser: Browser) -> Iterator[OpenTab]:
    """`open_tab(url, **context)`: a window of its own profile on that address. In the end none may have
    complained, or have asked anybody else for anything."""
    opened: list[tuple[BrowserContext, Tab]] = []

    def open_tab(url: str, **options: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(WAIT_MS)
        tab = Tab(context.new_page())
        opened.append((context, tab))
        tab.listen()
        tab.page.goto(url)
        return tab

    try:
        yield open_tab
    finally:
        for context, _ in opened:
            context.close()
    for _, tab in opened:
        assert tab.complaints == []
        assert len(tab.origins) == 1, tab.origins
