"""When the bytes of a local checkpoint were last proven to be those of its version, tensor by tensor.

A patch keeps the proof of a tensor: each word is compared before it is written, and read back afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class Proofs:
    """Times of `clock` at which tensors were last hashed in full and matched. A cache in memory: when the
    checkpoint is opened, `last_full_hash` of its state is all that is known."""

    def __init__(self, tensors: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._at = np.full(tensors, -np.inf)

    def add(self, tensors: NDArray[np.int64] | int | slice, at: float) -> None:
        """`at`: before the first of their bytes was read."""
        self._at[tensors] = np.maximum(self._at[tensors], at)

    def add_full_hash(self, unix_time: float | None) -> None:
        """All tensors at once. A time in the future proves nothing: the clock was set back since."""
        age = -1.0 if unix_time is None else time.time() - unix_time
        if age >= 0:
            self.add(slice(None), self.clock() - age)

    def before(self, at: float) -> NDArray[np.int64]:
        """Tensors last hashed before `at`."""
        return np.flatnonzero(self._at < at)

    @property
    def age(self) -> float:
        """Of the oldest proof, in seconds; infinite if a tensor was never hashed."""
        now = self.clock()
        return float(now - self._at.min(initial=now))
