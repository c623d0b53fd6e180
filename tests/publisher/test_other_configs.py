"""A trainer's config.json: other words for the base's model are taken, another model is not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import all_changed, snapshot
from publisher_cases import Place, make_place

from weightcast.shared.base.errors import Refused, WrongRun

BASE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "auto_map": {"AutoConfig": "configuration_x.C"},
    "id2label": {"0": "a"},
    "sliding_window": 4096,
    "use_sliding_window": False,
    "time_step_limit": [0.0, float("inf")],
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, config=json.dumps(BASE))


def saved(place: Place, config: str) -> Path:
    new = place.new(all_changed(place.model, np.random.default_rng(1)))
    (new / "config.json").write_text(config)
    return new


def changed(**members: Any) -> str:
    return json.dumps({**BASE, **members})


@pytest.mark.parametrize(
    "config",
    {
        "indented": json.dumps(BASE, indent=4, sort_keys=True),
        "another release": changed(
            transformers_version="5.1.0", use_cache=False, _name_or_path="somewhere", dtype="float32"
        ),
        "in training": changed(
            architectures=["FSDPQwen2ForCausalLM"], attention_dropout=0.1, eos_token_id=[1, 2]
        ),
        "remote code": changed(auto_map={"AutoConfig": "they/it--configuration_x.C"}, id2label={"0": "b"}),
        "more members": changed(layer_types=["full_attention"], rms_norm_eps=None, empty={}),
        "other names": changed(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "no window": changed(sliding_window=None),
        "moved members": json.dumps(
            {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}
        ),
        "several parts": json.dumps({"vision": {"rope_theta": 1.0}, "text": {"rope_theta": 10000.0}}),
        "floats": changed(time_step_limit=[0.0, {"__float__": "Infinity"}]),
        "nothing": "{}",
    }.values(),
)
def test_other_words_for_the_same_model(place: Place, config: str) -> None:
    new = saved(place, config)
    (new / "tokenizer.json").write_text("other")
    (new / "generation_config.json").write_text("{}")
    with place.publisher() as publisher:
        assert publisher.publish_checkpoint(new).version == 1
    place.arrives(all_changed(place.model, np.random.default_rng(1)), 1)
    assert (place.host / "config.json").read_bytes() == (place.base / "config.json").read_bytes()
    assert (place.host / "tokenizer.json").read_bytes() == (place.base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (changed(rope_theta=500000.0), "rope_theta (10000.0, base, and 500000.0)"),
        (changed(rope_scaling={"type": "yarn"}), 'rope_scaling.rope_type ("linear", base, and "yarn")'),
        (changed(rope_scaling={"type": "linear", "factor": 4.0}), "rope_scaling.factor (2.0, base, and 4.0)"),
        (changed(rope_scaling=None), 'rope_scaling.rope_type ("linear", base, and "default")'),
        (json.dumps({"max_position_embeddings": 4096}), "rope_scaling.rope_type ("),
        (json.dumps({"rope_parameters": {"rope_theta": 5.0}}), "rope_theta (10000.0, base, and 5.0)"),
        (changed(time_step_limit={"low": 0.0}), "time_step_limit ("),
        (changed(time_step_limit=[0.0, {"__float__": "NaN"}]), "time_step_limit ("),
        (changed(tie_word_embeddings=0), "tie_word_embeddings (false, base, and 0)"),
        (changed(use_sliding_window=True), "use_sliding_window (false, base, and true)"),
        (json.dumps(dict.fromkeys(BASE, 0)), "and 3 more"),
        ("[]", "not a JSON object"),
        ("{" * 100_000, "not a JSON object"),
        ("", "is empty"),
    ],
)
def test_another_model(place: Place, config: str, told: str) -> None:
    new = saved(place, config)
    with place.publisher() as publisher:
        before = snapshot(place.channel), snapshot(place.pub)
        with pytest.raises(Refused) as caught:
            publisher.publish_checkpoint(new)
        assert (snapshot(place.channel), snapshot(place.pub)) == before
        assert str(new / "config.json") in str(caught.value) and told in str(caught.value)
        assert caught.value.remedy
        (new / "config.json").unlink()
        assert publisher.publish_checkpoint(new).version == 1


def test_scaling_that_a_base_knows_nothing_of(tmp_path: Path) -> None:
    bare = {name: value for name, value in BASE.items() if name != "rope_scaling"}
    place = make_place(tmp_path, config=json.dumps(bare))
    newer = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}
    for scaling in ({"rope_scaling": newer}, {"rope_parameters": newer}):
        with place.publisher() as publisher, pytest.raises(WrongRun, match=r'"default", base, and "yarn"'):
            publisher.publish_checkpoint(saved(place, json.dumps(bare | scaling)))
    with place.publisher() as publisher:
        plain = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
        assert publisher.publish_checkpoint(saved(place, json.dumps(bare | plain))).version == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["a directory", "a pipe", "without end"])
def test_a_config_that_is_no_file(place: Place, what: str) -> None:
    new = saved(place, "{}")
    (new / "config.json").unlink()
    if what == "a directory":
        (new / "config.json").mkdir()
    elif what == "a pipe":
        os.mkfifo(new / "config.json")
    else:
        (new / "config.json").symlink_to("/dev/zero")
    with place.publisher() as publisher, pytest.raises(Refused, match=r"config\.json") as caught:
        publisher.publish_checkpoint(new)
    assert caught.value.remedy


def test_a_base_that_is_not_there_to_compare(place: Place) -> None:
    with place.publisher() as publisher:
        publisher.publish_checkpoint(saved(place, json.dumps(BASE)))
        (place.pub / "config.json").write_text(changed(rope_theta=1.0))
        with pytest.raises(WrongRun, match=r"config\.json differs from the run's"):
            publisher.publish_checkpoint(saved(place, changed(rope_theta=1.0)))
