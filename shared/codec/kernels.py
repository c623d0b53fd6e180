"""The compiled kernels of the codec, imported at their first use."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from weightcast.shared.digest.hash import compiled


@cache
def kernels() -> ModuleType:
    """The module `native`. Raises Refused where kernels cannot be compiled."""
    compiled()
    from weightcast.shared.codec import native

    return native
