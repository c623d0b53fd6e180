"""Lanes of bytes as they lie in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray
from weightcast.shared.digest.lanes import Lanes, LanesArray
from weightcast.shared.digest.load import kernels


def hash_bytes(data: ByteArray, first_word: int = 0) -> Lanes:
    """Raw lanes of contiguous bytes that begin at 8-byte word `first_word` of their tensor. A tail of less
    than 8 bytes counts as a word padded with zeros, so it must be the tensor's. Any alignment."""
    _check_contiguous(data)
    piece = np.array([[0, len(data), first_word]], np.int64)
    return Lanes(*kernels().hash_pieces(data, piece)[0].tolist())


def hash_pieces(data: ByteArray, pieces: NDArray[np.int64]) -> LanesArray:
    """As `hash_bytes` of many pieces of `data`, in one call. `pieces`: int64[n, 3], of each its first byte,
    the byte behind its last, and which 8-byte word of its tensor it begins at."""
    _check_contiguous(data)
    if len(pieces) and not 0 <= pieces[:, 0].min() <= pieces[:, 1].max() <= len(data):
        raise ValueError("pieces of other bytes")
    lanes: LanesArray = kernels().hash_pieces(data, pieces)
    return lanes


def _check_contiguous(data: ByteArray) -> None:
    if data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("only contiguous bytes have lanes")
