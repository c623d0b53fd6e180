"""Parts of a verl run around its checkpoint engine: a trainer's rank, and what loads weights into an engine.
Imported by Ray's processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def weights_of(base: Path, step: int) -> dict[str, torch.Tensor]:
    """What the trainer has after a step."""
    torch.manual_seed(step)
    found = load_file(base / "model.safetensors")
    return {name: tensor + step * 0.01 * torch.randn(tensor.shape) for name, tensor in found.items()}


class Rank(Worker):  # type: ignore[misc]
    """A rank of the trainer: every rank gathers the same tensors, as verl's engines do."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        import weightcast.integrations.verl  # noqa: F401

        self._base = Path(settings["base"])
        self.taken = 0
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "weightcast", is_master=self.rank == 0, bucket_size=1 << 20, **settings
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> dict[str, float]:
        def gathered() -> Any:
            for name, tensor in weights_of(self._base, global_steps).items():
                self.taken += 1
                yield name, tensor

        metrics: dict[str, float] = await self.checkpoint_engine.send_weights(
            gathered(), global_steps=global_steps
        )
        return {**metrics, f"taken/{self.rank}": self.taken}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter:
    """In place of verl's adapter of an engine: notes the digests of what it is to load."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self.replica_rank, self.is_leader_rank = 0, True

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int, wire_format: str
    ) -> None:
        assert wire_format == "named_tensors"
        loaded = {name: tensor async for name, tensor in weights}
        path = self._directory / f"step-{global_steps}-rank-{os.environ['RANK']}.json"
        path.write_text(json.dumps(digests(loaded)))
