"""prime-rl's ranks publish, each its slice of the layers, and subscribers move the engines; the orchestrator
follows as before. In both the trainer's and the orchestrator's process, before their `main`:

    from weightcast.integrations import prime_rl

    prime_rl.install(channel="/mnt/run7/channel", base="/models/base", local="/nvme/weightcast")

with `weight_broadcast.type = "filesystem"`, in whose place it comes. Written against the sources of October
2026 (`prime_rl/transports/weights`); not run with prime-rl.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prime_rl.transports import weights
from prime_rl.transports.weights import filesystem
from prime_rl.transports.weights.base import FINISHED_MARKER, WeightReceiver, WeightSender
from prime_rl.utils.pathing import wait_for_path
from prime_rl.utils.weights import convert_state_dict_to_hf, gather_weights_parallel
from torch import distributed as dist

from weightcast.publisher import Publisher, PublisherOptions, cast_like, init_channel
from weightcast.shared.base.errors import Refused


class PublishingSender(WeightSender):  # type: ignore[misc]
    """In each rank of the trainer."""

    made: Callable[[], object]
    opened: Callable[..., Publisher]
    fraction: float

    def __init__(self, output_dir: Path, config: Any, lora_config: Any = None) -> None:
        super().__init__(output_dir, config.timeout)
        if lora_config is not None:
            raise Refused("LoRA is not published here", remedy="merge it, or use prime-rl's own broadcast")
        self._publisher: Publisher | None = None
        if self.world.is_master:
            self.made()

    def _broadcast(self, model: Any, step: int, step_dir: Path) -> None:
        """prime-rl's markers around it make the orchestrator wait: the policy moves when the hosts have."""
        dist.barrier()  # until the master has met the orchestrator, and has made the channel
        if self._publisher is None:
            self._publisher = self.opened(rank=self.world.rank, world_size=self.world.world_size)
        held = convert_state_dict_to_hf(model, gather_weights_parallel(model))
        report = self._publisher.publish(cast_like(self._publisher, held), step=step)
        if self.world.is_master and self.fraction:
            self._publisher.wait(report.version, fraction=self.fraction, timeout=float(self.timeout))


class ReloadedReceiver(WeightReceiver):  # type: ignore[misc]
    """In the orchestrator: subscribers move the engines."""

    async def receive(self, step: int) -> None:
        self._ack(step)
        await wait_for_path(self.step_dir(step) / FINISHED_MARKER)


def install(
    *,
    channel: str,
    base: str | Path,
    local: str | Path,
    fraction: float = 1.0,
    options: PublisherOptions = PublisherOptions(),
) -> None:
    """Puts weightcast in the place of prime-rl's filesystem broadcast, in this process.

    Args:
        channel: As for `Publisher.open`; made from `base` if it is missing.
        base: The checkpoint directory that trainer and hosts start from.
        local: A directory of each trainer machine's own, with room for the weights.
        fraction: Of the hosts that serve a version before the policy moves to it; 0: none.
        options: The publisher's.
    """
    opened = partial(Publisher.open, channel, local=local, base=base, options=options)
    PublishingSender.made = staticmethod(partial(init_channel, channel, base))
    PublishingSender.opened, PublishingSender.fraction = staticmethod(opened), fraction
    for module in (weights, filesystem):
        module.FileSystemWeightSender = PublishingSender
        module.FileSystemWeightReceiver = ReloadedReceiver
