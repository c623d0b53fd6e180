"""A writer of the field's plain format, for channels that weightcast did not make."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from core_cases import Buffer, pack
from field_reader import INDEX, digest


def write_version(
    directory: Path,
    version: int,
    old: dict[str, bytes],
    new: dict[str, bytes],
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    shards: int = 1,
) -> None:
    """`shards`: source ranks, each with every n-th changed tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    changed = [name for name in new if new[name] != old[name]]
    files = min(shards, len(changed))
    weight_map = {}
    for number in range(files):
        name = f"model-{number:05d}-of-{files:05d}.safetensors"
        mine = changed[number::files]
        weight_map.update(dict.fromkeys(mine, name))
        framed = {tensor: frame(payload(encoding, old[tensor], new[tensor])) for tensor in mine}
        frames = {tensor: ("U8", (len(data),), data) for tensor, data in framed.items()}
        checksums = {tensor: digest(checksum, new[tensor]) for tensor in mine}
        (directory / name).write_bytes(pack(frames, aligned=False, metadata=checksums))
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64"}
TORCH_DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "I32": "int32"}
TORCH_DTYPES |= {"U8": "uint8", "BOOL": "bool"}
Tensors = Mapping[str, tuple[str, tuple[int, ...], Buffer]]
"""dtype, shape and bytes"""


def write_skyrl(
    directory: Path, version: int, old: Tensors, new: Tensors, *, checksum: str = "xxh3-128", files: int = 1
) -> None:
    """A version of SkyRL, its manifest last. `checksum`: sha256 as its older manifests have it."""
    directory.mkdir(parents=True, exist_ok=True)
    rows, names = [], []
    changed = [name for name in new if bytes(new[name][2]) != bytes(old[name][2])]
    for number in range(min(files, len(changed))):
        names.append(f"delta-rank00000-file{number:06d}.safetensors")
        frames: dict[str, tuple[str, tuple[int, ...], Buffer]] = {}
        for name in changed[number::files]:
            dtype, shape, data = new[name][0], new[name][1], bytes(new[name][2])
            framed = frame(payload("xor", bytes(old[name][2]), data))
            frames[name] = "U8", (len(framed),), framed
            stated = (
                {"sha256": digest("sha256", data)}
                if checksum == "sha256"
                else {"checksum": digest(checksum, data), "checksum_algorithm": checksum}
            )
            rows.append(
                {
                    "name": name,
                    "dtype": TORCH_DTYPES[dtype],
                    "shape": list(shape),
                    "uncompressed_num_bytes": len(data),
                    "compressed_num_bytes": len(framed),
                    "payload_file": names[-1],
                    "payload_key": name,
                    **stated,
                }
            )
        (directory / names[-1]).write_bytes(pack(frames))
    manifest = {
        "version": version,
        "base_version": version - 1,
        "tensors": rows,
        "total_uncompressed_num_bytes": sum(row["uncompressed_num_bytes"] for row in rows),
        "total_compressed_num_bytes": sum(row["compressed_num_bytes"] for row in rows),
        "payload_files": names,
    }
    temporary = directory / ".manifest.json.1.tmp"
    temporary.write_text(json.dumps(manifest))
    temporary.rename(directory / "manifest.json")


def payload(encoding: str, old: bytes, new: bytes) -> bytes:
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return (before ^ after).tobytes()
    places = np.flatnonzero(before != after)
    if encoding == "overwrite":
        return struct.pack("<I", len(places)) + places.astype("<u4").tobytes() + after[places].tobytes()
    assert encoding == "xor_sparse"
    values = (before ^ after)[places].tobytes()
    return struct.pack("<Q", len(places)) + places.astype("<u8").tobytes() + values


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data)


def write_pointer(channel: Path, version: int, run: str | None = None) -> None:
    """In the plain dialect, or with a run's name."""
    name = f"{version:06d}" if run is None else f"{run}/weight_v{version:06d}"
    (channel / "latest").write_text(name)


def root_of(tensors: dict[str, bytes]) -> str:
    """A digest of all tensor bytes, for records of what a channel leads to."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode() + b"\0" + len(tensors[name]).to_bytes(8, "little") + tensors[name])
    return state.hexdigest()
