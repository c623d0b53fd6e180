"""vLLM: what lives in a worker, and the plugin's routes in its server. Nothing is done unless
WEIGHTCAST_PATCH_DIR is set. The entry point `vllm.general_plugins` runs in every process of the engine;
`vllm.endpoint_plugins`, which vLLM follows when VLLM_PLUGINS names it, adds the routes: under /v1, so that
`--api-key` guards them. No dev mode is needed.

Written against vLLM 0.32.0. On its CPU platform linear layers compute with packed copies of their weights;
they keep plain ones here, because a patch would not reach a copy.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weightcast_engine.update import routes
from weightcast_engine.update.elements import misplaced
from weightcast_engine.update.front import Controls, Front
from weightcast_engine.update.places import storage
from weightcast_engine.update.rank import NOT_ENDED, Answer, EngineHere, EngineRank, Order

METHOD = "weightcast"
"""of a worker, as `collective_rpc` calls it"""
BACKEND = "weightcast"
"""of vLLM's weight transfer"""
_MODES = {"recompute": "keep", "wait": "wait", "abort": "abort"}
"""of a pause, by the policy"""
_RELOAD = "reload_weights"
_LOADS = ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update")
_PLAIN_FORMATS = ("auto", "hf", "safetensors", "runai_streamer", "fastsafetensors", "instanttensor")
_PLAIN_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "NoneType"}
)
NO_DRAFTER = frozenset({"none", "ngram", "ngram_gpu", "suffix"})
"""ways to draft without a model"""
_PLAIN_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
"""which compute with experts as a checkpoint has them"""
_FOLLOWED = frozenset({"CPU", "FLASHINFER_CUTLASS"})
"""whose packing is all in what `_pack` calls"""
_EXPERTS = ("w13_weight", "w2_weight")
_DIGIT = 128
"""below it, floats of any dtype hold every integer"""


def register() -> None:
    # it may be called twice, and older releases have no such factory
    with suppress(ImportError, ValueError):
        from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found]
            WeightTransferEngineFactory,
        )

        WeightTransferEngineFactory.register_engine(
            BACKEND, "weightcast_engine.vllm.transfer", "WeightcastTransfer"
        )
    if not os.environ.get("WEIGHTCAST_PATCH_DIR"):
        return
    from vllm.v1.worker.worker_base import WorkerBase  # type: ignore[import-not-found]

    setattr(WorkerBase, METHOD, obey)
    _keep_plain_weights()


def obey(worker: Any, order: Order) -> Answer:
    """A method of vLLM's worker."""
    rank = vars(worker).get("_weightcast")
    if rank is None:
        taken = transfers(worker.vllm_config)
        rank = (
            worker.weight_transfer_engine.rank if taken else EngineRank.from_environment(VllmEngine(worker))
        )
        worker._weightcast = rank
        _watch(worker, rank, () if taken else _LOADS)
    answer: Answer = rank.obey(order)
    return answer


def transfers(config: Any) -> bool:
    """Whether a framework loads versions by this plugin's backend."""
    return getattr(getattr(config, "weight_transfer_config", None), "backend", None) == BACKEND


def _watch(worker: Any, rank: EngineRank, loads: Sequence[str]) -> None:
    """This worker's own ways to other weights, whoever asks for them."""
    for name in (_RELOAD, "reset_weights", *loads):
        if hasattr(worker, name):
            setattr(worker, name, _watched(getattr(worker, name), rank, whole=name == _RELOAD))


def _watched(original: Callable[..., Any], rank: EngineRank, *, whole: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(*arguments: Any, **named: Any) -> Any:
        rank.forget(NOT_ENDED if whole else None)
        result = original(*arguments, **named)
        if whole:
            rank.forget("")
        return result

    return load


def _keep_plain_weights() -> None:
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if current_platform.is_cpu():
        import vllm._custom_ops as ops  # type: ignore[import-not-found]
        from vllm.model_executor.layers import utils  # type: ignore[import-not-found]

        ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


class VllmEngine(EngineHere):
    """Around a worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._orders: dict[object, Mapping[str, Tensor]] = {}
        """of packed experts, by backend and shapes"""

    @property
    def model(self) -> Any:
        return self._worker.model_runner.get_model()

    @property
    def directory(self) -> Path:
        return Path(self._worker.vllm_config.model_config.model)

    def hindrance(self) -> str | None:
        config = self._worker.vllm_config
        parallel, drafter = config.parallel_config, self.drafter()
        model, kind = config.model_config, config.load_config.load_format
        hindrances = {
            f"the model is quantised: {model.quantization}": model.quantization is not None,
            f"a draft model ({drafter}) has weights of its own": drafter not in NO_DRAFTER,
            "sleep mode is on, and weights that are away can't be read": bool(
                getattr(model, "enable_sleep_mode", False)
            ),
            "LoRA adapters are on": config.lora_config is not None,
            # replicas of a dense model are told that they are alone
            "experts are spread over data parallel replicas": parallel.data_parallel_size > 1,
            "experts move between ranks (EPLB)": bool(getattr(parallel, "enable_eplb", False)),
            "weights are offloaded": _offloads(config),
            f"weights are loaded as {kind}": str(kind) not in _PLAIN_FORMATS,
            f"{self.directory} is not a directory": not self.directory.is_dir(),
        }
        return next((reason for reason, applies in hindrances.items() if applies), None)

    def drafter(self) -> str:
        speculative = getattr(self._worker.vllm_config, "speculative_config", None)
        return "none" if speculative is None else str(getattr(speculative, "method", None) or "draft_model")

    @property
    def draft_directory(self) -> Path | None:
        config = getattr(self._worker.vllm_config, "speculative_config", None)
        draft = getattr(config, "draft_model_config", None)
        return None if draft is None or self.drafter() in NO_DRAFTER else Path(draft.model)

    def misplaced(self, patches: Path) -> str | None:
        return misplaced(self.directory, patches)

    def gather(self, own: Any) -> Sequence[Any]:
        from vllm.distributed.parallel_state import get_world_group  # type: ignore[import-not-found]

        group = get_world_group().cpu_group
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, own, group)
        return found

    def packed(self, name: str, module: Any) -> str | None:
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in _PLAIN_METHODS:
            return f"which computes by {method}"
        backend = _packs_for(module)
        if backend is not None and not self._order(module):
            return f"whose experts are packed for {backend.value}"
        # a function that closes over nothing reads the weight that it is given
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            return "which computes with a packed copy"
        return None

    def orders(self) -> Mapping[int, Tensor]:
        packed = [module for module in self.model.modules() if _packs_for(module) is not None]
        return {
            storage(getattr(module, name)): order
            for module in packed
            for name, order in self._order(module).items()
        }

    def _order(self, module: Any) -> Mapping[str, Tensor]:
        """Where vLLM's own packing moves the elements of one expert; nothing where it does more than that."""
        backend: str = _packs_for(module).name
        weights: dict[str, Any] = {name: getattr(module, name, None) for name in _EXPERTS}
        if backend not in _FOLLOWED or not all(_is_dense(weight) for weight in weights.values()):
            return {}
        known = (backend, *((one.shape, one.dtype, one.device) for one in weights.values()))
        if known not in self._orders:
            with suppress(Exception):  # a packing of another form, of any kind
                self._orders[known] = _traced_order(module, weights)
        return self._orders.setdefault(known, {})

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]

        with set_current_vllm_config(self._worker.vllm_config):
            yield

    def reload(self) -> None:
        # vLLM remembers weights_path, so that a call without it may read another directory
        self._worker.reload_weights(weights_path=str(self.directory))
        pack_experts_again(self.model)
        draft = self.draft_directory
        if draft is not None and draft.resolve() == self.directory.resolve():
            self.reload_draft()

    def reload_draft(self) -> None:
        """As vLLM 0.32 reloads a main model. Modules that are the main model's too keep their weights."""
        from vllm.model_executor.model_loader import get_model_loader  # type: ignore[import-not-found]
        from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
        from vllm.model_executor.model_loader.utils import (  # type: ignore[import-not-found]
            get_draft_load_config,
        )

        config, model = self._worker.vllm_config, self._worker.get_draft_model()
        draft = config.speculative_config.draft_model_config
        weights = get_model_loader(get_draft_load_config(config)).get_all_weights(draft, model)
        shared = shared_names(model, self.model)
        with self.at_rest():
            initialize_layerwise_reload(model)
            try:
                model.load_weights(one for one in weights if not one[0].endswith(shared))
            finally:
                finalize_layerwise_reload(model, draft)
        pack_experts_again(model)


def _packs_for(module: Any) -> Any:
    """The backend that this module's experts are packed for, if any."""
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    return None if backend is None or backend.name in _PLAIN_EXPERTS else backend


def _is_dense(weight: Any) -> bool:
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 3
        and weight.is_contiguous()
        and weight.untyped_storage().nbytes() == weight.nbytes
    )


def _traced_order(module: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Packs two experts whose elements are numbered, digit by digit, and finds where each number went.
    Raises ValueError unless every element went to one place, within its expert and in both the same."""
    lengths = {name: weight[0].numel() for name, weight in weights.items()}
    found = {name: torch.zeros(2, length, dtype=torch.int64) for name, length in lengths.items()}
    digit = 1
    while digit < 2 * max(lengths.values()):
        numbered = {}
        for name, weight in weights.items():
            numbers = torch.arange(2 * lengths[name]).view(2, *weight.shape[1:])
            numbered[name] = (numbers // digit % _DIGIT).to(weight)
        for name, packed in _pack(module, numbered).items():
            found[name] += packed.reshape(2, -1).to("cpu", torch.int64) * digit
        digit *= _DIGIT
    orders = {}
    for name, (first, second) in found.items():
        length = lengths[name]
        order = torch.full((length,), -1)
        order[first] = torch.arange(length)
        if (order < 0).any() or not torch.equal(second, first + length):
            raise ValueError(f"{name}: packing is not one order of every expert's elements")
        orders[name] = order.to(weights[name].device, torch.int32)
    return orders


def _pack(module: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """As vLLM does with the experts of this module when it has loaded them."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (  # type: ignore[import-not-found]
        convert_to_unquantized_kernel_format,
    )

    method = module.quant_method
    made = convert_to_unquantized_kernel_format(
        method.unquantized_backend,
        moe_config=copy.copy(module.moe_config),
        w13_weight=weights["w13_weight"],
        w2_weight=weights["w2_weight"],
    )
    layer: Any = nn.Module()
    layer.moe_config, layer.activation = module.moe_config, module.activation
    for name, weight in zip(_EXPERTS, made, strict=True):
        layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    experts = copy.copy(method.moe_kernel.fused_experts)
    experts.process_weights_after_loading(layer)
    return {name: getattr(layer, name).detach() for name in _EXPERTS}


def shared_names(draft: Any, main: Any) -> tuple[str, ...]:
    """How the names of tensors end that are loaded into memory of both models."""
    own = {id(parameter) for parameter in main.parameters()}
    shared = [name for name, one in draft.named_parameters(remove_duplicate=False) if id(one) in own]
    return tuple(".".join(name.split(".")[-2:]) for name in shared)


def _offloads(config: Any) -> bool:
    """A layer's weights are then kept elsewhere, and fetched from there when it computes."""
    offload, before = getattr(config, "offload_config", None), getattr(config, "cache_config", None)
    uva, prefetch = getattr(offload, "uva", before), getattr(offload, "prefetch", None)
    return (
        getattr(uva, "cpu_offload_gb", 0) > 0
        or getattr(prefetch, "offload_group_size", 0) > 0
        or getattr(offload, "offload_backend", "auto") != "auto"
    )


def pack_experts_again(model: Any) -> None:
    """vLLM 0.32 packs experts for its CPU kernels at the start and not at a reload, after which the kernels
    would take plain weights for packed ones."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(getattr(method, "unquantized_backend", None), "name", "") == "CPU":
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


class WeightcastRoutes:
    name = "weightcast"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        if not os.environ.get("WEIGHTCAST_PATCH_DIR"):
            return
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def look(request: Request) -> JSONResponse:
            return _reply(await routes.look(request.app.state.weightcast_front))

        async def act(request: Request) -> JSONResponse:
            data = await _body(request)
            if data is None:
                return _reply((413, {"error": f"more than {routes.BODY_LIMIT} bytes"}))
            name = request.url.path.rpartition("/")[2]
            return _reply(await routes.order(request.app.state.weightcast_front, name, data))

        def _reply(reply: routes.Reply) -> JSONResponse:
            return JSONResponse(reply[1], reply[0])

        # without annotations as strings, fastapi would look for the names in this module
        look.__annotations__, act.__annotations__ = {"request": Request}, {"request": Request}
        app.add_api_route(routes.PREFIX, look, methods=["GET"], include_in_schema=False)
        for name in routes.ROUTES:
            app.add_api_route(f"{routes.PREFIX}/{name}", act, methods=["POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        controls = VllmControls(engine_client)
        state.weightcast_front = Front(controls)
        if transfers(getattr(engine_client, "vllm_config", None)):
            from weightcast_engine.vllm.transfer import follow

            follow(engine_client, controls)


async def _body(request: Any) -> bytes | None:
    data = bytearray()
    async for block in request.stream():
        data += block
        if len(data) > routes.BODY_LIMIT:
            return None
    return bytes(data)


class VllmControls(Controls):
    """Through vLLM's own client of its engine."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def ranks(self, order: Order) -> Sequence[Answer]:
        """Of all data parallel replicas, one after the other."""
        core: Any = getattr(self._client, "engine_core", None)
        replicas: Sequence[bytes] = getattr(core, "core_engines", ())
        if len(replicas) < 2:
            answers: Sequence[Answer] = await self._client.collective_rpc(METHOD, args=(dict(order),))
            return answers
        if not hasattr(core, "_call_utility_async"):
            raise RuntimeError("this vLLM tells only what the first of its data parallel replicas answers")
        # vLLM's own collective_rpc has all of them obey, and drops what all but the first answer
        asked = ("collective_rpc", METHOD, None, (dict(order),), None)
        told = await asyncio.gather(*(core._call_utility_async(*asked, engine=one) for one in replicas))
        return [answer for answers in told for answer in answers]

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def pause(self, policy: str) -> None:
        # the pause clears the caches: blocks of the weights before must not be used again
        core: Any = getattr(self._client, "engine_core", None)
        renderer: Any = getattr(self._client, "renderer", None)
        if hasattr(core, "pause_scheduler_async") and hasattr(renderer, "clear_mm_cache_async"):
            # all that `pause_generation` does, but for its wait of 20 ms for others to read their tokens
            await renderer.clear_mm_cache_async()
            await core.pause_scheduler_async(mode=_MODES[policy], clear_cache=True)
        else:
            await self._client.pause_generation(mode=_MODES[policy], clear_cache=True)

    async def resume(self) -> None:
        await self._client.resume_generation()

    async def paused(self) -> bool:
        return bool(await self._client.is_paused())

    async def relabel(self, label: str) -> None:
        name = getattr(self._client, "update_weight_version", None)
        if name is not None:
            await name(label)
