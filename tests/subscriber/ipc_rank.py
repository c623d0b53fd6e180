"""A rank of an engine, fed by the released checkpoint-engine: `ipc_rank.py KIND UUID`.

Each line of its input is a JSON object: `handles`, and what is to go wrong. It answers each with a line:
`error`, empty after success, and `held`, the SHA-256 of every tensor. The package's own code takes the
messages; only what it asks a GPU and a model is a stand-in. What is loaded is overwritten at once, as some
loaders of engines do.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import zmq
from checkpoint_engine import worker

DEVICE = 3
kind, uuid = sys.argv[1:]
held: dict[str, str] = {}
wish: dict[str, Any] = {}
processed = 0


class DeviceManager:
    """A device whose work is always done."""

    device_module = SimpleNamespace(
        synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None
    )


def load_weights(weights: list[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        assert tensor.storage_offset() * tensor.itemsize % 256 == 0
        if wish.get("refuse") == name:
            raise ValueError(f"{name} has an unexpected shape {tuple(tensor.shape)}")
        if wish.get("die") == name:
            os._exit(9)
        data = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
        held[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
        tensor.zero_()


def process(*arguments: object) -> None:
    global processed
    processed += 1


def stand_in(name: str, **members: object) -> None:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(members)


def vllm() -> Any:
    platform = SimpleNamespace(device_type="cuda", get_device_uuid=lambda index: uuid)
    for package in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        stand_in(package)
    stand_in("vllm.platforms", current_platform=platform)
    stand_in("vllm.model_executor.model_loader.utils", process_weights_after_loading=process)
    extension = worker.VllmColocateWorkerExtension()
    vars(extension).update(
        device=torch.device("cuda", DEVICE),
        model_config=None,
        model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=load_weights)),
    )
    return extension


class SGLang:
    """What a released SGLang (0.5.23) does around the package."""

    context = zmq.Context()

    def update_weights_from_ipc(self, handles: dict[str, str]) -> None:
        if uuid not in handles:
            raise ValueError(f"Device UUID {uuid} not found in zmq_handles: {list(handles)}")
        worker.update_weights_from_ipc(
            self.context, handles[uuid], DEVICE, run=load_weights, post_hook=process
        )


worker.DeviceManager = DeviceManager
rank = vllm() if kind == "vllm" else SGLang()
path = list(sys.path)
print("ready", flush=True)
for line in sys.stdin:
    wish, processed = json.loads(line), 0
    sys.path[:] = path
    if wish.get("bare"):
        sys.path[:] = [each for each in path if "engine_plugin" not in each]
        for name in [name for name in sys.modules if name.startswith("weightcast_engine")]:
            del sys.modules[name]
    try:
        rank.update_weights_from_ipc(wish["handles"])
        error = "" if processed == 1 else f"the hook ran {processed} times"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    print(json.dumps({"error": error, "held": held}), flush=True)
