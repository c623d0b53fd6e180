"""The dtypes of safetensors as torch has them, and what of a checkpoint is on disk: names, shapes, dtypes."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from weightcast_engine.update.refusals import BadPatch

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    **{
        code: getattr(torch, name)
        for code, name in (
            *(("U16", "uint16"), ("U32", "uint32"), ("U64", "uint64")),
            ("F8_E8M0", "float8_e8m0fnu"),
        )
        if hasattr(torch, name)  # an engine's torch may be older
    },
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of a width in bytes: the dtype in which words are moved, so that nothing is rounded."""


@dataclass(frozen=True)
class Form:
    """What a checkpoint says of a tensor."""

    dtype: str
    """safetensors code"""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """bytes per element"""
        return int(DTYPES[self.dtype].itemsize)

    @property
    def per_word(self) -> int:
        """elements per 8-byte word"""
        return 8 // self.width


def checkpoint_forms(directory: Path) -> dict[str, Form]:
    """All tensors of the safetensors files in `directory`. Raises BadPatch where the directory can't be read,
    and for a dtype that torch has no name for: what a loader does with such a tensor can't be seen."""
    found: dict[str, Form] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            if not path.is_file():  # a pipe would be waited for
                raise ValueError(f"{path.name} is not a regular file")
            with safe_open(path, "numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    entry = file.get_slice(name)
                    if entry.get_dtype() not in DTYPES:
                        raise ValueError(f"{name[:200]} has a dtype that is not known here")
                    found[name] = Form(entry.get_dtype(), tuple(entry.get_shape()))
    except (OSError, ValueError, SafetensorError) as error:
        raise BadPatch(f"{directory}: {error}", remedy="check the engine's model directory") from error
    if not found:
        raise BadPatch(
            f"{directory}: no safetensors files with tensors", remedy="give the engine the local checkpoint"
        )
    return found


def misplaced(directory: Path, patches: Path) -> str | None:
    """Why `patches` are not those of the local checkpoint in `directory`."""
    own = directory / ".weightcast" / "engine"
    if os.path.realpath(own) == os.path.realpath(patches):
        return None
    try:
        if own.samefile(patches):
            return None
    except OSError:
        pass
    return (
        f"the engine loads {directory}, and WEIGHTCAST_PATCH_DIR is {patches}: not the same local checkpoint"
    )


def open_regular(directory: Path, name: str) -> int:
    """A descriptor of a file in `directory`, no link. Raises OSError."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{name} is not a regular file")
    return file
