"""Checkpoints on disk of a bf16 model that takes simulated optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from .steps import Masters, Words

INDEX = "model.safetensors.index.json"
_PERIOD = 64 << 20
"""words; tensors are cut from one ring of weights of this length, far beyond any coder's window"""
_STRIDE = 12_582_917
"""words between where two tensors begin in the ring"""
_SHARD_BYTES = 1 << 30
_WIDTHS = ((512 << 20, 4096), (64 << 20, 1024), (0, 512))
"""bytes from which a model has layers of a width"""
_NARROW = 64
"""width of experts"""


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, int]
    begin: int
    """place in the ring"""

    @property
    def words(self) -> int:
        return self.shape[0] * self.shape[1]


_Shapes = dict[str, tuple[int, int]]


def _of_layers(nbytes: int) -> _Shapes:
    width = next(width for least, width in _WIDTHS if nbytes >= least)
    layers = max(1, nbytes * 15 // 16 // (2 * width * width))
    rows = max(1, nbytes // 16 // (2 * width))
    square = {f"model.layers.{n}.mlp.weight": (width, width) for n in range(layers)}
    return {"model.embed_tokens.weight": (rows, width), **square}


def _of_experts(nbytes: int, count: int) -> _Shapes:
    rows = max(1, nbytes // count // (2 * _NARROW))
    names = (f"model.layers.{n // 1000}.experts.{n % 1000}.weight" for n in range(count))
    return dict.fromkeys(names, (rows, _NARROW))


class Model:
    """About `nbytes` of weights: one embedding of a sixteenth, square layers, norms that never change; or
    `experts` of equal size."""

    def __init__(self, nbytes: int, seed: int, experts: int = 0) -> None:
        shapes = _of_experts(nbytes, experts) if experts else _of_layers(nbytes)
        layers = 0 if experts else len(shapes) - 1
        width = next(iter(shapes.values()))[1]
        period = min(_PERIOD, nbytes // 2)
        self._tensors = [
            _Tensor(name, shape, n * _STRIDE % period) for n, (name, shape) in enumerate(shapes.items())
        ]
        self._norms = {f"model.layers.{n}.norm.weight": (1, width) for n in range(layers)}
        self._ring = Masters(period, seed)
        self.elements = sum(tensor.words for tensor in self._tensors) + layers * width
        self.nbytes = 2 * self.elements

    def step(self, density: float) -> None:
        self._ring.step(density)

    def digests(self) -> dict[str, str]:
        """xxh3-128 of each tensor's bytes."""
        found = {}
        for name, pieces in self._all():
            digest = xxhash.xxh3_128()
            for piece in pieces:
                digest.update(piece.data)
            found[name] = digest.hexdigest()
        return found

    def write(self, directory: Path) -> Path:
        """A checkpoint directory that appears whole. Shards of at most a GiB, or one larger tensor."""
        unfinished = directory.with_name(f".{directory.name}.unfinished")
        unfinished.mkdir()
        shards: list[list[tuple[str, tuple[int, int]]]] = [[]]
        room = _SHARD_BYTES
        for name, shape in self._shapes().items():
            size = 2 * shape[0] * shape[1]
            if shards[-1] and size > room:
                shards.append([])
                room = _SHARD_BYTES
            shards[-1].append((name, shape))
            room -= size
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._write_shard(unfinished / file, dict(shard))
            weight_map |= {name: file for name, _ in shard}
        (unfinished / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (unfinished / "config.json").write_text("{}")
        unfinished.rename(directory)
        return directory

    def _write_shard(self, path: Path, shapes: dict[str, tuple[int, int]]) -> None:
        """By name, as the safetensors library does."""
        header, end = {}, 0
        for name, shape in sorted(shapes.items()):
            size = 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, pieces in sorted(self._all(), key=lambda one: one[0]):
                for piece in pieces if name in shapes else ():
                    file.write(piece.data)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        return {tensor.name: tensor.shape for tensor in self._tensors} | self._norms

    def _all(self) -> Iterator[tuple[str, Iterator[Words]]]:
        for tensor in self._tensors:
            yield tensor.name, self._cut(tensor)
        for name, (_, width) in self._norms.items():
            yield name, iter([np.full(width, 0x3F80, np.uint16)])

    def _cut(self, tensor: _Tensor) -> Iterator[Words]:
        at, left = tensor.begin, tensor.words
        while left:
            piece = self._ring.words[at : at + left]
            yield piece
            at, left = 0, left - len(piece)


def digests_in(directory: Path) -> dict[str, str]:
    """As `Model.digests`, of what lies in a directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        whole = np.memmap(path, np.uint8, "r")
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = xxhash.xxh3_128_hexdigest(whole[begin:end].data)
    return found
