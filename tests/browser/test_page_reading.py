"""What the page shows of a fleet that is made up here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fleet_double
import pytest
from fleet_double import Double, host
from pydantic import BaseModel
from tabs import WAIT_MS, OpenTab
from waiting import wait_until

from weightcast.publisher.fleet.lag_history import LagHistory
from weightcast.publisher.fleet.versions import CatchUp, PrunePlan, Versions
from weightcast.shared.daemon.fleet import Fleet

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

LATEST = 128
NONE = "\N{EN DASH}"
"""stands for a figure that is not there"""
SILENT = "EngineFailed: sglang http://127.0.0.1:30000 did not confirm version 128 within 300 s"
RESTART = "restart the engine; it is reloaded when it answers"


def mixed_fleet() -> list[dict[str, Any]]:
    """Forty-four hosts, of which four are not well and one is behind."""
    hosts = [host(number, LATEST) for number in range(1, 45)]
    hosts[6] |= {
        "presence": "lost",
        "standing": "lost",
        "heard_seconds_ago": 341.0,
        "served_version": 117,
        "local_version": 117,
        "lag": 11,
    }
    engines = [
        {"name": "a", "kind": "sglang", "state": "failed", "version": 126, "confirmed_by": "digest"},
        {"name": "b", "kind": "sglang", "state": "serving", "version": 128, "confirmed_by": "digest"},
    ]
    hosts[11] |= {
        "standing": "failed",
        "ready": False,
        "state": "reloading",
        "served_version": 126,
        "lag": 2,
        "last_error": SILENT,
        "remedy": RESTART,
        "retries": 5,
        "engines": engines,
        "bytes": {"step": 84_000_000, "skip": 2_000_000, "anchor": 0, "repair": 0},
    }
    hosts[20] |= {"presence": "stale", "standing": "stale", "served_version": 125, "lag": 3}
    hosts[30] |= {"standing": "behind", "state": "fetching", "served_version": 127, "lag": 1}
    hosts[31] |= {
        "standing": "behind",
        "ready": False,
        "state": "seeding",
        "served_version": None,
        "local_version": None,
        "lag": None,
        "engines": [],
        "updates": [],
    }
    return hosts


@pytest.fixture
def double() -> Iterator[Double]:
    with fleet_double.serve(Double()) as double:
        double.versions = fleet_double.versions(LATEST)
        double.lag = fleet_double.lag_history(44, double.versions["versions"][0]["created"] + 5)
        double.catch_up = {
            "rows": [
                {
                    "lag": lag,
                    "bytes": 90_000_000 * lag,
                    "steps": ["step"] * lag,
                    "seconds": None if lag > 9 else 2.0 * lag,
                }
                for lag in (1, 2, 4, 8, 16)
            ],
            "joiner": {
                "bytes": 3_000_000_000,
                "steps": ["steps 1 to 128"],
                "seconds": 92.0,
                "without_base": {"bytes": 15_600_000_000, "steps": ["anchor 100", "steps 101 to 128"]},
            },
        }
        why = "before version 100, the first that is kept"
        double.plan = {
            "why_not": "",
            "horizon": 100,
            "remove": [{"version": version, "bytes": 91_000_000, "why": why} for version in range(1, 40)],
            "keep": [{"version": version, "bytes": 91_000_000, "why": "kept"} for version in range(100, 129)],
        }
        double.show(mixed_fleet(), LATEST)
        yield double


def rows(page: Page) -> list[str]:
    """Names of the hosts that are shown, in their order."""
    return [name.strip() for name in page.locator("tr.host th").all_inner_texts()]


def cells(page: Page, name: str) -> dict[str, str]:
    row = page.locator(f'tr.host[data-host="{name}"]')
    return {
        column: row.locator(f"td.{column}").inner_text().strip()
        for column in ("standing", "served", "local", "lag")
    }


def test_the_made_up_figures_have_the_publisher_s_form(double: Double) -> None:
    answers: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (Fleet, double.fleet),
        (Versions, double.versions),
        (LagHistory, double.lag),
        (CatchUp, double.catch_up),
        (PrunePlan, double.plan),
    ]
    for model, made in answers:
        assert model.model_validate_json(json.dumps(made)).model_dump(mode="json") == made


def test_every_standing_stands_there_in_words_the_worst_first(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    page.wait_for_selector("tr.host")
    assert rows(page)[:6] == [f"rollout-{number:03}" for number in (7, 12, 21, 31, 32, 1)]
    assert cells(page, "rollout-007") == {
        "standing": "Lostlast said ready",
        "served": "117",
        "local": "117",
        "lag": "11",
    }
    assert cells(page, "rollout-012")["standing"] == "Failedreloading"
    assert cells(page, "rollout-032") == {
        "standing": "Behindseeding",
        "served": NONE,
        "local": NONE,
        "lag": NONE,
    }
    assert page.locator("#figure-latest strong").inner_text() == "128"
    # the step comes with the versions, after the hosts
    page.locator(
        "#figure-latest.warning span", has_text="step 512, 3 min ago, usually every 30.0 s"
    ).wait_for()
    assert page.locator("#figure-ready dt").inner_text() == "Hosts up to date"
    assert page.locator("#figure-ready dd").inner_text() == "39 of 44, 40 ready"
    assert page.locator("#figure-largest-lag strong").inner_text() == "3", "of hosts that are not lost"
    assert page.get_by_text("run 4f2b9c1e7a55", exact=True).count() == 1
    assert page.title() == "1 lost, 1 failed, 1 stale, 2 behind · v128 · weightcast"


def test_an_error_and_what_to_do_stand_below_their_host(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    trouble = page.locator("tr.trouble")
    trouble.wait_for()
    assert trouble.get_attribute("data-trouble") == "rollout-012"
    assert SILENT in trouble.inner_text() and RESTART[1:] in trouble.inner_text()


def test_requests_at_all_gates_by_version(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    page.wait_for_selector("tr.host")
    assert page.locator("#requests").count() == 0
    hosts = [host(number, LATEST) for number in range(1, 5)]
    for each, served in zip(hosts, (128, 128, 127, None), strict=True):
        each |= {"gate": f"http://{each['host']}:8350", "served_version": served, "local_version": served}
        now = {"under_way": 3, "waiting": 1, "closed": int(served is None)}
        each["requests"] = {**now, "answered": 1000, "unmet": 2, "partial": 0}
        each["tokens"] = {"127": 500, "128": 1500}
    hosts[3] |= {"standing": "lost", "presence": "lost"}
    hosts[2]["requests"]["closed"] = 1
    double.show(hosts, LATEST)
    page.wait_for_selector("#requests")
    strip = [" ".join(each.split()) for each in page.locator("#requests dl > div").all_inner_texts()]
    assert strip[:5] == [
        "Gates 3", "Closed for updates 1", "Answered 3,000", "Ended partial 0", "Version missing (409) 6",
    ]  # fmt: skip
    rows = [each.split() for each in page.locator("#requests tbody tr").all_inner_texts()]
    assert rows == [["128", "2", "6", "2", "4,500", "75.0%"], ["127", "1", "3", "1", "1,500", "25.0%"]]


def test_a_host_shows_its_adapters(double: Double, open_tab: OpenTab) -> None:
    page, one = open_tab(double.url).page, host(1, LATEST)
    behind = {"version": 3, "target": 4, "main_version": 0, "state": "behind", "error": "no room for it"}
    one["adapters"] = [{"name": "adapter/math", **behind}]
    double.show([one], LATEST)
    page.get_by_role("button", name="rollout-001").click()
    page.get_by_text("version 3 of 4, trained on 0, behind: no room for it").wait_for()
    assert page.get_by_text("Adapter math").count() == 1


def test_the_verdict_comes_first(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    verdict = page.locator(".verdict")
    verdict.wait_for()
    found = f"rollout-012: {SILENT}; rollout-007: lost; rollout-021: stale; also 2 behind"
    assert verdict.inner_text() == f"39 of 44 hosts serve version 128; {found}"
    assert verdict.get_attribute("data-level") == "bad"
    double.show([host(1, LATEST)], LATEST)
    page.wait_for_selector('.verdict[data-level="good"]')
    assert verdict.inner_text() == "1 of 1 host serves version 128"
    assert page.locator("#figure-ready.good, #figure-largest-lag.good").count() == 2


def test_a_publisher_that_refuses_everything_does_not_look_healthy(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    refused = {
        "source": "step_400",
        "message": "step_400/model.safetensors is cut off: 90 bytes, header needs 200",
        "remedy": "write the checkpoint again",
        "seconds_ago": 61.0,
    }
    inbox = {"waiting": 1, "refused": 4, "skipped": 2}
    double.show([host(1, LATEST)], LATEST, last_refused=refused, refused_since_version=True, inbox=inbox)
    said = page.locator('[data-refused="step_400"]')
    said.wait_for()
    lines = said.locator("p").all_inner_texts()
    assert re.match("step_400 was refused 6. s ago, no version since: .* is cut off", lines[0])
    assert lines[1:] == ["Write the checkpoint again"]
    assert page.locator(".verdict").get_attribute("data-level") == "bad"
    assert "step_400 refused: step_400/model.safetensors is cut off" in page.locator(".verdict").inner_text()
    strip = page.locator("#publisher dl > div").all_inner_texts()
    assert [" ".join(each.split()) for each in strip] == [
        "Publisher ready",
        "Publishing nothing now",
        "Queue 0",
        "Inbox waiting 1",
        "Inbox refused 4",
        "Inbox skipped 2",
    ]
    assert page.title() == "see publisher · v128 · weightcast"
    double.show([host(1, LATEST)], LATEST, ready=False, reasons=["No space left on device"])
    page.get_by_text("not ready: No space left on device").first.wait_for()
    notes = ["global_step_7 is not published: it has no model.safetensors (convert it)"]
    held = "rolled back to version 2 (version 128 has its weights)"
    late: dict[str, Any] = {
        "held": held,
        "waiting": ["step_13"],
        "publishing": "step_9: diff",
        "notes": notes,
    }
    double.show([host(1, LATEST)], LATEST, **late)
    page.get_by_text("global_step_7 is not published").wait_for()
    said = page.locator("[data-held]").inner_text()
    assert f"{held}. Published after resume: step_13." in said
    assert page.get_by_role(
        "button", name="Copy weightcast channel resume --channel /shared/run7"
    ).is_visible()
    assert page.get_by_text("step_9: diff").count() == 1
    assert page.locator(".verdict").get_attribute("data-level") == "warning"


def test_stopped_hosts_are_calm_and_ghosts_come_last(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    gone = {"presence": "lost", "heard_seconds_ago": 4000.0, "ready": False}
    never = {"local_version": None, "served_version": None, "lag": None, "engines": []}
    ghost = host(
        1, LATEST, standing="lost", state="starting", last_error="Refused: no --base", **gone, **never
    )
    stopped = host(2, LATEST, standing="stopped", state="stopped", phase="stopped", **gone)
    unheard = host(3, LATEST, standing="stale", presence="stale", heard_seconds_ago=None)
    double.show([ghost, stopped, host(4, LATEST), unheard], LATEST)
    page.locator("tr.host.stopped").wait_for()
    assert rows(page) == ["rollout-003", "rollout-004", "rollout-002", "rollout-001"]
    assert cells(page, "rollout-002")["standing"] == "Stopped"
    assert page.locator('tr.host[data-host="rollout-003"] td.heard').inner_text() == "?"
    assert page.locator("tr.trouble").count() == 1
    assert page.locator("#figure-ready dd").inner_text().split() == ["1", "of", "2"]
    assert page.locator(".verdict").inner_text().startswith("1 of 2 hosts serve version 128")
    page.get_by_role("button", name="rollout-001").click()
    page.get_by_role("button", name="Forget rollout-001").click()
    page.locator("tr.host").nth(3).wait_for(state="detached")
    assert "rollout-001" not in rows(page)


def test_hosts_with_the_same_error_are_one_press_away(double: Double, open_tab: OpenTab) -> None:
    hosts = [host(number, LATEST) for number in range(1, 101)]
    for number, each in enumerate(hosts[:38]):
        error = f"/data/{number}/policy: no space left: 4096 bytes needed, {number} free"
        each |= {"standing": "failed", "last_error": error, "remedy": "run `weightcast doctor --local DIR`"}
    double.show(hosts, LATEST)
    page = open_tab(double.url).page
    page.get_by_role("button", name="38 hosts").click()
    page.get_by_text("38 of 100 hosts shown").wait_for(state="attached")
    assert "error=" in page.url
    copy = page.get_by_role("button", name="Copy weightcast doctor --local DIR").first
    copy.click()
    page.get_by_text("Copied").wait_for()


def test_a_host_opens_to_its_engines_and_its_last_updates_by_phase(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    page.get_by_role("button", name="rollout-012").click()
    inside = page.locator("tr.detail")
    assert "84.0 MB steps, 2.00 MB deltas from older versions" in inside.inner_text()
    engine = inside.get_by_role("row", name="a sglang failed")
    assert engine.inner_text().split() == ["a", "sglang", "failed", "126", "digest"]
    update = inside.locator("table.updates tbody tr").first
    bar = update.get_by_role("img")
    assert bar.get_attribute("aria-label") == (
        "plan 10.2 ms, fetch 348 ms, stage 204 ms, patch 123 ms, pause 20.4 ms, reload 256 ms, "
        "read back 40.9 ms, resume 20.4 ms"
    )
    widths = [part.bounding_box() for part in bar.locator("span").all()]
    fetch, patch = (widths[at]["width"] for at in (1, 3))  # type: ignore[index]
    assert fetch == pytest.approx(patch * 0.34 / 0.12, rel=0.05)
    turned = "element => getComputedStyle(element).transform"
    opened, closed = (page.locator(f'[aria-expanded="{word}"] > .turn').first for word in ("true", "false"))
    assert opened.evaluate(turned) != closed.evaluate(turned), "which row is open is to be seen"
    page.get_by_role("button", name="rollout-012").click()
    assert inside.count() == 0


def test_a_host_without_engines_and_updates_opens_too(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    page.get_by_role("button", name="rollout-032").click()
    text = page.locator("tr.detail").inner_text()
    assert "no engines" in text and "No update" in text


def test_hosts_of_one_name_are_told_apart_and_strangers_named(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    other = host(9, LATEST, standing="failed", run_id="another", key="c-1")
    hosts = [host(1, LATEST, key=f"{at}-1", host="same", local=f"/data/{at}") for at in "ab"]
    double.show([*hosts, other], LATEST)
    page.wait_for_selector("tr.host[data-host=same]")
    assert page.locator("tr.host small.path").all_inner_texts() == ["/data/a", "/data/b"]
    assert "Follows another run, another." in page.locator("tr.trouble").inner_text()


def test_adapters_no_engine_and_a_repeated_step_are_named(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    versions = double.versions["versions"]
    versions[0] |= {"step": versions[1]["step"]}
    math = {"name": "math", "version": 3, "target": 4, "main_version": LATEST, "state": "behind", "error": ""}
    code = {**math, "name": "code", "version": None, "state": "waiting"}
    double.show([host(1, LATEST, engines=[], adapters=[math, code])], LATEST)
    page.get_by_text("no engine, math@3, code@\u2013").wait_for()
    assert "1 of 1 host serves version 128 (1 without an engine)" in page.locator(".verdict").inner_text()
    page.locator("#versions summary").click()
    assert f"step {versions[1]['step']} again" in page.locator("#versions table").inner_text()


@pytest.mark.parametrize(
    ("state", "says"),
    [("silent", "does not answer"), ("failed", "has failed"), ("suspect", "is paused"), ("waiting", None)],
)
def test_an_engine_in_trouble_is_named(
    double: Double, open_tab: OpenTab, state: str, says: str | None
) -> None:
    page = open_tab(double.url).page
    engine = {"name": "e7", "kind": "vllm", "state": state, "version": 127, "confirmed_by": "label"}
    double.show([host(1, LATEST, lag=1, standing="behind", ready=False, engines=[engine])], LATEST)
    page.get_by_text("0 of 1 serving").wait_for()
    assert page.locator("tr.trouble").count() == (0 if says is None else 1)
    assert says is None or f"Engine e7 {says}" in page.locator("tr.trouble").inner_text()
    assert ("engine not serving" in cells(page, "rollout-001")["standing"]) == (state == "silent")


def test_sorted_by_any_column_and_back(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    heading = page.locator("th", has=page.get_by_role("button", name="Lag"))
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert rows(page)[0] == "rollout-032"
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows(page)[:3] == ["rollout-007", "rollout-021", "rollout-012"]
    assert page.locator("th[aria-sort=descending], th[aria-sort=ascending]").count() == 1
    page.get_by_role("button", name="Host").click()
    assert rows(page)[:2] == ["rollout-001", "rollout-002"]


def test_filtered_by_standing_and_by_words(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    behind = page.get_by_role("button", name="Behind")
    behind.click()
    assert rows(page) == ["rollout-031", "rollout-032"]
    assert behind.get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name=re.compile("^All")).click()
    page.get_by_role("searchbox").fill("not confirm")
    assert rows(page) == ["rollout-012"]
    page.get_by_role("searchbox").fill("nobody")
    assert page.get_by_text("No host is like that.").is_visible()


def test_a_look_survives_a_reload_and_can_be_sent(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(f"{double.url}/#only=failed&host=rollout-012-0000000c").page
    page.wait_for_selector("tr.detail")
    assert rows(page) == ["rollout-012"]
    page.get_by_role("button", name="Lag").click()
    page.reload()
    page.wait_for_selector("tr.detail")
    assert rows(page) == ["rollout-012"]
    assert page.locator("th.lag").get_attribute("aria-sort") == "ascending"


def test_what_changes_appears_by_itself_and_focus_stays(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    button = page.get_by_role("button", name="rollout-012")
    button.focus()
    hosts = mixed_fleet()
    hosts[11] = host(12, LATEST)
    double.show(hosts, LATEST)
    page.wait_for_selector("tr.host.ready[data-host=rollout-012]")
    assert page.locator("tr.trouble").count() == 0
    assert page.evaluate("document.activeElement.textContent") == "rollout-012"


def test_a_thousand_hosts_come_in_pages_and_are_found_at_once(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    double.show([host(number, LATEST) for number in range(1, 1001)], LATEST)
    page.get_by_text(f"1{NONE}25 of 1,000").wait_for()
    page.get_by_role("button", name="Next").click()
    assert rows(page)[0] == "rollout-026"
    assert page.get_by_text(f"26{NONE}50 of 1,000").is_visible()
    took = page.evaluate(
        """async () => {
            const field = document.querySelector("input[type=search]");
            const began = performance.now();
            field.value = "rollout-777";
            field.dispatchEvent(new InputEvent("input", { bubbles: true }));
            const shown = () => document.querySelectorAll("tr.host").length;
            while (shown() !== 1) await new Promise(requestAnimationFrame);
            return performance.now() - began;
        }"""
    )
    assert rows(page) == ["rollout-777"]
    page.get_by_role("button", name="rollout-777").click()
    # Large fleets come without updates: they are asked for.
    page.wait_for_selector("table.updates")
    assert took < 1000, "a reader waits"


def test_versions_are_charts_and_a_table(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    charts = page.locator("#versions figure")
    charts.first.wait_for()
    assert charts.count() == 2
    newest = double.versions["versions"][0]
    assert charts.nth(0).locator(".reading").inner_text() == f"{newest['bytes'] / 1e6:.0f} MB"
    label = charts.nth(1).get_by_role("img").get_attribute("aria-label")
    assert label is not None and label.startswith("Time to publish: ")
    drawn = (
        "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size"
    )
    for title in ("Published to served, half of the hosts", "Longest pause of engines"):
        label = page.get_by_role("img", name=title).get_attribute("aria-label")
        assert label is not None and ": 20 points, least " in label
    assert page.get_by_text("3 of 128 not known: published before this publisher started").is_visible()
    assert all(page.evaluate(drawn, canvas.element_handle()) > 8 for canvas in page.locator("canvas").all())
    page.get_by_text("128 versions as a table").click()
    row = page.locator("#versions tbody tr").nth(LATEST - 40)
    assert row.locator("th").inner_text() == "40"
    assert "tag best; kept; delta from 32" in row.inner_text()
    assert "weights of version 60" in page.locator("#versions tbody tr").nth(LATEST - 70).inner_text()


def test_lag_over_time_shows_holds_and_rollbacks(double: Double, open_tab: OpenTab) -> None:
    """By keyboard in the chart, and in the tables behind the charts."""
    page = open_tab(double.url).page
    chart, reading = (
        page.get_by_role("img", name="Hosts by versions behind"),
        page.locator("#lag .reading").first,
    )
    chart.focus()
    for text in ("held: rolled back to version 60", "version 70: weights of version 60", "behind: 5"):
        for _ in range(60):
            chart.press("ArrowLeft")
            if text in reading.inner_text():
                break
        assert text in reading.inner_text()
    assert f"up to date: 33, 2{NONE}3 behind: 5, 4 or more behind: 6" in reading.inner_text()
    chart.press("Escape")
    assert reading.inner_text() == "up to date: 44"
    page.locator("#lag summary").click()
    table = [row.inner_text().split("\t")[1:] for row in page.locator("#lag tbody tr").all()]
    well = ["44", "0", "0"]
    assert table == [
        [*well, NONE],
        [*well, "held: rolled back to version 60"],
        [*well, NONE],
        [*well, "version 70: weights of version 60"],
        [*well, NONE],
        ["33", "5", "6", NONE],
        [*well, NONE],
        [NONE, NONE, NONE, NONE],
        [*well, NONE],
    ]
    page.get_by_text("128 versions as a table").click()
    row = page.locator("#versions tbody tr").nth(LATEST - 80)
    assert "after a hold: rolled back to version 60" in row.inner_text()


def test_cost_and_pruning_are_told(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    page.locator("#catch-up summary").click()
    assert (
        "A new host with the base reads 3.00 GB in about 92.0 s. Without the base it reads 15.6 GB."
        in page.locator("#catch-up").inner_text()
    )
    row = page.locator("#catch-up tbody tr").last
    assert row.inner_text().split("\t") == ["16", "1.44 GB", NONE, "step, step, step, step, step and 11 more"]
    text = page.locator("#pruning").inner_text()
    assert "would remove 39 versions and free 3.55 GB; 29 versions with 2.64 GB would stay" in text


def test_what_a_host_says_is_text(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    evil = '<img src=x onerror="alert(1)"><script>alert(2)</script>'
    double.show([host(1, LATEST, host=evil, key="a-1", last_error=evil, remedy=evil, state=evil)], LATEST)
    page.get_by_role("button", name="onerror").click()
    assert rows(page) == [evil]
    assert page.locator("#page img, #page script").count() == 0


def test_before_anything_is_published_the_page_says_so(open_tab: OpenTab) -> None:
    with fleet_double.serve(Double()) as double:
        page = open_tab(double.url).page
        page.locator("#hosts").get_by_text("No host has reported yet.").wait_for()
        page.get_by_text("Nothing was published yet.").wait_for()
        page.get_by_text("Pruning now would remove nothing: nothing is published.").wait_for()
        assert page.title() == "no hosts · v0 · weightcast"
        assert page.get_by_text("the base, no version yet").count() == 1


def test_the_token_is_asked_for_once_and_kept_in_the_tab(open_tab: OpenTab) -> None:
    with fleet_double.serve(Double(), token="correct-horse") as double:
        double.show(mixed_fleet(), LATEST)
        tab = open_tab(double.url)
        field = tab.page.get_by_label("Token of this publisher")
        field.wait_for()
        assert tab.page.evaluate("document.activeElement.id") == "token"
        field.fill("wrong")
        field.press("Enter")
        tab.page.get_by_text("did not take this token").wait_for()
        field.fill("correct-horse")
        tab.page.get_by_role("button", name="Open").click()
        tab.page.wait_for_selector("tr.host")
        tab.page.reload()
        tab.page.wait_for_selector("tr.host")
        assert tab.page.evaluate("localStorage.length") == 0
        assert not any("correct-horse" in url for url in tab.requested)
        tab.forgive("401")


def test_a_lost_publisher_is_seen_and_found_again(open_tab: OpenTab) -> None:
    with fleet_double.serve(Double()) as double:
        double.show(mixed_fleet(), LATEST)
        tab = open_tab(double.url)
        tab.page.wait_for_selector('[data-link="live"]')
        tab.page.wait_for_selector("tr.host")
        port = int(double.url.rpartition(":")[2])
    tab.page.wait_for_selector('[data-link="lost"]')
    assert tab.page.get_by_text("Connection to the publisher lost").count() == 1
    assert rows(tab.page)[0] == "rollout-007", "what was known stays"
    assert tab.page.locator('[data-live="false"]').count() == 1
    verdict = tab.page.locator(".verdict")
    assert verdict.inner_text().startswith("Not connected") and verdict.get_attribute("data-level") == "bad"
    with fleet_double.serve(Double(), port=port) as double:
        double.show([host(1, LATEST + 1)], LATEST + 1)
        tab.page.wait_for_selector('[data-link="live"]')
        tab.page.wait_for_selector("tr.host.ready")
        assert cells(tab.page, "rollout-001")["served"] == "129"
    tab.forgive("ERR_", "fetch")


def test_by_keyboard_alone(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url).page
    page.wait_for_selector("tr.host")
    press = page.keyboard.press

    def here() -> str:
        return str(page.evaluate("document.activeElement.innerText || document.activeElement.type")).strip()

    def tab_to(text: str) -> None:
        for _ in range(60):
            if here().startswith(text):
                return
            press("Tab")
        pytest.fail(f"{text} is not reached, focus is on {here()}")

    press("Tab")
    assert here() == "Skip to the hosts"
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "hosts"
    tab_to("Failed")
    press("Space")
    assert rows(page) == ["rollout-012"]
    tab_to("rollout-012")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "focus is to be seen"
    press("Enter")
    page.wait_for_selector("tr.detail")
    press("Enter")
    assert page.locator("tr.detail").count() == 0
    press("Shift+Tab")
    assert here() == "Heard"
    press("Enter")
    assert page.locator("th.heard").get_attribute("aria-sort") == "ascending"
    tab_to("128 versions as a table")
    press("Enter")
    press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Versions as a table"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_readable_for_everybody(
    double: Double, open_tab: OpenTab, built: Path, scheme: str, width: int
) -> None:
    """axe-core's rules: contrast, names, roles, headings, order."""
    page = open_tab(double.url, color_scheme=scheme, viewport={"width": width, "height": 800}).page
    page.get_by_role("button", name="rollout-012").click()
    page.locator("#versions canvas").first.wait_for()
    for summary in page.locator("summary").all():
        summary.click()
    page.evaluate((built / "node_modules/axe-core/axe.min.js").read_text())
    found = page.evaluate("axe.run().then((result) => result.violations)")
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_scheme_is_followed_while_the_page_is_open(double: Double, open_tab: OpenTab) -> None:
    page = open_tab(double.url, color_scheme="light").page
    page.locator("#versions canvas").first.wait_for()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    wait_until(lambda: page.evaluate(ground) != light, WAIT_MS / 1000)
    assert page.locator("canvas").count() == 6
