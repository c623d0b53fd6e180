"""What the gate knows of a request while its engine moves between versions."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import pytest

from weightcast.subscriber.gate.conditions import Conditions, UpdatePolicy
from weightcast.subscriber.gate.traffic import Call, Traffic


def traffic(policy: UpdatePolicy = "pass") -> Traffic:
    """One engine that serves version 1."""
    made = Traffic(["engine"], policy=policy, drain_seconds=0.0, hold_seconds=0.0, most=8)
    made.name_adapters({})
    made.doubt("engine", 0.0)
    made.open("engine", 1, "process", math.inf)
    return made


def admitted(to: Traffic, conditions: Conditions) -> Call:
    call = Call(conditions)
    call.end = partial(to.leave, call)
    asyncio.run(to.admit(call))
    return call


def test_an_answer_that_ends_before_the_update_is_recorded_may_be_of_both_versions() -> None:
    """The engine may resume and finish it before the durable record says what it serves."""
    gate = traffic()
    call = admitted(gate, Conditions())
    gate.close("engine", 2)
    gate.leave(call)
    gate.open("engine", 2, "process", math.inf)
    assert (call.low, call.high, call.ended_by) == (1, 2, "")


@pytest.mark.parametrize(
    ("policy", "conditions", "ended_by"),
    [
        ("pass", Conditions(exact_version=1), "update"),
        ("pass", Conditions(min_version=1), ""),
        ("partial", Conditions(min_version=1), "update"),
        ("drain", Conditions(), "update"),
    ],
)
def test_an_update_ends_what_must_not_see_it(
    policy: UpdatePolicy, conditions: Conditions, ended_by: str
) -> None:
    gate = traffic(policy)
    call = admitted(gate, conditions)
    gate.close("engine", 2)
    assert call.ended_by == ended_by
    assert call.high == (1 if ended_by else 2)
