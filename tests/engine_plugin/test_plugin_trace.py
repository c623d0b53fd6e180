"""What a loader does is found out without writing, and what is no plain copy is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from patch_writer import bytes_of, lanes, root, some_changed, write_checkpoint, write_patch
from plugin_models import Llama, ToyEngine, ToyHost, checkpoint
from torch import Tensor, nn
from weightcast_engine.loader.derived import live_tensors, own_tensors, private_copies
from weightcast_engine.loader.trace import Map, trace
from weightcast_engine.update.elements import checkpoint_forms
from weightcast_engine.update.refusals import BadPatch


class Loads(nn.Module):
    """One parameter `w` [6, 8] float32 (more if told), loaded by the function given."""

    def __init__(self, load: Callable[[nn.Module, str, Tensor], object], **more: Tensor) -> None:
        super().__init__()
        self._load = load
        for name, tensor in {"w": torch.full((6, 8), 7.0), **more}.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(self, name, tensor)


def traced(room: Path, model: nn.Module, **tensors: Tensor) -> Map:
    """Its map; nothing live may have changed."""
    forms = checkpoint_forms(write_checkpoint(room, tensors))
    before = {name: (tensor.data_ptr(), bytes_of(tensor).tobytes()) for name, tensor in live_tensors(model)}
    found = trace(model.load_weights, forms, [tensor for _, tensor in live_tensors(model)])
    after = {name: (tensor.data_ptr(), bytes_of(tensor).tobytes()) for name, tensor in live_tensors(model)}
    assert before == after
    return found


W = torch.arange(48, dtype=torch.float32).reshape(6, 8)


def put(tensor: Tensor) -> Callable[[nn.Module, str, Tensor], object]:
    """A copy of something made of the tensor."""
    return lambda model, name, given: model.w.data.copy_(tensor(given))  # type: ignore[operator]


REFUSED: dict[str, tuple[Callable[[nn.Module, str, Tensor], object], Tensor, str]] = {
    "cast by the copy": (lambda m, n, t: m.w.data.copy_(t), W.bfloat16(), "is converted"),
    "cast before it": (lambda m, n, t: m.w.data.copy_(t.float()), W.bfloat16(), "computed from it"),
    "cast by to": (lambda m, n, t: m.w.data.copy_(t.to(m.w.dtype)), W.bfloat16(), "computed from it"),
    "cast by Python's name": (lambda m, n, t: m.w.data.copy_(t.to(int)), W, "computed from it"),
    "with another sign": (lambda m, n, t: m.w.data.copy_(torch._neg_view(t)), W, "another sign"),
    "half of its halves": (
        lambda m, n, t: m.w.data.view(torch.int16)[:3].copy_(t.view(torch.int16)[:3]),
        W,
        "another width",
    ),
    "by its strides": (
        lambda m, n, t: m.w.data.copy_(t.t().contiguous().as_strided((6, 8), (8, 1))),
        W.view(8, 6),
        "places in memory",
    ),
    "by its storage": (lambda m, n, t: t.untyped_storage() and m.w.data.copy_(t), W, "looked into"),
    "turned over": (
        lambda m, n, t: m.w.data.view(8, 3, 2).permute(2, 1, 0).copy_(t.view(2, 3, 8)),
        W,
        "another order",
    ),
    "scaled": (lambda m, n, t: m.w.data.copy_(t * 2), W, "computed from it"),
    "offset by one": (lambda m, n, t: m.w.data.copy_(t + 1), W, "computed from it"),
    "changed before": (lambda m, n, t: m.w.data.copy_(t.mul_(2)), W, "changed by the loader"),
    "spread": (lambda m, n, t: m.w.data.copy_(t), W[0].clone(), "is spread"),
    "repeated": (lambda m, n, t: m.w.data.copy_(t.expand(6, 8)), W[:1].clone(), "repeats"),
    "gathered": (lambda m, n, t: m.w.data.copy_(t[torch.tensor([1, 0, 2, 3, 4, 5])]), W, "computed from it"),
    "new data": (lambda m, n, t: setattr(m.w, "data", t), W, "__set__"),
    "set item": (lambda m, n, t: m.w.data.__setitem__(slice(0, 6), t), W, "__setitem__"),
    "added": (lambda m, n, t: m.w.data.add_(t), W, "add_"),
    "out": (lambda m, n, t: torch.add(t, t, out=m.w.data), W, "add"),
    "elsewhere first": (lambda m, n, t: m.w.data.copy_(torch.zeros(6, 8).copy_(t)), W, "none of the model's"),
    "looked into": (lambda m, n, t: m.w.data.copy_(t) if t[0, 0] > 0 else None, W, "not taken"),
    "to numpy": (lambda m, n, t: m.w.data.copy_(torch.from_numpy(t.numpy())), W, "not taken"),
    "an error": (lambda m, n, t: {}[n], W, "not taken by the model's loader: KeyError"),
    "filled after": (lambda m, n, t: m.w.data.copy_(t).fill_(0), W, "shares its place"),
    "normalised after": (lambda m, n, t: m.w.data.copy_(t).div_(2), W, "shares its place"),
    "filled over its last column": (
        lambda m, n, t: (m.w.data.narrow(1, 5, 3).zero_(), m.w.data.narrow(1, 0, 6).copy_(t)),
        W[:, :6].clone(),
        "shares its place",
    ),
    "filled over its last row": (
        lambda m, n, t: (m.w.data.narrow(0, 3, 3).zero_(), m.w.data.narrow(0, 0, 4).copy_(t)),
        W[:4].clone(),
        "shares its place",
    ),
    "the same place twice": (lambda m, n, t: (m.w.data.copy_(t), m.w.data.copy_(t)), W, "shares its place"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loader_that_does_not_just_copy_is_refused(tmp_path: Path, case: str) -> None:
    load, tensor, reason = REFUSED[case]
    found = traced(tmp_path, Loads(load), w=tensor)
    assert reason in found.refused["w"] and "w" not in found.pieces


TAKEN: dict[str, Callable[[nn.Module, str, Tensor], object]] = {
    "plain": lambda m, n, t: m.w.data.copy_(t),
    "without data": lambda m, n, t: m.w.copy_(t),
    "transposed": lambda m, n, t: m.w.data.view(8, 6).copy_(t.t()),
    "transposed there": lambda m, n, t: m.w.data.view(8, 6).t().copy_(t),
    "halves of it, transposed": lambda m, n, t: [
        half.copy_(part.t()) for half, part in zip(m.w.data.view(8, 6).chunk(2), t.chunk(2, 1), strict=True)
    ],
    "by rows": lambda m, n, t: [m.w.data[row].copy_(t[row]) for row in range(6)],
    "by columns": lambda m, n, t: [m.w.data.narrow(1, c, 4).copy_(t.narrow(1, c, 4)) for c in (0, 4)],
    "by chunks": lambda m, n, t: [a.copy_(b) for a, b in zip(m.w.chunk(3), t.chunk(3), strict=True)],
    "reshaped": lambda m, n, t: m.w.data.view(2, 3, 8).copy_(t.view(2, 3, 8)),
    "moved": lambda m, n, t: m.w.data.copy_(t.to(m.w.device)),
    "made contiguous": lambda m, n, t: m.w.data.copy_(t.narrow(0, 0, 6).contiguous()),
    "asked for its form": lambda m, n, t: (
        m.w.data.copy_(t) if t.shape == m.w.shape and t.dim() == 2 else None
    ),
}


@pytest.mark.parametrize("case", TAKEN)
def test_copies_of_narrow_views_are_taken(tmp_path: Path, case: str) -> None:
    host = ToyHost([Loads(TAKEN[case])], {"w": W}, tmp_path)
    host.run("hold", 0, root(0), "0")
    assert host.run("state")["refused"] == {}
    target = some_changed({"w": W}, 3, 0.3)
    host.update(write_patch(host.patches, {"w": W}, target, 1))
    fresh = Loads(TAKEN[case])
    fresh.load_weights(target.items())
    assert torch.equal(host.engines[0].model.w, fresh.w)
    assert host.run("digest", None, 0, 9)["lanes"] == {"w": lanes(target["w"])}


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "complex64", "float8_e8m0fnu"])
def test_a_tensor_of_any_dtype_is_given_to_the_loader_and_patched(tmp_path: Path, dtype: str) -> None:
    """One that it did not get could be a scale of others."""

    def load(model: nn.Module, name: str, given: Tensor) -> None:
        place = model.w if name == "w" else model.s
        place.data.copy_(given)  # type: ignore[operator, union-attr]
        if name == "z":
            model.w.data.clamp_(max=40)  # type: ignore[operator, union-attr]

    scale = torch.arange(1, 9).to(getattr(torch, dtype))
    host = ToyHost([Loads(load, s=torch.zeros_like(scale))], {"w": W, "s": scale}, tmp_path / "a")
    host.run("hold", 0, root(0), "0")
    assert host.run("state")["refused"] == {}
    words = scale.clone().view(torch.uint8)
    words[:: scale.element_size()] ^= 1
    target = {"w": W + 1, "s": words.view(scale.dtype)}
    host.update(write_patch(host.patches, {"w": W, "s": scale}, target, 1))
    assert host.run("digest", None, 0, 9)["lanes"] == {name: lanes(one) for name, one in target.items()}

    model = Loads(load, s=torch.zeros_like(scale))
    told = ToyHost([model], {"w": W, "z": scale}, tmp_path / "b").run("state")["refused"]
    assert "shares its place" in told["w"]


def test_a_pipe_among_the_files_of_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    host = ToyHost([Loads(put(lambda t: t))], {"w": W}, tmp_path)
    os.mkfifo(host.directory / "another.safetensors")
    told = host.run("state")
    assert not told["patchable"] and "not a regular file" in told["reason"]


def test_a_dtype_without_a_name_here_is_a_reason_to_patch_nothing(tmp_path: Path) -> None:
    host = ToyHost([Loads(put(lambda t: t))], {"w": W}, tmp_path)
    file = host.directory / "model.safetensors"
    header = b'{"w":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    told = host.run("state")
    assert not told["patchable"] and "w has a dtype that is not known here" in told["reason"]


def test_padding_beside_a_tensor_is_no_part_of_it(tmp_path: Path) -> None:
    """As SGLang pads slices of tensor-parallel ranks on a CPU: columns and rows that the checkpoint lacks."""

    def load(model: nn.Module, name: str, given: Tensor) -> None:
        assert isinstance(model.w, Tensor)
        wide = model.w.data.narrow(1, 0, 6)
        model.w.data.narrow(1, 6, 2).zero_()
        wide.narrow(0, 5, 1).fill_(0)
        wide.narrow(0, 0, 5).copy_(given)

    given = {"w": W[:5, :6].clone()}
    host = ToyHost([Loads(load)], given, tmp_path)
    host.run("hold", 0, root(0), "0")
    assert host.run("state")["refused"] == {}
    target = some_changed(given, 3, 0.3)
    host.update(write_patch(host.patches, given, target, 1))
    live = host.engines[0].model.w
    assert torch.equal(live[:5, :6], target["w"]) and not live[:5, 6:].any() and not live[5:].any()


def test_one_bad_tensor_leaves_the_others_patchable(tmp_path: Path) -> None:
    class Strict(Llama):
        def _load_norm(self, name: str, tensor: Tensor) -> None:
            self.norm.data.copy_(tensor)
            if float(tensor[0]) > 0:
                self.norm.data.mul_(2)

    found = traced(tmp_path, Strict(torch.float32), **checkpoint())
    assert set(found.refused) == {"norm.weight"}
    assert set(found.pieces) == set(checkpoint()) - {"norm.weight"}


def test_a_loader_that_takes_nothing_alone_is_given_up_after_some_runs(tmp_path: Path) -> None:
    runs = []

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        runs.append(len(list(weights)))
        raise RuntimeError("all or nothing")

    forms = checkpoint_forms(write_checkpoint(tmp_path, {f"t{n}": torch.zeros(2) for n in range(1000)}))
    found = trace(load, forms, [])
    assert len(found.refused) == 1000 and len(runs) < 1000


def test_two_tensors_in_one_place_are_both_refused(tmp_path: Path) -> None:
    found = traced(tmp_path, Loads(lambda m, n, t: m.w.data[2:4].copy_(t)), a=W[:2].clone(), b=W[2:4].clone())
    assert set(found.refused) == {"a", "b"}


def test_tensors_that_map_nowhere_are_refused_by_the_front(tmp_path: Path) -> None:
    host = ToyHost([Loads(lambda m, n, t: n == "w" and m.w.data.copy_(t))], {"w": W, "unused": W}, tmp_path)
    host.run("hold", 0, root(0), "0")
    assert list(host.run("state")["refused"]) == ["unused"]
    base = {"w": W, "unused": W}
    with pytest.raises(BadPatch, match="unused is taken nowhere"):
        host.run("check", write_patch(host.patches, base, some_changed(base, 1), 1))
    changed = base | some_changed({"w": W}, 2)
    host.update(write_patch(host.patches, base, changed, 1))
    assert torch.equal(host.engines[0].model.w, changed["w"])


def test_a_tensor_of_which_a_part_is_taken_is_refused(tmp_path: Path) -> None:
    host = ToyHost([Loads(lambda m, n, t: m.w.data[:4].copy_(t[:4]))], {"w": W}, tmp_path)
    assert list(host.run("state")["refused"]) == ["w"]


@pytest.mark.parametrize("registered", [False, True])
def test_weights_of_which_a_module_keeps_a_copy_are_refused(tmp_path: Path, registered: bool) -> None:
    class Latent(nn.Module):
        """As MLA does with kv_b_proj."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
            self.attention = nn.Module()
            self.attention.up = self.up
            self.kv_cache = torch.ones(3)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                getattr(self, name).weight.data.copy_(tensor)

        def loaded(self) -> None:
            made = self.up.weight.data.t().contiguous()
            self.attention.W_UV = nn.Parameter(made, requires_grad=False) if registered else made

    model = Latent()
    host = ToyHost([model], {"up": W, "out": W}, tmp_path)
    model.loaded()
    refused = host.run("state")["refused"]
    assert list(refused) == ["up"] and "attention computes with" in refused["up"] and "W_UV" in refused["up"]


def test_a_view_of_a_weight_is_no_copy() -> None:
    model = nn.Linear(8, 6)
    model.seen = model.weight.data[:2]
    assert private_copies(own_tensors(model)) == {}
    model.kept = [torch.ones(2)]
    assert len(private_copies(own_tensors(model))) == 2


def test_what_the_adapter_refuses_is_refused_by_storage(tmp_path: Path) -> None:
    host = ToyHost([Llama(torch.float32)], checkpoint(), tmp_path)
    engine: ToyEngine = host.engines[0]
    engine.refused = {int(engine.model.qkv.untyped_storage()._cdata): "is packed"}
    assert host.run("state")["refused"] == dict.fromkeys(("k.weight", "q.weight", "v.weight"), "is packed")
