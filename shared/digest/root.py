"""The root: one digest over all tensors of a version. docs/FORMAT.md, Root."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.digest.checksums import Lanes, LanesArray
from weightcast.shared.kernels.constants import MIX_A, MIX_B

CONTEXT = "weightcast root 1"
_NO_COMPONENT = bytes(4)

Array64 = NDArray[np.uint64]


def root(table: TensorTable, lanes: Sequence[Lanes] | LanesArray) -> str:
    """64 hex digits. `lanes`: raw lanes of each tensor, in the table's order."""
    if len(lanes) != len(table):
        raise ValueError(f"{len(lanes)} lanes for {len(table)} tensors")
    raw = np.array(lanes, np.uint64).reshape(-1, 2)
    # a tensor's lanes are bound to its length in bytes
    numbers = table.sizes.astype(np.uint64) * np.uint64(2) + np.uint64(1)
    final = np.stack([mix_a(raw[:, 0], numbers), mix_b(raw[:, 1], numbers)], 1).astype("<u8").tobytes()
    key = blake3(derive_key_context=CONTEXT)
    key.update(b"".join(head + final[16 * n : 16 * n + 16] for n, head in enumerate(_heads(table))))
    return key.hexdigest()


@lru_cache(maxsize=2)
def _heads(table: TensorTable) -> tuple[bytes, ...]:
    """Of each tensor what comes before its lanes: the same in every version."""
    names = ((spec, spec.name.encode()) for spec in table)
    return tuple(
        _NO_COMPONENT + len(name).to_bytes(4, "little") + name + _form(spec.dtype, spec.shape)
        for spec, name in names
    )


@lru_cache(4096)
def _form(dtype: str, shape: tuple[int, ...]) -> bytes:
    code, rank = dtype.encode(), len(shape)
    return struct.pack(f"<B{len(code)}sB{rank}Q", len(code), code, rank, *shape)


def _rounds(x: Array64, shifts: tuple[int, int, int], factors: tuple[int, int, int]) -> Array64:
    x = (x ^ (x >> np.uint64(shifts[0]))) * np.uint64(factors[1])
    x = (x ^ (x >> np.uint64(shifts[1]))) * np.uint64(factors[2])
    return x ^ (x >> np.uint64(shifts[2]))


def mix_a(words: Array64, numbers: Array64) -> Array64:
    return _rounds(words ^ (numbers * np.uint64(MIX_A[0])), (32, 29, 32), MIX_A)


def mix_b(words: Array64, numbers: Array64) -> Array64:
    return _rounds(words + numbers * np.uint64(MIX_B[0]), (31, 33, 30), MIX_B)
