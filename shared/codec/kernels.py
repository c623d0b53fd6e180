"""Which kernels the codec runs on."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from weightcast.shared.codec import plain
from weightcast.shared.digest.hash import kernels as digest_kernels


@cache
def kernels() -> ModuleType:
    """`native`, or `plain` where the digest runs on numpy too."""
    if digest_kernels() == "numpy":
        return plain
    from weightcast.shared.codec import native

    return native
