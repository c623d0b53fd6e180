"""What given names stand for, rule by rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.publisher.weights.match import resolve

KNOWN = ["model.layers.0.mlp.weight", "model.norm.weight", "lm_head.weight"]
CASES = {
    "model.norm.weight": ("model.norm.weight", ""),
    "module.model.norm.weight": ("model.norm.weight", "-module."),
    "_orig_mod.model.norm.weight": ("model.norm.weight", "-_orig_mod."),
    "module._orig_mod.model.norm.weight": ("model.norm.weight", "-module. -_orig_mod."),
    "_orig_mod.module.lm_head.weight": ("lm_head.weight", "-_orig_mod. -module."),
    "model.layers.0._orig_mod.mlp.weight": ("model.layers.0.mlp.weight", "-_orig_mod."),
    "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.weight": (
        "model.layers.0.mlp.weight",
        "-_fsdp_wrapped_module. -_checkpoint_wrapped_module.",
    ),
    "model.model.norm.weight": ("model.norm.weight", "-model."),
    "model.lm_head.weight": ("lm_head.weight", "-model."),
    "norm.weight": ("model.norm.weight", "+model."),
    "_orig_mod.norm.weight": ("model.norm.weight", "-_orig_mod. +model."),
    "value_head.weight": ("value_head.weight", ""),
    "module.value_head.weight": ("module.value_head.weight", ""),
    "module": ("module", ""),
    "layers.1.mlp.weight": ("layers.1.mlp.weight", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule(name: str) -> None:
    expected, rule = CASES[name]
    found = resolve([name], KNOWN)
    assert found.run_names == {name: expected}
    assert found.rules == ({rule: 1} if rule else {})
    assert not found.twice


def test_a_known_name_stands_for_itself() -> None:
    names = ["module.norm.weight", "norm.weight", "model.norm.weight"]
    assert resolve(names, names).run_names == {name: name for name in names}


def test_rules_are_counted_and_two_for_one_are_told() -> None:
    found = resolve(["module.model.norm.weight", "module.lm_head.weight", "norm.weight"], KNOWN)
    assert found.rules == {"-module.": 2, "+model.": 1}
    assert found.twice == (("model.norm.weight", "module.model.norm.weight", "norm.weight"),)


WORDS = st.sampled_from(["module", "model", "_orig_mod", "_fsdp_wrapped_module", "a", "norm", ""])
NAMES = st.lists(WORDS, min_size=1, max_size=5).map(".".join)


@given(st.lists(NAMES, unique=True), st.sets(NAMES))
def test_every_name_is_read_once(names: list[str], known: set[str]) -> None:
    found = resolve(names, known)
    assert list(found.run_names) == names
    assert all(found.run_names[name] == name for name in names if name in known)
    assert all(read in known or read == name for name, read in found.run_names.items())
    assert len(set(found.run_names.values())) + len(found.twice) == len(names)
