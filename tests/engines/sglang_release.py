"""The request and reply models of the installed SGLang, imported without torch, kernels or CUDA.

Its `io_struct` module imports half of the server. What the models themselves are made of (`REAL`) is loaded
from the release; everything else of sglang and torch is a hollow module whose names are hollow classes. The
decoder between SGLang's own processes, which needs the real classes, is left out.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import msgspec
from hollow import Hollow, HollowFinder

MODELS = "sglang.srt.managers.io_struct"
REAL = frozenset({MODELS, "sglang.srt.utils.msgspec_utils", "sglang.srt.utils.weight_versions"})
PARENTS = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.utils")


def _is_hollow(name: str) -> bool:
    return name not in REAL and name.partition(".")[0] in ("sglang", "torch")


def load_models() -> ModuleType:
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("sglang is not installed in this environment")
    root = Path(spec.submodule_search_locations[0])
    for name in PARENTS:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    sys.meta_path.insert(0, HollowFinder(_is_hollow))  # type: ignore[arg-type]
    decoder, msgspec.msgpack.Decoder = msgspec.msgpack.Decoder, Hollow
    try:
        return importlib.import_module(MODELS)
    finally:
        msgspec.msgpack.Decoder = decoder
