"""Adapters as peft saves them, and what a host makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from core_cases import read_checkpoint
from numpy.typing import NDArray
from safetensors.numpy import save_file

from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import open_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.verify.hashing import full_hash

Adapter = dict[str, NDArray[Any]]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
MATH, CODE = "adapter/math", "adapter/code"


def adapter(seed: int, rank: int = 4, layers: int = 2) -> Adapter:
    rng = np.random.default_rng(seed)
    found: Adapter = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        found[f"{name}.lora_A.weight"] = rng.normal(size=(rank, 48)).astype(np.float32)
        found[f"{name}.lora_B.weight"] = rng.normal(size=(48, rank)).astype(np.float16)
    return found


def save_adapter(directory: Path, tensors: Adapter, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    return directory


def follow(channel: Path | Store, name: str, host: Path) -> tuple[int, dict[str, bytes], dict[str, Any]]:
    """Version, tensors and configuration that a host without any base has afterwards."""
    nested = open_component(Channel.open(open_store(channel)), name)
    updater = LocalUpdater(nested.store, host, None, UpdaterOptions(visible_seconds=0.2))
    try:
        updater.update_to(nested)
        assert updater.local is not None and full_hash(updater.local).intact
        version = updater.local.state.position.version
    finally:
        updater.close()
    return version, read_checkpoint(host), json.loads((host / "adapter_config.json").read_text())


def bytes_of(tensors: Adapter) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}
