"""Two FSDP2 ranks train an adapter and publish it from their shards, and as a draft model in fp32:
adapter_ranks_child.py PLACE.

Each step writes what torch gathered to PLACE/full-<step>.safetensors and PLACE/draft-<step>.safetensors.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightcast.publisher import Publisher, PublisherOptions
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.base.failpoints import watch

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


def opened(rank: int, seconds: float) -> Publisher:
    return Publisher.open(
        place / "channel",
        local=place / f"pub-{rank}",
        base=place / "base",
        rank=rank,
        world_size=WORLD,
        options=PublisherOptions(deadline_seconds=seconds),
    )


def die(name: str, where: Path | None) -> None:
    if name == "part.written":
        os.kill(os.getpid(), signal.SIGKILL)


def run(rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=WORLD)
    model = fully_shard(Adapter(), mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": {"q_proj"}}
    with opened(rank, 100.0) as publisher:
        for step in (1, 2, 3):
            model(torch.randn(4, WIDTH)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report = publisher.publish(named(model), step=step, component="adapter/math", config=config)
            assert report.version == step
            draft = {name.replace("lora_", "model."): one for name, one in model.state_dict().items()}
            handle = publisher.submit(draft, step=step, component="draft", config={"model_type": "llama"})
            assert handle.result().version == step
            full = {name: one.full_tensor() for name, one in named(model).items()}
            if rank == 0:
                save_file(full, place / f"full-{step}.safetensors")
            whole = {name: one.full_tensor() for name, one in draft.items()}
            if rank == 0:
                save_file(whole, place / f"draft-{step}.safetensors")
        try:
            publisher.publish(broken(model, rank), step=4, component="adapter/math")
        except (WeightcastError, ValueError) as error:
            (place / f"failed-{rank}").write_text(f"{type(error).__name__}: {error}")
    dist.barrier()
    shards = {name: one.detach() for name, one in named(model).items()}
    if rank == 1:
        watch(die)
    with opened(rank, 5.0) as publisher:
        try:
            publisher.publish(shards, step=5, component="adapter/math")
        except WeightcastError as error:
            (place / "alone").write_text(f"{type(error).__name__}: {error}")
            (place / "after").write_text(str(publisher.component("adapter/math").version))


def run_again(rank: int) -> None:
    """New processes go on with step 5: this time each holds one of the tensors."""
    full = load_file(place / "full-3.safetensors")
    name = sorted(full)[rank]
    with opened(rank, 100.0) as publisher:
        report = publisher.publish({name: full[name] + 1}, step=5, component="adapter/math")
    assert report.version == 4, report


def forked(role: Callable[[int], None]) -> list[int]:
    """Wait statuses of the ranks."""
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            status = 1
            try:
                role(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


first, again = forked(run), forked(run_again)
if first != [0, signal.SIGKILL] or any(again):
    sys.exit(f"a rank failed: {first}, {again}")
