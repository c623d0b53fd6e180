"""Steps: how far each changed word moves, on the scale on which neighbours in value are neighbours.

step = ordinal(new) - ordinal(old). The ordinal of a float is its bits if its sign bit is clear, else
-1 - (bits ^ sign bit): order is kept, -0.0 comes before 0.0, NaNs keep their payloads. The ordinal of an
integer is its bits, and its step is taken modulo 2**width into [-2**(width-1), 2**(width-1)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import ByteArray, WordKind
from weightcast.shared.codec.changes import Changes
from weightcast.shared.codec.scratch import scratch
from weightcast.shared.digest.load import kernels


@dataclass(frozen=True)
class Steps:
    """Of each change: |step| - 1 and the exponent of the old word; `signs` has a bit each, least significant
    first, 1 for a step down. `tallies`: int64[256, 3], of each exponent its changes, the sum of |step| - 1,
    how many of those are not 0. In the thread's scratch: good until it measures again."""

    magnitude: NDArray[np.uint32]
    exponents: ByteArray
    signs: ByteArray
    tallies: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.magnitude)

    @property
    def histogram(self) -> NDArray[np.int64]:
        """Changes per exponent."""
        return self.tallies[:, 0]


def measure(changes: Changes, kind: WordKind) -> Steps:
    count, room = len(changes), scratch()
    magnitude = room.take("magnitude", np.uint32, count)
    exponents = room.take("exponents", np.uint8, count)
    signs = room.take("signs", np.uint8, count // 8 + 2)
    tallies = kernels().split(changes.old, changes.new, kind, magnitude, exponents, signs)
    return Steps(magnitude, exponents, signs[: (count + 7) // 8], tallies)
