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
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from weightcast.publisher import Publisher, PublisherOptions, cast_like, init_channel
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.checkpoint.state.state import Phase, read_state
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.sync.options import SyncOptions
from weightcast.subscriber.sync.sync import Sync

_LOOK_SECONDS = 0.1


@CheckpointEngineRegistry.register("weightcast")
class WeightcastEngine(CheckpointEngine):  # type: ignore[misc]
    """One per trainer rank and per rollout worker. The workers of a host share its local checkpoint: one of
    them patches it, the others wait for it."""

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
        self._channel, self._base, self._local = channel, Path(base), Path(local)
        self._is_master, self._deadline_seconds = is_master, deadline_seconds
        self._options = PublisherOptions(**(options or {}))
        self._publisher: Publisher | None = None
        self._sync: Sync | None = None
        self._before = 0

    def prepare(self) -> dict[str, Any]:
        """The version that the coming one follows, from the rank that publishes it."""
        if not self._is_master:
            return {}
        if self._publisher is None:
            init_channel(self._channel, self._base)
            local = self._local / "publisher"
            self._publisher = Publisher.open(
                self._channel, local=local, base=self._base, options=self._options
            )
        return {"version": self._publisher.version}

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
        """Publishes what verl gathers, copied into host memory. Raises what `Publisher.publish` raises.

        Returns:
            verl's metrics: seconds, bytes of the delta, share of the elements that changed.
        """
        publisher, began = self._publisher, time.perf_counter()
        # gathering is collective: every rank takes all of them
        pairs = [(name, tensor.detach().cpu()) for name, tensor in weights if publisher is not None]
        if publisher is None:
            return {}
        report = await asyncio.to_thread(publisher.publish, cast_like(publisher, pairs), step=global_steps)
        return {
            "weightcast/version": report.version,
            "weightcast/seconds": time.perf_counter() - began,
            "weightcast/delta_bytes": report.delta_bytes,
            "weightcast/changed_share": report.density_elements,
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """The host's local checkpoint at the coming version, tensor by tensor from its mapped files. Raises
        RetryLater when the version does not come in time, and what a sync raises."""
        await asyncio.to_thread(self._follow)
        for path in open_checkpoint(self._local / "rollout", follow_links=False).weight_files:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)

    def _follow(self) -> None:
        """Until the local checkpoint is at a version after `before`, moved there by this process or another
        one of the host."""
        local = self._local / "rollout"
        deadline, problem = time.monotonic() + self._deadline_seconds, ""
        while not _is_after(local, self._before):
            if time.monotonic() > deadline:
                waited = f"in {self._deadline_seconds:g} s"
                raise RetryLater(
                    f"{local} did not get past version {self._before} {waited}{problem}",
                    remedy="see the trainer's log: its rank 0 publishes",
                )
            if self._sync is None:
                self._sync = Sync(SyncOptions(self._channel, local, self._base))
            try:
                self._sync.sync_once()
            except RetryLater as error:
                # another worker of this host patches it, or the channel is being made
                problem = f": {error.message}"
            time.sleep(_LOOK_SECONDS)


def _is_after(local: Path, version: int) -> bool:
    state = read_state(LocalPaths(local).state)
    return state is not None and state.phase is Phase.CLEAN and state.position.version > version
