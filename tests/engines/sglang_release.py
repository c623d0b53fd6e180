"""The request and reply models of the installed SGLang, imported without torch, kernels or CUDA.

Its `io_struct` module imports half of the server. What the models themselves are made of (`REAL`) is loaded
from the release; everything else of sglang and torch is a hollow module whose names are hollow classes. The
decoder between SGLang's own processes, which needs the real classes, is left out.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

MODELS = "sglang.srt.managers.io_struct"
REAL = frozenset({MODELS, "sglang.srt.utils.msgspec_utils", "sglang.srt.utils.weight_versions"})
PARENTS = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.utils")


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
        return self

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
        if name in REAL or name.partition(".")[0] not in ("sglang", "torch"):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _HollowModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def load_models() -> ModuleType:
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("sglang is not installed in this environment")
    root = Path(spec.submodule_search_locations[0])
    for name in PARENTS:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    decoder, msgspec.msgpack.Decoder = msgspec.msgpack.Decoder, _Hollow
    try:
        return importlib.import_module(MODELS)
    finally:
        msgspec.msgpack.Decoder = decoder
