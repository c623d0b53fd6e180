"""What loaders do besides copying: whatever they make of weights refuses these by name, wherever it goes; and
a look at a loader changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from patch_writer import bytes_of, lanes, root, some_changed, write_patch
from plugin_models import ToyHost
from torch import Tensor, nn
from weightcast_engine.update.front import Front
from weightcast_engine.update.refusals import BadPatch, OtherBase, Refusal

W = torch.arange(48, dtype=torch.float32).reshape(6, 8) + 1


def weight(like: Tensor = W) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(like), requires_grad=False)


class Loaded(nn.Module):
    """Weights `first` and `second` in modules of their own, each copied as it comes; then `then`."""

    def __init__(self, then: Callable[[Any], object]) -> None:
        super().__init__()
        for name in ("first", "second"):
            module = nn.Module()
            module.w = weight()
            self.add_module(name, module)
        self.plain = SimpleNamespace(t=torch.zeros(6, 8))
        self.table: dict[str, Any] = {"t": torch.zeros(6, 8)}
        self.tuple: tuple[Any, ...] = ()
        self.number = 1.0
        self._then = then

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_submodule(name).w.data.copy_(tensor)  # type: ignore[operator, union-attr]
        self._then(self)


def refused(room: Path, model: nn.Module, **tensors: Tensor) -> dict[str, str]:
    told = ToyHost([model], tensors, room).run("state")
    assert told["in_doubt"] is False
    found: dict[str, str] = told["refused"]
    return found


MADE: dict[str, Callable[[Any], object]] = {
    "in a plain object, in place": lambda m: m.plain.t.copy_(m.first.w),
    "in a plain object, scaled": lambda m: m.plain.t.copy_(m.first.w * 2),
    "in a plain object, anew": lambda m: setattr(m.plain, "t", m.first.w.double()),
    "in a dict": lambda m: m.table.__setitem__("t", m.first.w + 1),
    "in a nested tuple": lambda m: setattr(m, "tuple", (("t", m.first.w + 1),)),
    "as bytes": lambda m: m.table.__setitem__("t", (m.first.w * 9).to(torch.int8)),
    "as one number's tensor": lambda m: m.table.__setitem__("t", m.first.w.abs().max()),
    "as a number": lambda m: setattr(m, "number", m.first.w.abs().max().item()),
    "as numbers": lambda m: m.table.__setitem__("t", m.first.w.tolist()),
    "as a decision": lambda m: (m.first.w > 48).any() and m.second.w.zero_(),
    "as a comparison": lambda m: setattr(m, "number", torch.equal(m.first.w, m.second.w)),
    "as an index": lambda m: setattr(m, "number", range(m.first.w.max().long())),
    "as another's memory": lambda m: torch.from_dlpack(m.first.w).clamp_(max=48),
    "as an array": lambda m: m.table.__setitem__("t", m.first.w.numpy().copy()),
    "at the weight": lambda m: setattr(m.first.w, "cache", m.first.w.bfloat16()),
    "in a function": lambda m: setattr(m, "act", lambda x, t=m.first.w * 2: t @ x),
    "by out=": lambda m: torch.mul(m.first.w, 2, out=m.second.w),
    "by out= of a list": lambda m: torch.cat([m.first.w[:3], m.first.w[3:]], out=m.second.w),
    "by an operator's form": lambda m: torch.ops.aten.copy_.default(m.second.w, m.first.w),
    "by an operator": lambda m: torch.ops.aten.copy_(m.second.w, m.first.w),
    "by an operator's out": lambda m: torch.ops.aten.mul.out(m.first.w, m.first.w, out=m.second.w),
    "in a list, each in its place": lambda m: torch._foreach_clamp_max_([m.second.w, m.first.w], 48),
    "in its place": lambda m: nn.functional.relu(m.first.w, inplace=True),
    "as raw memory": lambda m: m.second.w.untyped_storage().copy_(m.first.w.untyped_storage()),
}


@pytest.mark.parametrize("case", MADE)
def test_what_a_loader_makes_of_a_weight_refuses_it_wherever_it_goes(tmp_path: Path, case: str) -> None:
    model = Loaded(MADE[case])
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    before = host.live()
    assert "first" in host.run("state")["refused"]
    assert host.live() == before


def test_what_a_loader_makes_and_drops_refuses_nothing(tmp_path: Path) -> None:
    def then(model: Any) -> None:
        made = model.first.w * 2
        ring = [made]
        ring.append(ring)  # type: ignore[arg-type]
        made.sign_()
        del made, ring
        model.plain.scratch = [torch.full((6, 8), 7.0) for _ in range(64)]

    assert refused(tmp_path, Loaded(then), first=W, second=W) == {}


def test_what_is_made_is_found_beside_a_frozen_heap(tmp_path: Path) -> None:
    """As vLLM leaves it."""
    model = Loaded(lambda m: m.plain.t.copy_(m.first.w * 2))
    gc.freeze()
    try:
        assert list(refused(tmp_path, model, first=W, second=W)) == ["first"]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_weight_that_is_mixed_with_what_is_loaded_is_refused(tmp_path: Path) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = weight(), weight()

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                if name == "a":
                    self.a.data.copy_(tensor)
                else:
                    self.c.data.copy_(self.a * tensor)

    assert set(refused(tmp_path, Mixes(), a=W, b=W)) == {"a", "b"}


@pytest.mark.parametrize("order", ["a b s", "a s b", "s a b"])
def test_a_loader_that_fails_for_one_tensor_is_seen_with_all_others_at_once(
    tmp_path: Path, order: str
) -> None:
    """A single number is looked into by the loaders of vLLM and SGLang."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.s = weight(), weight(), weight(), nn.Parameter(torch.zeros(1), False)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            came = set[str]()
            for name, tensor in weights:
                came.add(name)
                if name == "s":
                    self.s.data.fill_(tensor.item())
                else:
                    getattr(self, name).data.copy_(tensor)
            if {"a", "b"} <= came:
                self.c.data.copy_(self.a * self.b)

    tensors = {name: torch.ones(1) if name == "s" else W for name in order.split()}
    found = refused(tmp_path, Looks(), **tensors)
    assert set(found) == {"a", "b", "s"} and "is not taken by the model's loader" in found["s"]


@pytest.mark.parametrize("rows", [0, 5, 6])
def test_weights_that_share_memory_in_another_way_than_views_are_refused(tmp_path: Path, rows: int) -> None:
    """What was loaded last lies in both."""
    model, memory = Loaded(lambda m: None), np.zeros((12, 8), np.float32)
    model.first.w, model.second.w = (
        nn.Parameter(torch.from_numpy(part), False) for part in (memory[:6], memory[rows : rows + 6])
    )
    ones = torch.ones(6, 8)
    found = refused(tmp_path, model, first=ones, second=ones)
    assert set(found) == (set() if rows == 6 else {"first", "second"})
    assert all("shares its memory" in reason for reason in found.values())


def test_what_else_lies_in_the_place_of_a_tensor_that_is_refused_is_refused_too(tmp_path: Path) -> None:
    """A head that is tied in the model, and kept in another dtype in the checkpoint."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = weight(W.bfloat16())

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, tensor in weights:
                self.embed.data.copy_(tensor)

    assert set(refused(tmp_path / "a", Tied(), embed=W.bfloat16(), head=W)) == {"embed", "head"}

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight()

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                (self.w if name == "w" else self.w.data[:, 2]).data.copy_(tensor)

    assert set(refused(tmp_path / "b", Columns(), w=W, column=W[:, 2].contiguous())) == {"w", "column"}


class Clamped(nn.Parameter):
    """At most 40, whoever copies into it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            args = (args[0], args[1].clamp(max=40.0))
        return super().__torch_function__(func, types, args, kwargs or {})


class Counted(nn.Parameter):
    """As it is; vLLM's parameters are such."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Elsewhere(Tensor):
    """Stands for another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = func(*(one.inner if isinstance(one, cls) else one for one in args), **(kwargs or {}))
        return args[0] if func is torch.ops.aten.copy_.default else cls(inner)


class Itself(Loaded):
    """Copies into the weights, and not into their `data`."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_submodule(name).w.copy_(tensor)  # type: ignore[operator, union-attr]


def test_parameters_of_other_classes_are_loaded_in_their_own_way(tmp_path: Path) -> None:
    model = Itself(lambda m: None)
    model.first.w, model.second.w = (kind(torch.zeros(6, 8), False) for kind in (Clamped, Counted))
    found = refused(tmp_path / "a", model, first=W, second=W)
    assert list(found) == ["first"] and "computed from it" in found["first"]

    model.first.w = nn.Parameter(Elsewhere(torch.zeros(6, 8)), False)
    found = refused(tmp_path / "b", model, first=W, second=-W)
    assert list(found) == ["first"] and "Elsewhere" in found["first"]


class Pool(Loaded):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        def load(pair: tuple[str, Tensor]) -> None:
            target = self.get_submodule(pair[0]).w.data  # type: ignore[union-attr]
            target.zero_()  # type: ignore[operator]
            target.copy_(pair[1])  # type: ignore[operator]

        list(self.pool.map(load, weights))


@pytest.mark.parametrize("started", [False, True])
def test_a_loader_with_threads_is_refused_and_none_is_started(tmp_path: Path, started: bool) -> None:
    model = Pool(lambda m: None)
    model.pool = ThreadPoolExecutor(2)
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    if not started:
        model.pool = ThreadPoolExecutor(2)
    before, threads = host.live(), len(model.pool._threads)
    found = host.run("state")["refused"]
    assert set(found) == {"first", "second"} and "loads in threads" in found["first"]
    assert len(model.pool._threads) == threads and started is (threads > 0)
    assert host.live() == before
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


REPLACES: dict[str, Callable[[nn.Module, str, Tensor], object]] = {
    "a parameter": lambda m, n, t: setattr(m.get_submodule(n), "w", nn.Parameter(t, False)),
    "all of a module": lambda m, n, t: m.get_submodule(n).load_state_dict({"w": t}, assign=True),
}


@pytest.mark.parametrize("case", REPLACES)
def test_weights_that_a_loader_replaces_are_put_back(tmp_path: Path, case: str) -> None:
    class Replaces(Loaded):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, tensor in weights:
                REPLACES[case](self, name, tensor)

    model = Replaces(lambda m: None)
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    before = host.live()
    assert set(host.run("state")["refused"]) == {"first", "second"}
    assert host.live() == before and not any(one.is_meta for one in model.parameters())


class Keeps(Loaded):
    """Keeps something at each load, besides copying: `keep` of itself, the name and the tensor."""

    def __init__(self, keep: Callable[[Any, str, Tensor], object]) -> None:
        super().__init__(lambda m: None)
        self.cached: Any = torch.zeros(6, 8)
        self.loads = 0
        self.names = list[Any]()
        self._keep = keep

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_submodule(name).w.data.copy_(tensor)  # type: ignore[operator, union-attr]
            self._keep(self, name, tensor)

    def kept(self) -> list[object]:
        plain = [one.tolist() for one in (self.cached, self.plain.t, self.table["t"])]
        return [*plain, *self.children(), self.loads, len(self.names), vars(self.plain).get("number")]


LEFT: dict[str, Callable[[Any, str, Tensor], object]] = {
    "the tensor": lambda m, n, t: setattr(m, "cached", t),
    "what is made of the tensor": lambda m, n, t: setattr(m, "cached", t * 2),
    "a copy of the tensor": lambda m, n, t: setattr(m, "cached", torch.empty(6, 8).copy_(t)),
    "a copy of the weight": lambda m, n, t: setattr(m, "cached", torch.empty(6, 8).copy_(m.first.w)),
    "in a dict": lambda m, n, t: m.table.__setitem__("t", t),
    "in a list": lambda m, n, t: m.names.append(t),
    "a count": lambda m, n, t: setattr(m, "loads", m.loads + 1),
    "a module": lambda m, n, t: m.add_module("third", nn.Module()),
    "in an object, of the weight": lambda m, n, t: setattr(m.plain, "t", torch.empty(6, 8).copy_(m.first.w)),
    "a number of the tensor": lambda m, n, t: setattr(
        m.plain, "number", torch.empty(6, 8).copy_(t).max().item()
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_a_model_keeps_is_as_before_a_look_at_its_loader(tmp_path: Path, case: str) -> None:
    model = Keeps(LEFT[case])
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    before = model.kept()
    told = host.run("state")
    assert not told["in_doubt"] and told["patchable"]
    assert model.kept() == before


def test_a_loader_that_keeps_what_it_is_given_where_nobody_can_put_it_back_leaves_a_doubt(
    tmp_path: Path,
) -> None:
    host = ToyHost([Keeps(lambda m, n, t: setattr(m.plain, "t", t))], {"first": W, "second": W}, tmp_path)
    host.run("hold", 0, root(0), "0")
    told = host.run("state")
    assert told["in_doubt"] and not told["patchable"] and "keeps what it was given" in told["reason"]
    host.run("pause", "wait")
    host.run("reload", "0")
    told = host.run("state")
    assert not told["in_doubt"] and not told["patchable"] and "keeps what it was given" in told["reason"]


def compiled(model: Any) -> None:
    with torch._C.DisableTorchFunction():  # as compiled code
        model.first.w.clamp_(max=40)


def caught(model: Any) -> None:
    with contextlib.suppress(RuntimeError):
        compiled(model)


BELOW: dict[str, Callable[[Any], object]] = {
    "compiled": compiled,
    "within a call": lambda m: nn.functional.embedding(torch.arange(6), m.first.w, max_norm=9.0),
    "of the data": lambda m: nn.functional.embedding(torch.arange(6), m.first.w.data, max_norm=9.0),
    "caught": caught,
}


@pytest.mark.parametrize("case", BELOW)
def test_a_write_below_torchs_calls_is_not_carried_out(tmp_path: Path, case: str) -> None:
    host = ToyHost([Loaded(BELOW[case])], {"first": W / 40, "second": -W}, tmp_path)
    # a load would change these
    host.engines[0].model.first.w.copy_(W)
    before = host.live()
    told = host.run("state")
    assert "first" in told["refused"] and not told["in_doubt"]
    assert host.live() == before


def test_a_loader_that_changes_weights_unseen_is_asked_once_and_then_never(tmp_path: Path) -> None:
    """The engine is in doubt until a reload, and no weight of it is patched any more."""

    def then(model: Any) -> None:
        torch.utils.swap_tensors(model.first.w, nn.Parameter(model.first.w.clone(), False))

    host = ToyHost([Loaded(then)], {"first": W, "second": W}, tmp_path)
    host.run("hold", 0, root(0), "0")
    told = host.run("state")
    assert told["in_doubt"] and not told["patchable"] and "changed its weights" in told["reason"]
    host.run("pause", "wait")
    host.run("reload", "0")
    host.run("resume")
    told = host.run("state")
    assert not told["in_doubt"] and not told["patchable"] and "changed its weights" in told["reason"]


def test_what_a_first_step_keeps_refuses_the_weight_from_then_on(tmp_path: Path) -> None:
    model = Loaded(lambda m: None)
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    host.run("hold", 0, root(0), "0")
    assert host.run("state")["refused"] == {}
    model.first.wide = model.first.w.double()
    target = some_changed({"first": W, "second": W}, 3, 0.3)
    with pytest.raises(BadPatch, match="first computes with a tensor wide"):
        host.run("check", write_patch(host.patches, {"first": W, "second": W}, target, 1))
    alone = {"first": W, "second": target["second"]}
    host.update(write_patch(host.patches, {"first": W, "second": W}, alone, 1))
    assert host.run("digest", ["second"], 0, 1)["lanes"] == {"second": lanes(alone["second"])}


class Slotted:
    __slots__ = ("t",)

    def __init__(self, t: Tensor) -> None:
        self.t = t

    def get(self) -> Tensor:
        return self.t


class Own(Tensor):
    pass


KEPT: dict[str, Callable[[Any, Tensor], object]] = {
    "an object": lambda m, t: setattr(m.plain, "t", t),
    "an object of an object": lambda m, t: setattr(m.plain, "t", SimpleNamespace(inner=[t])),
    "a dict": lambda m, t: m.table.__setitem__("t", t),
    "a private dict": lambda m, t: setattr(m, "_cache", {"t": t}),
    "a function": lambda m, t: setattr(m, "act", lambda x: t @ x),
    "a function's default": lambda m, t: setattr(m, "act", lambda x, t=t: t @ x),
    "a function's named default": lambda m, t: setattr(m, "act", lambda x, *, t=t: t @ x),
    "a call with it": lambda m, t: setattr(m, "act", functools.partial(torch.add, t)),
    "a call of it": lambda m, t: setattr(m, "act", Slotted(t).get),
    "an object with slots": lambda m, t: setattr(m, "act", Slotted(t)),
    "a queue": lambda m, t: setattr(m, "act", deque([t])),
    "a tensor of another class": lambda m, t: setattr(m.plain, "t", t.as_subclass(Own)),
    "the weight": lambda m, t: setattr(m.first.w, "cache", t),
    "a buffer of another module": lambda m, t: m.second.register_buffer("t", t),
}


@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_that_the_engine_made_is_known_by_what_it_holds(
    tmp_path: Path, case: str, dtype: torch.dtype
) -> None:
    """As attention keeps its sinks in float32, in an object that is no module."""
    model = Loaded(lambda m: None)
    host = ToyHost([model], {"first": W, "second": -W}, tmp_path)
    KEPT[case](model, model.first.w.detach().to(dtype).clone())
    found = host.run("state")["refused"]
    assert "first" in found and ("second" not in found or "buffer" in case)


def test_eight_bit_scales_that_are_kept_are_compared(tmp_path: Path) -> None:
    model = Loaded(lambda m: None)
    host = ToyHost([model], {"first": W, "second": -W}, tmp_path)
    model.plain.t = torch.ones(48).to(torch.float8_e8m0fnu)
    assert host.run("state")["refused"] == {}


@pytest.mark.parametrize("kind", ["integers", "no numbers", "one storage"])
def test_a_copy_is_known_whatever_the_weight_is(tmp_path: Path, kind: str) -> None:
    model = Loaded(lambda m: None)
    first = W.int() if kind == "integers" else W.clone()
    if kind == "integers":
        model.first.w = weight(first)
    elif kind == "no numbers":
        first[1, 2] = float("nan")
    else:
        both = torch.zeros(2, 6, 8)
        model.first.w, model.second.w = (nn.Parameter(one, requires_grad=False) for one in both)
    host = ToyHost([model], {"first": first, "second": -W}, tmp_path)
    model.plain.t = model.first.w.detach().clone()
    assert "kept a second time" in host.run("state")["refused"]["first"]


def test_tensors_without_memory_of_their_own_are_passed_by(tmp_path: Path) -> None:
    model = Loaded(lambda m: m.first.w.double())
    host = ToyHost([model], {"first": W, "second": -W}, tmp_path)
    model.plain.t = W.to_sparse()
    told = host.run("state")
    assert told["refused"] == {} and told["patchable"] and not told["in_doubt"]


BESIDE: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "in a dict": lambda m, w: setattr(m, "made", {"wide": w * 2}),
    "in a dict of lists": lambda m, w: setattr(m, "_made", {"wide": [w * 2]}),
    "as complex numbers": lambda m, w: setattr(m, "made", torch.view_as_complex(w.view(6, 4, 2) * 2)),
    "as 8-bit integers": lambda m, w: setattr(m, "made", (w * 2).to(torch.int8)),
    "as 4-bit integers": lambda m, w: setattr(m, "made", w[:, :1].to(torch.int32)),
    "as a buffer of integers": lambda m, w: m.register_buffer("made", (w * 2).to(torch.int8)),
}


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("case", BESIDE)
def test_what_a_module_keeps_beside_its_weights_refuses_these(
    tmp_path: Path, case: str, buffer: bool
) -> None:
    model = Loaded(lambda m: None)
    if buffer:
        del model.first.w
        model.first.register_buffer("w", torch.zeros(6, 8))
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    BESIDE[case](model.first, model.first.w.detach())  # type: ignore[arg-type, operator]
    assert list(host.run("state")["refused"]) == ["first"]


def test_indices_and_flags_beside_weights_refuse_nothing(tmp_path: Path) -> None:
    model = Loaded(lambda m: None)
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    model.first.register_buffer("places", torch.arange(6))
    model.first.experts, model.first.mask = torch.zeros(9, dtype=torch.int32), W > 3
    assert host.run("state")["refused"] == {}


def test_other_tensors_that_an_engine_keeps_refuse_nothing(tmp_path: Path) -> None:
    model = Loaded(lambda m: None)
    host = ToyHost([model], {"first": W, "second": -W}, tmp_path)
    model.plain.t = torch.ones(6, 8)
    model.table["views"] = [model.first.w.detach().t(), model.second.w]
    model.table["self"], model.table["model"] = model.table, model
    assert host.run("state")["refused"] == {}


def test_a_buffer_beside_its_modules_weights_that_nothing_loads_refuses_these(tmp_path: Path) -> None:
    model = Loaded(lambda m: None)
    host = ToyHost([model], {"first": W, "second": W}, tmp_path)
    model.first.register_buffer("scales", torch.rand(6))
    assert list(host.run("state")["refused"]) == ["first"]


class Late:
    """Two servers before one engine: what the second one asks comes in after so many steps of the first's."""

    def __init__(self, controls: Any, steps: int, order: Callable[[], Any]) -> None:
        self._controls, self._left, self._order = controls, steps, order
        self.answer: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controls, name)

    async def ranks(self, order: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self.answer = await self._order()
        return await self._controls.ranks(order)


def test_two_servers_before_one_engine_never_take_each_others_sums(tmp_path: Path) -> None:
    base = {"first": W, "second": W}
    host = ToyHost([Loaded(lambda m: None)], base, tmp_path)
    host.run("hold", 0, root(0), "0")
    file = write_patch(host.patches, base, some_changed(base, 1, 0.3), 1)
    others = Front(host.controls)
    came_between = 0
    for step in range(1, 12):
        late = Late(host.controls, step, lambda: others.digest(None, 0, 9))
        try:
            assert asyncio.run(Front(late).check(file))["tensors"] == 2
        except OtherBase as error:
            assert "another order came between" in error.message
            came_between += 1
        if late.answer is not None:
            assert late.answer["lanes"] == {name: lanes(tensor) for name, tensor in base.items()}
    assert came_between > 0


def test_sums_of_another_server_are_not_passed_by_this_one(tmp_path: Path) -> None:
    """It staged another file under the same name, and was not yet told what its sums are worth."""
    base = {"first": W, "second": W}
    host = ToyHost([Loaded(lambda m: None)], base, tmp_path)
    host.run("hold", 0, root(0), "0")
    file = write_patch(host.patches, base, some_changed(base, 1, 0.3), 1)
    before = host.live()

    async def other_sums() -> None:
        write_patch(host.patches, dict.fromkeys(base, W + 1), some_changed(base, 2, 0.3), 1)
        for order in (
            {"do": "stage", "file": file, "anew": True, "seconds": 60.0},
            {"do": "sums", "file": file, "turn": "theirs"},
            {"do": "more", "turn": "theirs", "budget": 1 << 20},
        ):
            [answer] = await host.controls.ranks(order)
            assert answer["status"] == 200
        assert answer["done"]

    orders = len(host.controls.orders)
    host.run("check", file)
    passed = host.controls.orders[orders:].index("passed") + 1
    host.run("pause", "wait")
    with pytest.raises(OtherBase, match="another order came between"):
        asyncio.run(Front(Late(host.controls, passed, other_sums)).check(file))
    with pytest.raises(OtherBase):
        host.run("apply", file, "1")
    assert host.live() == before


@pytest.mark.parametrize("begun", range(2, 7))
def test_a_check_of_another_server_between_check_and_apply_takes_nothing_of_the_update(
    tmp_path: Path, begun: int
) -> None:
    """Whichever of its orders come before the one server's check, and which after it."""
    base = {"first": W, "second": W}
    host = ToyHost([Loaded(lambda m: None)], base, tmp_path)
    host.run("hold", 0, root(0), "0")
    target = some_changed(base, 1, 0.3)
    file = write_patch(host.patches, base, target, 1)
    mine = Front(host.controls)
    for steps in range(1, 5):

        async def checked() -> None:
            await mine.check(file)

        async def applied() -> object:
            await mine.pause("wait")
            return await mine.apply(file, "1")

        before = host.live()
        others = Late(Late(host.controls, begun, checked), begun + steps, applied)
        with contextlib.suppress(Refusal):
            asyncio.run(Front(others).check(file))
        if others.answer is not None:
            held = {name: bytes_of(tensor).tobytes() for name, tensor in target.items()}
            assert host.live() == [{f"{name}.w": data for name, data in held.items()}]
            return
        assert host.live() == before


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
