"""Lanes of bytes as they lie in memory."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.base.errors import Refused
from weightcast.shared.digest.lanes import Lanes, LanesArray

_PROBE = np.arange(81, dtype=np.uint8)
"""vectors and a tail"""
_PROBED = "f9a9f853a195b6ebd436d2077f9e0573"


@cache
def compiled() -> ModuleType:
    """The kernels of lanes, `lanes_native`, checked against known lanes. Imported late: numba is slow to
    import. Raises Refused where kernels cannot be compiled or compute something else."""
    try:
        from weightcast.shared.digest import lanes_native

        found = lanes_native.hash_bytes(_PROBE, 3).hex()
    except Exception as error:  # numba, llvmlite and the linker each fail in their own way
        raise Refused(
            f"kernels cannot be compiled on this machine: {type(error).__name__}: {error}",
            remedy="reinstall numba and llvmlite, unset NUMBA_DISABLE_JIT, and allow executable memory",
        ) from error
    if found != _PROBED:
        raise Refused(
            f"compiled kernels compute lanes {found} instead of {_PROBED}",
            remedy="remove the kernel cache (WEIGHTCAST_CACHE) and unset all NUMBA_* variables",
        )
    return lanes_native


def all_compiled() -> None:
    """To be called when every kernel was used: from then on processes need no compiler to begin."""
    compiled()
    from weightcast.shared.digest.native import STORE

    STORE.completed()


def hash_bytes(data: ByteArray, first_word: int = 0) -> Lanes:
    """Raw lanes of contiguous bytes that begin at 8-byte word `first_word` of their tensor. A tail of less
    than 8 bytes counts as a word padded with zeros, so it must be the tensor's. Any alignment."""
    _check_contiguous(data)
    lanes: Lanes = compiled().hash_bytes(data, first_word)
    return lanes


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    """As `hash_bytes` of many pieces of `data`, in one call. `pieces`: int64[n, 3], of each its first byte,
    the byte behind its last, and which 8-byte word of its tensor it begins at."""
    _check_contiguous(data)
    if len(pieces) and not 0 <= pieces[:, 0].min() <= pieces[:, 1].max() <= len(data):
        raise ValueError("pieces of other bytes")
    lanes: LanesArray = compiled().hash_pieces(data, pieces)
    return lanes


def _check_contiguous(data: ByteArray) -> None:
    if data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("only contiguous bytes have lanes")
