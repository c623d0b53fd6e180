"""Directories without a safetensors checkpoint: what is there instead, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from weightcast.shared.errors import Refused
from weightcast.shared.files.paths import printable

_FORMATS = {
    "a PyTorch distributed checkpoint": re.compile(r"\.distcp$"),
    "GGUF": re.compile(r"\.gguf$"),
    "PyTorch": re.compile(r"\.(bin|pt|pth|ckpt)$"),
    "another format": re.compile(r"\.(h5|msgpack|onnx|npz)$"),
}
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler|rng_state|random_states|training_args)")
_DEPTH = 4
_MOST_DIRECTORIES = 1000
_REMEDY = "save Hugging Face safetensors: save_pretrained with safe_serialization=True"


def is_other_format(name: str) -> bool:
    """Whether a file of this name holds weights, but no safetensors."""
    return _format_of(name) != ""


def no_checkpoint(directory: Path, names: Collection[str]) -> Refused:
    """`names`: of the files in it."""
    others = sorted(name for name in names if is_other_format(name))
    below = next(_below(directory), None)
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        found = f"only {_format_of(others[0])} ({printable(others[0])}{more})"
        return Refused(f"{directory} has no safetensors, {found}", remedy=_REMEDY)
    if below is not None:
        return Refused(f"{directory} has no safetensors, but {below} has", remedy=f"give {below}")
    return Refused(
        f"{directory} is no checkpoint: no safetensors file", remedy="is it complete, and the right one?"
    )


def _format_of(name: str) -> str:
    if _TRAINING_STATE.match(name):
        return ""
    return next((what for what, pattern in _FORMATS.items() if pattern.search(name)), "")


def _below(directory: Path) -> Iterator[Path]:
    """Directories in it with safetensors, as far as they are found quickly."""
    for number, (path, inner, names) in enumerate(os.walk(directory)):
        at = Path(path)
        deep = len(at.relative_to(directory).parts) >= _DEPTH or number > _MOST_DIRECTORIES
        inner[:] = [] if deep else sorted(name for name in inner if not name.startswith("."))
        if at != directory and any(name.endswith(".safetensors") for name in names):
            yield at
