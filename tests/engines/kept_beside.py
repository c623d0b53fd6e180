"""A weight loader for SGLang that loads nothing: it writes down what the engine's latent attention computes
with, `{layer}.{w_kc|w_vc|kv_b}` of a rank, into the file that its one tensor is named after."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file

LOADER = "kept_beside.write"


def write(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    [(file, _)] = named_tensors
    found = {}
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        of = {"w_kc": attention.w_kc, "w_vc": attention.w_vc, "kv_b": attention.kv_b_proj.weight}
        found |= {f"{number}.{name}": tensor.detach().contiguous() for name, tensor in of.items()}
    save_file(found, f"{file}.{torch.distributed.get_rank()}")
