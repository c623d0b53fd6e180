"""A small Llama on any device: trained as by a trainer, served from a captured CUDA graph as by an engine."""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

PLUGIN = Path(__file__).resolve().parents[1] / "subscriber" / "engine_plugin"
sys.path.insert(0, str(PLUGIN))

from weightcast_engine.update.front import Controls, Front  # noqa: E402
from weightcast_engine.update.rank import Answer, EngineHere, EngineRank, Order  # noqa: E402

Result = TypeVar("Result")
WINDOW = 64
"""tokens that one replay reads: there is no cache of earlier ones"""
_HEAD = 64


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    vocabulary: int = 1024


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.o = _weight(3 * hidden, hidden), _weight(hidden, hidden)
        self.gate_up, self.down = _weight(8 * hidden, hidden), _weight(hidden, 4 * hidden)
        self.norm = nn.Parameter(torch.ones(2, hidden))

    def forward(self, x: Tensor) -> Tensor:
        heads = (F.rms_norm(x, x.shape[-1:], self.norm[0]) @ self.qkv.T).unflatten(-1, (3, -1, _HEAD))
        q, k, v = heads.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + attended @ self.o.T
        gate, up = (F.rms_norm(x, x.shape[-1:], self.norm[1]) @ self.gate_up.T).chunk(2, -1)
        return x + (F.silu(gate) * up) @ self.down.T


def _weight(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns).mul_(columns**-0.5))


class Llama(nn.Module):  # type: ignore[misc]
    """Fused projections, as engines have them; its checkpoint has them apart."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden))
        self.layers = nn.ModuleList(_Layer(shape.hidden) for _ in range(shape.layers))
        self.head = _weight(shape.vocabulary, shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            x = layer(x)
        return F.rms_norm(x, x.shape[-1:]) @ self.head.T

    def checkpoint(self) -> dict[str, Tensor]:
        """Views of the parameters by the checkpoint's names."""
        found = {"embed.weight": self.embed.detach(), "head.weight": self.head.detach()}
        for number, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                parts = {"qkv": "q k v", "gate_up": "gate up", "norm": "norm_1 norm_2"}.get(
                    name, name
                ).split()
                for part, tensor in zip(parts, parameter.detach().chunk(len(parts)), strict=True):
                    found[f"layers.{number}.{part}.weight"] = tensor
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own, loaded = self.checkpoint(), set()
        for name, tensor in weights:
            own[name].copy_(tensor)
            loaded.add(name)
        return loaded


def made(shape: Shape, device: Any, seed: int = 0) -> Llama:
    """In bf16."""
    torch.manual_seed(seed)
    with device:
        model = Llama(shape)
    model.bfloat16()
    return model


def save(model: Llama, directory: Path) -> Path:
    directory.mkdir(parents=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.checkpoint().items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return directory


class Trainer:
    """bf16 weights and fp32 masters under AdamW, whose rate is that of RL."""

    def __init__(self, model: Llama, batch: int = 8) -> None:
        self.model, self._batch = model, batch
        self._weights = list(model.parameters())
        self._masters = [weight.detach().float().requires_grad_() for weight in self._weights]
        fused = self._weights[0].is_cuda
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-6, weight_decay=0.0, fused=fused)
        self.tensors = model.checkpoint()

    def step(self) -> Mapping[str, Tensor]:
        vocabulary = len(self.model.embed)
        tokens = torch.randint(vocabulary, (self._batch, WINDOW + 1), device=self.model.embed.device)
        scores = self.model(tokens[:, :-1]).flatten(0, 1)
        F.cross_entropy(scores.float(), tokens[:, 1:].flatten()).backward()
        for weight, master in zip(self._weights, self._masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        if self.model.embed.is_cuda:
            torch.cuda.synchronize()
        return self.tensors


class GraphEngine(EngineHere, Controls):
    """A model behind the engine plugin's own code. A thread decodes without end, from a captured CUDA graph
    where there is a GPU, and carries out orders between two steps."""

    def __init__(self, shape: Shape, directory: Path, device: Any) -> None:
        self._directory, self._model = directory, made(shape, device, seed=99)
        self.read_from = directory
        """by a reload"""
        self._front = Front(self)
        self._tokens = torch.zeros(1, WINDOW, dtype=torch.int64, device=device)
        self.reload()
        self._replay = self._captured() if device.type == "cuda" else self._step
        self._rank = EngineRank(self, directory / ".weightcast" / "engine", 4 << 30)
        self._orders = queue.SimpleQueue[Callable[[], None]]()
        self._going, self._ended, self.steps = True, False, 0
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _step(self) -> Tensor:
        return self._model(self._tokens)[:, -1].argmax(-1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _captured(self) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            said = self._step()

        def replay() -> Tensor:
            graph.replay()
            return said

        return replay

    def ask(self, name: str, *arguments: Any) -> Any:
        """One of `Front`'s orders."""
        return asyncio.run(getattr(self._front, name)(*arguments))

    def decode(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy."""

        def decoded() -> list[int]:
            self._tokens.zero_()
            self._tokens[0, -len(prompt) :] = torch.tensor(prompt)
            return [self._next() for _ in range(count)]

        return self._between_steps(decoded)

    def _next(self) -> int:
        said = self._replay()
        self._tokens.copy_(torch.cat([self._tokens[:, 1:], said[None]], 1))
        return int(said)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _serve(self) -> None:
        while not self._ended:
            try:
                order = self._orders.get(block=not self._going)
            except queue.Empty:
                self._next()
                self.steps += 1
            else:
                order()

    def _between_steps(self, work: Callable[[], Result]) -> Result:
        end: Future[Result] = Future()

        def order() -> None:
            try:
                end.set_result(work())
            except BaseException as error:
                end.set_exception(error)

        self._orders.put(order)
        return end.result()

    def __enter__(self) -> GraphEngine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._between_steps(lambda: setattr(self, "_ended", True))
        self._thread.join()

    # what the plugin asks of an engine

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def directory(self) -> Path:
        return self._directory

    def hindrance(self) -> str | None:
        return None

    def drafter(self) -> str:
        return "none"

    def packed(self, name: str, module: Any) -> str | None:
        return None

    def reload(self) -> None:
        tensors = load_file(self.read_from / "model.safetensors", device=str(self._tokens.device))
        with torch.no_grad():
            self._model.load_weights(tensors.items())

    async def ranks(self, order: Order) -> Sequence[Answer]:
        return [self._between_steps(lambda: self._rank.obey(order))]

    async def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    async def pause(self, policy: str) -> None:
        def pause() -> None:
            self._going = False
            self.synchronise()

        self._between_steps(pause)

    async def resume(self) -> None:
        self._between_steps(lambda: setattr(self, "_going", True))

    async def paused(self) -> bool:
        return not self._going

    async def relabel(self, label: str) -> None:
        pass
