"""An inference server that streams the digest of the weights which it holds, a token at a time: what made an
answer can be read in it. `python streaming_engine.py PORT_FILE PORT DIALECT` speaks vLLM's dialect, or
SGLang's, until it is killed.

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
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvicorn
from core_cases import unpack
from hosts import digest, on_disk
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

KEY_VARIABLE = "WEIGHTCAST_TEST_ENGINE_KEY"


class Engine:
    """As vLLM."""

    def __init__(self) -> None:
        self.held, self.label = "seed", "default"
        self.started = f"{time.time():.3f}{os.getpid()}"
        self.running = asyncio.Event()
        self.running.set()
        self.under_way: dict[asyncio.Event, str] = {}
        """one of each request, set to abort it, and its `rid`"""
        self.cache: dict[tuple[str, str], str] = {}
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        """of all requests"""
        self.streamed = 0
        self.lingering, self.released = 0, asyncio.Event()
        """answers that are finished, but for their last bytes"""
        self.adapters: dict[str, tuple[str, str]] = {}
        """what each holds, and the directory that it is from"""

    salt, prompt, adapter = "cache_salt", "prompt", "model"

    async def tokens(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        aborted = asyncio.Event()
        # unloading leaves it to the requests under way
        adapter, _ = self.adapters.get(request.get(self.adapter, ""), (None, ""))
        self.under_way[aborted] = request.get("rid", "")
        try:
            await self.running.wait()
            prefix = (request.get(self.salt, ""), str(request.get(self.prompt, "")))
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
                weights = self.held if adapter is None else f"{self.held}+{adapter}"
                yield {"text": f"{weights} ", "finish_reason": reason, **cached}
                cached = {}
        finally:
            del self.under_way[aborted]

    async def complete(self, request: Request) -> Response:
        asked = await request.json()
        self.requests.append({"headers": dict(request.headers), **asked})
        is_chat = "chat" in request.url.path
        if set(asked.get(self.salt) or "") & set("@/\\\0"):
            return JSONResponse(
                {"error": {"message": "Parameter 'cache_salt' must not contain '@', '/'"}}, 400
            )
        if "@" in asked.get("model", "") and asked["model"] not in self.adapters:
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if asked.get("stream"):
            return StreamingResponse(self.events(asked, is_chat), media_type="text/event-stream")
        choices = [choice async for choice in self.tokens(asked)]
        text = "".join(choice["text"] for choice in choices)
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return self.whole(
            asked,
            {
                "choices": [{**said, "finish_reason": choices[-1]["finish_reason"]}] * asked.get("n", 1),
                "cached_by": choices[0].get("cached_by"),
                "usage": {"completion_tokens": len(text.split())},
            },
        )

    def whole(self, asked: dict[str, Any], answer: dict[str, Any]) -> Response:
        text = json.dumps(answer)

        async def halves() -> AsyncIterator[str]:
            yield text[:20]
            await self.linger(asked)
            yield text[20:]

        return StreamingResponse(halves(), media_type="application/json")

    async def linger(self, asked: dict[str, Any]) -> None:
        if asked.get("linger"):
            self.lingering += 1
            await self.released.wait()

    async def release(self, request: Request) -> Response:
        self.released.set()
        self.lingering, self.released = 0, asyncio.Event()
        return Response()

    async def events(self, asked: dict[str, Any], is_chat: bool) -> AsyncIterator[str]:
        count = 0
        async for choice in self.tokens(asked):
            count += bool(choice["text"])
            if is_chat:
                choice["delta"] = {"content": choice.pop("text")}
            yield f"data: {json.dumps({'choices': [choice], 'usage': {'completion_tokens': count}})}\n\n"
        await self.linger(asked)
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

    async def load_adapter(self, request: Request) -> Response:
        asked = await request.json()
        name, path = asked["lora_name"], asked["lora_path"]
        if name in self.adapters:
            return JSONResponse({"error": {"message": "has already been loaded"}}, 400)
        self.adapters[name] = digest(unpack(Path(path, "adapter_model.safetensors").read_bytes())), path
        return JSONResponse({"success": True})

    async def unload_adapter(self, request: Request) -> Response:
        found = self.adapters.pop((await request.json())["lora_name"], None)
        return JSONResponse({"success": found is not None}, 200 if found else 400)

    def models(self) -> dict[str, Any]:
        cards = [{"id": name, "root": path, "parent": "m"} for name, (_, path) in self.adapters.items()]
        return {"data": [{"id": "m", "root": "m", "parent": None}, *cards]}

    async def relabel(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.label})

    def app(self) -> Starlette:
        routes = [
            *self.dialect(),
            _say("/requests", lambda: self.requests),
            _say("/headers", lambda: self.headers),
            _say("/streamed", lambda: self.streamed),
            _say("/lingering", lambda: self.lingering),
            Route("/release", self.release, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            _say("/under_way", lambda: len(self.under_way)),
        ]
        return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=self.note)])

    async def note(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        self.headers.append(dict(request.headers))
        if b'"crash"' in await request.body():
            return StreamingResponse(_broken_off(), media_type="application/json")
        answer = await call_next(request)
        # of this hop
        answer.headers.update({"connection": "x-hop", "x-hop": "1"})
        return answer

    def dialect(self) -> list[Route]:
        config = {"device_config": {"device": "cuda"}, "speculative_config": None}
        return [
            Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            _say("/v1/models", self.models),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/collective_rpc", self.reload, methods=["POST"]),
            Route("/update_weight_version", self.relabel, methods=["POST"]),
            _say("/weight_info", lambda: {"weight_version": self.label}),
            _say("/is_paused", lambda: {"is_paused": not self.running.is_set()}),
            _say("/version", lambda: {"version": "0.32.0"}),
            _say("/server_info", lambda: {"vllm_config": config, "vllm_env": {}, "system_env": {}}),
            _text("/metrics", lambda: f"process_start_time_seconds {self.started}\n"),
        ]


class SGLang(Engine):
    """`/generate` as slime asks it: token ids and their log probabilities, where it was aborted what came so
    far. `POST /double` sets what its answers call the weights."""

    salt, prompt, adapter = "extra_key", "text", "lora_path"
    said: str | None = None

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        self.requests.append({"headers": dict(request.headers), **asked})
        if asked.get("stream"):
            return StreamingResponse(self.generated(asked), media_type="text/event-stream")
        [last] = [answer async for answer in self.answers(asked)][-1:]
        return self.whole(asked, last)

    async def generated(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        async for answer in self.answers(asked):
            yield f"data: {json.dumps(answer)}\n\n"
        await self.linger(asked)
        yield "data: [DONE]\n\n"

    async def answers(self, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Each holds all that came before it."""
        tokens: list[str] = []
        sampling = asked.get("sampling_params", {})
        wanted = {
            **asked,
            "max_tokens": sampling.get("max_new_tokens", 3),
            "seconds": asked.get("seconds", 0),
        }
        cached = ""
        async for choice in self.tokens(wanted):
            tokens += choice["text"].split()
            cached = choice.get("cached_by", cached)
            reason = choice["finish_reason"]
            if reason == "abort" and asked.get("whole"):
                # it was done just before
                reason = "stop"
            meta = {
                "id": asked["rid"],
                "finish_reason": reason and {"type": reason},
                "weight_version": self.label if self.said is None else self.said,
                "completion_tokens": len(tokens),
                "cached_by": cached,
                "output_token_logprobs": [[-1.0, number, None] for number in range(len(tokens))],
            }
            text = "".join(f"{token} " for token in tokens)
            yield {"text": text, "output_ids": list(range(len(tokens))), "meta_info": meta}

    async def abort(self, request: Request) -> Response:
        if request.headers.get("content-type") != "application/json":
            # as SGLang, which takes it for bytes
            return Response(status_code=400)
        asked = await request.json()
        for aborted, rid in self.under_way.items():
            if asked.get("abort_all") or rid.startswith(asked["rid"]):
                aborted.set()
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        self.running.clear()
        return JSONResponse({"status": "ok"})

    async def load(self, request: Request) -> Response:
        asked = await request.json()
        self.held, self.label = on_disk(Path(asked["model_path"])), asked["weight_version"]
        return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})

    async def say(self, request: Request) -> Response:
        self.said = (await request.json())["said"]
        return Response()

    def dialect(self) -> list[Route]:
        started = {"speculative_algorithm": None, "api_key": os.environ.get(KEY_VARIABLE)}
        named = 'sglang:startup_time_seconds{engine_type="unified",model_name="m",phase="tokenizer_e2e"}'
        return [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/abort_request", self.abort, methods=["POST"]),
            Route("/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            _say("/v1/models", self.models),
            Route("/pause_generation", self.pause_generation, methods=["POST"]),
            Route("/continue_generation", self.resume, methods=["POST"]),
            Route("/update_weights_from_disk", self.load, methods=["POST"]),
            Route("/update_weight_version", self.relabel, methods=["POST"]),
            Route("/double", self.say, methods=["POST"]),
            _say("/model_info", lambda: {"model_path": "m", "weight_version": self.label}),
            _say("/get_model_info", lambda: {"model_path": "m", "weight_version": self.label}),
            _say("/server_info", lambda: {**started, "weight_version": self.label}),
            _text("/metrics", lambda: f"{named} {self.started}\n"),
        ]


async def _broken_off() -> AsyncIterator[str]:
    yield "{"
    raise ConnectionError


def _say(path: str, answer: Callable[[], Any]) -> Route:
    return Route(path, lambda request: JSONResponse(answer()))


def _text(path: str, answer: Callable[[], str]) -> Route:
    return Route(path, lambda request: PlainTextResponse(answer()))


async def serve(port_file: Path, port: int, dialect: str) -> None:
    engine = SGLang() if dialect == "sglang" else Engine()
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
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
