"""Rules over the engines of a host."""

from __future__ import annotations

import pytest

from weightcast.subscriber.engines.base import EngineFacts
from weightcast.subscriber.engines.rules import EngineResult, ResultState, judge, needs_reload


def result(name: str, state: ResultState, attempts: int = 1) -> EngineResult:
    return EngineResult(name, state, 8, "8", attempts=attempts)


def test_engines_are_sorted_by_state() -> None:
    verdict = judge(
        [result("a", "failed"), result("b", "served"), result("c", "suspect"), result("d", "refused")]
    )
    assert (verdict.served, verdict.refused, verdict.suspect, verdict.failed) == (
        ("b",),
        ("d",),
        ("c",),
        ("a",),
    )


@pytest.mark.parametrize(
    ("results", "ready", "may_roll_back", "journal_droppable"),
    [
        ([], False, False, True),
        ([result("a", "served")], True, False, True),
        ([result("a", "served"), result("b", "refused")], True, False, False),
        ([result("a", "refused"), result("b", "failed")], False, True, False),
        ([result("a", "failed")], False, True, True),
        ([result("a", "failed", attempts=0)], False, False, True),
        ([result("a", "refused", attempts=0)], False, False, False),
        ([result("a", "suspect")], False, True, True),
    ],
)
def test_what_the_host_may_do(
    results: list[EngineResult], ready: bool, may_roll_back: bool, journal_droppable: bool
) -> None:
    verdict = judge(results)
    assert (verdict.ready, verdict.may_roll_back, verdict.journal_droppable) == (
        ready,
        may_roll_back,
        journal_droppable,
    )


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (EngineFacts(True, label="8", process="p"), False),
        (EngineFacts(True, label="8", process="q"), True),
        (EngineFacts(True, label="default", process="p"), True),
        (EngineFacts(True, label="default"), True),
        (EngineFacts(True, label="8"), False),
        (EngineFacts(True), False),
        (EngineFacts(False), False),
    ],
)
def test_a_restart_is_seen_in_process_or_label(facts: EngineFacts, wanted: bool) -> None:
    assert needs_reload(facts, "p", "8") is wanted


def test_nothing_to_compare_with_is_no_restart() -> None:
    assert not needs_reload(EngineFacts(True, label="8", process="p"), None, None)
