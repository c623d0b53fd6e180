"""An inference server for the example model, speaking the part of SGLang's HTTP dialect that rollouts need.

It reads one local checkpoint directory, and only at start and when told to reload. Weights are copied into
memory: what happens to the files in between does not reach generation. Unlike SGLang it refuses a checkpoint
with other names or shapes instead of exiting or mixing.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from safetensors import SafetensorError

from examples import checkpoint
from examples.model import CausalLM, KeyValue
from examples.waiting import wait_until, write_whole

PEFT_PREFIX, LORA_A, LORA_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
PauseMode = Literal["abort", "retract", "in_place"]


class BadRequest(ValueError):
    """Answered with HTTP 400."""


@dataclass
class Adapter:
    """As peft saved it. `merged`: what the model's weights are with it."""

    directory: Path
    scale: float
    tensors: Mapping[str, torch.Tensor]
    merged: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Adapter:
        config = json.loads((directory / checkpoint.ADAPTER_CONFIG).read_text())
        return cls(directory, config["lora_alpha"] / config["r"], checkpoint.load(directory))

    def merge(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError where it is for another model."""
        merged = {}
        try:
            for name, low in self.tensors.items():
                if name.endswith(LORA_A):
                    module = name.removeprefix(PEFT_PREFIX).removesuffix(LORA_A)
                    high = self.tensors[name.removesuffix(LORA_A) + LORA_B]
                    merged[f"{module}.weight"] = weights[f"{module}.weight"] + self.scale * (high @ low)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"it is for another model: {error}") from error
        if 2 * len(merged) != len(self.tensors):
            raise ValueError("it has other tensors than those of LoRA")
        self.merged = merged


@dataclass(eq=False)
class Batch:
    """Sequences of one length that are decoded together."""

    tokens: torch.Tensor
    """int64 (sequences, positions): prompt and what was sampled so far"""
    prompt_length: int
    wanted: int
    temperature: float
    adapter: Adapter | None = None
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """per sampled position, float32 (sequences, 1), at temperature 1"""
    cache: list[KeyValue] | None = None
    aborted: bool = False
    label: str = ""
    """weight version of the last step"""

    @property
    def done(self) -> bool:
        return self.aborted or len(self.logprobs) == self.wanted


@dataclass(frozen=True)
class Reloaded:
    success: bool
    message: str
    paused_requests: int


class EventLog:
    """What happened when, one JSON object per line: a witness beside everyone's status pages."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def note(self, event: str, **facts: object) -> None:
        if self._path is not None:
            with self._path.open("a") as stream:
                stream.write(json.dumps({"time": time.time(), "event": event, **facts}) + "\n")


class Engine:
    """`pace` is called before every decoding step, with nothing held: it may wait."""

    def __init__(
        self,
        directory: Path,
        seed: int = 0,
        log: EventLog | None = None,
        pace: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self.label = "default"
        self._model = CausalLM(checkpoint.load_config(directory)).requires_grad_(False)
        self._random = torch.Generator().manual_seed(seed)
        self._log = EventLog(None) if log is None else log
        self._pace = pace
        self.adapters: dict[str, Adapter] = {}
        """loaded, by name"""
        self._turn = threading.Condition()
        """held for one decoding step, or for one change of weights"""
        self._running: set[Batch] = set()
        self._paused = False
        self._draining = False
        self._copy_weights(directory)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        temperature: float,
        adapter: str | None = None,
    ) -> list[dict[str, Any]]:
        """One result per prompt, in order. Waits while the engine is paused."""
        chosen = None if adapter is None else self._adapter(adapter)
        results: dict[int, dict[str, Any]] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
            batch = self._batch([prompts[place] for place in places], new_tokens, temperature)
            batch.adapter = chosen
            self._decode(batch)
            results.update(zip(places, _results(batch), strict=True))
        return [results[place] for place in range(len(prompts))]

    def pause(self, mode: PauseMode) -> None:
        """`abort` ends what runs, `retract` drops its caches and recomputes, `in_place` keeps them."""
        with self._turn:
            self._paused = True
            for batch in self._running:
                batch.aborted |= mode == "abort"
                batch.cache = batch.cache if mode == "in_place" else None
            self._turn.notify_all()
            self._log.note("paused", mode=mode)

    def resume(self) -> None:
        with self._turn:
            self._paused = False
            self._turn.notify_all()
            self._log.note("resumed", label=self.label)

    def reload(self, directory: Path, label: str | None, flush_cache: bool = True) -> Reloaded:
        """Without a pause it first waits for running requests. A failure keeps the old weights and label."""
        with self._turn, self._drained():
            try:
                self._copy_weights(directory)
            except (OSError, ValueError, SafetensorError) as error:
                return Reloaded(False, f"{directory}: {error}", len(self._running))
            self.directory = directory
            self.label = self.label if label is None else label
            self._log.note("reloaded", label=self.label)
            if flush_cache and not self._flush():
                return Reloaded(
                    False, "weights were updated, but the cache was not flushed", len(self._running)
                )
            return Reloaded(True, "weights updated", len(self._running))

    def load_adapter(self, name: str, directory: Path) -> None:
        """Under a name of its own, next to the others."""
        if name in self.adapters:
            raise BadRequest(f"the adapter {name} is loaded already")
        try:
            adapter = Adapter.read(directory)
            with self._turn:
                adapter.merge(self._model.state_dict())
                self.adapters[name] = adapter
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise BadRequest(f"{directory}: {error}") from error
        self._log.note("loaded", label=name)

    def unload_adapter(self, name: str) -> None:
        """Requests under way go on with it."""
        self._adapter(name)
        del self.adapters[name]
        self._log.note("unloaded", label=name)

    def flush(self) -> bool:
        with self._turn:
            return self._flush()

    def relabel(self, label: str, abort: bool) -> None:
        with self._turn:
            self.label = label
            for batch in self._running:
                batch.aborted |= abort
            self._turn.notify_all()

    def checksums(self, adapter: str | None = None) -> dict[str, str]:
        with self._turn:
            if adapter is None:
                return checkpoint.memory_checksums(self._model.state_dict())
            return checkpoint.memory_checksums(self._adapter(adapter).tensors, dtype=None)

    def _adapter(self, name: str) -> Adapter:
        try:
            return self.adapters[name]
        except KeyError:
            raise BadRequest(f"the adapter {name} is not loaded") from None

    @property
    def running(self) -> int:
        return len(self._running)

    def _batch(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float) -> Batch:
        config = self._model.config
        tokens = torch.tensor([list(prompt) for prompt in prompts])
        if not 0 < tokens.shape[-1] <= config.max_position_embeddings - new_tokens:
            raise BadRequest(f"prompt and answer must fit in {config.max_position_embeddings} tokens")
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise BadRequest(f"token ids must lie in 0..{config.vocab_size - 1}")
        return Batch(tokens, tokens.shape[1], new_tokens, temperature)

    def _decode(self, batch: Batch) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not (self._paused or self._draining))
            self._running.add(batch)
        try:
            while not batch.done:
                self._pace()
                with self._turn:
                    self._turn.wait_for(lambda: batch.aborted or not self._paused)
                    if not batch.done:
                        self._step(batch)
        finally:
            with self._turn:
                self._running.remove(batch)
                self._turn.notify_all()

    def _step(self, batch: Batch) -> None:
        tokens = batch.tokens if batch.cache is None else batch.tokens[:, -1:]
        weights = {} if batch.adapter is None else dict(batch.adapter.merged)
        output = torch.func.functional_call(self._model, weights, (tokens, batch.cache))
        logprobs = output.logits[:, -1].log_softmax(-1)
        sampled = self._sample(output.logits[:, -1], batch.temperature)
        batch.tokens = torch.cat([batch.tokens, sampled], dim=1)
        batch.logprobs.append(logprobs.gather(1, sampled))
        batch.cache, batch.label = output.cache, self.label

    def _sample(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1, keepdim=True)
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=self._random)

    @contextmanager
    def _drained(self) -> Iterator[None]:
        self._draining = True
        try:
            self._turn.wait_for(lambda: self._paused or not self._running)
            yield
        finally:
            self._draining = False
            self._turn.notify_all()

    def _flush(self) -> bool:
        """Caches belong to requests here, so none may be held."""
        return all(batch.cache is None for batch in self._running)

    def _copy_weights(self, directory: Path) -> None:
        loaded = checkpoint.load(directory)
        live = self._model.state_dict()
        if {name: tensor.shape for name, tensor in loaded.items()} != {
            name: t.shape for name, t in live.items()
        }:
            raise ValueError("tensor names or shapes are not those of the model")
        for name, tensor in live.items():
            tensor.copy_(loaded[name])
        for adapter in self.adapters.values():
            adapter.merge(live)


class Generate(BaseModel):
    class Sampling(BaseModel):
        max_new_tokens: int = 8
        temperature: float = 1.0
        n: int = 1

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: Sampling = Sampling()
    return_logprob: bool = False
    lora_path: str | None = None


class Lora(BaseModel):
    lora_name: str
    lora_path: Path = Path()


class Pause(BaseModel):
    mode: PauseMode = "abort"


class Update(BaseModel):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    flush_cache: bool = True


class Relabel(BaseModel):
    new_version: str
    abort_all_requests: bool = True


class Check(BaseModel):
    action: str
    lora_name: str | None = None
    """SGLang's has none: it shows the model's weights alone"""


def create_app(engine: Engine) -> FastAPI:
    app = FastAPI(title="example engine")

    @app.exception_handler(BadRequest)
    async def _bad_request(_: object, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    @app.get("/health")
    @app.get("/ready")
    def health() -> None:
        return None

    @app.get("/model_info")
    @app.get("/get_model_info")
    def model_info() -> dict[str, Any]:
        return {"model_path": str(engine.directory), "weight_version": engine.label, "is_generation": True}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        own = {"id": str(engine.directory), "root": str(engine.directory), "parent": None}
        cards = [
            {"id": name, "root": str(adapter.directory), "parent": own["id"]}
            for name, adapter in list(engine.adapters.items())
        ]
        return {"object": "list", "data": [own, *cards]}

    @app.post("/load_lora_adapter")
    def load_adapter(request: Lora) -> JSONResponse:
        return _adapters(engine, lambda: engine.load_adapter(request.lora_name, request.lora_path))

    @app.post("/unload_lora_adapter")
    def unload_adapter(request: Lora) -> JSONResponse:
        return _adapters(engine, lambda: engine.unload_adapter(request.lora_name))

    @app.post("/generate")
    def generate(request: Generate) -> Any:
        return _generate(engine, request)

    @app.post("/pause_generation")
    def pause(request: Pause) -> dict[str, str]:
        engine.pause(request.mode)
        return {"status": "ok", "message": "Generation paused."}

    @app.post("/continue_generation")
    def resume() -> dict[str, str]:
        engine.resume()
        return {"status": "ok", "message": "Generation continued."}

    @app.post("/update_weights_from_disk")
    def update(request: Update) -> JSONResponse:
        return _update(engine, request)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    def flush() -> JSONResponse:
        flushed = engine.running == 0 and engine.flush()
        return JSONResponse({"success": flushed}, status_code=200 if flushed else 400)

    @app.post("/update_weight_version")
    def relabel(request: Relabel) -> dict[str, object]:
        engine.relabel(request.new_version, request.abort_all_requests)
        return {"success": True, "message": "Weight version updated.", "new_version": request.new_version}

    @app.post("/weights_checker")
    def check(request: Check) -> dict[str, object]:
        if request.action != "checksum":
            raise BadRequest(f"action {request.action!r} is not supported")
        return {"success": True, "message": "", "ranks": [{"checksums": engine.checksums(request.lora_name)}]}

    return app


def _adapters(engine: Engine, change: Callable[[], None]) -> JSONResponse:
    """As SGLang answers."""
    error = None
    try:
        change()
    except BadRequest as refusal:
        error = str(refusal)
    loaded = {name: str(adapter.directory) for name, adapter in list(engine.adapters.items())}
    reply = {"success": error is None, "error_message": error, "loaded_adapters": loaded}
    return JSONResponse(reply, status_code=200 if error is None else 400)


def _generate(engine: Engine, request: Generate) -> Any:
    prompts = _prompts(request)
    if not prompts:
        raise BadRequest("no prompt")
    sampling = request.sampling_params
    if sampling.max_new_tokens < 1 or sampling.n < 1 or sampling.temperature < 0:
        raise BadRequest("max_new_tokens and n must be at least 1, temperature at least 0")
    repeated = [prompt for prompt in prompts for _ in range(sampling.n)]
    results = engine.generate(repeated, sampling.max_new_tokens, sampling.temperature, request.lora_path)
    if not request.return_logprob:
        for result in results:
            del result["meta_info"]["output_token_logprobs"]
    return results[0] if _is_single(request) and sampling.n == 1 else results


def _prompts(request: Generate) -> list[list[int]]:
    match request.text, request.input_ids:
        case str() as text, None:
            return [_encode(text)]
        case list() as texts, None:
            return [_encode(text) for text in texts]
        case None, list() as tokens:
            return cast(list[list[int]], [tokens] if _is_single(request) else tokens)
    raise BadRequest("either text or input_ids")


def _is_single(request: Generate) -> bool:
    return isinstance(request.text, str) or all(
        isinstance(token, int) for token in request.input_ids or ["many"]
    )


def _encode(text: str) -> list[int]:
    try:
        return checkpoint.encode(text)
    except ValueError as error:
        raise BadRequest(f"text may hold the characters {checkpoint.VOCABULARY} only") from error


def _update(engine: Engine, request: Update) -> JSONResponse:
    if request.abort_all_requests:
        engine.pause("abort")
    reloaded = engine.reload(Path(request.model_path), request.weight_version, request.flush_cache)
    if request.abort_all_requests and not request.keep_pause:
        engine.resume()
    reply = {
        "success": reloaded.success,
        "message": reloaded.message,
        "num_paused_requests": reloaded.paused_requests,
    }
    return JSONResponse(reply, status_code=200 if reloaded.success else 400)


def _results(batch: Batch) -> Iterator[dict[str, Any]]:
    answers = batch.tokens[:, batch.prompt_length :].tolist()
    logprobs = torch.cat(batch.logprobs, dim=1).tolist() if batch.logprobs else [[] for _ in answers]
    for answer, chosen in zip(answers, logprobs, strict=True):
        reason = {"type": "abort"} if batch.aborted else {"type": "length", "length": len(answer)}
        yield {
            "text": checkpoint.decode(answer),
            "output_ids": answer,
            "meta_info": {
                "id": uuid.uuid4().hex,
                "finish_reason": reason,
                "weight_version": batch.label,
                "prompt_tokens": batch.prompt_length,
                "completion_tokens": len(answer),
                "output_token_logprobs": [[p, token, None] for p, token in zip(chosen, answer, strict=True)],
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a checkpoint directory with SGLang's HTTP dialect.")
    parser.add_argument("--model", type=Path, required=True, help="local checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1", help="it asks nobody for a password: keep it private")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--port-file", type=Path, help="receives the port before the model is there")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--events", type=Path, help="pauses and reloads, one JSON object per line")
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="seconds to wait for a complete model directory"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Bound but not listening: the port is known to others, connections are refused until the model is loaded.
    with socket.socket() as listener:
        listener.bind((options.host, options.port))
        if options.port_file is not None:
            write_whole(options.port_file, str(listener.getsockname()[1]))
        wait_until(
            lambda: checkpoint.is_complete(options.model), f"checkpoint in {options.model}", options.deadline
        )
        app = create_app(Engine(options.model, options.seed, EventLog(options.events)))
        settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main()
