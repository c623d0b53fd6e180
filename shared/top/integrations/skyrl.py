"""SkyRL's workers publish: rank 0 publishes what all ranks gather, and subscribers move the engines. SkyRL's
own weight transfer and its calls to the servers are left out.

    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from weightcast.integrations.skyrl import PublishingWorker

    class Worker(PublishingWorker, fsdp_worker.FSDPPolicyWorkerBase):
        weightcast = {"channel": "/mnt/run7/channel", "base": "/models/base", "local": "/nvme/weightcast"}

    fsdp_worker.PolicyWorker = ray.remote(num_gpus=1)(Worker)

in the entrypoint, before SkyRL makes its trainer; for Megatron with `MegatronPolicyWorkerBase`. Written
against SkyRL 0.4.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist

from weightcast.integrations.transfer import Sender


class PublishingWorker:
    """Put before a worker of SkyRL's. `weightcast`: `channel`, `base`, `local` and `options` of `Sender`;
    `fraction` (1.0) of the hosts that serve a version before the training goes on, 0 to wait for none."""

    weightcast: Mapping[str, Any]

    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        """On every rank: the engine whose `send_weights` SkyRL calls after each step."""
        worker: Any = self
        worker._weight_sync_inference_client = inference_engine_client
        source = worker._build_weight_source(getattr(torch, inference_engine_cfg.model_dtype), "nccl")
        worker._weight_sync_engine = await asyncio.to_thread(_Engine, source, **self.weightcast)
        dist.barrier()


class _Engine:
    """In place of SkyRL's trainer engines: what its workers read and call."""

    skyrl_handles_prefix_cache_reset = True  # subscribers do, with the reload
    skyrl_force_disable_expandable_segments = False
    skyrl_empty_cache_after_send = True
    skyrl_draft_source = None

    def __init__(self, source: Iterable[tuple[str, Any]], *, fraction: float = 1.0, **settings: Any) -> None:
        self._source, self._fraction = source, fraction
        self._sender = Sender(**settings)
        if dist.get_rank() == 0:
            self._sender.open()

    def send_weights(self) -> None:
        """As `Sender.send`; SkyRL's workers call it in a thread."""
        asyncio.run(self._sender.send(self._source, fraction=self._fraction))

    def shutdown(self) -> None:
        self._sender.close()
