"""Engine patches as docs/FORMAT.md says, written for tests without the reader's code."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from weightcast.shared.digest.checksums import hash_bytes

CODES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
WEIGHTS = "model.safetensors"
Tensors = Mapping[str, torch.Tensor]


def root(version: int) -> str:
    """Stands for the root of a version: the engine only compares it."""
    return f"{version:064x}"


def name_of(version: int) -> str:
    return f"{version}-{version:08x}.patch"


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def lanes(tensor: torch.Tensor) -> str:
    return hash_bytes(bytes_of(tensor)).hex()


def header_and_payload(
    base: Tensors, target: Tensors, version: int, step: int = 1
) -> tuple[dict[str, Any], bytes]:
    rows, payload = [], b""
    for name, new in target.items():
        width = new.element_size()
        kind = f"<u{width}"
        before, after = (bytes_of(tensor).view(kind) for tensor in (base[name], new))
        index = np.flatnonzero(before != after)
        if not len(index):
            continue
        rows.append(
            {
                "name": name, "dtype": CODES[new.dtype], "shape": list(new.shape), "changes": len(index),
                "index_width": 4, "offset": len(payload),
                "lanes_old": lanes(base[name]), "lanes_new": lanes(new),
            }
        )  # fmt: skip
        payload += _padded(index.astype("<u4").tobytes(), 8) + _padded(after[index].tobytes(), 8)
    header = {
        "format": 1,
        "run_id": "run",
        "base": {"version": version - step, "root": root(version - step)},
        "target": {"version": version, "root": root(version), "digest": root(version)},
        "tensors": rows,
    }
    return header, payload


def packed(header: Mapping[str, Any], payload: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    body = _padded(b"wcpatch1" + struct.pack("<Q", len(text)) + text, 64) + payload
    return body + hashlib.sha256(body).digest()


def _padded(data: bytes, unit: int) -> bytes:
    return data + bytes(-len(data) % unit)


def write_patch(directory: Path, base: Tensors, target: Tensors, version: int, step: int = 1) -> str:
    """The name of the patch from version - step to version."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name_of(version)).write_bytes(packed(*header_and_payload(base, target, version, step)))
    return name_of(version)


def write_checkpoint(directory: Path, tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(own, directory / "model.safetensors")
    return directory


def some_changed(tensors: Tensors, seed: int, share: float = 0.05) -> dict[str, torch.Tensor]:
    """At least one element of each tensor that has any, never NaN."""
    random = torch.Generator().manual_seed(seed)
    return {name: _changed(tensor, share, random) for name, tensor in tensors.items()}


def _changed(tensor: torch.Tensor, share: float, random: torch.Generator) -> torch.Tensor:
    new = tensor.clone()
    if tensor.numel():
        words = new.view(-1).view(torch.uint8).reshape(new.numel(), -1)
        chosen = torch.rand(new.numel(), generator=random) < share
        chosen[int(torch.randint(new.numel(), (1,), generator=random))] = True
        words[chosen, 0] ^= (
            1 if tensor.dtype == torch.bool else torch.randint(1, 4, (1,), generator=random).to(torch.uint8)
        )
    return new
