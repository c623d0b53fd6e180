"""NeMo RL's refit transport: policy rank 0 publishes, every generation host brings its local checkpoint to
the new version, and NeMo RL's vLLM workers load from there. Only deltas cross the network.

    policy.generation.refit_transport=weightcast.integrations.nemo_rl:WeightcastEngine

with `channel`, `base` and `local` below the same name in `policy.generation.refit_cfg`. Written against the
sources of October 2026 (`nemo_rl/utils/checkpoint_engines/base.py`); not run with NeMo RL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weightcast.integrations.transfer import Receiver, Sender
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.layout import read_pointer


class WeightcastEngine(CheckpointEngine):  # type: ignore[misc]
    """One per policy rank and per generation worker."""

    def __init__(
        self,
        bucket_size: int,
        *,
        channel: str,
        base: str,
        local: str,
        deadline_seconds: float = 600.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """NeMo RL gives `bucket_size`: bytes of a batch that a generation worker loads. The rest is as for
        verl's engine."""
        self._channel, self._bucket_size, self._before = channel, bucket_size, 0
        self._sender = Sender(channel, base, Path(local) / "publisher", options)
        self._receiver = Receiver(channel, base, Path(local) / "rollout", deadline_seconds)

    def prepare(self) -> dict[str, Any]:
        """The version that the coming one follows: no worker knows yet whether it will publish."""
        pointer = read_pointer(open_store(self._channel))
        return {"version": 0 if pointer is None else pointer.version}

    def init_policy_process_group(self, *, worker_rank: int, **sizes: Any) -> None:
        if worker_rank == 0:
            self._sender.open()

    def init_rollout_process_group(self, *, metadata: Sequence[Mapping[str, Any]], **sizes: Any) -> None:
        self._before = max(each["version"] for each in metadata)

    async def send_weights(self, weights: Generator[tuple[str, Any], None, None]) -> None:
        """As `Sender.send`."""
        await self._sender.send(weights)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """The host's local checkpoint at the coming version. Raises what `Receiver.follow` raises."""
        await asyncio.to_thread(self._receiver.follow, self._before)
        batch: list[tuple[str, Any]] = []
        nbytes = 0
        for name, tensor in self._receiver.tensors():
            if batch and nbytes + tensor.nbytes > self._bucket_size:
                yield batch
                batch, nbytes = [], 0
            batch.append((name, tensor))
            nbytes += tensor.nbytes
        yield batch
