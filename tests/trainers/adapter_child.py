"""Two gloo ranks of a framework's trainer whose model is sharded by FSDP2, with weightcast's adapter.

    python adapter_child.py ROOT skyrl|prime_rl

After each of three steps rank 0 writes `ROOT/step-N.safetensors`, full tensors gathered and rounded by torch.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import stand_ins
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

root, kind = Path(sys.argv[1]), sys.argv[2]
PLACES = {name: str(root / name) for name in ("channel", "base", "local")}
STEPS, WORLD = 3, 2


class Untouched:
    """SkyRL's client of its servers: nobody calls them."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the server's {name} was called")


def skyrl_sender() -> Callable[[Any, int], None]:
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase

    from weightcast.integrations.skyrl import PublishingWorker

    class Worker(PublishingWorker, FSDPPolicyWorkerBase):  # type: ignore[misc]
        weightcast: ClassVar = {**PLACES, "fraction": 0.0}

    worker: Any = Worker.__new__(Worker)  # its __init__ needs a GPU
    worker.cfg = SimpleNamespace(
        placement=SimpleNamespace(colocate_all=False),
        use_expandable_segments=False,
        fully_async=SimpleNamespace(enabled=False),
    )
    worker._is_lora = worker._is_multimodal_lm_only = False
    settings = SimpleNamespace(model_dtype="bfloat16", enable_prefix_caching=True)

    def send(model: Any, step: int) -> None:
        worker.model = SimpleNamespace(model=model)
        if step == 1:
            asyncio.run(worker.init_weight_sync_state(Untouched(), settings))
        asyncio.run(worker.broadcast_to_inference_engines(None, settings))

    return send


def prime_rl_sender() -> Callable[[Any, int], None]:
    from prime_rl.transports import weights

    sender = weights.setup_weight_sender(root / "out", SimpleNamespace(timeout=60), None)
    send: Callable[[Any, int], None] = sender.broadcast
    return send


def orchestrate() -> None:
    """prime-rl's orchestrator: sees each step end."""
    from prime_rl.transports import weights

    receiver = weights.FileSystemWeightReceiver(root / "out" / "broadcasts", None, Untouched(), "model")

    async def follow() -> None:
        for step in range(1, STEPS + 1):
            await receiver.wait_published(step)
            await receiver.receive(step)

    asyncio.run(asyncio.wait_for(follow(), 100))


def run(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=WORLD)
    send = skyrl_sender() if kind == "skyrl" else prime_rl_sender()
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + step / 64)
        send(model, step)
        full = {
            name: one.full_tensor().to(torch.bfloat16).contiguous().clone()
            for name, one in model.state_dict().items()
        }
        if rank == 0:
            save_file(full, root / f"step-{step}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if kind == "skyrl":
    stand_ins.skyrl()
else:
    stand_ins.prime_rl()
    from weightcast.integrations import prime_rl

    prime_rl.install(**PLACES, fraction=0.0)
children = []
for number in range(WORLD):
    child = os.fork()
    if not child:
        status = 1
        try:
            run(number)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    children.append(child)
if kind == "prime_rl":
    orchestrate()
if any(os.waitpid(child, 0)[1] for child in children):
    sys.exit("a rank failed")
