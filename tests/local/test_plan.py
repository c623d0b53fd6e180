"""The table of plans: every row is facts and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightcast.shared.channel.channel import Shown
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.checkpoint.update.plan import (
    Link,
    Need,
    Patch,
    Plan,
    PlanFacts,
    Refuse,
    Relabel,
    Seed,
    Stay,
    plan,
)


def digest(version: int) -> str:
    return f"d{version}"


def delta(version: int, base: int | None = None, **changes: object) -> Link:
    base = version - 1 if base is None else base
    link = Link(version, "delta", base, digest(base), digest(version), f"r{version}", 1, "whole", 10)
    return replace(link, **changes)  # type: ignore[arg-type]


def anchor(version: int) -> Link:
    return Link(version, "anchor", -1, "", digest(version), f"r{version}", 1, "", 100)


def here(version: int, **changes: object) -> Position:
    return replace(Position(version, digest(version), f"r{version}", 1), **changes)  # type: ignore[arg-type]


def facts(at: Position | None, target: int, *links: Link, **changes: object) -> PlanFacts:
    known = {link.version: link for link in links}
    return replace(PlanFacts(at, target, known, digest(0)), **changes)  # type: ignore[arg-type]


def gone(known: PlanFacts, *versions: int) -> PlanFacts:
    return replace(known, links={**known.links, **dict.fromkeys(versions)})


THREE = (delta(1), delta(2), delta(3))
BULKY = tuple(replace(one, space=4) for one in THREE)
LONG = {"shown": {3: Shown(10, skips={0: 5})}, "multi_step": {(3, 0): delta(3, 0, nbytes=5, space=12)}}
"""A delta from version 0, of fewer bytes than the steps."""
SPLIT = (delta(1), delta(2, grid="two parts"), delta(3, grid="two parts"))

ROWS: list[tuple[str, PlanFacts, Plan]] = [
    ("at the base before the first version", facts(here(0), 0), Stay()),
    ("the target's index is unread", facts(here(0), 3), Need(3)),
    ("an index on the way is unread", facts(here(0), 3, delta(3)), Need(2)),
    ("at the target, its index unread", facts(here(3), 3), Need(3)),
    ("at the target", facts(here(3), 3, *THREE), Stay()),
    ("at the target, which is pruned", gone(facts(here(3), 3), 3), Stay()),
    ("one behind", facts(here(2), 3, *THREE), Patch(((3,),), 10)),
    ("several behind fold", facts(here(0), 3, *THREE), Patch(((1, 2, 3),), 30)),
    (
        "far behind: legs of bounded length",
        facts(here(0), 130, *map(delta, range(1, 131))),
        Patch((tuple(range(1, 65)), tuple(range(65, 129)), (129, 130)), 1300),
    ),
    ("a disk with room for all", facts(here(0), 3, *BULKY, room=12), Patch(((1, 2, 3),), 30)),
    ("a disk with room for some", facts(here(0), 3, *BULKY, room=8), Patch(((1, 2), (3,)), 30)),
    ("a disk without room for any", facts(here(0), 3, *BULKY, room=3), Patch(((1,), (2,), (3,)), 30)),
    (
        "steps where a longer delta has no room",
        facts(here(0), 3, *BULKY, **LONG, room=11),
        Patch(((1, 2), (3,)), 30),
    ),
    (
        "a longer delta where its room is there",
        facts(here(0), 3, *BULKY, **LONG, room=12),
        Patch(((3,),), 5, {3: 0}),
    ),
    (
        "a longer delta where nothing else leads on, without room",
        facts(here(0), 3, BULKY[2], **{**LONG, "links": {2: None, 3: BULKY[2]}}, room=1),
        Patch(((3,),), 5, {3: 0}),
    ),
    ("other grids are other legs", facts(here(0), 3, *SPLIT), Patch(((1,), (2, 3)), 30)),
    ("a delta from an older version", facts(here(1), 3, delta(3, 1)), Patch(((3,),), 10)),
    (
        "through a blocked version, to a newer one",
        facts(here(1), 3, *THREE, blocked=frozenset({digest(2)})),
        Patch(((2, 3),), 20),
    ),
    ("equal bytes", facts(here(2), 3, delta(3, root="r2")), Relabel(3)),
    ("equal bytes, going back as asked", facts(here(3), 2, delta(2, root="r3"), exact=True), Relabel(2)),
    ("a newer epoch", facts(here(2), 3, delta(3, epoch=2)), Patch(((3,),), 10)),
    ("a foreign delta whose local index is unread", facts(here(2), 3, delta(3, parent=None)), Need(2)),
    ("a foreign delta", facts(here(2), 3, delta(2), delta(3, parent=None)), Patch(((3,),), 10)),
    ("a foreign delta from the base", facts(here(0), 1, delta(1, parent=None)), Patch(((1,),), 10)),
    # full weights
    ("new, nothing published", facts(None, 0), Seed(0, Patch((), 0), "no local checkpoint yet")),
    ("new", facts(None, 3, *THREE), Seed(0, Patch(((1, 2, 3),), 30), "no local checkpoint yet")),
    (
        "new, with a base and few deltas since",
        facts(None, 3, *THREE, shown={2: Shown(10, anchor=100)}),
        Seed(0, Patch(((1, 2, 3),), 30), "no local checkpoint yet"),
    ),
    (
        "new, with an anchor of fewer bytes than the deltas since the base",
        facts(None, 3, *THREE, shown={2: Shown(10, anchor=15)}),
        Seed(2, Patch(((3,),), 10), "no local checkpoint yet"),
    ),
    (
        "new, a chain that begins with an anchor",
        facts(None, 8, anchor(7), delta(8)),
        Seed(7, Patch(((8,),), 10), "no local checkpoint yet"),
    ),
    (
        "new, without a base",
        facts(None, 3, *THREE, shown={3: Shown(10, anchor=100)}, base=None),
        Seed(3, Patch((), 0), "no local checkpoint yet"),
    ),
    (
        "a new chain began",
        facts(here(3), 8, anchor(7), delta(8)),
        Seed(7, Patch(((8,),), 10), "version 7 begins a new chain"),
    ),
    (
        "a fork at the local version",
        facts(here(2, digest="other"), 3, *THREE),
        Seed(
            0,
            Patch(((1, 2, 3),), 30),
            "version 3 continues another version 2 than the local one",
        ),
    ),
    (
        "a fork of the same number",
        facts(here(3, digest="other"), 3, *THREE),
        Seed(
            0,
            Patch(((1, 2, 3),), 30),
            "version 3 of the channel differs from the local version 3",
        ),
    ),
    (
        "a foreign version was rewritten",
        facts(here(2, digest="other"), 3, *(delta(v, parent=None) for v in (1, 2, 3))),
        Seed(0, Patch(((1, 2, 3),), 30), "version 2 of the channel was rewritten"),
    ),
    (
        "the local base is another run's",
        facts(here(0, digest="other"), 0),
        Seed(0, Patch((), 0), "the local base is another run's"),
    ),
    (
        "going back as asked",
        facts(here(3), 1, *THREE, exact=True),
        Seed(0, Patch(((1,),), 10), "going back from version 3"),
    ),
    (
        "back to the base as asked",
        facts(here(3), 0, exact=True),
        Seed(0, Patch((), 0), "going back from version 3"),
    ),
]


@pytest.mark.parametrize(("known", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_plan(known: PlanFacts, expected: Plan) -> None:
    assert plan(known) == expected


def test_an_older_pointer_is_not_followed() -> None:
    answer = plan(facts(here(9), 5, delta(5)))
    assert isinstance(answer, Stay) and "latest names version 5, version 9 was applied" in answer.reason


def test_with_keys_an_older_pointer_is_refused_unless_asked_for() -> None:
    known = facts(here(9), 5, delta(5), signed=True)
    answer = plan(known)
    assert isinstance(answer, Refuse) and not answer.waits and "latest names version 5" in answer.reason
    assert not isinstance(plan(replace(known, exact=True)), Refuse | Stay)


def test_a_blocked_target_waits_for_a_newer_one() -> None:
    answer = plan(facts(here(2), 3, *THREE, blocked=frozenset({digest(3)})))
    assert isinstance(answer, Refuse) and answer.waits


def test_an_older_epoch_is_refused() -> None:
    answer = plan(facts(here(2, epoch=5), 3, delta(3, epoch=4)))
    assert isinstance(answer, Refuse) and "epoch 4" in answer.reason and not answer.waits


REFUSED = {
    "no full weights at all": facts(None, 3, *THREE, base=None),
    "the base is another than version 1 starts from": facts(None, 1, delta(1, parent="other")),
    "the chain has a hole": gone(facts(None, 3, delta(3)), 2),
    "the target is gone": gone(facts(None, 3), 3),
    "versions that do not follow each other": facts(None, 3, delta(1), delta(2, digest="other"), delta(3)),
}


@pytest.mark.parametrize("known", REFUSED.values(), ids=REFUSED.keys())
def test_no_way_is_a_refusal_with_a_remedy(known: PlanFacts) -> None:
    answer = plan(known)
    assert isinstance(answer, Refuse) and answer.reason and answer.remedy and not answer.waits


def test_a_hole_below_an_anchor_does_no_harm() -> None:
    known = gone(facts(here(0), 8, anchor(7), delta(8), base=None), 6)
    assert isinstance(plan(known), Seed)


def test_a_refusal_names_the_target_and_why() -> None:
    answer = plan(replace(facts(here(3), 2, *THREE, exact=True), base=None))
    assert isinstance(answer, Refuse)
    assert answer.reason == (
        "version 2 cannot be reached: going back from version 3: no full weights to start from"
    )


OTHER = {"digest": "another history's"}
SIGNED_ROWS: list[tuple[str, PlanFacts, type[Plan]]] = [
    ("a step that fits", facts(here(2), 3, *THREE), Patch),
    ("the version that lies here, under another digest", facts(here(3, **OTHER), 3, *THREE), Refuse),
    ("a step that continues another version", facts(here(2, **OTHER), 3, *THREE), Refuse),
    ("a new chain that an anchor began", facts(here(1), 3, anchor(2), delta(3)), Seed),
    (
        "a fork, and full weights behind it",
        facts(here(2, **OTHER), 3, *THREE, shown={3: Shown(10, {}, 100)}),
        Refuse,
    ),
    ("an older pointer, bytes lost", facts(None, 2, *THREE, reached=3), Refuse),
    ("the same pointer, bytes lost", facts(None, 3, *THREE, reached=3), Seed),
    ("an older version by number, bytes lost", facts(None, 2, *THREE, reached=3, exact=True), Seed),
]


@pytest.mark.parametrize(("known", "kind"), [row[1:] for row in SIGNED_ROWS], ids=[r[0] for r in SIGNED_ROWS])
def test_signed_history_does_not_branch(known: PlanFacts, kind: type[Plan]) -> None:
    assert isinstance(plan(replace(known, signed=True)), kind)
    if kind is Refuse:
        unsigned = plan(known)
        assert isinstance(unsigned, Seed), "an unsigned channel is right: it may have been restored"
