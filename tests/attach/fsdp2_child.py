"""The example's trainer in worlds of other sizes, one after another: fsdp2_child.py PLACE.

Each rank of each world leaves PLACE/rank-<n>-<rank>.json. After each world the full state dict, gathered by
torch, lies in PLACE/full-<n>.safetensors and a distributed checkpoint in PLACE/saved.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as saving
from safetensors.torch import save_file

from examples import checkpoint
from examples.attach import fsdp2
from examples.model import CausalLM
from weightcast.publisher import Publisher
from weightcast.shared.base.errors import WeightcastError

place = Path(sys.argv[1])
channel, local, base, saved = (place / name for name in ("channel", "pub", "base", "saved"))


def resumed(world: int) -> CausalLM:
    config = checkpoint.load_config(base)
    model = fsdp2.sharded(config, fsdp2.hybrid_mesh() if world == 4 else None)
    if saved.exists():
        state = {"model": model.state_dict()}
        saving.load(state, checkpoint_id=saved)
        model.load_state_dict(state["model"])
    else:
        fsdp2.load_full(model, checkpoint.load(base))
    return model


def broken(model: CausalLM, rank: int):  # type: ignore[no-untyped-def]
    for name, shard in model.state_dict().items():
        if rank == 1 and "norm" in name:
            raise ValueError("the device is gone")
        yield name, shard.to(torch.bfloat16)


def fail_once(publisher: Publisher, model: CausalLM, rank: int) -> str:
    try:
        publisher.publish(broken(model, rank), step=0)
    except (WeightcastError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "published"


def run(rank: int, world: int, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/meeting-{number}", rank=rank, world_size=world
    )
    model = resumed(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(rank + 10 * number)
    losses, versions = [], []
    with fsdp2.open_publisher(channel, local, base, deadline_seconds=100.0) as publisher:
        failed = fail_once(publisher, model, rank) if number == 1 else ""
        for step in (1, 2) if number == 1 else (1,):
            losses.append(fsdp2.train_step(model, optimizer, random))
            versions.append(fsdp2.publish(publisher, model, step).version)
    saving.save({"model": model.state_dict()}, checkpoint_id=saved)
    tensors = fsdp2.full(model)
    if rank == 0:
        save_file(
            {name: one.to(torch.bfloat16) for name, one in tensors.items()},
            place / f"full-{number}.safetensors",
        )
    (place / f"rank-{number}-{rank}.json").write_text(json.dumps([number, rank, versions, failed]))
    dist.barrier()
    dist.destroy_process_group()


for number, world in enumerate((2, 4, 2), 1):
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            status = 1
            try:
                run(rank, world, number)
                status = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1]:
            sys.exit(f"a rank of world {number} failed")
