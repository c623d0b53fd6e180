"""vLLM: the plugin's routes, in its own server. Installed by the entry point `vllm.endpoint_plugins`, which
vLLM follows when VLLM_PLUGINS names it. Under /v1, so that `--api-key` guards them; no dev mode is needed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from weightcast_engine.update import routes
from weightcast_engine.update.front import Controls, Front
from weightcast_engine.update.rank import Answer, Order
from weightcast_engine.vllm.worker import METHOD

_MODES = {"recompute": "keep", "wait": "wait", "abort": "abort"}


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
        state.weightcast_front = Front(VllmControls(engine_client))


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
