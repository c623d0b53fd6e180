"""transformers' Trainer on a model that is sharded by FSDP2 over gloo ranks; every rank has the callback.

Accelerate does not wrap models in FSDP on a CPU, so the model is sharded before the trainer gets it, and each
trainer believes to be alone.

    python sharded_child.py ROOT WORLD HOW
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from weightcast.publisher import PublisherOptions
from weightcast.publisher.transformers_hook import PublishCallback
from weightcast.shared.base.errors import WeightcastError

STEPS = 3
root, world, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Gathers(TrainerCallback):  # type: ignore[misc]
    """Full tensors by torch's own way, rounded by torch."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        full = {}
        for name, one in kwargs["model"].state_dict().items():
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            full[name] = whole.to(torch.bfloat16).contiguous().clone()
        if dist.get_rank() == 0:
            save_file(full, root / "full.safetensors")


def arguments() -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(root / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def train(rank: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    options = {"newest": {"when_busy": "newest"}, "copy": {"hold": "copy"}}.get(how, {})
    publish = PublishCallback(
        root / "channel",
        local=root / "publisher",
        base=root / "base",
        options=PublisherOptions(deadline_seconds=60.0),
        **options,
    )
    rng = np.random.default_rng(rank)
    rows = [rng.integers(2, 64, 12) for _ in range(16)]
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]
    Trainer(model, arguments(), train_dataset=data, callbacks=[publish, Gathers()]).train()


def run(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=world)
    said = ""
    try:
        train(rank)
    except WeightcastError as error:
        said = str(error)
    (root / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


children = []
for number in range(world):
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
if any(os.waitpid(child, 0)[1] for child in children):
    sys.exit("a rank failed")
