"""The compiled kernels, imported at first use: compiling takes seconds, and many commands need none."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np

from weightcast.shared.base.errors import Refused

_PROBE = np.arange(81, dtype=np.uint8)
"""vectors and a tail"""
_PROBED = "f9a9f853a195b6ebd436d2077f9e0573"


@cache
def kernels() -> ModuleType:
    """The module `native`, checked by a known checksum. Raises Refused where kernels cannot be compiled or
    compute something else."""
    try:
        native = import_module("weightcast.shared.kernels.native")
        probe = native.hash_pieces(_PROBE, np.array([[0, len(_PROBE), 3]]))
        found = "".join(f"{word:016x}" for word in probe[0].tolist())
    except Exception as error:  # numba, llvmlite and the linker each fail in their own way
        raise Refused(
            f"kernels cannot be compiled on this machine: {type(error).__name__}: {error}",
            remedy="reinstall numba and llvmlite, unset NUMBA_DISABLE_JIT, and allow executable memory",
        ) from error
    if found != _PROBED:
        raise Refused(
            f"compiled kernels return the checksum {found}, expected {_PROBED}",
            remedy="remove the kernel cache (WEIGHTCAST_CACHE) and unset all NUMBA_* variables",
        )
    return native


def mark_complete() -> None:
    """Call this after every kernel was used: later processes then start without importing the compiler."""
    kernels()
    from weightcast.shared.kernels.compiler import STORE

    STORE.completed()
