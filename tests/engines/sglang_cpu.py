"""A released SGLang where there is no GPU: `sglang_cpu.py ...` is `python -m sglang.launch_server ...`.

Server, tokenizer, scheduler, loader, models, caches and sampling are the release's own; on its platform for
CPUs they compute with torch alone. What it imports and cannot be had without CUDA (`ABSENT`) is there as
hollow modules, whose names are hollow classes: enough to be imported, wrong for who would compute with it.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = frozenset({"cuda", "cutlass", "flashinfer", "sgl_kernel", "torchvision", "triton_kernels"})


class _HollowType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Hollow(metaclass=_HollowType):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __init_subclass__(cls, **options: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As a decorator it leaves the function as it is."""
        decorates = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        return False


class _HollowModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _HollowType(name, (_Hollow,), {})
        setattr(self, name, made)
        return made


class _Finder:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _HollowModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """The two libraries look for `cuda` and `torchvision` themselves, and shall not find them."""
    importlib.import_module("tvm_ffi")
    importlib.import_module("transformers.utils.import_utils").is_torchvision_greater_or_equal("0.27")
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]


def main() -> None:
    launch = importlib.import_module("sglang.launch_server")
    launch.load_plugins()
    try:
        launch.run_server(launch.prepare_server_args(sys.argv[1:]))
    finally:
        launch.kill_process_tree(os.getpid(), include_parent=False)


# also in the processes that the server spawns, which import this file anew
install()

if __name__ == "__main__":
    main()
