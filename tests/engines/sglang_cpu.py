"""A released SGLang where there is no GPU: `sglang_cpu.py ...` is `python -m sglang.launch_server ...`.

Server, tokenizer, scheduler, loader, models, caches and sampling are the release's own; on its platform for
CPUs they compute with torch alone. What it imports and cannot be had without CUDA (`ABSENT`) is there as
hollow modules, whose names are hollow classes: enough to be imported, wrong for who would compute with it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

import kept_beside
from hollow import HollowFinder

ABSENT = frozenset({"cuda", "cutlass", "flashinfer", "sgl_kernel", "torchvision", "triton_kernels"})


def _is_hollow(name: str) -> bool:
    return name.partition(".")[0] in ABSENT


def install() -> None:
    """The two libraries look for `cuda` and `torchvision` themselves, and shall not find them."""
    importlib.import_module("tvm_ffi")
    importlib.import_module("transformers.utils.import_utils").is_torchvision_greater_or_equal("0.27")
    sys.meta_path.append(HollowFinder(_is_hollow))  # type: ignore[arg-type]
    unpin()
    if importlib.util.find_spec("checkpoint_engine") is not None:
        # it knows GPUs and NPUs; there is nothing to wait for, and nothing to free, on a CPU
        calls = dict.fromkeys(("synchronize", "empty_cache", "ipc_collect"), lambda: None)
        device = SimpleNamespace(device_module=SimpleNamespace(**calls))
        vars(importlib.import_module("checkpoint_engine.worker"))["DeviceManager"] = lambda: device


def unpin() -> None:
    """Layers under adapters pin memory, which torch refuses without CUDA."""
    torch = importlib.import_module("torch")

    def unpinned(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return make(*arguments, **options)

        return made

    for name in ("tensor", "empty", "zeros", "arange", "ones_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: tensor


def main() -> None:
    launch = importlib.import_module("sglang.launch_server")
    launch.load_plugins()
    try:
        launch.run_server(launch.prepare_server_args(sys.argv[1:]))
    finally:
        launch.kill_process_tree(os.getpid(), include_parent=False)


# also in the processes that the server spawns, which import this file anew
install()
kept_beside.register()

if __name__ == "__main__":
    main()
