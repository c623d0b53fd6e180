"""Which kernels the codec runs on."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from weightcast.shared.codec import bits_plain
from weightcast.shared.digest.hash import kernels


@cache
def bits() -> ModuleType:
    """`bits_native`, or `bits_plain` where the digest runs on numpy too."""
    if kernels() == "numpy":
        return bits_plain
    from weightcast.shared.codec import bits_native

    return bits_native
