"""Weights as trainers have them: wrapped names, tied heads, values that are no numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, all_changed, tensor
from publisher_cases import Place, as_numpy, make_place

from weightcast.publisher import init_channel
from weightcast.shared.base.errors import Refused

torch = pytest.importorskip("torch")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TORCH_TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def tensors(model: Model) -> dict[str, Any]:
    return {
        name: torch.from_numpy(one.data.copy()).view(TORCH_TYPES[one.dtype]).reshape(one.shape)
        for name, one in model.items()
    }


class Tied(torch.nn.Module):  # type: ignore[misc]
    """As Qwen2ForCausalLM: `state_dict` has the head and the embedding, one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(20, 8, dtype=torch.bfloat16)
        self.model.norm = torch.nn.LayerNorm(8, bias=False, dtype=torch.float32)
        self.lm_head = torch.nn.Linear(8, 20, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.model.embed_tokens.weight


class Wrapper(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.module = inner


def base_of(module: Any) -> Model:
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32"}
    found = {}
    for name, one in module.state_dict().items():
        if name != HEAD:
            data = one.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
            found[name] = Tensor(kinds[one.dtype], tuple(one.shape), data)
    return found


@pytest.mark.parametrize(
    "config",
    [
        '{"tie_word_embeddings": true}',
        '{"text_config": {"tie_word_embeddings": true}}',
        "{}",
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_tied_model_is_published_unchanged(tmp_path: Path, config: str, wrapped: bool) -> None:
    module = Tied()
    place = make_place(tmp_path, base_of(module), config=config)
    with torch.no_grad():
        module.model.embed_tokens.weight.mul_(1.5)
    given = Wrapper(module) if wrapped else module
    with place.publisher(non_finite="refuse") as publisher:
        report = publisher.publish(given.state_dict())
        assert report.mapped == ({"-module.": 3} if wrapped else {})
        assert publisher.submit(given.state_dict()).result(240).changed_elements == 0
    place.arrives(base_of(module), 2)


def test_a_head_of_its_own_needs_a_base_that_has_one(tmp_path: Path) -> None:
    module = Tied()
    place = make_place(tmp_path, base_of(module), config='{"tie_word_embeddings": false}')
    with place.publisher() as publisher, pytest.raises(Refused, match=f"{HEAD} is not part of the run"):
        publisher.publish(module.state_dict())


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "model."])
def test_wrapped_names_of_checkpoints(tmp_path: Path, rng: np.random.Generator, prefix: str) -> None:
    base = {"model.a.weight": tensor(rng, "F32", 5, 3), "b.weight": tensor(rng, "BF16", 7)}
    place = make_place(tmp_path, base)
    model = all_changed(base, rng)
    with place.publisher() as publisher:
        report = publisher.publish_checkpoint(place.new({prefix + name: one for name, one in model.items()}))
    rule = " ".join(f"-{word}." for word in prefix.split(".") if word)
    assert report.mapped == {rule: 2}
    place.arrives(model, 1)


def test_two_names_for_one_tensor(tmp_path: Path, rng: np.random.Generator) -> None:
    base = {"model.a": tensor(rng, "F32", 5)}
    place = make_place(tmp_path, base)
    array = as_numpy(base["model.a"])
    with (
        place.publisher() as publisher,
        pytest.raises(Refused, match=r"model\.a and module\.model\.a both stand for model\.a"),
    ):
        publisher.publish({"model.a": array, "module.model.a": array})


def test_rules_that_a_channel_was_made_with(tmp_path: Path, rng: np.random.Generator) -> None:
    base = {"a": tensor(rng, "F32", 5), "b": tensor(rng, "F32", 5)}
    place = make_place(tmp_path, base, frozen=["b"], aliases={"c": "a"})
    made = init_channel(place.channel, place.base)
    assert init_channel(place.channel, place.base, frozen=["b"], aliases={"c": "a"}) == made
    with pytest.raises(Refused, match=r"alias d=a; frozen \*"):
        init_channel(place.channel, place.base, frozen=["*"], aliases={"d": "a"})


# values that are no numbers

BAD = {
    "F8_E4M3": [float("nan")],
    "F8_E5M2": [float("nan"), float("inf")],
    "F16": [float("nan"), float("inf"), float("-inf")],
    "BF16": [float("nan"), float("inf"), float("-inf")],
    "F32": [float("nan"), float("inf"), float("-inf")],
    "F64": [float("nan"), float("inf"), float("-inf")],
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Every kind of float, with values that were no numbers from the start."""
    made: Model = {}
    for kind in BAD:
        values = torch.linspace(-3, 3, 70, dtype=torch.float32)
        values[11] = float("nan")
        one = values.to(TORCH_TYPES[kind]).view(torch.uint8).numpy().reshape(-1).copy()
        made[f"{kind}.w"] = Tensor(kind, (7, 10), one)
    made["I32.w"] = Tensor("I32", (70,), np.arange(280, dtype=np.uint8))
    return make_place(tmp_path_factory.mktemp("floats"), made)


def test_elements_that_become_no_numbers(floats: Place) -> None:
    with floats.publisher(non_finite="refuse") as publisher:
        before = publisher.version
        good = tensors(floats.model)
        good["F32.w"][3, 3] += 1
        good["I32.w"][5] = 0x7F800000
        assert publisher.submit(good).result(240).version == before + 1
        for kind, values in BAD.items():
            for value in values:
                bad = {name: one.clone() for name, one in good.items()}
                bad[f"{kind}.w"].view(-1)[:2] = torch.tensor([value, value]).to(bad[f"{kind}.w"].dtype)
                for give in (publisher.publish, lambda given: publisher.submit(given).result(240)):
                    with pytest.raises(Refused, match=rf"{kind}\.w \(2\)"):
                        give(bad)
        assert publisher.version == before + 1
        assert publisher.publish(good).changed_elements == 0
    with floats.publisher() as publisher:
        bad = tensors(floats.model)
        bad["BF16.w"][0, 0] = float("inf")
        report = publisher.publish(bad)
        assert (report.version, report.non_finite) == (before + 3, {"BF16.w": 1})


def test_elements_that_become_no_numbers_are_counted(floats: Place) -> None:
    with floats.publisher() as publisher:
        good, bad = tensors(floats.model), tensors(floats.model)
        good["F32.w"][3, 3] += 1
        assert publisher.publish(good).non_finite == {}, "what was no number before does not count"
        for kind, values in BAD.items():
            bad[f"{kind}.w"].view(-1)[:3] = torch.tensor([values[0]] * 3).to(bad[f"{kind}.w"].dtype)
        report = publisher.submit(bad).result(240)
        assert report.non_finite == {f"{kind}.w": 3 for kind in BAD}
        assert report.non_finite_elements == 3 * len(BAD)
        assert publisher.publish(bad).non_finite == {}
