"""Two FSDP2 ranks train an adapter and publish it from their shards: adapter_ranks_child.py PLACE.

After each step the adapter that torch gathered lies in PLACE/full-<step>.safetensors.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightcast.publisher import Publisher, PublisherOptions
from weightcast.shared.base.errors import WeightcastError

WORLD, WIDTH, RANK = 2, 40, 6
NAME = "base_model.model.model.layers.0.self_attn.q_proj."
place = Path(sys.argv[1])


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Linear(WIDTH, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_B(self.lora_A(x))


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {NAME + name: one.to(torch.bfloat16) for name, one in model.state_dict().items()}


def broken(model: nn.Module, rank: int):  # type: ignore[no-untyped-def]
    for name, shard in named(model).items():
        if rank == 1 and "lora_B" in name:
            raise ValueError("the device is gone")
        yield name, shard


def run(rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=WORLD)
    model = fully_shard(Adapter(), mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": {"q_proj"}}
    options = PublisherOptions(deadline_seconds=100.0)
    with Publisher.open(
        place / "channel",
        local=place / f"pub-{rank}",
        base=place / "base",
        rank=rank,
        world_size=WORLD,
        options=options,
    ) as publisher:
        for step in (1, 2, 3):
            model(torch.randn(4, WIDTH)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = publisher.publish(
                named(model), step=step, component="adapter/math", adapter_config=config
            )
            assert report.version == step
            full = {name: one.full_tensor() for name, one in named(model).items()}
            if rank == 0:
                save_file(full, place / f"full-{step}.safetensors")
        try:
            publisher.publish(broken(model, rank), step=4, component="adapter/math")
        except (WeightcastError, ValueError) as error:
            (place / f"failed-{rank}").write_text(f"{type(error).__name__}: {error}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            status = 1
            try:
                run(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    if any(ended):
        sys.exit("a rank failed")


main()
