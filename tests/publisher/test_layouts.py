"""Which layout of a watched tree is published: rules without IO."""

from __future__ import annotations

import pytest

from weightcast.publisher.daemon.sources.layouts import Fit, Layouts, matches, pattern_of, save_of, step_of
from weightcast.shared.base.elements import TensorSpec, TensorTable

GOOD, WORSE = Fit(True, 9, 0), Fit(False, 8, -1)
ACTOR, CRITIC = "global_step_20/actor/hf", "global_step_20/critic/hf"


def table(*names: str) -> TensorTable:
    return TensorTable.of([TensorSpec(name, "BF16", (2, 2), 8) for name in names])


@pytest.mark.parametrize(
    ("name", "step", "save", "pattern"),
    [
        ("checkpoint-100", 100, "checkpoint-100", "checkpoint-*"),
        ("run/epoch_1/step_20", 20, "run/epoch_1/step_20", "run/epoch_*/step_*"),
        ("global_step_20/actor/huggingface", 20, "global_step_20", "global_step_*/actor/huggingface"),
        ("iter_0000020/hf", 20, "iter_0000020", "iter_*/hf"),
        ("step_20/policy-7b/weights", 20, "step_20", "step_*/policy-*b/weights"),
        ("final/weights", None, "final", "final/weights"),
        (".", None, ".", "."),
    ],
)
def test_the_save_and_the_step_of_a_path(name: str, step: int | None, save: str, pattern: str) -> None:
    assert (step_of(name), save_of(name), pattern_of(name)) == (step, save, pattern)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        (ACTOR, "global_step_*/actor/hf", True),
        (ACTOR, "./global_step_*/actor/hf/", True),
        (ACTOR, "*/actor/*", True),
        (ACTOR, "**/hf", True),
        (ACTOR, "**", True),
        (ACTOR, "global_step_*", False),
        (ACTOR, "*", False),
        (ACTOR, "global_step_*/**/actor/hf/**", True),
        (".", ".", True),
        (".", "**", True),
        (".", "*", False),
        ("checkpoint-1", ".", False),
    ],
)
def test_a_pattern_matches_component_by_component(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


def test_fit_counts_tensors_of_the_base_by_name_and_shape() -> None:
    base = table("a", "b", "head")
    assert Fit.of(table("a", "b", "head"), base) > Fit.of(table("a", "b", "head", "value"), base)
    assert Fit.of(table("a", "b", "value"), base) > Fit.of(table("a", "value"), base)
    assert Fit.of(table("a", "b", "head"), base).complete
    assert not Fit.of(table("a", "b", "value"), base).complete


def clear(layouts: Layouts, *names: str) -> list[str]:
    return [name for name in names if layouts.is_clear(name)]


def test_the_layout_that_fits_the_base_is_published() -> None:
    layouts = Layouts()
    layouts.judge({ACTOR: GOOD, CRITIC: WORSE}, [])
    assert clear(layouts, ACTOR, CRITIC) == [ACTOR]
    left = layouts.left[pattern_of(CRITIC)]
    assert "fit the base better" in left.reason and "--watch-pattern 'global_step_*/critic/hf'" in left.remedy


def test_two_layouts_that_fit_are_both_named_and_not_published() -> None:
    layouts = Layouts()
    layouts.judge({ACTOR: GOOD, CRITIC: GOOD}, [])
    assert clear(layouts, ACTOR, CRITIC) == []
    (left,) = set(layouts.left.values())
    assert pattern_of(ACTOR) in left.name and pattern_of(CRITIC) in left.name
    assert f"--watch-pattern '{pattern_of(ACTOR)}'" in left.remedy
    assert layouts.is_left("global_step_40/actor/hf"), "not clear at one step, not clear at the next"


def test_a_checkpoint_within_a_checkpoint_is_a_part_of_it() -> None:
    layouts = Layouts()
    layouts.judge({"run/step_1": GOOD, "run/step_1/ema": GOOD}, [])
    assert clear(layouts, "run/step_1", "run/step_1/ema") == ["run/step_1"]


def test_checkpoints_directly_in_the_watched_directory_come_first() -> None:
    layouts = Layouts()
    layouts.judge({"checkpoint-1": GOOD, "archive/checkpoint-1": GOOD}, [])
    assert clear(layouts, "checkpoint-1", ".", "archive/checkpoint-1") == ["checkpoint-1", "."]
    other = Layouts()
    other.judge({"reward_model": WORSE, ACTOR: GOOD}, [])
    assert clear(other, ACTOR) == [ACTOR]


@pytest.mark.parametrize(
    ("name", "fit", "expected"),
    [
        ("run_b/step_30", GOOD, True),
        ("run_b/step_20", GOOD, False),
        ("run_b/step_30", WORSE, False),
        ("archive/best", GOOD, False),
    ],
)
def test_another_layout_than_before_is_published_for_a_later_step(
    name: str, fit: Fit, expected: bool
) -> None:
    layouts = Layouts()
    layouts.judge({name: fit}, [(1, "run_a/step_10"), (2, "run_a/step_20")])
    assert layouts.is_clear(name) is expected
    assert layouts.is_clear("run_a/step_40"), "the layout from before still is"
    assert expected or "run_a/step_*" in layouts.left[pattern_of(name)].reason


def test_with_a_pattern_it_alone_decides() -> None:
    layouts = Layouts("*/critic/hf")
    assert layouts.is_left(ACTOR) and layouts.is_left("checkpoint-1") and not layouts.is_left(CRITIC)
    layouts.judge({CRITIC: WORSE}, [])
    assert layouts.is_clear(CRITIC)
    assert {each.name for each in layouts.left.values()} == {pattern_of(ACTOR), "checkpoint-*"}
