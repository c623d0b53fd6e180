"""Waiting for hosts by their reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from publisher_cases import Place

from weightcast.shared.base.choices import LOST_SECONDS
from weightcast.shared.base.errors import NotInTime, Refused, RetryLater
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import Report, write_report
from weightcast.shared.daemon.fleet import FleetReader
from weightcast.shared.daemon.wait import wait_for_version

RUN = "run-under-test"


def report(host: str, served: int | None, state: str = "ready", counter: int = 1) -> Report:
    return Report(host, "/data/policy", RUN, state, served, served, "latest", 0, "", (), counter, "test")


Wait = Callable[..., list[str]]


class Clock:
    """Time passes only while somebody waits; what happens then may be said before."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wait(place: Place, clock: Clock) -> Wait:
    look = FleetReader(open_store(place.channel), clock=clock, updates=0).read
    return partial(wait_for_version, look, clock=clock, pause=clock.pause)


def test_ready_hosts_count(place: Place, wait: Wait, clock: Clock) -> None:
    write_report(open_store(place.channel), report("a", 4))
    write_report(open_store(place.channel), report("b", 5))
    write_report(open_store(place.channel), report("c", 7))
    write_report(open_store(place.channel), report("d", 5, state="patching"))
    write_report(open_store(place.channel), report("e", None))
    write_report(open_store(place.channel), replace(report("f", 9), run_id="another run"))
    assert wait(5, None, None, 0.0) == ["b", "c"]
    assert wait(5, 2, None, 0.0) == ["b", "c"]
    assert wait(5, None, 0.4, 0.0) == ["b", "c"]
    with pytest.raises(
        NotInTime, match=r"2 of 5 hosts .* a \(ready, version 4\), d \(patching, version 5\), e"
    ):
        wait(5, 3, None, 1.0)
    with pytest.raises(NotInTime, match="2 of 5"):
        wait(5, 1, 0.41, 1.0)
    with pytest.raises(NotInTime, match="2 of 5"):
        wait(5, 3, 0.1, 1.0)


def test_it_waits(place: Place, wait: Wait, clock: Clock) -> None:
    clock.events = [
        (110.0, lambda: write_report(open_store(place.channel), report("a", 1))),
        (120.0, lambda: write_report(open_store(place.channel), report("a", 3, counter=2))),
    ]
    assert wait(3, None, 1.0, 60.0) == ["a"]
    assert 120.0 <= clock.now < 121.0


def test_a_channel_that_cannot_be_read_for_a_while(place: Place, wait: Wait, clock: Clock) -> None:
    hosts = place.channel / "hosts"
    hosts.write_text("no directory")
    with pytest.raises(RetryLater, match=r"hosts: Not a directory"):
        wait(3, None, None, timeout=5.0)

    def mend() -> None:
        hosts.unlink()
        write_report(open_store(place.channel), report("a", 3))

    clock.events = [(clock.now + 2.0, mend)]
    assert wait(3, None, None, timeout=5.0) == ["a"]


def test_nobody_reports(wait: Wait) -> None:
    with pytest.raises(NotInTime, match=r"nobody reports .check that a subscriber follows"):
        wait(1, None, 0.5, 2.0)


def test_hosts_that_are_gone_are_no_part_of_the_fleet(place: Place, wait: Wait, clock: Clock) -> None:
    write_report(open_store(place.channel), report("gone", 1))
    write_report(open_store(place.channel), report("here", 8))
    clock.events = [
        (
            100.0 + LOST_SECONDS - 1,
            lambda: write_report(open_store(place.channel), report("here", 8, counter=2)),
        )
    ]
    assert wait(8, None, 1.0, LOST_SECONDS + 10) == ["here"]
    assert clock.now >= 100.0 + LOST_SECONDS


@pytest.mark.parametrize("bad", [(0, None), (None, 0.0), (None, 1.5), (-1, 0.5)])
def test_what_makes_no_sense(wait: Wait, bad: tuple[int | None, float | None]) -> None:
    with pytest.raises(Refused, match=r"1 or more|a fraction above 0"):
        wait(1, *bad, 1.0)


def test_through_the_publisher(place: Place) -> None:
    with place.publisher() as publisher:
        version = publisher.publish_checkpoint(place.new(place.model)).version
        write_report(open_store(place.channel), report("a", version))
        assert publisher.wait(version, min_hosts=1, timeout=5) == ["a"]
