"""An inference server that streams the digest of the weights which it holds, a token at a time: what made an
answer can be read in it. `python streaming_engine.py PORT_FILE` speaks vLLM's dialect until it is killed.

A prefix that it has seen under the same salt is not computed again: `cached_by` in the first event is the
digest of the weights that computed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvicorn
from hosts import on_disk
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


class Engine:
    def __init__(self) -> None:
        self.held, self.label = "seed", "default"
        self.started = f"{time.time():.3f}{os.getpid()}"
        self.running = asyncio.Event()
        self.running.set()
        self.under_way: set[asyncio.Event] = set()
        """one of each request, set to abort it"""
        self.cache: dict[tuple[str, str], str] = {}
        self.requests: list[dict[str, Any]] = []
        self.streamed = 0

    async def tokens(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        aborted = asyncio.Event()
        self.under_way.add(aborted)
        try:
            await self.running.wait()
            prefix = (request.get("cache_salt", ""), request.get("prompt", ""))
            cached = {"cached_by": self.cache.setdefault(prefix, self.held)}
            count = request.get("max_tokens", 3)
            for number in range(count):
                if request.get("seconds"):
                    await asyncio.sleep(request["seconds"])
                await self.running.wait()
                if aborted.is_set():
                    yield {"text": "", "finish_reason": "abort"}
                    return
                reason = "length" if number == count - 1 else None
                self.streamed += 1
                yield {"text": f"{self.held} ", "finish_reason": reason, **cached}
                cached = {}
        finally:
            self.under_way.discard(aborted)

    async def complete(self, request: Request) -> Response:
        asked = await request.json()
        self.requests.append({"headers": dict(request.headers), **asked})
        if asked.get("stream"):
            return StreamingResponse(self.events(asked), media_type="text/event-stream")
        choices = [choice async for choice in self.tokens(asked)]
        text = "".join(choice["text"] for choice in choices)
        return JSONResponse(
            {
                "choices": [{"text": text, "finish_reason": choices[-1]["finish_reason"]}],
                "cached_by": choices[0].get("cached_by"),
                "usage": {"completion_tokens": len(choices)},
            }
        )

    async def events(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        count = 0
        async for choice in self.tokens(asked):
            count += 1
            yield f"data: {json.dumps({'choices': [choice], 'usage': {'completion_tokens': count}})}\n\n"
        yield "data: [DONE]\n\n"

    async def pause(self, request: Request) -> Response:
        self.running.clear()
        if request.query_params["mode"] == "abort":
            for aborted in self.under_way:
                aborted.set()
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.running.set()
        return JSONResponse({"status": "resumed"})

    async def reload(self, request: Request) -> Response:
        asked = await request.json()
        self.held = on_disk(Path(asked["kwargs"]["weights_path"]))
        return JSONResponse({"results": [None]})

    async def relabel(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.label})

    def app(self) -> Starlette:
        def say(path: str, answer: Any) -> Route:
            return Route(path, lambda request: JSONResponse(answer()))

        config = {"device_config": {"device": "cuda"}, "speculative_config": None}
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
                Route("/collective_rpc", self.reload, methods=["POST"]),
                Route("/update_weight_version", self.relabel, methods=["POST"]),
                say("/weight_info", lambda: {"weight_version": self.label}),
                say("/is_paused", lambda: {"is_paused": not self.running.is_set()}),
                say("/version", lambda: {"version": "0.32.0"}),
                say("/server_info", lambda: {"vllm_config": config, "vllm_env": {}, "system_env": {}}),
                say("/requests", lambda: self.requests),
                say("/streamed", lambda: self.streamed),
                say("/under_way", lambda: len(self.under_way)),
                Route(
                    "/metrics",
                    lambda request: PlainTextResponse(f"process_start_time_seconds {self.started}\n"),
                ),
            ]
        )


async def serve(port_file: Path, port: int) -> None:
    engine = Engine()
    server = uvicorn.Server(
        uvicorn.Config(engine.app(), port=port, log_level="warning", access_log=False, timeout_keep_alive=5)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port_file.write_text(str(server.servers[0].sockets[0].getsockname()[1]))
    with contextlib.suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
