"""Questions of the tests to a real SGLang's ranks, as actions of `/weights_checker`.

kept FILE   writes what its latent attention computes with, `{layer}.{w_kc|w_vc|kv_b}`, to FILE.{rank}
flip        changes a bit of a weight of the last rank
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT, FLIP = "kept ", "flip"


def register() -> None:
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    target = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
    hooks.HookRegistry.register(target, answered, hooks.HookType.AROUND)


def answered(original: Callable[..., Any], runner: Any, *given: Any, action: str, **named: Any) -> Any:
    import torch

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if action.startswith(KEPT):
        write(runner.model, Path(f"{action.removeprefix(KEPT)}.{rank}"))
    elif action != FLIP:
        return original(runner, *given, action=action, **named)
    elif rank == ranks - 1:
        flip(runner.model)
    # the first rank answers for all
    torch.distributed.barrier()
    return None


def write(model: Any, file: Path) -> None:
    from safetensors.torch import save_file

    found = {}
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        of = {"w_kc": attention.w_kc, "w_vc": attention.w_vc, "kv_b": attention.kv_b_proj.weight}
        found |= {f"{number}.{name}": tensor.detach().contiguous() for name, tensor in of.items()}
    save_file(found, file)


def flip(model: Any) -> None:
    import torch

    weight = dict(model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
    weight.data.view(torch.int32)[1, 1] ^= 1
