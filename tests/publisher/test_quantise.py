"""Quantised weights: scales that are held, codes that are taken over, checkpoints as they are quantised.
tests/trainers/test_quantise_reference.py compares them with the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, tensor
from daemonkit import Daemon, Places, rename_in, write
from in_process import Command

from weightcast.publisher import Quantiser, RawTensor, Shard, quantise, quantise_checkpoint
from weightcast.publisher.weights.quantise import SCHEMES
from weightcast.shared.base.errors import Refused

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

NAME = "model.layers.0.mlp.up_proj.weight"


def matrix(seed: int = 0, rows: int = 300, columns: int = 256) -> Any:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).bfloat16()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


def scale_of(scheme: str, made: dict[str, Any]) -> Any:
    module, names = NAME.removesuffix("weight"), SCHEMES[scheme].names
    scale = SCHEMES[scheme].load(made[module + names[1]])
    return scale if len(names) == 2 else scale / made[module + names[2]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_held_scales_stay_until_a_value_needs_another_one(scheme: str) -> None:
    weight, quantiser, exact = matrix().float(), Quantiser(scheme, hold=1 / 16), Quantiser(scheme)
    first = scale_of(scheme, dict(quantiser({NAME: weight})))
    for share in (1.0078125, 1.03125, 0.96875):
        made = dict(quantiser({NAME: weight * share}))
        assert torch.equal(scale_of(scheme, made), first)
        # the largest value is clamped no further than with the scale that follows it
        assert scheme == "nvfp4" or bool(
            (first >= scale_of(scheme, dict(exact({NAME: weight * share})))).all()
        )
    assert not torch.equal(scale_of(scheme, dict(quantiser({NAME: weight * 2.5}))), first)
    assert same(dict(exact({NAME: weight})), dict(quantise({NAME: weight}, scheme)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_restart_goes_on_with_the_scales_of_the_checkpoint(tmp_path: Path, scheme: str) -> None:
    quantiser = Quantiser(scheme, hold=1 / 16)
    save_file(dict(quantiser({NAME: matrix()})), tmp_path / "model.safetensors")
    moved = {NAME: matrix().float() * 1.03125}
    again = Quantiser(scheme, hold=1 / 16)
    again.start_from(tmp_path)
    assert same(dict(again(moved)), dict(quantiser(moved)))
    assert not same(dict(again(moved)), dict(quantise(moved, scheme)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bands_that_do_not_change_are_not_quantised_again(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightcast.publisher.weights.quantise._BAND", 128 * 256)
    other, weight = "model.layers.1.mlp.up_proj.weight", matrix()
    given = {NAME: weight, other: matrix(1)}
    quantiser = Quantiser(scheme)
    reused = []
    for number in range(4):
        changed = weight.clone()
        changed[290] *= 0.5**number
        made = dict(quantiser({**given, NAME: changed}))
        assert same(made, dict(quantise({**given, NAME: changed}, scheme)))
        reused.append(quantiser.reused)
    # codes are kept from the second version on, once it is known that their source stays
    assert reused == [0, 0, *[(256 + 300) * 256] * 2]
    small = Quantiser(scheme, keep_bytes=1000)
    for _ in range(3):
        assert same(dict(small(given)), dict(quantise(given, scheme)))
    assert small.reused == 0


def test_matrices_that_engines_join_have_one_global_scale() -> None:
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkvo"]
    made = dict(quantise({name: matrix() * 2**n for n, name in enumerate(names)}, "nvfp4"))
    units = [float(made[name.removesuffix("weight") + "weight_global_scale"]) for name in names]
    assert units[0] == units[1] == units[2] != units[3]


def test_what_is_not_a_matrix_of_a_layer_passes() -> None:
    given = {
        "lm_head.weight": matrix(),
        "model.embed_tokens.weight": matrix(),
        "model.layers.0.mlp.gate.weight": matrix(),
        "model.norm.weight": matrix()[0],
        "model.layers.0.codes.weight": matrix().to(torch.int8),
        "model.layers.0.experts.gate_up_proj": matrix(),
    }
    made = dict(quantise(given, "fp8-block"))
    assert all(made[name] is one for name, one in given.items()) and made.keys() == given.keys()
    array = matrix().view(torch.uint8).numpy().tobytes()
    raw = dict(quantise({NAME: RawTensor("BF16", (300, 256), array)}, "fp8-block"))
    assert same(raw, dict(quantise({NAME: matrix()}, "fp8-block")))


@pytest.mark.parametrize(
    ("given", "scheme", "said"),
    [
        (matrix(columns=40), "mxfp8", "40 columns do not divide into blocks of 32"),
        (matrix() / 0.0, "int8-channel", "NaN or infinite"),
        (Shard(matrix(), (0, 0), (600, 256)), "fp8-block", "is a shard"),
        (matrix(), "fp9", "unknown scheme"),
    ],
)
def test_refusals(given: Any, scheme: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        list(quantise({NAME: given}, scheme))


def test_config_names_what_is_not_quantised(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = (NAME, NAME.replace("up", "gate"), "model.layers.0.mlp.gate.weight")
    save_file({name: matrix() for name in names}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    for scheme in SCHEMES:
        quantise_checkpoint(source, tmp_path / scheme, scheme)
        config = json.loads((tmp_path / scheme / "config.json").read_text())
        said = config["quantization_config"]
        key = "modules_to_not_convert" if scheme == "fp8-block" else "ignore"
        assert config["model_type"] == "llama" and said[key] == ["lm_head", "model.layers.0.mlp.gate"]
        assert same(
            load_file(tmp_path / scheme / "model.safetensors"),
            dict(quantise(load_file(source / "model.safetensors"), scheme)),
        )
        assert (tmp_path / scheme / "tokenizer.json").exists()
    with pytest.raises(Refused, match="exists"):
        quantise_checkpoint(source, tmp_path / "nvfp4", "nvfp4")
    with pytest.raises(Refused, match="quantised already"):
        quantise_checkpoint(tmp_path / "nvfp4", tmp_path / "twice", "mxfp8")
    assert not (tmp_path / "twice").exists()


def test_exports_in_bf16_become_versions_of_a_quantised_run(tmp_path: Path, weightcast: Command) -> None:
    places, rng = Places(tmp_path), np.random.default_rng(1)
    places.watch.mkdir()
    models: list[Model] = [
        {NAME: tensor(rng, "BF16", 70, 64), "model.norm.weight": tensor(rng, "BF16", 64)} for _ in range(3)
    ]
    done = weightcast(
        "quantise", write(tmp_path / "source", models[0]), places.base, "--scheme", "int8-channel"
    )
    assert done.code == 0 and "9,088 bytes" in done.out and "%" in done.out, done.err

    def held() -> dict[str, Any]:
        return {
            name: one for path in places.local.glob("*.safetensors") for name, one in load_file(path).items()
        }

    def wanted(model: Model) -> dict[str, Any]:
        given = {name: RawTensor(one.dtype, one.shape, one.data) for name, one in model.items()}
        made = {name: one for name, one in quantise(given, "int8-channel") if name != "model.norm.weight"}
        norm = torch.from_numpy(model["model.norm.weight"].data).view(torch.bfloat16)
        return {**made, "model.norm.weight": norm}

    daemon = Daemon.start(places, "--quantise", "int8-channel").ready()
    try:
        rename_in(places.watch / "step_1", models[1])
        daemon.wait_for_version(1)
        assert same(held(), wanted(models[1]))
    finally:
        daemon.stop()
    export = write(tmp_path / "step_2", models[2])
    options = ("--channel", places.channel, "--local", places.local, "--base", places.base)
    assert weightcast("publish", export, *options).code == 3
    done = weightcast("publish", export, *options, "--quantise", "int8-channel")
    assert done.code == 0, done.err
    assert same(held(), wanted(models[2]))
