"""A second reader of the field's delta format, with none of weightcast's code.

    follow(channel, checkpoint)    checkpoint: the base, a single file; returns the bytes at the pointer

Written from the description of the format alone: pointer in both dialects, the index's `metadata` and
`weight_map`, shards of one zstd frame per tensor, digests of the complete new bytes in `__metadata__`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from blake3 import blake3

INDEX = "model.safetensors.index.json"


def header_of(data: bytes) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def digest(kind: str, data: bytes) -> str:
    return {
        "xxh3-128": lambda: xxhash.xxh3_128_hexdigest(data),
        "sha256": lambda: hashlib.sha256(data).hexdigest(),
        "blake3": lambda: blake3(data).hexdigest(),
        "adler32": lambda: f"{zlib.adler32(data):08x}",
    }[kind]()


def pointer(channel: Path) -> tuple[int, Path]:
    """Version, and the directory of the version directories."""
    text = (channel / "latest").read_text().strip()
    run, _, name = text.rpartition("/")
    digits = name.removeprefix("weight_v")
    assert digits.isdigit() and len(digits) >= 6, text
    return int(digits), channel / "updates" if run else channel


def read(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    header, start = header_of(data)
    found = {}
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            found[name] = data[start + begin : start + end]
    return found


def follow(channel: Path, checkpoint: Path) -> dict[str, bytes]:
    """Tensor bytes at the pointer's version."""
    tensors = read(checkpoint)
    if not (channel / "latest").exists():
        return follow_skyrl(channel, tensors)
    target, prefix = pointer(channel)
    for version in range(1, target + 1):
        apply(prefix / f"weight_v{version:06d}", version, tensors)
    return tensors


def apply(directory: Path, version: int, tensors: dict[str, bytes]) -> None:
    index = json.loads((directory / INDEX).read_bytes())
    facts = index["metadata"]
    assert all(type(value) is str for value in facts.values())
    assert (facts["version"], facts["base_version"]) == (f"{version:06d}", f"{version - 1:06d}")
    assert facts["compression_format"] == "zstd"
    assert sorted(set(index["weight_map"].values())) == sorted(
        p.name for p in directory.glob("*.safetensors")
    )
    for shard in sorted(set(index["weight_map"].values())):
        data = (directory / shard).read_bytes()
        header, _ = header_of(data)
        payloads = read(directory / shard)
        assert set(payloads) == {name for name, file in index["weight_map"].items() if file == shard}
        for name, frame in payloads.items():
            assert header[name]["dtype"] == "U8" and header[name]["shape"] == [len(frame)]
            tensors[name] = step(facts["delta_encoding"], frame, tensors[name])
            expected = header["__metadata__"][name]
            assert digest(facts["checksum_format"], tensors[name]) == expected, name


def follow_skyrl(channel: Path, tensors: dict[str, bytes]) -> dict[str, bytes]:
    for version, directory in enumerate(sorted(channel.glob("delta-????????")), 1):
        manifest = json.loads((directory / "manifest.json").read_bytes())
        assert (manifest["version"], manifest["base_version"]) == (version, version - 1)
        payloads = {name: read(directory / name) for name in manifest["payload_files"]}
        for one in manifest["tensors"]:
            name = one["name"]
            tensors[name] = step("xor", payloads[one["payload_file"]][one["payload_key"]], tensors[name])
            assert len(tensors[name]) == one["uncompressed_num_bytes"]
            kind = one.get("checksum_algorithm", "sha256")
            assert digest(kind, tensors[name]) == one.get("checksum", one.get("sha256")), name
    return tensors


def step(encoding: str, frame: bytes, old: bytes) -> bytes:
    size = zstandard.frame_content_size(frame)
    assert size >= 0, "the frame declares no content size"
    payload = zstandard.ZstdDecompressor().decompress(frame)
    assert len(payload) == size
    if encoding == "xor":
        assert len(payload) == len(old)
        return (np.frombuffer(payload, np.uint8) ^ np.frombuffer(old, np.uint8)).tobytes()
    assert encoding == "overwrite"
    count = int.from_bytes(payload[:4], "little")
    positions = np.frombuffer(payload, "<u4", count, 4)
    values = np.frombuffer(payload, np.uint8, count, 4 + 4 * count)
    assert len(payload) == 4 + 5 * count and (np.diff(positions.astype(np.int64)) > 0).all()
    new = np.frombuffer(old, np.uint8).copy()
    new[positions] = values
    return new.tobytes()
