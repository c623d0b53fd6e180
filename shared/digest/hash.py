"""Lanes of bytes as they lie in memory."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.digest import lanes_plain
from weightcast.shared.digest.lanes import Lanes, LanesArray
from weightcast.shared.words import ByteArray


@cache
def _chosen() -> tuple[ModuleType, str]:
    """With why it is not the compiled one."""
    try:
        from weightcast.shared.digest import lanes_native

        probe = np.arange(81, dtype=np.uint8)  # vectors and a tail
        if lanes_native.hash_bytes(probe, 3) == lanes_plain.hash_bytes(probe, 3):
            return lanes_native, ""
        return lanes_plain, "compiled kernels compute other digests"
    except Exception as error:  # numba, llvmlite and the linker fail in ways of their own; all mean the same
        return lanes_plain, f"{type(error).__name__}: {error}"


def implementation() -> ModuleType:
    """`lanes_native` where it compiles, else `lanes_plain`. Chosen late: importing numba is slow."""
    return _chosen()[0]


def why_not_compiled() -> str:
    """Empty where kernels are compiled."""
    return _chosen()[1]


def kernels() -> Literal["numba", "numpy"]:
    """Which kernels digest and codec run on in this process."""
    return "numpy" if implementation() is lanes_plain else "numba"


def all_compiled() -> None:
    """To be called when every kernel was used: from then on processes need no compiler to begin."""
    if kernels() == "numba":
        from weightcast.shared.digest.native import STORE

        STORE.completed()


def hash_bytes(data: ByteArray, first_word: int = 0) -> Lanes:
    """Raw lanes of contiguous bytes that begin at 8-byte word `first_word` of their tensor. A tail of less
    than 8 bytes counts as a word padded with zeros, so it must be the tensor's. Any alignment."""
    _check_contiguous(data)
    lanes: Lanes = implementation().hash_bytes(data, first_word)
    return lanes


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    """As `hash_bytes` of many pieces of `data`, in one call. `pieces`: int64[n, 3], of each its first byte,
    the byte behind its last, and which 8-byte word of its tensor it begins at."""
    _check_contiguous(data)
    if len(pieces) and not 0 <= pieces[:, 0].min() <= pieces[:, 1].max() <= len(data):
        raise ValueError("pieces of other bytes")
    lanes: LanesArray = implementation().hash_pieces(data, pieces)
    return lanes


def _check_contiguous(data: ByteArray) -> None:
    if data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("only contiguous bytes have lanes")
