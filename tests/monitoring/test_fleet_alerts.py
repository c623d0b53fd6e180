"""A person on call: five hosts, and four things that break. Each is found on the page in a real browser, by
`weightcast fleet`, and as an alert of a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faultkit import Place, fill, until
from in_process import Command
from promkit import Prometheus
from tabs import OpenTab, chromium, tabs
from worldkit import Host, World, get

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.monitoring
STALE_SECONDS, LOST_SECONDS = 15, 20
FOUND_SECONDS = 90.0
"""from a break to its alert, besides the seconds until a silent host counts as lost"""
SHOWN_MS = 30_000.0
"""from the API to the page"""
PICTURES = os.environ.get("WEIGHTCAST_PICTURES")
"""where the README's pictures are to be written, if anywhere"""
CORRUPTER = """\
import os, pathlib, sys
order = pathlib.Path(sys.argv[1])
if os.environ["WEIGHTCAST_PHASE"] == "version" and order.exists():
    order.unlink()
    shards = pathlib.Path(os.environ["WEIGHTCAST_DIR"]).glob("*.safetensors")
    shard = max(shards, key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x10
    shard.write_bytes(data)
"""


@dataclass
class OnCall:
    """What somebody on call looks at."""

    world: World
    prometheus: Prometheus
    page: Page
    command: Callable[..., dict[str, Any]]

    def in_api(self, name: str) -> dict[str, Any]:
        fleet = get(self.world.address, "/v1/fleet")
        return self._of(fleet, name)

    def in_terminal(self, name: str) -> dict[str, Any]:
        return self._of(self.command("fleet", "--url", self.world.address, "--json"), name)

    def _of(self, fleet: dict[str, Any], name: str) -> dict[str, Any]:
        local = str(self.world.root / name / "local")
        found: dict[str, Any] = next(host for host in fleet["hosts"] if host["local"] == local)
        return found

    def row(self, name: str) -> Locator:
        return self.page.locator(f"tr.host[data-key='{self.in_api(name)['key']}']")

    def shows_standing(self, name: str, word: str) -> None:
        self.row(name).locator(".badge", has_text=word).wait_for(timeout=SHOWN_MS)

    def shows_trouble(self, name: str, text: str | re.Pattern[str]) -> None:
        key = self.in_api(name)["key"]
        self.page.locator(f"tr.host[data-key='{key}'] + tr.trouble", has_text=text).wait_for(timeout=SHOWN_MS)

    def alarmed(self, alert: str, **labels: str) -> None:
        until(lambda: self.prometheus.firing(alert, **labels), f"{alert} fires", FOUND_SECONDS)

    def calm(self, alert: str, **labels: str) -> None:
        firing = self.prometheus.firing
        until(lambda: not firing(alert, **labels), f"{alert} no longer fires", FOUND_SECONDS)


@pytest.fixture
def open_tab() -> Iterator[OpenTab]:
    with chromium() as browser, tabs(browser) as open_it:
        yield open_it


@pytest.fixture
def command(weightcast: Command) -> Callable[..., dict[str, Any]]:
    def call(*arguments: str) -> dict[str, Any]:
        code, out, _ = weightcast(*arguments)
        assert code == 0
        found: dict[str, Any] = json.loads(out)
        return found

    return call


@pytest.fixture
def world(place: Place, stack: ExitStack, tmp_path: Path) -> World:
    world = World(place, stack, tmp_path, token="")
    script = tmp_path / "corrupter.py"
    script.write_text(CORRUPTER)
    world.start_publisher(
        *("--stale-seconds", STALE_SECONDS, "--lost-seconds", LOST_SECONDS),
        # it would repair the damage before anybody is alarmed
        *("--verify-rate", "0"),
        *("--post-write", f"{sys.executable} -S {script} {corrupt_next(world)}"),
    )
    place.tmpfs(tmp_path / "full", 16)
    for name in ("stopped", "engineless", "full", "well-a", "well-b"):
        world.start_host(name, local=tmp_path / name / "local")
    world.arrive(0)
    return world


def corrupt_next(world: World) -> Path:
    """While it exists, the next version is damaged between its index and the pointer."""
    return world.root / "corrupt-next"


@pytest.fixture
def on_call(world: World, open_tab: OpenTab, command: Callable[..., dict[str, Any]]) -> OnCall:
    prometheus = world.start_prometheus()
    return OnCall(world, prometheus, open_tab(f"http://{world.address}/").page, command)


def test_what_breaks_is_found_on_the_page_in_the_terminal_and_by_an_alert(
    world: World, on_call: OnCall, open_tab: OpenTab
) -> None:
    all_is_well(world, on_call)
    with world.publishing(pause_seconds=1.0):
        a_host_stops(world.hosts["stopped"], on_call)
        an_engine_dies(world.hosts["engineless"], on_call)
        filler = a_disk_fills_up(world.hosts["full"], on_call)
    if PICTURES is not None:
        take_pictures(on_call, open_tab, Path(PICTURES))
    a_delta_is_corrupt(world, on_call)
    what_was_mended_recovers(world, on_call, filler)
    assert "WeightcastCrashes" not in on_call.prometheus.all_firing()


def all_is_well(world: World, on_call: OnCall) -> None:
    newest = world.publish()
    world.arrive(newest)
    for name in world.hosts:
        until(lambda name=name: is_ready_at(newest, on_call.in_terminal(name)), name, FOUND_SECONDS)
        on_call.shows_standing(name, "Up to date")
    until(lambda: on_call.prometheus.value("sum(up)") == 1 + len(world.hosts), "all are scraped")
    assert on_call.prometheus.all_firing() == set()


def is_ready_at(version: int, host: dict[str, Any]) -> bool:
    return (host["served_version"], host["standing"]) == (version, "ready")


def a_host_stops(host: Host, on_call: OnCall) -> None:
    host.daemon.signal(signal.SIGSTOP)
    on_call.alarmed("WeightcastHostDown", instance=host.address)
    until(lambda: on_call.in_api("stopped")["standing"] == "lost", "lost", LOST_SECONDS + FOUND_SECONDS)
    on_call.shows_standing("stopped", "Lost")
    found = on_call.in_terminal("stopped")
    assert found["standing"] == "lost" and found["heard_seconds_ago"] >= LOST_SECONDS and found["lag"] > 3
    on_call.alarmed("WeightcastHostLost")


def an_engine_dies(host: Host, on_call: OnCall) -> None:
    host.end_engine()
    on_call.alarmed("WeightcastEngineSilent", instance=host.address, engine="engineless")
    until(lambda: not on_call.in_api("engineless")["ready"], "not ready", FOUND_SECONDS)
    on_call.row("engineless").get_by_text("0 of 1 serving").wait_for(timeout=SHOWN_MS)
    until(lambda: tells_of_a_silent_engine(on_call.in_terminal("engineless")), "silent", FOUND_SECONDS)


def tells_of_a_silent_engine(host: dict[str, Any]) -> bool:
    engines = [(engine["name"], engine["state"]) for engine in host["engines"]]
    return engines == [("engineless", "silent")] and host["standing"] == "failed"


def a_disk_fills_up(host: Host, on_call: OnCall) -> Path:
    filler = fill(host.local.parent)
    on_call.alarmed("WeightcastDiskNearlyFull", instance=host.address, place="local")
    # before an update, or in the middle of one
    said = re.compile("MiB free|No space left on device")
    until(lambda: said.search(on_call.in_api("full")["last_error"]), "the disk", FOUND_SECONDS)
    on_call.shows_trouble("full", said)
    until(lambda: said.search(on_call.in_terminal("full")["last_error"]), "the terminal", FOUND_SECONDS)
    assert re.search("free space on|make it larger", on_call.in_terminal("full")["remedy"])
    return filler


def take_pictures(on_call: OnCall, open_tab: OpenTab, pictures: Path) -> None:
    """Of the whole page, with a host opened to its last updates."""
    on_call.world.arrive(len(on_call.world.versions) - 1, "well-a", "well-b")
    for name in ("well-a", "well-b"):
        until(lambda name=name: on_call.in_api(name)["standing"] == "ready", name, FOUND_SECONDS)
    key = on_call.in_api("well-a")["key"]
    for scheme in ("light", "dark"):
        view = {"width": 1180, "height": 1000}
        address = f"http://{on_call.world.address}/#host={key}"
        page = open_tab(address, color_scheme=scheme, viewport=view).page
        page.wait_for_selector("table.updates")
        page.locator("#versions canvas").first.wait_for()
        page.screenshot(path=pictures / f"fleet-{scheme}.png", full_page=True)


def a_delta_is_corrupt(world: World, on_call: OnCall) -> None:
    """An odd version: no delta leads around it before the next one."""
    if len(world.versions) % 2 == 0:
        world.arrive(world.publish(), "well-a", "well-b")
    corrupt_next(world).touch()
    damaged = world.publish()
    assert damaged % 2 == 1
    for name in ("well-a", "well-b"):
        host = world.hosts[name]
        on_call.alarmed("WeightcastDigestMismatch", instance=host.address)
        until(lambda name=name: "DamagedFile" in on_call.in_api(name)["last_error"], name, FOUND_SECONDS)
        on_call.shows_trouble(name, "weight_v")
        assert f"weight_v{damaged:06d}" in on_call.in_terminal(name)["last_error"]
        assert host.serves(damaged - 1)


def what_was_mended_recovers(world: World, on_call: OnCall, filler: Path) -> None:
    filler.unlink()
    world.hosts["stopped"].daemon.signal(signal.SIGCONT)
    newest = world.publish()
    well = [name for name in world.hosts if name != "engineless"]
    for name in well:
        world.hosts[name].daemon.wake()
    world.arrive(newest, *well)
    for name in well:
        until(
            lambda name=name: on_call.in_api(name)["standing"] == "ready", f"{name} is ready", FOUND_SECONDS
        )
        on_call.shows_standing(name, "Up to date")
    on_call.calm("WeightcastHostDown")
    on_call.calm("WeightcastHostLost")
    on_call.calm("WeightcastDiskNearlyFull", instance=world.hosts["full"].address, place="local")
