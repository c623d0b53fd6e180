"""A trainer with FSDP2 (`fully_shard`) that publishes from every rank's local shards.

    torchrun --nproc-per-node 2 -m examples.attach.fsdp2 --channel DIR --local DIR --base CHECKPOINT
    python -m examples.attach.fsdp2 --ranks 2 --channel DIR --local DIR --base CHECKPOINT

The channel was made before, with `weightcast channel init --base CHECKPOINT`; the checkpoint is one of
`examples.checkpoint` (`python -m examples.attach.fsdp2 --write-base CHECKPOINT` makes one). What attaches
weightcast is `open_publisher` and `publish`; the rest is any FSDP2 trainer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from examples import checkpoint
from examples.checkpoint import Config
from examples.model import CausalLM
from weightcast.publisher import Publisher, PublisherOptions, PublishReport


def open_publisher(channel: Path, local: Path, base: Path, deadline_seconds: float = 600.0) -> Publisher:
    """On every rank. Ranks of one machine share `local`."""
    return Publisher.open(
        channel,
        local=local,
        base=base,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        options=PublisherOptions(deadline_seconds=deadline_seconds),
    )


def publish(publisher: Publisher, model: CausalLM, step: int) -> PublishReport:
    """On every rank, with the same step. The masters are float32, the run is bfloat16: each rank casts its
    own shards, and nothing is gathered."""
    shards = {name: shard.to(torch.bfloat16) for name, shard in model.state_dict().items()}
    return publisher.publish(shards, step=step)


def sharded(config: Config, mesh: DeviceMesh | None = None) -> CausalLM:
    """Layers and root, as usual; projections back to the hidden size are cut by columns."""

    def placement(parameter: torch.nn.Parameter) -> Shard | None:
        down = parameter.ndim == 2 and parameter.shape[1] == config.intermediate_size
        return Shard(1) if down and config.intermediate_size % dist.get_world_size() == 0 else None

    model = CausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh)


def hybrid_mesh() -> DeviceMesh:
    """HSDP: two copies of a model that is sharded over half of the ranks."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def load_full(model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every rank gives the same full tensors and keeps its shards."""
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, {name: one.float() for name, one in tensors.items()}, options=options)


def full(model: CausalLM) -> dict[str, Any]:
    """What publishing does not need: all tensors gathered, float32, on rank 0."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def train_step(model: CausalLM, optimizer: torch.optim.Optimizer, random: torch.Generator) -> float:
    """Next-token loss on random text: the weights move, that is all."""
    config = model.config
    tokens = torch.randint(0, config.vocab_size, (4, config.max_position_embeddings), generator=random)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def run(arguments: argparse.Namespace) -> None:
    config = checkpoint.load_config(arguments.base)
    model = sharded(config)
    load_full(model, checkpoint.load(arguments.base))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    # every rank has its own data, as in data-parallel training
    random = torch.Generator().manual_seed(dist.get_rank())
    with open_publisher(arguments.channel, arguments.local, arguments.base) as publisher:
        for step in range(1, arguments.steps + 1):
            loss = train_step(model, optimizer, random)
            report = publish(publisher, model, step)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.3f}, version {report.version}, {report.delta_bytes} bytes")


def in_group(rank: int, world_size: int, meeting: str, arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    try:
        run(arguments)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--channel", type=Path)
    parser.add_argument("--local", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, without torchrun")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--write-base", type=Path, help="write a checkpoint with random weights, and end")
    given = parser.parse_args(arguments)
    if given.write_base is not None:
        torch.manual_seed(0)
        checkpoint.save(given.write_base, Config(), CausalLM(Config()).state_dict())
    elif "RANK" in os.environ:
        in_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", given)
    else:
        with tempfile.TemporaryDirectory() as directory:
            context = (given.ranks, f"file://{directory}/meeting", given)
            processes.start_processes(in_group, context, nprocs=given.ranks, start_method="fork")


if __name__ == "__main__":
    main()
