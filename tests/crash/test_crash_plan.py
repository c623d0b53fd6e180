"""Which kill comes next, and what counts as covered; no process is killed here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from crash_failpoints import failpoints_of
from crash_processes import Order
from crash_run import Plan, Tally, never_reached, short, uncovered
from crash_scenarios import Run

SEED = 20


@pytest.fixture
def tally(tmp_path: Path) -> Tally:
    return Tally(tmp_path / "kills")


def plan_of(tally: Tally, *names: str, cover: int = 3, row: str = "") -> Plan:
    return Plan(random.Random(SEED), names, row, cover, tally)


def run_of(order: Order, rows: dict[str, int], *, struck: bool = False) -> Run:
    nowhere: Any = None
    return Run(nowhere, order, random.Random(SEED), struck=struck, rows=rows)


def learned(plan: Plan, rows: dict[str, int]) -> None:
    """Every scenario of the plan ran once, and nobody was struck."""
    for name in plan.names:
        plan.learn(name, run_of(Order(), rows))


def test_each_scenario_runs_once_without_a_strike(tally: Tally) -> None:
    plan = plan_of(tally, "publish", "follow")
    assert plan.next() == ("publish", Order())
    plan.learn("publish", run_of(Order(), {"a.b": 1}))
    assert plan.next() == ("follow", Order())


def test_what_is_not_covered_goes_before_everything_else(tally: Tally) -> None:
    plan = plan_of(tally, "publish", "take over", "disturb publisher", "power of publisher")
    rows = {f"file.begun {kind}": 1 for kind in "abcdefgh"}
    learned(plan, rows)
    killed = []
    for _ in rows:
        name, order = plan.next()
        assert (name, order.nth) == ("publish", 1)
        killed.append(order.key)
        tally.add("publisher", order.key)
        plan.learn(name, run_of(order, {}, struck=True))
    assert sorted(killed) == sorted(rows)


def test_rows_that_are_short_go_before_moments_until_all_have_their_kills(tally: Tally) -> None:
    plan = plan_of(tally, "publish")
    rows = {f"file.begun {kind}": 5 for kind in "abcd"}
    learned(plan, rows)
    for _ in range(3 * len(rows)):
        name, order = plan.next()
        assert order.key in rows
        tally.add("publisher", order.key)
        plan.learn(name, run_of(order, {}, struck=True))
    tally.look()
    assert {tally.kills("publisher", row) for row in rows} == {3}
    asked = [("publisher", row) for row in rows]
    assert uncovered(asked, tally, 3) == short(asked, tally, 3) == []


def test_a_row_that_is_never_passed_leaves_turns_to_others(tally: Tally) -> None:
    plan = plan_of(tally, "publish")
    learned(plan, {"a.never": 1, "b.often": 1})
    for _ in range(100):
        name, order = plan.next()
        struck = order.key == "b.often"
        if struck:
            tally.add("publisher", order.key)
        plan.learn(name, run_of(order, {}, struck=struck))
    tally.look()
    assert tally.kills("publisher", "b.often") > 20
    assert uncovered([("publisher", "a.never")], tally, 3) == [
        "a.never: 0 kills",
        "a.never: no publisher was killed there",
    ]


def test_what_was_passed_once_by_chance_is_not_asked_of_a_side(tally: Tally) -> None:
    plan = plan_of(tally, "publish")
    learned(plan, {"a.b": 1})
    plan.learn("publish", run_of(Order("a.b"), {"c.d": 1}, struck=True))
    assert plan.asked("publish") == ["a.b"]
    plan.learn("publish", run_of(Order("a.b"), {"c.d": 1}, struck=True))
    assert plan.asked("publish") == ["a.b", "c.d"]


def test_parts_count_the_kills_of_one_another(tally: Tally) -> None:
    other = Tally(tally.file)
    other.add("publisher", "file.begun a")
    tally.add("publisher", "file.begun b")
    tally.add("rank 1", "file.begun a")
    for each in (tally, other):
        each.look()
        assert each.kills("publisher", "file.begun a") == 1 and each.kills("rank 1", "file.begun b") == 0
        assert each.covers("publisher", "file.begun b", 3) and not each.covers("rank 1", "file.begun b", 3)
    assert short([("rank 1", "file.begun a")], tally, 3) == ["file.begun a, rank 1: 1 kills"]


@pytest.mark.parametrize(("channel", "name"), [("", "prune.deleted"), ("s3://bucket", "object.begun")])
def test_a_failpoint_without_a_kill_is_named(tally: Tally, channel: str, name: str) -> None:
    for each in failpoints_of(channel):
        if each != name:
            tally.add("publisher", each)
    tally.look()
    assert never_reached(tally, channel) == [f"{name}: never reached"]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tally: Tally) -> None:
    tally.file.write_text('["host", "a.b"]\n["host", "a.')
    tally.look()
    with tally.file.open("a") as file:
        file.write('b"]\n')
    tally.look()
    assert tally.kills("host", "a.b") == 2


@pytest.mark.parametrize("cover", [0, 3])
def test_a_part_of_a_row_s_name_selects_the_scenarios_that_pass_it(tally: Tally, cover: int) -> None:
    plan = plan_of(tally, "publish", "take over", cover=cover, row="only.here")
    plan.learn("publish", run_of(Order(), {"a.b state": 1}))
    plan.learn("take over", run_of(Order(), {"x.only.here state": 1}))
    for _ in range(20):
        name, order = plan.next()
        assert (name, order.key) == ("take over", "x.only.here state")


def test_a_part_that_no_row_contains_ends_with_the_rows_that_there_are(tally: Tally) -> None:
    plan = plan_of(tally, "publish", row="file.lynked")
    learned(plan, {"file.linked claim": 1})
    with pytest.raises(
        SystemExit, match=r"'file\.lynked' in publish; rows that were passed: file\.linked claim"
    ):
        plan.next()
