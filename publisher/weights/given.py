"""What a caller may give as a tensor. A trainer imports this without kernels, torch or web framework."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np

from weightcast.shared.base.elements import DTYPES, TensorSpec
from weightcast.shared.base.errors import Refused
from weightcast.shared.files.strict_json import MAX_INTEGER

_NUMPY_NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


class _Torch:
    """The module, imported at its first use: trainers and checkpoints of other kinds do without."""

    def __getattr__(self, name: str) -> Any:
        found = vars(self)[name] = getattr(importlib.import_module("torch"), name)
        return found


torch: Any = _Torch()


def settle(tensors: Iterable[Any]) -> None:
    """Returns when what their streams have queued is done: other streams and threads read them then."""
    for device in {tensor.device for tensor in tensors if on_cuda(tensor)}:
        torch.cuda.synchronize(device)


def to_host(tensor: Any) -> Any:
    """Through pinned memory, which torch keeps for the next one: a copy to other memory takes four times as
    long, and one thread at a time."""
    if tensor.device.type == "cuda":
        try:
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # the host has no more memory to pin
            return tensor.cpu()
        pinned.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return pinned
    return tensor.cpu()


def torch_dtype(dtype: str) -> Any:
    """Of its safetensors name."""
    return getattr(torch, next(name for name, own in _NUMPY_NAMES.items() if own == dtype))


@dataclass(frozen=True)
class RawTensor:
    """Bytes with a dtype that numpy may have no name for. `data`: a buffer, C order, little-endian."""

    dtype: str
    """safetensors name, e.g. BF16"""
    shape: tuple[int, ...]
    data: Any

    @property
    def flat(self) -> Any:
        return np.frombuffer(self.data, np.uint8)


@dataclass(frozen=True)
class Shard:
    """A rank's piece of a tensor, for trainers that shard without DTensor: `tensor` (torch or numpy) begins
    at element `offsets` of the tensor of `shape` that the ranks hold together."""

    tensor: Any
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return self.tensor.dtype


@dataclass(frozen=True)
class CastTensor:
    """A tensor that is published in another dtype, made each time it is read."""

    tensor: Any
    dtype: str
    """safetensors name"""
    convert: Callable[[Any, str], Any]

    @property
    def shape(self) -> Any:
        return self.tensor.shape

    @property
    def device(self) -> Any:
        return self.tensor.device

    def made(self) -> Any:
        return self.convert(self.tensor, self.dtype)


_OWN = RawTensor, CastTensor


def pairs_of(named_tensors: object) -> Iterator[tuple[str, Any]]:
    """Raises Refused for what is neither a mapping nor an iterable of names with their tensors."""
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if not isinstance(pairs, Iterable):
        raise _no_pairs(named_tensors)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise _no_pairs(pair)
        yield pair[0], pair[1]


def _no_pairs(given: object) -> Refused:
    return Refused(
        f"expected (name, tensor) pairs, got {type(given).__name__}",
        remedy="give model.state_dict(), or pairs of names and tensors",
    )


def dtype_of(name: str, tensor: Any) -> str:
    """Its safetensors name. Raises Refused."""
    if isinstance(tensor, _OWN):
        return tensor.dtype
    layout = str(getattr(tensor, "layout", "torch.strided")).removeprefix("torch.")
    if layout != "strided" or getattr(tensor, "is_nested", False):
        raise Refused(
            f"{name}: expected a dense tensor, got layout {layout}", remedy="give tensor.to_dense()"
        )
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise Refused(
            f"{name}: expected a tensor, got {type(tensor).__name__}",
            remedy="give torch tensors or numpy arrays",
        )
    if getattr(tensor, "is_meta", False):
        raise Refused(f"{name} is on the meta device and has no values", remedy="load it first")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _NUMPY_NAMES:
        raise Refused(f"{name}: safetensors has no dtype {tensor.dtype}", remedy="cast it")
    return _NUMPY_NAMES[dtype]


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """Raises Refused."""
    dtype = dtype_of(name, tensor)
    if hasattr(tensor, "full_tensor") or isinstance(tensor, Shard):
        raise Refused(
            f"{name} is a shard of a distributed tensor",
            remedy="give tensor.full_tensor(), or open a Publisher on every rank",
        )
    shape = tuple(map(int, tensor.shape))
    if isinstance(tensor, _OWN):
        itemsize = DTYPES[dtype][0] if dtype in DTYPES else 0
    else:
        itemsize = int(tensor.dtype.itemsize)
    spec = TensorSpec(name, dtype, shape, math.prod(shape) * itemsize)
    if isinstance(tensor, RawTensor) and (not itemsize or memoryview(tensor.data).nbytes != spec.nbytes):
        raise Refused(
            f"{name}: {memoryview(tensor.data).nbytes} bytes do not make a {dtype} tensor {list(shape)}",
            remedy="give all bytes of the tensor",
        )
    return spec


def shard_of(name: str, tensor: Any) -> Shard | None:
    """The local piece of a distributed tensor, None for a whole one. Nothing is communicated. Raises
    Refused."""
    if isinstance(tensor, CastTensor):
        piece = shard_of(name, tensor.tensor)
        return None if piece is None else replace(piece, tensor=replace(tensor, tensor=piece.tensor))
    if isinstance(tensor, Shard):
        return tensor
    return _local_shard(name, tensor) if hasattr(tensor, "full_tensor") else None


def _local_shard(name: str, tensor: Any) -> Shard:
    """Where the local shard of a DTensor is, from what torch's distributed checkpoints ask it for."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise Refused(f"{name} is a partial sum on each rank", remedy="redistribute it to shards first")
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise Refused(f"{name} has {len(chunks)} local shards", remedy="give whole tensors per rank")
    offsets = tuple(int(offset) for offset in chunks[0].offsets)
    return Shard(tensor.detach().to_local(), offsets, tuple(int(size) for size in tensor.shape))


def in_torch(tensor: Any) -> bool:
    """Whether its memory is torch's."""
    source = tensor.tensor if isinstance(tensor, CastTensor) else tensor
    return not isinstance(source, np.ndarray | RawTensor)


def on_cuda(tensor: Any) -> bool:
    """ROCm's devices too."""
    return in_torch(tensor) and str(tensor.device.type) == "cuda"


def whole_step(step: SupportsIndex | None, world_size: int = 1) -> int | None:
    """As a version's index can state it; numpy's integers and the like are taken. Raises Refused, also for
    none among several ranks."""
    if step is None and world_size > 1:
        # by the step alone ranks know that they publish the same weights
        raise Refused("step= is required when world_size > 1", remedy="give the trainer's step on every rank")
    if step is None:
        return None
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_INTEGER:
        raise Refused(f"step {step!r} is not a step number", remedy="give an integer >= 0, or None")
    return number
