"""Models as plain bytes, checkpoints of them, what lies in a directory: without any of weightcast's code."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from forked import Forked
from numpy.typing import NDArray

Buffer = bytes | NDArray[np.uint8]

ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "F64": 8,
}


class Tensor(NamedTuple):
    """`data`: uint8, little-endian elements."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def changed(self, rng: np.random.Generator, elements: int) -> Tensor:
        """With `elements` of its elements different."""
        size = ITEM_SIZES[self.dtype]
        data = self.data.copy().reshape(-1, size)
        for row in rng.choice(len(data), min(elements, len(data)), replace=False):
            data[row, 0] ^= 1 if self.dtype == "BOOL" else rng.integers(1, 256)
        return Tensor(self.dtype, self.shape, data.reshape(-1))

    def flipped(self, rng: np.random.Generator, share: float) -> Tensor:
        """With the lowest bit of such a share of its elements flipped."""
        data = self.data.copy().reshape(-1, ITEM_SIZES[self.dtype])
        data[:, 0] ^= (rng.random(len(data)) < share).astype(np.uint8)
        return Tensor(self.dtype, self.shape, data.reshape(-1))


Model = dict[str, Tensor]


def tensor(rng: np.random.Generator, dtype: str, *shape: int) -> Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == "BOOL":
        data = rng.integers(0, 2, count, np.uint8)
    elif dtype in ("BF16", "F16", "F32"):
        values = (rng.standard_normal(count) * 0.02).astype(np.float32)
        halves = values.astype(np.float16) if dtype == "F16" else (values.view(np.uint32) >> 16).astype("<u2")
        data = (values if dtype == "F32" else halves).view(np.uint8)
    else:
        data = rng.integers(0, 256, count * ITEM_SIZES[dtype], np.uint8)
    return Tensor(dtype, shape, data)


def every_dtype(rng: np.random.Generator) -> Model:
    """Each dtype, 0-dim and empty tensors, odd sizes; in this order most offsets are unaligned."""
    model = {"odd.first": tensor(rng, "I8", 3)}
    for dtype in ITEM_SIZES:
        model[f"{dtype.lower()}.matrix"] = tensor(rng, dtype, 23, 17)
        model[f"{dtype.lower()}.odd"] = tensor(rng, "U8", 5)
    model["scalar"] = tensor(rng, "F32")
    model["wide.scalar"] = tensor(rng, "F64")
    model["empty"] = tensor(rng, "BF16", 0, 7)
    model["long"] = tensor(rng, "BF16", 3, 4099)
    return model


def some_changed(model: Model, rng: np.random.Generator, elements: int = 3) -> Model:
    """Every second tensor changed; at least one."""
    names = [name for name, one in model.items() if len(one.data)]
    moved = set(names[int(rng.integers(0, 2)) :: 2])
    return {n: one.changed(rng, elements) if n in moved else one for n, one in model.items()}


def all_changed(model: Model, rng: np.random.Generator, elements: int = 3) -> Model:
    return {name: one.changed(rng, elements) for name, one in model.items()}


def much_changed(model: Model, rng: np.random.Generator, shares: Sequence[float] = (0.5, 0.95)) -> Model:
    """Such shares of their elements by turns, by their lowest bits."""
    turns = zip(model.items(), itertools.cycle(shares), strict=False)
    return {name: one.flipped(rng, share) for (name, one), share in turns}


def pack(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Buffer]],
    *,
    aligned: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """A safetensors file of dtypes, shapes and bytes. `aligned`: to 8 bytes, as libraries do."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    pieces, end = [], 0
    for name, (dtype, shape, data) in tensors.items():
        pieces.append(bytes(data))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(pieces[-1])]}
        end += len(pieces[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if aligned else 0)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def header_of(data: bytes) -> tuple[dict[str, Any], int]:
    """A file's header, and where the bytes of its tensors begin."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def unpack(data: bytes) -> dict[str, bytes]:
    """Tensor bytes of a safetensors file."""
    header, start = header_of(data)
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: data[start + begin : start + end] for name, (begin, end) in places.items()}


def write_checkpoint(
    directory: Path, model: Model, *, files: int = 1, config: str = "{}", aligned: bool = False
) -> Path:
    """A single file without an index, or `files` shards with one."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    if files == 1:
        (directory / "model.safetensors").write_bytes(pack(model, aligned=aligned))
        return directory
    names = list(model)
    weight_map = {}
    for number in range(files):
        shard = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = {name: model[name] for name in names[number::files]}
        (directory / shard).write_bytes(pack(own, aligned=aligned))
        weight_map.update(dict.fromkeys(own, shard))
    total = sum(len(one.data) for one in model.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read_checkpoint(directory: Path) -> dict[str, bytes]:
    """Tensor bytes of all safetensors files."""
    found: dict[str, bytes] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= unpack(path.read_bytes())
    return found


def bytes_of(model: Model) -> dict[str, bytes]:
    return {name: one.data.tobytes() for name, one in model.items()}


def place_of(directory: Path, name: str) -> tuple[Path, int]:
    """File and offset of a tensor's first byte."""
    for path in sorted(directory.glob("*.safetensors")):
        header, start = header_of(path.read_bytes())
        if name in header:
            return path, start + header[name]["data_offsets"][0]
    raise LookupError(name)


def flip(directory: Path, name: str, byte: int = 0) -> None:
    """Changes one byte of a tensor in place, in the same inode."""
    path, offset = place_of(directory, name)
    with path.open("r+b") as file:
        file.seek(offset + byte)
        old = file.read(1)[0]
        file.seek(offset + byte)
        file.write(bytes([old ^ 0x10]))


def rot(directory: Path, name: str, byte: int = 0) -> None:
    """As `flip`, and the file's times stay, as on a failing disk."""
    path, _ = place_of(directory, name)
    found = path.stat()
    flip(directory, name, byte)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


NOT_STATE = ("owner", "patch", "publishers", ".trash")
"""locks, claims: change without anything being published or patched"""


def snapshot(directory: Path, leave_out: Sequence[str] = NOT_STATE) -> dict[str, str]:
    """Every file and directory below, by content."""
    found = {}
    for root, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if name not in leave_out]
        for name in directories:
            found[str((Path(root) / name).relative_to(directory))] = "directory"
        for name in files:
            path = Path(root) / name
            if name not in leave_out:
                found[str(path.relative_to(directory))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def start(script: Path, *arguments: object) -> subprocess.Popen[str]:
    """A child process whose stdout is read by line."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return Forked(
        [script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def ended(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits; exit status and what it wrote."""
    out, err = child.communicate(timeout=120)
    return child.returncode, out + err


def kill(child: subprocess.Popen[str]) -> None:
    """SIGKILL, and waits for the end."""
    child.kill()
    child.communicate(timeout=60)
