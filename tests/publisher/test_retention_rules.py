"""Which versions go: the rule alone, on channels made up by hypothesis."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightcast.publisher.maintenance.retention import (
    Retention,
    Situation,
    cheapest,
    decide,
    window,
)
from weightcast.shared.channel.channel import Shown


def held(anchor: int | None = None, skips: dict[int, int] | None = None, created: float = 0.0) -> Shown:
    return Shown(10, skips or {}, anchor, created)


def steps(last: int, anchors: tuple[int, ...] = ()) -> dict[int, Shown]:
    return {v: held(100 if v in anchors else None) for v in range(1, last + 1)}


def gone(situation: Situation, retention: Retention) -> list[int]:
    return [removal.version for removal in decide(situation, retention).removals]


def test_nothing_goes_without_a_bound_or_full_weights() -> None:
    assert gone(Situation(9, steps(9, (2, 5)), 0.0), Retention()) == []
    verdict = decide(Situation(9, steps(9, (8,)), 0.0), Retention(keep_versions=3))
    assert verdict.removals == () and "no full weights at or before version 7" in verdict.why_not


def test_from_the_full_weights_before_the_newest() -> None:
    verdict = decide(Situation(9, steps(9, (2, 5)), 0.0), Retention(keep_versions=3))
    assert [removal.version for removal in verdict.removals] == [1, 2, 3, 4] and verdict.horizon == 5
    assert verdict.removals[1].nbytes == 110


def test_by_age() -> None:
    versions = {v: held(100 if v in (2, 6) else None, created=3600.0 * v) for v in range(1, 10)}
    assert gone(Situation(9, versions, 3600.0 * 10), Retention(keep_hours=3.0)) == [1, 2, 3, 4, 5]
    assert gone(Situation(9, versions, 3600.0 * 10), Retention(keep_hours=6.0)) == [1]
    assert gone(Situation(9, versions, 3600.0 * 10), Retention(keep_versions=7, keep_hours=1.0)) == [1]


YEAR = 365 * 24 * 3600.0


def every_minute(last: int, jump_at: int | None = None, jump: float = YEAR) -> dict[int, Shown]:
    """A day and more of versions; from `jump_at` on the clock shows another time."""
    late = {v: jump if jump_at is not None and v >= jump_at else 0.0 for v in range(1, last + 1)}
    anchors = range(1, last, 10)
    return {v: held(100 if v in anchors else None, created=60.0 * v + late[v]) for v in range(1, last + 1)}


def kept_from(versions: dict[int, Shown], now: float, hosts: tuple[int, ...] = ()) -> int:
    return window(Situation(max(versions), versions, now, hosts), Retention(keep_hours=24.0))


def test_a_clock_that_jumps_ahead_takes_an_eighth_at_most() -> None:
    day = 24 * 60
    assert kept_from(every_minute(2000), 2000 * 60.0) == 2000 - day
    for at in (None, 1000, 1990, 2000):
        found = kept_from(every_minute(2000, at), 2000 * 60.0 + YEAR)
        assert 2000 - day <= found <= 2000 - day + day / 8 + 1, at


def test_a_clock_that_goes_back_keeps_more() -> None:
    day = 24 * 60
    for at in (None, 1000, 2000):
        assert 2000 - day - 1 <= kept_from(every_minute(2000, at, -YEAR), 2000 * 60.0 - YEAR) <= 2000 - day


def test_a_living_host_s_way_is_kept_over_a_jump() -> None:
    """As long as it is young by the versions that came since."""
    assert kept_from(every_minute(2000, 2000), 2000 * 60.0 + YEAR, hosts=(900,)) <= 901


def test_what_is_usual_counts_wholly() -> None:
    """A version a day, kept for two: no rule of eighths makes sixteen of it."""
    versions = {v: held(100, created=24 * 3600.0 * v) for v in range(1, 30)}
    assert window(Situation(29, versions, 24 * 3600.0 * 29.5), Retention(keep_hours=48.0)) == 28


def test_hosts_hold_back_up_to_a_bound() -> None:
    many = steps(100, (10, 50, 90))
    bound = Retention(keep_versions=5, host_versions=50)
    assert window(Situation(100, many, 0.0, hosts=[98]), bound) == 96
    assert window(Situation(100, many, 0.0, hosts=[60, 98]), bound) == 61
    assert window(Situation(100, many, 0.0, hosts=[3, 60]), bound) == 61
    assert window(Situation(100, many, 0.0, hosts=[3]), bound) == 96
    assert window(Situation(100, many, 0.0, hosts=[10**9]), bound) == 96
    assert [window(Situation(100, many, 0.0, hosts=[host]), bound) for host in (44, 45)] == [96, 46]


def test_what_is_wanted_stays_reachable() -> None:
    many = steps(100, (10, 20, 90))
    bound = Retention(keep_versions=5)
    assert set(range(1, 90)) - set(gone(Situation(100, many, 0.0, wanted=[23]), bound)) == {20, 21, 22, 23}
    # before any full weights: for hosts that have the base
    assert set(range(1, 90)) - set(gone(Situation(100, many, 0.0, wanted=[3]), bound)) == {1, 2, 3}


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    last = draw(st.integers(1, 24))
    versions = {}
    for version in range(1, last + 1):
        spans = [1 << k for k in range(1, 5) if version % (1 << k) == 0 and draw(st.booleans())]
        skips = {version - span: draw(st.integers(1, 40)) for span in spans}
        full = draw(st.integers(0, 3)) == 0
        nbytes, anchor = draw(st.integers(1, 30)), draw(st.integers(30, 90)) if full else None
        whole = full and draw(st.integers(0, 5)) == 0
        versions[version] = Shown(nbytes, skips, anchor, 3600.0 * version, whole)
    numbers = st.lists(st.integers(0, last), max_size=3)
    return Situation(last, versions, 3600.0 * last, draw(numbers), draw(numbers))


bounds = st.builds(
    Retention,
    keep_versions=st.none() | st.integers(1, 12),
    keep_hours=st.none() | st.floats(0.5, 12.0),
    host_versions=st.integers(0, 12),
)


@given(situations(), bounds)
def test_nobody_s_way_gets_longer(before: Situation, bound: Retention) -> None:
    verdict = decide(before, bound)
    removed = {removal.version for removal in verdict.removals}
    after = {version: one for version, one in before.versions.items() if version not in removed}
    if not removed:
        return
    assert max(removed) < verdict.horizon <= before.pointer and before.pointer in after
    first = window(before, bound)

    def price(versions: dict[int, Shown], target: int, start: dict[int, int]) -> int | None:
        way = cheapest(versions, target, start)
        return None if way is None else way.nbytes

    everything = dict(before.versions)
    for target in {before.pointer, *before.wanted} - {0}:
        assert price(after, target, {}) == price(everything, target, {})
    for host in before.hosts:
        if first <= host + 1 <= before.pointer:
            hers = {host: 0}
            assert price(after, before.pointer, hers) == price(everything, before.pointer, hers)
    for version in range(first, before.pointer + 1):
        assert price(after, version, {}) is not None


@given(situations(), bounds)
def test_a_second_time_nothing_goes(before: Situation, bound: Retention) -> None:
    removed = set(gone(before, bound))
    left = {version: one for version, one in before.versions.items() if version not in removed}
    again = Situation(before.pointer, left, before.now, before.hosts, before.wanted)
    assert set(gone(again, bound)) == set() or not removed
