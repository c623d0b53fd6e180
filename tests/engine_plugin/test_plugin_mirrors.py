"""Copies that a model keeps of its weights are patched with them, or their weights are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from patch_writer import lanes, root, some_changed, write_patch
from plugin_models import ToyHost
from torch import Tensor, nn
from weightcast_engine.update.refusals import BadPatch, InDoubt, OtherBase

HEADS, NOPE, VALUE, RANK = 4, 6, 10, 8


class Latent(nn.Module):
    """As SGLang keeps the parts of DeepSeek's `kv_b_proj`: `keys` [heads, NOPE, RANK] lies in memory as
    [heads, RANK, NOPE], `values` [heads, RANK, VALUE] as [heads, VALUE, RANK]."""

    def __init__(self, dtype: torch.dtype = torch.float32, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank = rank
        rows = HEADS // ranks * (NOPE + VALUE)
        self.up = nn.Parameter(torch.full((rows, RANK), 7.0).to(dtype), requires_grad=False)
        self.out = nn.Parameter(torch.zeros(3, RANK, dtype=dtype), requires_grad=False)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.scale: float | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "up":
                self.up.data.copy_(tensor.narrow(0, self.rank * len(self.up), len(self.up)))
            else:
                self.out.data.copy_(tensor)
        self.keep()

    def keep(self) -> None:
        keys, values = self.up.unflatten(0, (-1, NOPE + VALUE)).split([NOPE, VALUE], dim=1)
        self.keys = bound(self.keys, keys.transpose(1, 2).contiguous().transpose(1, 2))
        self.values = bound(self.values, values.contiguous().transpose(1, 2))

    def computes(self) -> Tensor:
        assert self.keys is not None and self.values is not None
        return torch.bmm(
            torch.bmm(torch.ones(len(self.keys), 2, NOPE), self.keys.float()), self.values.float()
        )


def bound(kept: Tensor | None, made: Tensor) -> Tensor:
    return made if kept is None else kept.copy_(made)


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    shapes = {"up": (HEADS * (NOPE + VALUE), RANK), "out": (3, RANK)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def latent_host(room: Path, ranks: int = 1, dtype: torch.dtype = torch.float32) -> ToyHost:
    host = ToyHost([Latent(dtype, rank, ranks) for rank in range(ranks)], weights(dtype), room)
    host.run("hold", 0, root(0), "0")
    return host


def models(host: ToyHost) -> list[Latent]:
    return [engine.model for engine in host.engines if isinstance(engine.model, Latent)]


def require_fresh(host: ToyHost, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    for model in models(host):
        fresh = Latent(dtype, model.rank, len(host.engines))
        fresh.load_weights(tensors.items())
        for mine, other in ((model.keys, fresh.keys), (model.values, fresh.values), (model.up, fresh.up)):
            assert mine is not None and other is not None and torch.equal(mine, other)
        assert torch.equal(model.computes(), fresh.computes())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_kept_beside_is_patched_with_it(tmp_path: Path, dtype: torch.dtype, ranks: int) -> None:
    """With one head on a rank its values are no copy."""
    host, base = latent_host(tmp_path, ranks, dtype), weights(dtype)
    assert host.run("state")["refused"] == {}
    kept = [(model.keys, model.values) for model in models(host)]
    for version in range(1, 11):
        target = some_changed(base, version, 0.5 if version == 10 else 0.05)
        host.update(write_patch(host.patches, base, target, version), str(version))
        require_fresh(host, target, dtype)
        base = target
    told = host.run("digest", None, 0, 9)
    assert told["lanes"] == {name: lanes(tensor) for name, tensor in base.items()}
    for model, (keys, values) in zip(models(host), kept, strict=True):
        assert model.keys is keys and model.values is values


@pytest.mark.parametrize("which", ["keys", "values", "up"])
def test_a_flipped_bit_in_either_place_is_found(tmp_path: Path, which: str) -> None:
    host, base = latent_host(tmp_path, 2), weights()
    assert host.run("digest", ["up"], 0, 1)["lanes"] == {"up": lanes(base["up"])}
    with torch.no_grad():
        getattr(models(host)[1], which).view(torch.int32)[-1, -1] ^= 1
    with pytest.raises(OtherBase, match="up: places that hold the same elements differ"):
        host.run("digest", ["up"], 0, 1)
    target = base | {"up": base["up"] + 1}
    with pytest.raises(OtherBase, match="up: places that hold the same elements differ"):
        host.run("check", write_patch(host.patches, base, target, 1))


@pytest.mark.parametrize("failures", [1, 3])
def test_what_is_kept_beside_is_taken_back_too(tmp_path: Path, failures: int) -> None:
    host, base = latent_host(tmp_path, 2), weights()
    file = write_patch(host.patches, base, some_changed(base, 1, 0.3), 1)
    host.run("check", file)
    host.run("pause", "recompute")
    host.engines[1].failures = failures
    with pytest.raises(InDoubt):
        host.run("apply", file, "1")
    require_fresh(host, base)


def test_a_copy_that_the_model_makes_anew_is_patched_where_it_lies_then(tmp_path: Path) -> None:
    host, base = latent_host(tmp_path), weights()
    target = some_changed(base, 1, 0.3)
    first = write_patch(host.patches, base, target, 1)
    host.run("check", first)
    [model] = models(host)
    model.keys = None
    model.keep()
    host.run("pause", "recompute")
    with pytest.raises(OtherBase, match="weights moved since"):
        host.run("apply", first, "1")
    host.update(first)
    require_fresh(host, target)


def test_a_copy_that_is_not_what_it_was_copied_from_is_refused(tmp_path: Path) -> None:
    host = latent_host(tmp_path)
    [model] = models(host)
    assert model.values is not None
    model.values[0, 0, 0] += 1
    assert "is not what the model keeps as its copy" in host.run("state")["refused"]["up"]


Made = Callable[[nn.Module], object]


class Keeps(nn.Module):
    """Two weights in modules of their own; what is made of the first when all are loaded is told."""

    def __init__(self, made: Made, second: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Module(), nn.Module()
        self.first.w = nn.Parameter(torch.zeros(6, 8), requires_grad=False)
        self.second.w = nn.Parameter(torch.zeros(6, 8) if second is None else second, requires_grad=False)
        self.own, self.more = nn.Module(), nn.Module()
        self.own.t, self.more.t = torch.zeros(6, 8), torch.zeros(6, 8)
        self.table = nn.Module()
        self.table.register_buffer("t", torch.ones(6, 8))
        self._made = made

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self.first.w.data.copy_(tensor)  # type: ignore[operator, union-attr]
        self._made(self)


TIED: dict[str, Made] = {
    "whole": lambda m: m.second.w.data.copy_(m.first.w),
    "of a copy": lambda m: m.second.w.data.copy_(m.first.w.clone()),
    "turned": lambda m: m.second.w.data.view(8, 6).copy_(m.first.w.t()),
    "turned there": lambda m: m.second.w.data.view(8, 6).t().copy_(m.first.w),
    "turned twice": lambda m: m.second.w.data.copy_(m.first.w.t().contiguous().t()),
    "in its parts": lambda m: [m.second.w.data[at].copy_(m.first.w[at]) for at in range(6)],
    "twice": lambda m: [m.second.w.data.copy_(m.first.w) for _ in range(2)],
    "and beside it": lambda m: (m.second.w.data.copy_(m.first.w), m.own.t.copy_(m.first.w)),
    "onto itself": lambda m: m.first.w.data.copy_(m.first.w),
}
W = torch.arange(48, dtype=torch.float32).reshape(6, 8)


@pytest.mark.parametrize("case", TIED)
def test_a_weight_that_a_loader_copies_from_another_is_patched_with_it(tmp_path: Path, case: str) -> None:
    host = ToyHost([Keeps(TIED[case])], {"w": W}, tmp_path)
    host.run("hold", 0, root(0), "0")
    assert host.run("state")["refused"] == {}
    target = some_changed({"w": W}, 3, 0.3)
    host.update(write_patch(host.patches, {"w": W}, target, 1))
    fresh = Keeps(TIED[case])
    fresh.load_weights(target.items())
    live = host.engines[0].model
    for mine, other in (
        (live.first.w, fresh.first.w),
        (live.second.w, fresh.second.w),
        (live.own.t, fresh.own.t),
    ):
        assert torch.equal(mine, other)
    assert host.run("digest", None, 0, 9)["lanes"] == {"w": lanes(target["w"])}


COMPUTED = "is also part of what the model's loader computes"
UNLIKE: dict[str, tuple[Made, str]] = {
    "scaled": (lambda m: m.second.w.data.copy_(m.first.w * 2), COMPUTED),
    "scaled by one": (lambda m: m.second.w.data.copy_(m.first.w * 1), COMPUTED),
    "added to": (lambda m: m.second.w.data.zero_().add_(m.first.w), COMPUTED),
    "gathered": (lambda m: m.second.w.data.copy_(m.first.w[torch.arange(6)]), COMPUTED),
    "by another tensor": (lambda m: m.second.w.data.copy_(torch.zeros(6, 8).copy_(m.first.w)), COMPUTED),
    "changed in between": (lambda m: m.second.w.data.copy_(m.first.w.clone().mul_(1)), COMPUTED),
    "of a view": (lambda m: m.second.w.data.copy_((m.first.w + 0).view(6, 8)), COMPUTED),
    "kept, scaled": (lambda m: m.own.t.copy_(m.first.w * 1), COMPUTED),
    "some columns": (lambda m: m.second.w.data[:, :4].copy_(m.first.w[:, :4]), "is copied elsewhere in part"),
    "into a part": (lambda m: m.second.w.data[3:].copy_(m.first.w[1:4]), "second computes with w"),
    "rows that overlap": (
        lambda m: (m.second.w.data[:4].copy_(m.first.w[:4]), m.own.t[2:].copy_(m.first.w[2:])),
        "is copied elsewhere in part",
    ),
    "part of a copy": (lambda m: m.second.w.data[:3].copy_(m.first.w.clone()[1:4]), COMPUTED),
    "a copy, spread": (
        lambda m: m.second.w.data.copy_(m.first.w[0].clone().expand(6, 8)),
        "repeats or overlaps",
    ),
    "spread": (lambda m: m.second.w.data.copy_(m.first.w[:1]), COMPUTED),
    "converted": (lambda m: m.second.w.data.copy_(m.first.w.double()), COMPUTED),
    "copied, and computed from the copy": (
        lambda m: (m.second.w.data.copy_(m.first.w), m.own.t.copy_(m.second.w * 2)),
        COMPUTED,
    ),
    "copied, and copied on": (
        lambda m: (m.second.w.data.copy_(m.first.w), m.own.t.copy_(m.second.w)),
        "is copied elsewhere with other values",
    ),
    "kept, and copied on": (
        lambda m: (m.own.t.copy_(m.first.w), m.more.t.copy_(m.own.t)),
        "is copied elsewhere with other values",
    ),
    "kept, and computed from there": (
        lambda m: (m.own.t.copy_(m.first.w), m.more.t.copy_(m.own.t + 1)),
        COMPUTED,
    ),
    "filled from a table": (lambda m: m.first.w.data.copy_(m.table.t), "shares its place"),
    "filled from what is kept": (lambda m: m.first.w.data.copy_(m.more.t), "shares its place"),
    "filled from a copy of a table": (
        lambda m: m.first.w.data[:2].copy_(m.table.t.clone()[:2]),
        "shares its place",
    ),
    "seen as others": (
        lambda m: m.second.w.data.view(torch.int16).copy_(m.first.w.view(torch.int16)),
        "another width",
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_what_is_made_of_a_weight_in_another_way_refuses_it(tmp_path: Path, case: str) -> None:
    made, reason = UNLIKE[case]
    host = ToyHost([Keeps(made)], {"w": W}, tmp_path)
    host.run("hold", 0, root(0), "0")
    assert reason in host.run("state")["refused"]["w"]
    with pytest.raises(BadPatch, match="w "):
        host.run("check", write_patch(host.patches, {"w": W}, some_changed({"w": W}, 1), 1))


EARLY: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "at once": lambda m, t: (m.second.w.data.copy_(m.first.w), m.first.w.data.copy_(t)),
    "by a copy": lambda m, t: [
        m.second.w.data.copy_(one) for one in [m.first.w.clone()] if m.first.w.data.copy_(t) is not None
    ],
}


@pytest.mark.parametrize("case", EARLY)
def test_a_copy_of_what_was_there_before_is_none_of_what_is_loaded(tmp_path: Path, case: str) -> None:
    class Before(Keeps):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, tensor in weights:
                EARLY[case](self, tensor)

    host = ToyHost([Before(lambda m: None)], {"w": W}, tmp_path)
    host.engines[0].reload()
    assert "before it is loaded" in host.run("state")["refused"]["w"]


def test_a_copy_that_is_made_again_after_each_part_is_patched(tmp_path: Path) -> None:
    class Parts(Keeps):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                self.first.w.data.narrow(0, 3 * "ab".index(name), 3).copy_(tensor)  # type: ignore[operator, union-attr]
                for at in (0, 3):
                    self.second.w.data[at : at + 3].copy_(self.first.w[at : at + 3])  # type: ignore[index, operator, union-attr]

    host = ToyHost([Parts(lambda m: None)], {"a": W[:3].clone(), "b": W[3:].clone()}, tmp_path)
    assert host.run("state")["refused"] == {}


def test_a_place_that_is_copied_to_and_loaded_belongs_to_neither(tmp_path: Path) -> None:
    def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            getattr(model, name).w.data.copy_(tensor)
        model.second.w.data.copy_(model.first.w)  # type: ignore[operator, union-attr]

    class Both(Keeps):
        load_weights = load

    host = ToyHost([Both(lambda m: None)], {"first": W, "second": W + 1}, tmp_path)
    assert set(host.run("state")["refused"]) == {"first", "second"}


def test_copies_of_a_module_that_keeps_something_else_too_do_not_free_its_weights(tmp_path: Path) -> None:
    host = latent_host(tmp_path)
    [model] = models(host)
    model.more = torch.ones(3)
    refused = host.run("state")["refused"]
    assert set(refused) == {"up", "out"} and "more" in refused["up"]
