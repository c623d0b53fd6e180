"""An engine that runs weightcast-engine itself: the plugin's routes over HTTP, around a small model whose
tensor parallel ranks lie on as many hosts as there are local checkpoints."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine_plugin"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "subscriber" / "engine_plugin"))

import torch
from doubles import Answer, Call, Double
from hosts import Weights
from patch_writer import CODES, bytes_of, some_changed
from plugin_models import Llama, Ranks, ToyEngine, checkpoint
from safetensors.torch import load_file
from torch import Tensor
from weightcast_engine.update import routes
from weightcast_engine.update.elements import misplaced
from weightcast_engine.update.front import Front
from weightcast_engine.update.rank import EngineRank

Tensors = Mapping[str, Tensor]
PATCH_LIMIT = 1 << 24


def patches_of(local: Path) -> Path:
    return local / ".weightcast" / "engine"


def weights_of(tensors: Tensors) -> Weights:
    return Weights(
        {
            name: (CODES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor).tobytes())
            for name, tensor in tensors.items()
        }
    )


def base_tensors() -> dict[str, Tensor]:
    return checkpoint()


def next_tensors(tensors: Tensors, seed: int) -> dict[str, Tensor]:
    return some_changed(tensors, seed)


class CoreEngine(Double):
    """`hosts`: the local checkpoints that its ranks read, one each; `patches`: where these lie, if not there.
    Each start is another process."""

    def __init__(self, *hosts: Path, patches: Path | None = None) -> None:
        super().__init__()
        self.hosts, self.patches = hosts, patches
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine")
        self._thread.start()
        self.restart()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def restart(self) -> None:
        """Loads what lies on disk; where nothing lies yet, what it was made with."""
        super().restart()
        ranks = len(self.hosts)
        self.ranks = [
            _HostEngine(Llama(torch.float32, rank, ranks), host) for rank, host in enumerate(self.hosts)
        ]
        for rank in self.ranks:
            if rank.files():
                rank.reload()
        self.controls = Ranks(
            [EngineRank(rank, self._patches(rank.directory), PATCH_LIMIT) for rank in self.ranks]
        )
        self.front = Front(self.controls)

    def _patches(self, local: Path) -> Path:
        return patches_of(local) if self.patches is None else self.patches

    def behave(self, call: Call) -> Answer:
        if call.method == "GET" and call.path == routes.PREFIX:
            return self._answer(routes.look(self.front))
        route = call.path.removeprefix(f"{routes.PREFIX}/")
        if call.method != "POST" or route not in routes.ROUTES:
            return Answer(404, {"detail": "Not Found"})
        return self._answer(routes.order(self.front, route, json.dumps(call.body).encode()))

    def _answer(self, reply: Any) -> Answer:
        return Answer(*asyncio.run_coroutine_threadsafe(reply, self._loop).result())

    def routes(self) -> list[str]:
        """What was done, in order."""
        return [call.path.rpartition("/")[2] for call in self.calls if call.method == "POST"]

    def live(self) -> list[dict[str, bytes]]:
        return [_parameters(rank.model) for rank in self.ranks]

    def holds(self, tensors: Tensors) -> bool:
        """Whether each rank's memory is that of a fresh load, to the last bit."""
        fresh = [Llama(torch.float32, rank, len(self.hosts)) for rank in range(len(self.hosts))]
        with torch.no_grad():
            for model in fresh:
                model.load_weights(tensors.items())
        return self.live() == [_parameters(model) for model in fresh]


def _parameters(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor).tobytes() for name, tensor in model.named_parameters()}


class _HostEngine(ToyEngine):
    """Reads all files of a local checkpoint."""

    def drafter(self) -> str:
        return "none"

    def misplaced(self, patches: Path) -> str | None:
        return misplaced(self.directory, patches)

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("model*.safetensors"))

    def reload(self) -> None:
        tensors = {name: tensor for file in self.files() for name, tensor in load_file(file).items()}
        with torch.no_grad():
            self.model.load_weights(tensors.items())  # type: ignore[operator]
