"""The page beside a real publisher and real hosts: they come, stop, fail and recover as one looks on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "publisher"), str(TESTS / "subscriber")]

from live_fleet import LiveFleet, Rollout, wait_until  # noqa: E402

if TYPE_CHECKING:
    from conftest import OpenTab
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

SHOWN_WITHIN_MS = 2000
"""from the API to the page"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LiveFleet]:
    with LiveFleet(tmp_path, "--stale-seconds", "6", "--lost-seconds", "10") as running:
        yield running


def row(page: Page, rollout: Rollout) -> Locator:
    return page.locator(f'tr.host[data-local="{rollout.local}"]')


def figures(page: Page, rollout: Rollout) -> tuple[str, str]:
    found = row(page, rollout)
    return found.locator("td.served").inner_text(), found.locator("td.lag").inner_text()


def stands(page: Page, rollout: Rollout, word: str) -> None:
    row(page, rollout).locator(".badge", has_text=word).wait_for(timeout=60_000)


def in_api(fleet: LiveFleet, rollout: Rollout, **expected: Any) -> dict[str, Any]:
    def met() -> dict[str, Any] | None:
        host = fleet.host(rollout)
        return (
            host
            if host is not None and all(host[name] == value for name, value in expected.items())
            else None
        )

    found: dict[str, Any] = wait_until(met, 60)
    return found


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
        newest = fleet.publish()
    api = in_api(fleet, stopping, lag=newest - 1)
    seen = time.monotonic()
    page.wait_for_function(
        "([key, served, lag]) => {"
        "  const row = document.querySelector(`tr[data-key='${key}']`);"
        "  const text = (column) => row.querySelector('td.' + column).innerText;"
        "  return text('served') === served && text('lag') === lag;"
        "}",
        arg=[api["key"], str(api["served_version"]), str(api["lag"])],
        timeout=SHOWN_WITHIN_MS,
    )
    assert (time.monotonic() - seen) * 1000 < SHOWN_WITHIN_MS
    assert figures(page, stopping) == ("1", "3")

    with fleet.keep_publishing():
        stands(page, stopping, "Stale")
        stands(page, stopping, "Lost")
        assert row(page, stopping).locator("td.heard").inner_text() != "0 s"
        stopping.go_on()
        stands(page, stopping, "Ready")
    in_api(fleet, stopping, lag=0)
    page.wait_for_function(
        "() => [...document.querySelectorAll('tr.host td.lag')].every((cell) => cell.innerText === '0')"
    )
    page.get_by_text(f"{fleet.published} versions as a table").wait_for()


def test_an_engine_that_died_is_named_with_what_to_do(fleet: LiveFleet, open_tab: OpenTab) -> None:
    fleet.publish()
    rollout = fleet.join("rollout")
    page = open_tab(fleet.url).page
    stands(page, rollout, "Ready")
    rollout.engine.close()
    fleet.publish()
    trouble = page.locator("tr.trouble")
    trouble.wait_for(timeout=60_000)
    api = in_api(fleet, rollout, ready=False, lag=1)
    assert api["engines"][0]["name"] in trouble.inner_text()
    assert "does not answer" in trouble.inner_text() and "See that it runs" in trouble.inner_text()
    row(page, rollout).get_by_role("button").click()
    page.locator("tr.detail").get_by_role("row", name="silent").wait_for()
    assert page.locator("tr.detail table.updates tbody tr").count() >= 1
