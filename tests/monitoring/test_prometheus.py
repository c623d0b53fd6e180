"""A real Prometheus scrapes real daemons with the shipped configuration; its rules see what happens, and
every query of the dashboard finds something."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from faultkit import Place, until
from promkit import dashboard_queries
from worldkit import World

from weightcast.shared.channel.claims import claim, this_process
from weightcast.shared.channel.directory_store import open_store

pytestmark = pytest.mark.monitoring
ALARM_SECONDS = 60.0


@pytest.fixture
def world(place: Place, stack: ExitStack, tmp_path: Path) -> World:
    world = World(place, stack, tmp_path)
    world.start_publisher()
    world.start_host("host-a")
    world.arrive(0)
    return world


def test_scrapes_alerts_and_the_dashboard(world: World) -> None:
    world.arrive(world.publish())
    prometheus = world.start_prometheus(still_seconds=20)
    until(lambda: prometheus.value("sum(up)") == 2, "both are scraped")
    for _ in range(2):
        world.arrive(world.publish())
    until(lambda: prometheus.value("weightcast:newest_version") == 3, "the newest version is recorded")
    until(lambda: prometheus.value("weightcast:host_behind_versions") == 0, "the host is at it")
    assert prometheus.all_firing() == set()

    for panel, expr in dashboard_queries():
        until(lambda expr=expr: prometheus.query(expr), f"{panel}: {expr} finds something", 20)

    world.hosts["host-a"].end_engine()
    until(lambda: prometheus.firing("WeightcastEngineSilent", engine="host-a"), "engine", ALARM_SECONDS)
    until(lambda: prometheus.firing("WeightcastNoNewVersion"), "no new version", ALARM_SECONDS)
    claim(open_store(world.channel), this_process(), take_over=True)
    assert world.publisher.wait() == 3, "it lost the channel"
    until(lambda: prometheus.firing("WeightcastPublisherDown"), "publisher down", ALARM_SECONDS)
    assert "WeightcastCrashes" not in prometheus.all_firing()


def test_metrics_are_sound_in_the_eyes_of_promtool(world: World) -> None:
    """Names, units and types as Prometheus recommends them."""
    import httpx
    from worldkit import HEADERS

    world.arrive(world.publish())
    for address in (world.address, world.hosts["host-a"].address):
        text = httpx.get(f"http://{address}/metrics", headers=HEADERS, trust_env=False).text
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
