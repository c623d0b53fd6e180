"""What the adapter for vLLM refuses, on modules as vLLM keeps them, without vLLM."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from patch_writer import bytes_of, root, some_changed, write_checkpoint, write_patch
from plugin_models import Ranks
from torch import Tensor, nn
from weightcast_engine.update.front import Front
from weightcast_engine.update.rank import Answer, EngineRank, Order
from weightcast_engine.update.refusals import BadPatch, InDoubt, OtherBase
from weightcast_engine.vllm.hook import METHOD, VllmControls, VllmEngine, obey, shared_names

OUT, IN, BLOCK = 256, 128, 128


class Fp8LinearMethod:
    """Named as vLLM's."""


class UnquantizedEmbeddingMethod:
    """Named as vLLM's."""


def fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Fp8Linear(nn.Module):
    """Block-scaled 8-bit floats; kernels may keep the weights transposed, as `turned` does."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.quant_method = Fp8LinearMethod()
        weight = torch.zeros(OUT, IN, dtype=torch.float8_e4m3fn)
        self.weight = fixed(weight.t() if turned else weight)
        self.weight_scale_inv = fixed(torch.ones(OUT // BLOCK, IN // BLOCK))


class Fp8Model(nn.Module):
    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.embed = nn.Module()
        self.embed.quant_method = UnquantizedEmbeddingMethod()  # type: ignore[assignment]
        self.embed.weight = fixed(torch.zeros(40, IN, dtype=torch.bfloat16))
        self.proj, self.norm = Fp8Linear(turned), nn.Module()
        self.norm.weight = fixed(torch.zeros(IN, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def fp8_checkpoint() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    return {
        "embed.weight": torch.randn(40, IN, generator=random).bfloat16(),
        "norm.weight": torch.randn(IN, generator=random).bfloat16(),
        "proj.weight": torch.randn(OUT, IN, generator=random).to(torch.float8_e4m3fn),
        "proj.weight_scale_inv": torch.rand(OUT // BLOCK, IN // BLOCK, generator=random),
    }


def loaded(tensors: dict[str, Tensor], turned: bool = False) -> Fp8Model:
    model = Fp8Model(turned)
    for name, weight in model.named_parameters():
        (weight.data.t() if weight.shape != tensors[name].shape else weight.data).copy_(tensors[name])
    return model


@pytest.fixture(autouse=True)
def vllm_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModuleType("vllm.config")
    config.set_current_vllm_config = lambda _: nullcontext()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)


class Vllm:
    """A front of one worker around a model, with the configuration that vLLM would have."""

    def __init__(self, room: Path, model: nn.Module, tensors: dict[str, Tensor], **config: Any) -> None:
        self.model, self.tensors = model, tensors
        directory = write_checkpoint(room / "model", tensors)
        self.patches = directory / ".weightcast" / "engine"
        known = {"quantization": None, "enable_sleep_mode": False, "model": str(directory), **config}
        parallel = SimpleNamespace(data_parallel_size=1, enable_eplb=False)
        vllm_config = SimpleNamespace(
            parallel_config=parallel,
            speculative_config=None,
            lora_config=None,
            load_config=SimpleNamespace(load_format="auto"),
            **{name: known.pop(name) for name in ("offload_config", "cache_config") if name in known},
        )
        vllm_config.model_config = SimpleNamespace(**known)
        runner = SimpleNamespace(get_model=lambda: model)
        worker = SimpleNamespace(vllm_config=vllm_config, model_runner=runner)
        self.engine = VllmEngine(worker)
        self.rank = EngineRank(self.engine, self.patches, 1 << 24)
        self.controls = Ranks([self.rank])
        self.front = Front(self.controls)

    def run(self, name: str, *arguments: Any) -> Any:
        return asyncio.run(getattr(self.front, name)(*arguments))

    def patch(self, *names: str) -> tuple[str, dict[str, Tensor]]:
        changed = some_changed(self.tensors, 5)
        target = {**self.tensors, **{name: changed[name] for name in names}}
        return write_patch(self.patches, self.tensors, target, 1), target

    def live(self) -> dict[str, bytes]:
        return {name: bytes_of(weight).tobytes() for name, weight in self.model.named_parameters()}


@pytest.mark.parametrize("turned", [False, True])
def test_8_bit_floats_and_their_scales_are_refused_by_name_and_the_rest_is_patched(
    tmp_path: Path, turned: bool
) -> None:
    tensors = fp8_checkpoint()
    vllm = Vllm(tmp_path, loaded(tensors, turned), tensors)
    vllm.run("hold", 0, root(0), "0")
    refused = vllm.run("state")["refused"]
    assert set(refused) == {"proj.weight", "proj.weight_scale_inv"}
    assert refused["proj.weight_scale_inv"] == "belongs to proj, which computes by Fp8LinearMethod"
    before = vllm.live()
    for name in refused:
        with pytest.raises(BadPatch, match=name):
            vllm.run("check", vllm.patch(name, "norm.weight")[0])
    assert vllm.live() == before
    file, target = vllm.patch("embed.weight", "norm.weight")
    vllm.run("check", file)
    vllm.run("pause", "wait")
    assert vllm.run("apply", file, "1")["version"] == 1
    for name in ("embed.weight", "norm.weight"):
        assert vllm.live()[name] == bytes_of(target[name]).tobytes() != before[name]
    assert vllm.live()["proj.weight"] == before["proj.weight"]


def offload(
    cpu_offload_gb: float = 0, offload_group_size: int = 0, offload_backend: str = "auto"
) -> SimpleNamespace:
    return SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=cpu_offload_gb),
        prefetch=SimpleNamespace(offload_group_size=offload_group_size),
        offload_backend=offload_backend,
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quantization": "fp8"}, "the model is quantised: fp8"),
        ({"enable_sleep_mode": True}, "sleep mode is on, and weights that are away can't be read"),
        ({"offload_config": offload(cpu_offload_gb=1.5)}, "weights are offloaded"),
        ({"offload_config": offload(offload_group_size=2)}, "weights are offloaded"),
        ({"offload_config": offload(offload_backend="prefetch")}, "weights are offloaded"),
        ({"cache_config": SimpleNamespace(cpu_offload_gb=1)}, "weights are offloaded"),
    ],
)
def test_a_model_is_refused_as_a_whole_with_the_reason(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    vllm = Vllm(tmp_path, Fp8Model(), fp8_checkpoint(), **config)
    state = vllm.run("state")
    assert (state["patchable"], state["reason"]) == (False, reason)
    before = vllm.live()
    with pytest.raises(BadPatch, match=reason):
        vllm.run("check", vllm.patch("norm.weight")[0])
    assert vllm.live() == before


def test_a_model_that_is_not_offloaded_is_patched(tmp_path: Path) -> None:
    vllm = Vllm(tmp_path, Fp8Model(), fp8_checkpoint(), offload_config=offload())
    assert vllm.run("state")["patchable"]


class Client:
    """vLLM's client of its engine, of a release that has what is named, and what was asked of it."""

    def __init__(self, *parts: str) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._clear) if "renderer" in parts else None
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._stop) if "core" in parts else None

    async def _clear(self) -> None:
        self.asked.append(("clear",))

    async def _stop(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(("scheduler", mode, clear_cache))

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(("pause", mode, clear_cache))


@pytest.mark.parametrize(("policy", "mode"), [("recompute", "keep"), ("wait", "wait"), ("abort", "abort")])
def test_a_pause_clears_the_caches_and_waits_for_no_reader(policy: str, mode: str) -> None:
    client = Client("renderer", "core")
    asyncio.run(VllmControls(client).pause(policy))
    assert client.asked == [("clear",), ("scheduler", mode, True)]


@pytest.mark.parametrize("parts", [(), ("renderer",), ("core",)])
def test_a_client_with_other_insides_is_paused_by_its_own_route(parts: tuple[str, ...]) -> None:
    client = Client(*parts)
    asyncio.run(VllmControls(client).pause("recompute"))
    assert client.asked == [("pause", "keep", True)]


class Worker(SimpleNamespace):
    """With vLLM's own ways to other weights."""

    fails = False

    def reload_weights(self, weights_path: str | None = None) -> str:
        if self.fails:
            raise RuntimeError("no such file")
        return f"from {weights_path}"

    def update_weights(self, update_info: object) -> object:
        return update_info

    def reset_weights(self, seed: int) -> str:
        return "random"


def looked(worker: Worker) -> tuple[object, object, object]:
    told = obey(worker, {"do": "look"})
    return told["version"], told["label"], told["doubt"]


def test_what_vllm_loads_itself_is_known_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_PATCH_DIR", str(tmp_path / ".weightcast" / "engine"))
    config = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    worker = Worker(vllm_config=config)
    hold = {"do": "hold", "version": 3, "root": root(3), "label": "3"}
    loads = (
        lambda: worker.reload_weights(weights_path="/x"),
        lambda: worker.update_weights({"x": 1}),
        lambda: worker.reset_weights(seed=1),
    )
    for load in loads:
        assert obey(worker, hold)["status"] == 200
        assert looked(worker) == (3, "3", "")
        assert load() in ("from /x", {"x": 1}, "random")
        assert looked(worker) == (None, None, "")
    worker.fails = True
    with pytest.raises(RuntimeError, match="no such file"):
        worker.reload_weights()
    worker.update_weights(None)
    assert looked(worker) == (None, None, "a reload was not ended")
    assert obey(worker, hold)["status"] == 409
    worker.fails = False
    worker.reload_weights()
    assert obey(worker, hold)["status"] == 200 and looked(worker) == (3, "3", "")


class Replicas:
    """vLLM's client of several replicas of an engine: a call comes to all, the first one's answer back."""

    def __init__(self, ranks: Sequence[EngineRank]) -> None:
        self.replicas = {bytes([number, 0]): rank for number, rank in enumerate(ranks)}
        self.engine_core = SimpleNamespace(core_engines=list(self.replicas), _call_utility_async=self._call)

    async def collective_rpc(self, method: str, args: tuple[Order]) -> list[Answer]:
        return [rank.obey(*args) for rank in self.replicas.values()][:1]

    async def _call(
        self, utility: str, method: str, timeout: None, args: tuple[Order], named: None, *, engine: bytes
    ) -> list[Answer]:
        assert (utility, method, timeout, named) == ("collective_rpc", METHOD, None, None)
        return [self.replicas[engine].obey(*args)]

    async def is_paused(self) -> bool:
        return True

    async def update_weight_version(self, label: str) -> None:
        pass


@pytest.fixture
def two(tmp_path: Path) -> tuple[Vllm, Vllm, Front]:
    """Replicas of one model, and the front of both."""
    tensors = fp8_checkpoint()
    first, second = (Vllm(tmp_path, loaded(tensors), tensors) for _ in range(2))
    front = Front(VllmControls(Replicas([first.rank, second.rank])))
    asyncio.run(front.hold(0, root(0), "0"))
    return first, second, front


def test_all_replicas_are_patched(two: tuple[Vllm, Vllm, Front]) -> None:
    first, second, front = two
    assert asyncio.run(front.state())["ranks"] == 2
    file, target = first.patch("embed.weight")
    asyncio.run(front.check(file))
    assert asyncio.run(front.apply(file, "1"))["version"] == 1
    assert first.live()["embed.weight"] == bytes_of(target["embed.weight"]).tobytes()
    assert second.live() == first.live()


def test_the_weights_of_every_replica_are_compared(two: tuple[Vllm, Vllm, Front]) -> None:
    _, second, front = two
    with torch.no_grad():
        second.model.get_parameter("norm.weight").view(torch.int16)[5] ^= 1
    with pytest.raises(OtherBase, match=r"norm\.weight"):
        asyncio.run(front.digest(["norm.weight"], 0, 1))


def test_where_one_replica_takes_no_patch_none_does(
    two: tuple[Vllm, Vllm, Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, front = two
    before = first.live()
    file, _ = first.patch("embed.weight")
    asyncio.run(front.check(file))
    monkeypatch.setattr(second.engine, "synchronise", fails_once())
    with pytest.raises(InDoubt, match="once"):
        asyncio.run(front.apply(file, "1"))
    assert (first.live(), second.live()) == (before, before)


def test_a_reload_that_one_replica_does_not_end_is_none(
    two: tuple[Vllm, Vllm, Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, front = two
    monkeypatch.setattr(first.engine, "reload", lambda: None)
    monkeypatch.setattr(second.engine, "reload", fails_once())
    with pytest.raises(InDoubt, match="a reload failed: RuntimeError: once"):
        asyncio.run(front.reload("1"))
    assert asyncio.run(front.state())["in_doubt"]
    asyncio.run(front.reload("1"))
    assert not asyncio.run(front.state())["in_doubt"]


def fails_once() -> Callable[[], None]:
    left = [1]

    def fail() -> None:
        if left:
            left.pop()
            raise RuntimeError("once")

    return fail


def test_replicas_that_cannot_be_heard_one_by_one_are_not_asked(tmp_path: Path) -> None:
    vllm = Vllm(tmp_path, Fp8Model(), fp8_checkpoint())
    client = Replicas([vllm.rank, vllm.rank])
    del client.engine_core._call_utility_async
    with pytest.raises(RuntimeError, match="the first of its data parallel replicas"):
        asyncio.run(VllmControls(client).ranks({"do": "look"}))


def test_what_a_draft_model_shares_with_the_main_model_is_not_loaded_into(tmp_path: Path) -> None:
    """vLLM gives a drafter the main model's embeddings where its own were equal at the start."""
    main, draft = nn.Module(), nn.Module()
    main.embed, draft.model = nn.Embedding(4, 2), nn.Module()
    draft.model.embed_tokens, draft.model.norm = main.embed, nn.LayerNorm(2)
    assert shared_names(draft, main) == ("embed_tokens.weight",)
