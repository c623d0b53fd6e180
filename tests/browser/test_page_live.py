"""The page beside a real publisher and real hosts: they come, stop, fail and recover as one looks on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "publisher"), str(TESTS / "subscriber")]

from live_fleet import LiveFleet, Rollout, wait_until  # noqa: E402
from tabs import OpenTab  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

SHOWN_WITHIN_MS = 2000
"""from the API to the page"""
BOUNDS = ("--stale-seconds", "6", "--lost-seconds", "9")
VISIBLE_SECONDS = 60
"""until a host that was told of is there, on a machine with other work"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LiveFleet]:
    with LiveFleet(tmp_path, *BOUNDS) as running:
        yield running


def row(page: Page, rollout: Rollout) -> Locator:
    return page.locator(f'tr.host[data-local="{rollout.local}"]')


def figures(page: Page, rollout: Rollout) -> tuple[str, str]:
    found = row(page, rollout)
    return found.locator("td.served").inner_text(), found.locator("td.lag").inner_text()


def stands(page: Page, rollout: Rollout, word: str) -> None:
    row(page, rollout).locator(".badge", has_text=word).wait_for(timeout=VISIBLE_SECONDS * 1000)


def in_api(fleet: LiveFleet, rollout: Rollout, **expected: Any) -> dict[str, Any]:
    def met() -> dict[str, Any] | None:
        host = fleet.host(rollout)
        if host is None or any(host[name] != value for name, value in expected.items()):
            return None
        return host

    found: dict[str, Any] = wait_until(met, VISIBLE_SECONDS)
    return found


def shows_soon(page: Page, host: dict[str, Any]) -> None:
    """The page says of a host what the API says, within the bound."""
    page.wait_for_function(
        """([key, served, lag]) => {
          const row = document.querySelector(`tr[data-key="${key}"]`);
          const text = (column) => row.querySelector("td." + column).innerText;
          return text("served") === served && text("lag") === lag;
        }""",
        arg=[host["key"], str(host["served_version"]), str(host["lag"])],
        timeout=SHOWN_WITHIN_MS,
    )


def test_hosts_appear_stop_and_recover(fleet: LiveFleet, open_tab: OpenTab) -> None:
    page = open_tab(fleet.url).page
    page.locator("#hosts").get_by_text("No host has reported yet.").wait_for()
    fleet.publish()
    stopping, staying = fleet.join("stopping"), fleet.join("staying")
    stands(page, stopping, "Ready")
    stands(page, staying, "Ready")
    assert figures(page, stopping) == ("1", "0")

    stopping.hold()
    for _ in range(3):
        fleet.publish()
    shows_soon(page, in_api(fleet, stopping, lag=3))
    assert figures(page, stopping) == ("1", "3")
    stands(page, stopping, "Stale")
    stands(page, stopping, "Lost")
    shows_soon(page, in_api(fleet, stopping, presence="lost"))

    stopping.go_on()
    stands(page, stopping, "Ready")
    shows_soon(page, in_api(fleet, stopping, lag=0))
    assert figures(page, stopping) == ("4", "0")
    page.get_by_text("4 versions as a table").wait_for()


def test_the_page_outlives_its_publisher(fleet: LiveFleet, open_tab: OpenTab) -> None:
    fleet.publish()
    rollout = fleet.join("rollout")
    tab = open_tab(fleet.url)
    stands(tab.page, rollout, "Ready")
    port = fleet.url.rpartition(":")[2]
    fleet.publisher.stop()
    tab.page.wait_for_selector('[data-link="lost"]')
    assert figures(tab.page, rollout) == ("1", "0"), "what was known stays"
    fleet.restart_publisher("--port", port)
    tab.page.wait_for_selector('[data-link="live"]')
    fleet.publish()
    shows_soon(tab.page, in_api(fleet, rollout, served_version=2))
    tab.forgive("ERR_", "fetch")
