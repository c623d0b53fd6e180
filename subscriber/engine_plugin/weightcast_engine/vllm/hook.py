"""vLLM: what lives in a worker, and the plugin's routes in its server. Nothing is done unless
WEIGHTCAST_PATCH_DIR is set. The entry point `vllm.general_plugins` runs in every process of the engine;
`vllm.endpoint_plugins`, which vLLM follows when VLLM_PLUGINS names it, adds the routes: under /v1, so that
`--api-key` guards them. No dev mode is needed.

Written against vLLM 0.32.0. On its CPU platform linear layers compute with packed copies of their weights;
they keep plain ones here, because a patch would not reach a copy.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weightcast_engine.update import routes
from weightcast_engine.update.elements import misplaced
from weightcast_engine.update.front import Controls, Front
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

    def misplaced(self, patches: Path) -> str | None:
        return misplaced(self.directory, patches)

    def packed(self, name: str, module: Any) -> str | None:
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in _PLAIN_METHODS:
            return f"which computes by {method}"
        experts = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if experts is not None and experts.name not in _PLAIN_EXPERTS:
            return f"whose experts are packed for {experts.value}"
        # a function that closes over nothing reads the weight that it is given
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            return "which computes with a packed copy"
        return None

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]

        with set_current_vllm_config(self._worker.vllm_config):
            yield

    def reload(self) -> None:
        # vLLM remembers weights_path, so that a call without it may read another directory
        self._worker.reload_weights(weights_path=str(self.directory))
        pack_experts_again(self.model)


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
