"""A real vLLM as the demo's engine: how it is started, and what a user of its HTTP interface asks it.

The trainer and the demo see of it what any user sees (`/v1/completions`); reloads are between it and the
subscriber.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from examples import checkpoint
from examples.model import CausalLM
from examples.summary import EngineEvent
from examples.trainer import (
    DIGITS,
    RANK,
    Answer,
    Dialect,
    Fleet,
    answer_logprobs,
    prompts_of,
    random_questions,
)

MODEL = "demo"
CLOSE = 1e-3
"""nats: two float32 implementations of one model; another version is off by a thousand times as much"""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # its threads would all be bound to the first core, with every other vLLM on the machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def command(python: Path, model: Path, port: int, seed: int, adapters: int = 0) -> list[str | Path]:
    """`adapters`: so many, of each of which two versions are loaded."""
    lora = ("--max-lora-rank", RANK, "--max-loras", 2 * adapters, "--max-cpu-loras", 4 * adapters)
    return [
        *("env", *(f"{name}={value}" for name, value in ENVIRONMENT.items())),
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--seed", str(seed)),
        *("--max-model-len", str(checkpoint.Config().max_position_embeddings), "--enforce-eager"),
        *(["--enable-lora", *map(str, lora)] if adapters else []),
    ]


def _request(questions: torch.Tensor, group: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompts_of(questions).tolist(),
        "n": group,
        "max_tokens": DIGITS,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }


def _answers(answer: Any) -> list[Answer]:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [
        Answer(
            tokens=list(choice["token_ids"]),
            logprobs=(choice["logprobs"] or {}).get("token_logprobs") or [],
            complete=choice["finish_reason"] == "length",
        )
        for choice in choices
    ]


DIALECT = Dialect(_request, _answers, adapter="model")


@torch.no_grad()
def answers_like(gate: str, directory: Path, adapter: Path | None = None) -> bool:
    """Whether the engine gives its answers the log probabilities that a fresh load of `directory` gives, with
    the adapter of this directory's name."""
    model, weights = CausalLM(checkpoint.load_config(directory)), checkpoint.load(directory)
    if adapter is not None:
        # not for the trainer, whose environment serves nothing
        from examples.engine import Adapter

        read = Adapter.read(adapter)
        read.merge(weights)
        weights |= read.merged
    model.load_state_dict(weights)
    questions = random_questions(24, torch.Generator().manual_seed(1))
    fleet = Fleet(gate, DIALECT, adapter="" if adapter is None else adapter.name)
    found = fleet.rollouts(questions, group=2, step=0, oldest=0)
    expected = answer_logprobs(model, found.questions, found.answers)
    return bool((expected - found.logprobs).abs().max() < CLOSE)


def events_of(updates: Iterable[Mapping[str, Any]]) -> Sequence[EngineEvent]:
    """Pauses and reloads as the subscriber's status tells them: vLLM keeps no log of them."""
    return [
        event
        for update in updates
        if update["pause_seconds"] is not None
        for event in (
            EngineEvent(update["at"] - update["pause_seconds"], "paused", ""),
            EngineEvent(update["at"], "reloaded", str(update["version"])),
            EngineEvent(update["at"], "resumed", str(update["version"])),
        )
    ]
