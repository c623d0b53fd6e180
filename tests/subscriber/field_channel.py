"""A publisher of the field's plain format, written from its description alone: no code of ours."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
import zstandard
from blake3 import blake3
from hosts import Weights, pack

Encoding = Literal["xor", "overwrite", "xor_sparse"]
Dialect = Literal["plain", "stitch"]


def checksum(data: bytes, form: str) -> str:
    match form:
        case "xxh3-128":
            return xxhash.xxh3_128_hexdigest(data)
        case "blake3":
            return blake3(data).hexdigest()
    return f"{zlib.adler32(data):08x}"


def payload(old: bytes, new: bytes, encoding: str) -> bytes:
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    at = np.flatnonzero(before != after)
    if encoding == "xor":
        return (before ^ after).tobytes()
    if encoding == "overwrite":
        return len(at).to_bytes(4, "little") + at.astype("<u4").tobytes() + after[at].tobytes()
    changed = (before ^ after)[at].tobytes()
    return len(at).to_bytes(8, "little") + at.astype("<u8").tobytes() + changed


class FieldChannel:
    def __init__(self, root: Path, base: Weights, dialect: Dialect = "plain", run: str = "run-a") -> None:
        self.root, self.dialect, self.run = root, dialect, run
        self.weights = [base]
        self.versions_dir.mkdir(parents=True)

    @property
    def versions_dir(self) -> Path:
        return self.root if self.dialect == "plain" else self.root / "updates"

    def directory(self, version: int) -> Path:
        return self.versions_dir / f"weight_v{version:06d}"

    def point(self, version: int) -> None:
        name = f"{version:06d}" if self.dialect == "plain" else f"{self.run}/weight_v{version:06d}"
        temporary = self.root / "latest.tmp"
        temporary.write_text(name)
        temporary.rename(self.root / "latest")

    def publish(
        self,
        new: Weights,
        encoding: Encoding = "xor",
        form: str = "xxh3-128",
        ranks: int = 1,
        version: int | None = None,
    ) -> int:
        number = len(self.weights) if version is None else version
        old = self.weights[number - 1]
        changed = [n for n in new.tensors if new.tensors[n][2] != old.tensors[n][2]]
        directory = self.directory(number)
        directory.mkdir(exist_ok=True)
        weight_map: dict[str, str] = {}
        for rank in range(ranks):
            mine = changed[rank::ranks]
            if mine:
                file = f"model-{rank:05d}-of-{ranks:05d}.safetensors"
                (directory / file).write_bytes(self._shard(old, new, mine, encoding, form))
                weight_map |= dict.fromkeys(mine, file)
        index = self.index(number, encoding, form, weight_map)
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        self.point(number)
        self.weights[number:] = [new]
        return number

    @staticmethod
    def index(number: int, encoding: str, form: str, weight_map: Mapping[str, str]) -> dict[str, object]:
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": form,
        }
        return {"metadata": metadata, "weight_map": dict(weight_map)}

    @staticmethod
    def _shard(old: Weights, new: Weights, names: list[str], encoding: str, form: str) -> bytes:
        frames = {}
        for name in names:
            raw = payload(old.tensors[name][2], new.tensors[name][2], encoding)
            frame = zstandard.ZstdCompressor(level=1).compress(raw)
            frames[name] = ("U8", (len(frame),), frame)
        checksums = {name: checksum(new.tensors[name][2], form) for name in names}
        return _with_metadata(pack(frames), checksums)

    def publish_full(self, new: Weights) -> int:
        number = len(self.weights)
        new.write(self.directory(number))
        self.weights.append(new)
        self.point(number)
        return number

    def digest(self, version: int) -> str:
        return self.weights[version].digest()


def _with_metadata(file: bytes, metadata: Mapping[str, str]) -> bytes:
    length = int.from_bytes(file[:8], "little")
    header = {"__metadata__": dict(metadata), **json.loads(file[8 : 8 + length])}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + file[8 + length :]
