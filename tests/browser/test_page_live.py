"""The page beside a real publisher and real hosts: they come, stop, fail and recover as one looks on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "publisher"), str(TESTS / "subscriber")]

from live_fleet import LiveFleet, Rollout  # noqa: E402
from tabs import OpenTab  # noqa: E402
from waiting import wait_until  # noqa: E402

from weightcast.shared.cli.main import run as weightcast  # noqa: E402

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
    script = """([key, served, lag]) => {
          const row = document.querySelector(`tr[data-key="${key}"]`);
          const text = (column) => row.querySelector("td." + column).innerText;
          return text("served") === served && text("lag") === lag;
        }"""
    shown = [host["key"], str(host["served_version"]), str(host["lag"])]
    wait_until(lambda: page.evaluate(script, shown), SHOWN_WITHIN_MS / 1000)


def test_hosts_appear_stop_and_recover(fleet: LiveFleet, open_tab: OpenTab) -> None:
    page = open_tab(fleet.url).page
    page.locator("#hosts").get_by_text("No host has reported yet.").wait_for()
    fleet.publish()
    stopping, staying = fleet.join("stopping"), fleet.join("staying")
    stands(page, stopping, "Up to date")
    stands(page, staying, "Up to date")
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
    stands(page, stopping, "Up to date")
    shows_soon(page, in_api(fleet, stopping, lag=0))
    assert figures(page, stopping) == ("4", "0")
    page.get_by_text("4 versions as a table").wait_for()

    channel = str(fleet.places.channel)
    assert weightcast(["channel", "rollback", "--to", "2", "--channel", channel]) == 0
    held = page.locator("[data-held]", has_text="rolled back to version 2 (version 5 has its weights)")
    held.get_by_role("button", name=f"Copy weightcast channel resume --channel {channel}").wait_for()
    page.locator("#figure-latest", has_text="with the weights of version 2").wait_for()
    assert weightcast(["channel", "resume", "--channel", channel]) == 0
    held.wait_for(state="detached")


def test_the_page_outlives_its_publisher(fleet: LiveFleet, open_tab: OpenTab) -> None:
    fleet.publish()
    rollout = fleet.join("rollout")
    tab = open_tab(fleet.url)
    stands(tab.page, rollout, "Up to date")
    port = fleet.url.rpartition(":")[2]
    fleet.publisher.stop()
    tab.page.wait_for_selector('[data-link="lost"]')
    assert figures(tab.page, rollout) == ("1", "0"), "what was known stays"
    fleet.restart_publisher("--port", port)
    tab.page.wait_for_selector('[data-link="live"]')
    fleet.publish()
    shows_soon(tab.page, in_api(fleet, rollout, served_version=2))
    tab.forgive("ERR_", "fetch")


@pytest.fixture
def five(tmp_path: Path) -> Iterator[LiveFleet]:
    with LiveFleet(tmp_path, *BOUNDS, "--keep-versions", "12", "--anchor-every", "8") as running:
        yield running


def test_of_five_hosts_the_dead_and_the_broken_are_named(five: LiveFleet, open_tab: OpenTab) -> None:
    """Half a minute of real time: bounds of presence, and engines that are given time to answer."""
    five.publish(0.008)
    hosts = [five.join(f"rollout-{number}") for number in range(1, 6)]
    page = open_tab(five.url).page
    for host in hosts:
        stands(page, host, "Up to date")
    for seed in range(2):
        five.publish(0.005 + seed * 37 % 11 / 2000)
    dead, broken = hosts[1], hosts[3]
    for host in hosts:
        in_api(five, host, served_version=five.published)
    dead.hold()
    broken.engine.close()
    five.publish(0.006)
    five.publish(0.007)
    stands(page, dead, "Lost")
    shows_soon(page, in_api(five, dead, lag=2))
    api = in_api(five, broken, ready=False)
    trouble = page.locator(f'tr.trouble[data-trouble="{api["host"]}"]', has_text=api["engines"][0]["name"])
    trouble.wait_for(timeout=VISIBLE_SECONDS * 1000)
    assert "does not answer" in trouble.inner_text() and "wake URL" in trouble.inner_text()
    row(page, broken).get_by_role("button").click()
    page.locator("tr.detail").get_by_role("row", name="silent").wait_for()
    page.locator("tr.detail table.updates").get_by_text("not taken by any engine").first.wait_for()
    assert page.locator("tr.host").count() == 5
    assert page.locator("#figure-ready").inner_text().split()[-3:] == ["3", "of", "5"]
