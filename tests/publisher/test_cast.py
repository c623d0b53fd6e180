"""fp32 masters against a bf16 base: rounded as torch rounds, counted, published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, tensor
from hypothesis import given
from hypothesis import strategies as st
from publisher_cases import Place, make_place

from weightcast.publisher import cast_like
from weightcast.publisher.daemon.sources.handed import HandedWeights, HandOverSource
from weightcast.publisher.trainer.handover import HandOver
from weightcast.publisher.weights.given import CastTensor, RawTensor
from weightcast.shared.base.errors import Refused

torch = pytest.importorskip("torch")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def base() -> Model:
    rng = np.random.default_rng(1)
    return {
        EMBEDDING: tensor(rng, "BF16", 9, 5),
        "model.half": tensor(rng, "F16", 7),
        "model.norm": tensor(rng, "F32", 5),
        "model.steps": tensor(rng, "I32", 3),
        "model.zero": tensor(rng, "BF16"),
        "model.empty": tensor(rng, "BF16", 0, 4),
    }


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, base(), config='{"tie_word_embeddings": true}')


def masters() -> dict[str, Any]:
    random = torch.Generator().manual_seed(2)
    shapes = {name: one.shape for name, one in base().items()}
    made = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    made["model.steps"] = torch.arange(3, dtype=torch.int32)
    return {**made, HEAD: made[EMBEDDING]}


def expected(given: dict[str, Any]) -> Model:
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
    found = {}
    for name, one in base().items():
        data = given[name].to(kinds[one.dtype]).reshape(-1).view(torch.uint8).numpy().copy()
        found[name] = Tensor(one.dtype, one.shape, data)
    return found


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("by", ["publisher", "directory"])
def test_masters_are_published(place: Place, kind: str, by: str) -> None:
    given = masters()
    tensors = {f"module.{n}": one.numpy() if kind == "numpy" else one for n, one in given.items()}
    with place.publisher() as publisher:
        weights = cast_like(publisher if by == "publisher" else place.base, tensors)
        assert (weights.tensors, weights.elements) == (5, 9 * 5 * 2 + 7 + 1)
        assert publisher.publish(weights).mapped == {"-module.": 7}
        place.arrives(expected(given), 1)
        given = {name: one * 1.01 if one.is_floating_point() else one for name, one in given.items()}
        given[HEAD] = given[EMBEDDING]
        publisher.submit(cast_like(publisher, given.items())).result(240)
    place.arrives(expected(given), 2)


def test_through_shared_memory(place: Place, tmp_path: Path) -> None:
    given, handed_over = masters(), HandOverSource(tmp_path / "export", tmp_path / "memory")
    with HandOver(tmp_path / "export") as hand_over, place.publisher() as publisher:
        hand_over.put(cast_like(place.base, given))
        handed = handed_over.newest()
        assert handed is not None
        publisher.publish_weights(lambda: HandedWeights(handed_over.export, handed))
    place.arrives(expected(given), 1)


def test_an_untied_head_is_still_refused(place: Place) -> None:
    given = masters()
    given[HEAD] = given[HEAD] + 1
    with place.publisher() as publisher, pytest.raises(Refused, match=f"{HEAD} is tied"):
        publisher.publish(cast_like(publisher, given))


@pytest.mark.parametrize(("name", "has"), [("model.steps", torch.float32), ("model.norm", torch.int32)])
def test_what_is_no_rounding(place: Place, name: str, has: Any) -> None:
    given = {**masters(), name: torch.zeros(base()[name].shape, dtype=has)}
    with pytest.raises(Refused, match=f"{name} is .* rounding cannot"):
        cast_like(place.base, given)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_numpy_rounds_as_torch_does(bits: list[int]) -> None:
    array = np.array([*bits, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0x3F808000, 0x3F818000], np.uint32)
    weights = cast_from(array.view(np.float32))
    rounded = torch.from_numpy(array.view(np.float32).copy()).to(torch.bfloat16)
    mine = torch.from_numpy(weights.view(np.int16).copy()).view(torch.bfloat16)
    nan = rounded.isnan()
    assert bool((mine.isnan() == nan).all())
    assert bool((mine.view(torch.int16) == rounded.view(torch.int16))[~nan].all())


def cast_from(array: Any) -> Any:
    from weightcast.publisher.trainer import precision

    made = CastTensor(array, "BF16", precision._converted).made()
    assert isinstance(made, RawTensor)
    return np.asarray(made.data)
