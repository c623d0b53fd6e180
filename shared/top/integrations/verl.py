"""verl's checkpoint engine `weightcast`: rank 0 of the trainer publishes, every rollout host brings its local
checkpoint to the new version, and verl's own server adapter loads from there. Only deltas cross the network.

    checkpoint_engine.backend=weightcast
    checkpoint_engine.custom_backend_module=weightcast.integrations.verl
    +checkpoint_engine.engine_kwargs.weightcast.channel=/mnt/run7/channel
    +checkpoint_engine.engine_kwargs.weightcast.base=/models/base
    +checkpoint_engine.engine_kwargs.weightcast.local=/nvme/weightcast

(below `actor_rollout_ref.rollout.`). Written against verl 0.9.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from weightcast.integrations.transfer import Receiver, Sender


@CheckpointEngineRegistry.register("weightcast")
class WeightcastEngine(CheckpointEngine):  # type: ignore[misc]
    """One per trainer rank and per rollout worker."""

    def __init__(
        self,
        bucket_size: int,
        *,
        channel: str,
        base: str,
        local: str,
        is_master: bool = False,
        deadline_seconds: float = 600.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """verl gives `bucket_size` and, to trainers, `is_master`; the rest is `engine_kwargs.weightcast`.

        Args:
            bucket_size: Not used.
            channel: As for `Publisher.open`; made from `base` if it is missing.
            base: The checkpoint directory that trainer and rollouts start from, on every host.
            local: A directory of each host's own, with room for the weights.
            is_master: Whether this rank publishes.
            deadline_seconds: How long a rollout worker waits for a version.
            options: Of `PublisherOptions`, by name.
        """
        self._is_master, self._before = is_master, 0
        self._sender = Sender(channel, base, Path(local) / "publisher", options)
        self._receiver = Receiver(channel, base, Path(local) / "rollout", deadline_seconds)

    def prepare(self) -> dict[str, Any]:
        """The version that the coming one follows, from the rank that publishes it."""
        return {"version": self._sender.open()} if self._is_master else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tells every worker the version before the coming one."""
        (before,) = (each["version"] for each in metadata if each)
        return {"before": [before] * actor_wg_world_size}, {"before": [before] * rollout_world_size}

    def init_process_group(self, *, before: int) -> None:
        self._before = before

    def finalize(self) -> None:
        """Nothing is held between updates but the publisher's claim and the local checkpoint's lock."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float]:
        """As `Sender.send`: verl's metrics."""
        return await self._sender.send(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """The host's local checkpoint at the coming version. Raises what `Receiver.follow` raises."""
        await asyncio.to_thread(self._receiver.follow, self._before)
        for name, tensor in self._receiver.tensors():
            yield name, tensor
