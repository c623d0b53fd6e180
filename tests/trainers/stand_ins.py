"""Interfaces of what cannot be installed here, from their sources, as far as weightcast's adapters and these
tests use them: prime-rl and NeMo RL (no packages), and what SkyRL's worker imports (flash-attn, vLLM)."""

from __future__ import annotations

import asyncio
import importlib.machinery
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist


def put(name: str, **members: Any) -> ModuleType:
    """A module with these members, in place of any; the packages around it where they are missing."""
    package, _, last = name.rpartition(".")
    if package and package not in sys.modules:
        put(package)
    module = ModuleType(name)
    module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    sys.modules[name] = module
    if package:
        setattr(sys.modules[package], last, module)
    return module


def skyrl() -> None:
    """Before SkyRL 0.4.0 is imported. Its package `backends` is for an HTTP server and needs Python 3.12."""
    import skyrl

    class WeightSource(ABC):
        @abstractmethod
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def whole(tensor: Any) -> Any:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    backends = put("skyrl.backends")
    backends.__path__ = [str(Path(skyrl.__path__[0]) / "backends")]
    put("flash_attn.bert_padding", pad_input=None, unpad_input=None)
    base = {"ParamMeta": tuple, "WeightSource": WeightSource, "materialize_full_tensor": whole}
    put("vllm.distributed.weight_transfer.base", **base, VLLMWeightSyncClient=object)
    put("vllm.distributed.weight_transfer.packed_tensor", DEFAULT_PACKED_BUFFER_SIZE_BYTES=1 << 30)


def nemo_rl() -> None:
    class CheckpointEngine(ABC):
        @abstractmethod
        def prepare(self) -> Any: ...
        @abstractmethod
        def init_policy_process_group(self, **kwargs: Any) -> None: ...
        @abstractmethod
        def init_rollout_process_group(self, **kwargs: Any) -> None: ...
        @abstractmethod
        async def send_weights(self, weights: Any) -> None: ...
        @abstractmethod
        def receive_weight_batches(self) -> Any: ...

    put("nemo_rl.utils.checkpoint_engines.base", CheckpointEngine=CheckpointEngine)


def prime_rl() -> None:
    """A sender meets its receiver by marker files; each rank holds a slice of the tensors, on the CPU."""
    sender_ready, receiver_ready, finished = ".sender_ready", ".receiver_ready", ".finished"

    class WeightSender(ABC):
        def __init__(self, output_dir: Path, timeout: int) -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            self.world = SimpleNamespace(rank=rank, world_size=size, is_master=rank == 0)
            self.output_dir, self.timeout = output_dir, timeout

        def broadcast(self, model: Any, step: int) -> None:
            step_dir = self.output_dir / "broadcasts" / f"step_{step}"
            if self.world.is_master:
                step_dir.mkdir(parents=True)
                (step_dir / sender_ready).touch()
                until = time.monotonic() + self.timeout
                while not (step_dir / receiver_ready).exists():
                    assert time.monotonic() < until
                    time.sleep(0.05)
            self._broadcast(model, step, step_dir)
            if self.world.is_master:
                (step_dir / finished).touch()

        @abstractmethod
        def _broadcast(self, model: Any, step: int, step_dir: Path) -> None: ...

    class WeightReceiver(ABC):
        def __init__(self, broadcast_dir: Path, config: Any, admin_plane: Any, model_name: str) -> None:
            self.broadcast_dir = broadcast_dir

        def step_dir(self, step: int) -> Path:
            return self.broadcast_dir / f"step_{step}"

        async def wait_published(self, step: int) -> None:
            await wait_for_path(self.step_dir(step) / sender_ready)

        def _ack(self, step: int) -> None:
            (self.step_dir(step) / receiver_ready).touch()

        @abstractmethod
        async def receive(self, step: int) -> None: ...

    async def wait_for_path(path: Path) -> None:
        while not path.exists():
            await asyncio.sleep(0.05)

    def gather_weights_parallel(model: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        held = {}
        for number, (name, tensor) in enumerate(model.state_dict().items()):
            full = tensor.to(dtype).full_tensor()
            if number % dist.get_world_size() == dist.get_rank():
                held[name] = full.cpu()
        return held

    put(
        "prime_rl.transports.weights.base",
        FINISHED_MARKER=finished,
        WeightSender=WeightSender,
        WeightReceiver=WeightReceiver,
    )
    weights = sys.modules["prime_rl.transports.weights"]
    put("prime_rl.transports.weights.filesystem")
    weights.setup_weight_sender = lambda output_dir, config, parallel_dims, lora_config=None: (  # type: ignore[attr-defined]
        weights.FileSystemWeightSender(output_dir, config, lora_config)
    )
    put("prime_rl.utils.pathing", wait_for_path=wait_for_path)
    put(
        "prime_rl.utils.weights",
        gather_weights_parallel=gather_weights_parallel,
        convert_state_dict_to_hf=lambda model, state: state,
    )
