"""The way of the fewest bytes: skip deltas, anchors, equal bytes; against a search that tries everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.channel.channel import Shown
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.checkpoint.update.plan import (
    Link,
    Look,
    Need,
    Patch,
    Plan,
    PlanFacts,
    Refuse,
    Relabel,
    Seed,
    plan,
)


def link(version: int, base: int, **changes: object) -> Link:
    one = Link(version, "delta", base, f"d{base}", f"d{version}", f"r{version}", 1, "whole", 1)
    return replace(one, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class World:
    """What a channel holds. `links` and `skips` that differ from the usual."""

    shown: Mapping[int, Shown]
    links: Mapping[int, Link | None]
    skips: Mapping[tuple[int, int], Link | None]

    def main(self, version: int) -> Link | None:
        if version in self.links:
            return self.links[version]
        return link(version, version - 1) if version in self.shown else None

    def skip(self, version: int, base: int) -> Link | None:
        return self.skips.get((version, base), link(version, base))


def world(
    shown: Mapping[int, Shown],
    links: Mapping[int, Link | None] | None = None,
    skips: Mapping[tuple[int, int], Link | None] | None = None,
) -> World:
    return World(shown, links or {}, skips or {})


def answer(start: PlanFacts, of: World) -> tuple[Plan, list[Need]]:
    """As a reader finds out; every index that it read."""
    facts, read = start, []
    while isinstance(asked := plan(facts), Need | Look):
        if isinstance(asked, Look):
            seen = {v: one for v, one in of.shown.items() if asked.above < v <= facts.looked}
            facts = replace(facts, shown={**facts.shown, **seen}, looked=asked.above)
            continue
        for need in (asked, *asked.also):
            read.append(need)
            if need.base_version is None:
                facts = replace(facts, links={**facts.links, need.version: of.main(need.version)})
            else:
                key = need.version, need.base_version
                facts = replace(facts, multi_step={**facts.multi_step, key: of.skip(*key)})
    return asked, read


def asking(here: int | None, target: int, base: str | None = "d0") -> PlanFacts:
    at = None if here is None else Position(here, f"d{here}", f"r{here}", 1)
    return PlanFacts(at, target, {}, base, looked=target)


def steps(last: int, nbytes: int = 10) -> dict[int, Shown]:
    """Versions with the deltas that the rule makes: from v - 2^k where 2^k divides v, each 2 bytes more."""
    found = {}
    for version in range(1, last + 1):
        spans = [k for k in range(1, 7) if version % (1 << k) == 0]
        found[version] = Shown(nbytes, {version - (1 << k): nbytes + 2 * k for k in spans})
    return found


def test_one_delta_brings_a_host_32_versions_behind() -> None:
    got, read = answer(asking(32, 64), world(steps(64)))
    assert got == Patch(((64,),), 20, {64: 32})
    assert len(read) == 2


def test_an_odd_distance_takes_few_hops_and_reads_few_indexes() -> None:
    got, read = answer(asking(3, 1000), world(steps(1000, 100)))
    assert isinstance(got, Patch)
    (leg,) = got.legs
    assert len(leg) < 25 and len(read) < 60 and leg[-1] == 1000


def test_one_behind_looks_at_nothing_but_the_index() -> None:
    start = replace(asking(999, 1000), links={1000: link(1000, 999)})
    assert plan(start) == Patch(((1000,),), 1)
    assert plan(replace(start, avoid={(1000, 999)})) == Look(999)


def test_equal_bytes_on_the_way_are_taken_up_by_their_record() -> None:
    back = {10: link(10, 9, root="r5")}
    got, _ = answer(asking(5, 12), world({v: Shown(10) for v in range(1, 13)}, back))
    assert got == Relabel(10, Patch(((11, 12),), 20))


def test_full_weights_of_fewer_bytes_than_the_deltas() -> None:
    shown = steps(9) | {8: Shown(10, {}, 15)}
    got, _ = answer(asking(1, 9), world({v: replace(one, skips={}) for v, one in shown.items()}))
    assert got == Seed(8, Patch(((9,),), 10), "full weights of version 8 are fewer bytes")


CASES = {
    "other bytes": link(4, 0, root="other"),
    "another version 4": link(4, 0, digest="other"),
    "another version 0": link(4, 0, parent="other"),
    "unreadable, or pruned meanwhile": None,
}


def test_a_delta_that_does_not_fit_is_gone_around() -> None:
    for name, bad in CASES.items():
        got, _ = answer(asking(0, 4), world(steps(4), skips={(4, 0): bad}))
        assert got == Patch(((2, 4),), 24, {2: 0, 4: 2}), name


def test_a_hole_is_skipped() -> None:
    shown = steps(8)
    for version in range(1, 8):
        del shown[version]
    got, _ = answer(asking(0, 8), world(shown))
    assert got == Patch(((8,),), 16, {8: 0})
    got, _ = answer(asking(1, 8, base=None), world(shown, dict.fromkeys(range(1, 8))))
    assert isinstance(got, Refuse)


def test_versions_that_hold_full_weights_are_found_behind_a_hole() -> None:
    shown = {1: Shown(10), 6: Shown(200), 7: Shown(10), 8: Shown(10)}
    new_chain = world(shown, {6: link(6, 6, kind="anchor", parent=None, nbytes=200)})
    for here in (None, 1):
        got, read = answer(asking(here, 8, base=None), new_chain)
        assert isinstance(got, Seed)
        assert (got.version, got.then) == (6, Patch(((7, 8),), 20))
        assert Need(6) in read


def test_other_grids_are_other_legs() -> None:
    got, _ = answer(asking(0, 6), world(steps(6), skips={(4, 0): link(4, 0, grid="two parts")}))
    assert got == Patch(((4,), (6,)), 26, {4: 0, 6: 4})


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, int]:
    last = draw(st.integers(1, 9))
    shown = {}
    for version in range(1, last + 1):
        bases = draw(st.sets(st.integers(0, version - 1), max_size=2)) - {version - 1}
        skips = {base: draw(st.integers(1, 60)) for base in bases}
        full = draw(st.none() | st.integers(30, 90))
        if version == last or draw(st.integers(0, 5)):
            shown[version] = Shown(draw(st.integers(1, 30)), skips, full)
    damaged = [(v, b) for v, one in shown.items() for b in one.skips if not draw(st.integers(0, 4))]
    return World(shown, {}, dict.fromkeys(damaged)), last


def fewest(of: World, here: int | None, target: int) -> int | None:
    """Bytes of the best way from `here`, or from full weights where that is fewer or the only way."""
    lowest = 0 if here is None else here
    best: dict[int, int] = {lowest: 0}
    for version in range(lowest + 1, target + 1):
        ways = []
        one = of.shown.get(version)
        if one is None:
            continue
        skips = {b: n for b, n in one.skips.items() if of.skips.get((version, b), 1) is not None}
        hops = {**skips, version - 1: one.nbytes}
        ways += [best[base] + nbytes for base, nbytes in hops.items() if base in best]
        ways += [one.anchor] if one.anchor is not None else []
        if ways:
            best[version] = min(ways)
    return best.get(target)


@given(worlds(), st.data())
def test_no_way_has_fewer_bytes(case: tuple[World, int], data: st.DataObject) -> None:
    of, last = case
    # one version behind, the target's own delta is taken without a look for others
    here = data.draw(st.sampled_from([None, *range(last - 1)]))
    got, _ = answer(asking(here, last), of)
    best = fewest(of, here, last)
    if best is None:
        assert isinstance(got, Refuse) or (isinstance(got, Seed) and check_connected(got, of, here) == last)
        return
    assert isinstance(got, Patch | Seed)
    legs = got if isinstance(got, Patch) else got.then
    full = of.shown[got.version].anchor if isinstance(got, Seed) and got.version else 0
    assert full is not None and legs.nbytes + full == best
    assert check_connected(got, of, here) == last


def check_connected(got: Patch | Seed, of: World, here: int | None) -> int | None:
    """Where the plan ends, each hop starting where the one before it ended."""
    at, legs = (got.version, got.then) if isinstance(got, Seed) else (here, got)
    for version in (version for leg in legs.legs for version in leg):
        base = legs.multi_step.get(version, version - 1)
        assert base == at and version in of.shown and of.skip(version, base) is not None
        at = version
    return at
