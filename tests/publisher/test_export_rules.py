"""Exports that need `--cast`, `--rename` or `--drop`: what arrives, what is counted, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, tensor, write_checkpoint
from daemonkit import Daemon, Places
from hypothesis import assume, given
from hypothesis import strategies as st
from in_process import Command
from publisher_cases import Place, make_place
from waiting import wait_until

from weightcast.publisher import HandOver, RawTensor, cast_like
from weightcast.publisher.weights.export_rules import BadRule, Rename
from weightcast.publisher.weights.precision import STORED, rounded
from weightcast.shared.base.errors import Refused

torch = pytest.importorskip("torch")

KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STATE = "decoder.layers.0._extra_state"


def base() -> Model:
    rng = np.random.default_rng(1)
    return {
        "model.embed_tokens.weight": tensor(rng, "BF16", 9, 5),
        "model.layers.0.half": tensor(rng, "F16", 7),
        "model.layers.0.wide": tensor(rng, "F32", 5),
        "model.layers.0.widest": Tensor("F64", (3,), np.arange(3.0).view(np.uint8)),
        "model.layers.0.codes": tensor(rng, "U8", 6),
        "lm_head.weight": tensor(rng, "BF16", 9, 5),
    }


def export(dtype: str, prefix: str = "", seed: int = 2) -> Model:
    """The base's tensors with other values, the floating-point ones as `dtype`."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, one in base().items():
        if one.dtype in KINDS:
            values = torch.from_numpy(rng.standard_normal(one.shape)).to(KINDS[dtype])
            one = Tensor(dtype, one.shape, values.reshape(-1).view(torch.uint8).numpy().copy())
        found[name.replace("model.", f"model.{prefix}", 1)] = one
    return found


def as_base(given: Model, prefix: str = "") -> Model:
    """As torch rounds it."""
    found = {}
    for (name, wanted), one in zip(base().items(), given.values(), strict=True):
        if one.dtype in KINDS:
            flat = torch.from_numpy(one.data.copy()).view(KINDS[one.dtype]).to(KINDS[wanted.dtype])
            one = Tensor(wanted.dtype, one.shape, flat.view(torch.uint8).numpy().copy())
        found[name] = one
    return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, base())


def publish(place: Place, checkpoint: Path, *more: object) -> tuple[object, ...]:
    where = ("--channel", place.channel, "--local", place.pub, "--base", place.base, "--json")
    return "publish", checkpoint, *where, *more


@pytest.mark.parametrize("dtype", KINDS)
def test_an_export_in_another_precision_is_cast(place: Place, weightcast: Command, dtype: str) -> None:
    given = export(dtype)
    code, out, err = weightcast(*publish(place, place.new(given), "--cast"))
    assert code == 0, err
    cast = sum(one.dtype in KINDS and one.dtype != dtype for one in base().values())
    assert json.loads(out)["cast"] == cast
    place.arrives(as_base(given), 1)


def test_renamed_and_dropped_tensors_are_counted(place: Place, weightcast: Command) -> None:
    given = export("F32", "language_model.")
    rng = np.random.default_rng(3)
    states = {STATE: tensor(rng, "U8", 40), "decoder._extra_state": tensor(rng, "U8", 0)}
    flags = ("--cast", "--rename", "model.language_model.=model.", "--drop", "*_extra_state")
    code, out, err = weightcast(*publish(place, place.new({**given, **states}), *flags))
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["cast"], facts["renamed"], facts["dropped"], facts["notes"]) == (4, 5, 2, [])
    place.arrives(as_base(given), 1)


def test_a_rule_that_matches_nothing_is_said(place: Place, weightcast: Command) -> None:
    flags = ("--drop", "*_extra_state", "--rename", "transformer.=model.")
    code, out, _ = weightcast(*publish(place, place.new(base()), *flags))
    assert code == 0 and json.loads(out)["notes"] == [
        "--drop *_extra_state applied to no tensor",
        "--rename transformer.=model. applied to no tensor",
    ]


REFUSED = {
    "cast is named": ({}, export("F32"), (), "round with --cast"),
    "rename is named": ({}, export("BF16", "language_model."), (), "--rename model.language_model.=model."),
    "both are named": ({"head.weight": ("BF16", 4)}, {}, (), "--rename A=B, or leave out with --drop"),
    "drop is named": ({STATE: ("U8", 3)}, base(), (), "--drop GLOB"),
    "a needed tensor is dropped": ({}, base(), ("--drop", "*head*"), "takes lm_head.weight, which the run"),
    "two become one": ({"x.lm_head.weight": ("BF16", 4)}, base(), ("--rename", "x.="), "both become lm_head"),
    "another shape": (
        {"x.lm_head.weight": ("BF16", 4)},
        base(),
        ("--drop", "lm_head.weight", "--rename", "x.="),
        "x.lm_head.weight (for lm_head.weight) is BF16 [4], expected BF16 [9, 5]|lm_head.weight is BF16 [4]",
    ),
    "no rounding to integers": (
        {"model.layers.0.codes": ("F32", 6)},
        base(),
        ("--cast",),
        "model.layers.0.codes is F32 [6], expected U8 [6]",
    ),
    "quantise is named": ({"model.layers.0.codes": ("F32", 6)}, base(), ("--cast",), "quantise"),
    "an adapter": (
        {"base_model.model.q.lora_A.weight": ("BF16", 4)},
        base(),
        (),
        "hold an unmerged LoRA adapter",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_option(place: Place, weightcast: Command, case: str) -> None:
    more, given, flags, text = REFUSED[case]
    added = {name: tensor(np.random.default_rng(4), *form) for name, form in more.items()}
    code, out, _ = weightcast(*publish(place, place.new({**given, **added}), *flags))
    facts = json.loads(out)
    assert code == 3
    assert any(part in f"{facts['message']} {facts['remedy']}" for part in text.split("|"))
    assert not (place.channel / "latest").exists()


def test_messages_to_python_name_functions(place: Place) -> None:
    given = {name: np.zeros(one.shape, np.float32) for name, one in base().items() if one.dtype != "U8"}
    with place.publisher() as publisher, pytest.raises(Refused) as refused:
        publisher.publish(given)
    assert "`cast_like`" in refused.value.remedy and "--cast" not in refused.value.remedy


def test_python_takes_the_rules_for_a_checkpoint(place: Place) -> None:
    given = export("F32", "language_model.")
    rename = ["model.language_model.*=model.*"]
    with place.publisher() as publisher:
        report = publisher.publish_checkpoint(place.new(given), cast=True, rename=rename)
    assert (report.cast, report.renamed, report.dropped) == (4, 5, 0)
    place.arrives(as_base(given), 1)


@pytest.mark.parametrize("text", ["", "a", "=b", "a=a", "a*=b", "a=b*", "*.a.*=b*", "*=*"])
def test_a_bad_rename_is_a_usage_error(place: Place, weightcast: Command, text: str) -> None:
    with pytest.raises(BadRule):
        Rename.of(text)
    code, out, _ = weightcast(*publish(place, place.base, f"--rename={text}"))
    assert code == 2 and "--rename" in out
    where = ("--channel", place.channel, "--local", place.pub, "--base", place.base)
    code, _, err = weightcast("publisher", "run", *where, f"--rename={text}")
    assert code == 2 and "rename" in err


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        ("a.=", "a.b", "b"),
        ("a.=c.", "a.b", "c.b"),
        ("a.=c.", "b.a.x", None),
        ("*=m.*", "x", "m.x"),
        ("h.*.attn=layers.*.self_attn", "h.3.attn", "layers.3.self_attn"),
        ("h.*.attn=layers.*.self_attn", "h.3.attn.bias", None),
        ("a*a=b*", "a", None),
        ("*.ffn.*=*.mlp.*", "layers.0.ffn.up.weight", "layers.0.mlp.up.weight"),
    ],
)
def test_how_names_are_rewritten(rule: str, name: str, expected: str | None) -> None:
    assert Rename.of(rule).applied(name) == expected


PATTERNS = (0, 1, 0x007F, 0x7F80, 0x7F81, 0x7FC0, 0x7C00, 0x7C01, 0x3F80, 0x477F, 0x8000, 0xFF80)


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS)), st.binary(min_size=8, max_size=256))
def test_numpy_rounds_as_torch_does(found: str, wanted: str, data: bytes) -> None:
    """Subnormals, ties, overflow and infinities by bits; the payload of a NaN depends on torch's CPU."""
    assume(found != wanted)
    edges = np.array([high << 16 | low for high in PATTERNS for low in (0, 1, 0x7FFF, 0x8000, 0x8001)], "<u4")
    raw = np.frombuffer(data[: len(data) // 8 * 8] + edges.tobytes(), np.uint8).copy()
    mine = np.ascontiguousarray(rounded(raw.view(STORED[found]), found, wanted))
    theirs = torch.from_numpy(raw).view(KINDS[found]).to(KINDS[wanted])
    ours = torch.from_numpy(mine.view(np.uint8)).view(KINDS[wanted])
    nan = theirs.isnan()
    assert torch.equal(ours.isnan(), nan)
    bits = [one.masked_fill(nan, 0).view(torch.uint8) for one in (ours, theirs)]
    assert torch.equal(*bits)


def test_raw_tensors_are_cast_by_numpy(place: Place) -> None:
    given = export("BF16")
    pairs = {name: RawTensor(one.dtype, one.shape, one.data) for name, one in given.items()}
    with place.publisher() as publisher:
        publisher.publish(cast_like(publisher, pairs))
    place.arrives(as_base(given), 1)


def test_a_daemon_applies_its_rules_to_everything_it_is_given(tmp_path: Path) -> None:
    places = Places(tmp_path)
    write_checkpoint(places.base, base())
    places.watch.mkdir()
    hand = tmp_path / "hand"
    flags = ("--cast", "--rename", "model.language_model.=model.", "--drop", "*_extra_state")
    state = {STATE: tensor(np.random.default_rng(5), "U8", 8)}
    daemon = Daemon.start(places, *flags, "--hand-over", str(hand), "--allow", str(tmp_path)).ready()
    try:
        write_checkpoint(places.watch / ".a", {**export("F32", "language_model.", 6), **state}).rename(
            places.watch / "step_1"
        )
        _counted(daemon.wait_for_version(1), (4, 5, 1))
        asked = write_checkpoint(tmp_path / "asked", {**export("F32", "language_model.", 7), **state})
        assert daemon.post("/v1/publish", {"checkpoint": str(asked)}).status_code == 202
        _counted(daemon.wait_for_version(2), (4, 5, 1))
        given = export("F32", "language_model.", 8)
        with HandOver(hand) as hand_over:
            raw = {name: RawTensor(one.dtype, one.shape, one.data) for name, one in given.items()}
            hand_over.put(raw)
            _counted(daemon.wait_for_version(3), (4, 5, 0))
        extra = {"x": tensor(np.random.default_rng(9), "U8", 1)}
        refused = write_checkpoint(tmp_path / "refused", base() | extra)
        id = daemon.post("/v1/publish", {"checkpoint": str(refused)}).json()["id"]
        job = wait_until(lambda: _failed(daemon.get(f"/v1/publications/{id}").json()))
        assert "--drop" in job["error"]["remedy"]
    finally:
        daemon.kill()
    Place(tmp_path, base()).arrives(as_base(given), 3)


def _failed(job: dict[str, Any]) -> dict[str, Any] | None:
    return job if job["state"] == "failed" else None


def _counted(status: dict[str, Any], counts: tuple[int, int, int]) -> None:
    last = status["publications"][0]
    assert (last["cast"], last["renamed"], last["dropped"]) == counts
