"""How long a host takes for the deltas since the last full weights, estimated: rules without IO.

Measured on the publisher, which stages and patches every version as a host does. What hosts wait for their
link comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.shared.channel.shown import Shown

_FADING = 0.9
"""of what was measured, per version"""


class Pace:
    """Seconds per byte of delta, over the last ten versions or so."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._first = True

    def measured(self, nbytes: int, seconds: float) -> None:
        if self._first:
            # kernels may have been compiled meanwhile
            self._first = False
            return
        self._bytes = _FADING * self._bytes + nbytes
        self._seconds = _FADING * self._seconds + seconds

    def seconds_for(self, nbytes: int) -> float:
        """0 until something was measured."""
        return nbytes * self._seconds / self._bytes if self._bytes else 0.0


def fewest_bytes(shown: Mapping[int, Shown], start: int, target: int) -> int | None:
    """Of deltas that lead from version `start` to `target`; None when none do."""
    best = {start: 0}
    for version in sorted(version for version in shown if start < version <= target):
        hops = {version - 1: shown[version].nbytes, **shown[version].skips}
        ways = [best[base] + nbytes for base, nbytes in hops.items() if base in best]
        if ways:
            best[version] = min(ways)
    return best.get(target)
