"""torch tensors in process, on a GPU where there is one: layouts, views, ties, odd values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, Tensor, all_changed, every_dtype, some_changed, tensor
from publisher_cases import make_place

from weightcast.shared.base.errors import Refused

torch = pytest.importorskip("torch")

TORCH_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def as_torch(one: Tensor) -> Any:
    if not len(one.data):
        return torch.empty(one.shape, dtype=TORCH_TYPES[one.dtype], device=DEVICE)
    flat = torch.from_numpy(one.data.copy())
    return flat.view(TORCH_TYPES[one.dtype]).reshape(one.shape).to(DEVICE)


def given_of(model: Model) -> dict[str, Any]:
    return {name: as_torch(one) for name, one in model.items()}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(31)


@pytest.mark.parametrize("encoding", ["fast", "small", "xor"])
def test_every_dtype(tmp_path: Path, rng: np.random.Generator, encoding: str) -> None:
    model = every_dtype(rng)
    place = make_place(tmp_path, model)
    first = some_changed(model, rng)
    second = all_changed(first, rng, 2)
    with place.publisher(encoding=encoding) as publisher:
        for version, model in enumerate([first, second, second, some_changed(second, rng)], 1):
            assert publisher.publish(given_of(model)).version == version
    place.arrives(model, 4)


def test_odd_values_are_compared_by_their_bits(tmp_path: Path) -> None:
    old = np.array([0x7FC0, 0x7FC1, 0x0000, 0x8000, 0x7F80, 0x3F80] * 40, "<u2")
    new = old.copy()
    new[[0, 2, 3]] = [0x7FC2, 0x8000, 0x0000]
    model: Model = {"odd": Tensor("BF16", (len(old),), old.view(np.uint8))}
    place = make_place(tmp_path, model)
    with place.publisher() as publisher:
        model = {"odd": Tensor("BF16", (len(old),), new.view(np.uint8))}
        publisher.publish(given_of(model))
    place.arrives(model, 1)


def test_tensors_that_lie_oddly_in_memory(tmp_path: Path, rng: np.random.Generator) -> None:
    model: Model = {name: tensor(rng, "BF16", 40, 32) for name in ("a", "b", "c", "d")}
    place = make_place(tmp_path, model)
    with place.publisher() as publisher:
        for _ in range(2):
            model = all_changed(model, rng)
            plain = given_of(model)
            wide = torch.zeros(80, 64, dtype=torch.bfloat16, device=DEVICE)
            wide[::2, ::2] = plain["b"]
            shifted = torch.zeros(40 * 32 + 3, dtype=torch.bfloat16, device=DEVICE)[3:].view(40, 32)
            shifted.copy_(plain["c"])
            odd = {
                "a": plain["a"].t().contiguous().t(),
                "b": wide[::2, ::2],
                "c": shifted,
                "d": torch.nn.Parameter(plain["d"]),
            }
            publisher.publish(odd)
    place.arrives(model, 2)


def test_views_that_turn_signs_are_published_as_what_they_show(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    def given_as_views(model: Model) -> dict[str, Any]:
        real, pairs = as_torch(model["f"]), as_torch(Tensor("F32", (60, 2), model["c"].data))
        turned = torch.view_as_complex(pairs).conj_physical()
        return {"f": torch._neg_view(-real), "c": turned.conj()}

    floats = {name: tensor(rng, "F32", 120) for name in "fc"}
    complexes = [{**floats, "c": Tensor("C64", (60,), floats["c"].data)}]
    for _ in range(2):
        floats = all_changed(floats, rng)
        complexes.append({**floats, "c": Tensor("C64", (60,), floats["c"].data)})
    place = make_place(tmp_path, complexes[0])
    with place.publisher() as publisher:
        for model in complexes[1:]:
            publisher.publish(given_as_views(model))
    place.arrives(model, 2)


def test_tensors_that_are_not_dense_are_refused_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    model: Model = {"a": tensor(rng, "F32", 40, 3)}
    place = make_place(tmp_path, model)
    dense = as_torch(model["a"])
    with place.publisher() as publisher:
        for odd in (dense.to_sparse(), torch.nested.nested_tensor([dense], layout=torch.jagged)):
            with pytest.raises(Refused, match="a: expected a dense tensor"):
                publisher.publish({"a": odd})


@pytest.mark.parametrize("base_ties", [False, True])
def test_tied_tensors_are_compared_by_bits(tmp_path: Path, rng: np.random.Generator, base_ties: bool) -> None:
    model: Model = {"embed": tensor(rng, "BF16", 90, 8), "other": tensor(rng, "F32", 8)}
    if base_ties:
        model["head"] = model["embed"]
    place = make_place(tmp_path, model, aliases={"head": "embed"})
    with place.publisher() as publisher:
        for step in range(3):
            model = {**model, "embed": model["embed"].changed(rng, 4)}
            tied = {**model, "head": model["embed"]}
            given = given_of(tied)
            given["head"] = (given["embed"], given["embed"].view(90, 8), given["head"])[step]
            publisher.publish(given)
            untied = {**given, "head": as_torch(model["embed"].changed(rng, 1))}
            with pytest.raises(Refused, match="tied"):
                publisher.publish(untied)
    place.arrives(tied if base_ties else model, 3)


def test_the_same_name_twice(tmp_path: Path, rng: np.random.Generator) -> None:
    place = make_place(tmp_path, {"a": tensor(rng, "F16", 90)})
    model = all_changed(place.model, rng)
    given = as_torch(model["a"])
    with place.publisher() as publisher:
        with pytest.raises(Refused, match="twice"):
            publisher.publish([("a", given), ("a", as_torch(place.model["a"]))])
        publisher.publish([("a", given), ("a", given.clone())])
    place.arrives(model, 1)
