"""Whether new weights have the content of a version: read in full, hashed, compared by root."""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.publisher.weights.match import Matched
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.channel.base import Base
from weightcast.shared.codec.parallel import SMALL_RESULTS, ordered
from weightcast.shared.digest.lanes import Lanes
from weightcast.shared.digest.root import root
from weightcast.shared.local.hashing import hash_tensor
from weightcast.shared.local.state import Position, unpack_lanes
from weightcast.shared.progress import Advance
from weightcast.shared.words import Words


@dataclass(frozen=True)
class Content:
    """Whole tensors of one process."""

    weights: NewWeights
    matched: Matched
    base: Base
    threads: int = 1

    def has_root(self, wanted: str, position: Position | None, advance: Advance | None = None) -> bool:
        """`position`: of a local checkpoint. If it has the wanted root, reading ends at the first tensor
        that differs. Raises Refused when the weights changed while they were read."""
        # tensors that may be left out are frozen, and keep the bytes of the base
        lanes = self.base.lanes.copy()
        at_wanted = position if position is not None and position.root == wanted else None
        expected = None if at_wanted is None else unpack_lanes(at_wanted.lanes)
        for tensor, found in ordered(self._hash, self.matched.sources, self.threads, each=SMALL_RESULTS):
            if expected is not None and found != Lanes(*expected[tensor].tolist()):
                return False
            lanes[tensor] = found
            if advance is not None:
                advance(self.base.table[tensor].nbytes)
        self.weights.finish()
        return root(self.base.table, lanes) == wanted

    def _hash(self, tensor: int) -> tuple[int, Lanes]:
        name = self.matched.sources[tensor]

        def words_in(_: int, start: int, stop: int) -> Words:
            return self.weights.words_in(name, start, stop)

        return tensor, hash_tensor(self.base.table[tensor], tensor, words_in)
