"""A publication: what is asked for (the job), what was given (the input), and how long each phase took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from weightcast.publisher.publish.commit import PostWrite
from weightcast.publisher.publish.report import PublishReport
from weightcast.publisher.ranks.rendezvous import Rank
from weightcast.publisher.weights.match import Matched, match
from weightcast.publisher.weights.precision import NonFinite
from weightcast.publisher.weights.tensors import InputFacts, NewWeights
from weightcast.shared.base.elements import TensorTable, Words
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.index import Encoding, Index
from weightcast.shared.channel.run_files import Base, ChannelFile
from weightcast.shared.channel.signing import PrivateKey, Trust
from weightcast.shared.checkpoint.state.state import Position, Step, unpack_lanes
from weightcast.shared.digest.checksums import Lanes, hash_bytes, root
from weightcast.shared.kernels.parallel import SMALL_RESULTS, ordered

Until = Literal["patched", "out"]
"""when a publication returns: its local checkpoint is at the version, or the pointer is"""
Watching = Callable[[str], None]
"""Called with the name of each phase as it begins."""
_HASHED_BYTES = 16 << 20
"""of a tensor that are hashed at a time; a multiple of 8"""


@dataclass(frozen=True)
class PublishOptions:
    """What every publication of one publisher has in common."""

    encoding: Encoding = "fast"
    threads: int = 1
    deadline_seconds: float = 600.0
    """for ranks to meet"""
    anchor_every: int = 0
    """an anchor beside every Nth version; 0: none"""
    post_write: PostWrite | None = None
    key: PrivateKey | None = None
    """signs what is published"""
    trust: Trust | None = None
    """whose versions are continued; None: anybody's"""
    non_finite: NonFinite = "allow"
    keep_journal: Callable[[Step, float], None] | None = None
    """called with each patched step, while its journal exists, and the seconds that staging and patching
    took"""
    free_space: Callable[[], bool] = lambda: False
    """drops one of the files that the local disk holds for speed alone; False when none is left"""


class WeightSource:
    """Opens the new weights for as long as they may be read.

    `lent`: their owner waits for `free` before it changes them. `copied`: they are a copy, so that their
    owner is free from the start. `on_device`: they are compared on their device, not on the host.
    """

    def __init__(
        self,
        read: Callable[[], NewWeights],
        *,
        lent: bool = False,
        copied: bool = False,
        on_device: bool = False,
    ) -> None:
        self._read = read
        self.lent, self.copied, self.on_device = lent, copied, on_device
        self.free = threading.Event()
        """set once the owner may change the weights"""
        self.spent = False
        """the weights may have changed since they were compared: they must not be read again"""
        if copied:
            self.free.set()

    def open(self) -> NewWeights:
        return self._read()

    def release_tensors(self) -> None:
        """Lent weights belong to their owner again."""
        if self.lent:
            self.spent = True
            self.drop()
            self.free.set()

    def drop(self) -> None:
        """Keeps the new weights in memory no longer."""
        self._read = _spent


def _spent() -> NewWeights:
    raise RetryLater("the tensors may have changed since they were compared", remedy="submit them again")


class Phases:
    """Seconds of each phase up to now, in the order in which they began."""

    def __init__(self, watching: Watching | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._watching = watching

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._watching is not None:
            self._watching(name)
        began = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began


@dataclass(frozen=True)
class PublishJob:
    source: WeightSource
    step: int | None
    phase: Phases = field(default_factory=Phases)
    advance: Advance | None = None
    root: str | None = None
    """the root that the version must have, where that is known before"""
    carried_of: int | None = None
    """the version whose config files this one carries; None: the previous one, updated with those of the
    input"""
    request: str = ""
    """written into the version's index, by which whoever asked for the version finds it again"""
    check_allowed: Callable[[], None] | None = None
    """called before anything is written to the channel; raises what forbids it"""
    on_pointer_moved: Callable[[PublishReport], None] | None = None
    """called once `latest` names the version; the rest concerns the publisher's own files alone"""

    def check_root(self, index: Index) -> None:
        """Raises DamagedFile when other bytes are about to be published than were asked for."""
        if self.root is not None and index.root != self.root:
            raise DamagedFile(
                f"version {index.version}: expected root {self.root[:16]}, computed {index.root[:16]}",
                remedy="nothing was published; run `weightcast channel verify`",
            )


@dataclass(frozen=True)
class Input:
    """New weights that fit the run."""

    weights: NewWeights
    matched: Matched
    facts: InputFacts

    @classmethod
    def open(
        cls, source: WeightSource, file: ChannelFile, table: TensorTable, rank: Rank, phase: Phases
    ) -> Input:
        """Raises what `matched_input` does; nothing stays open then."""
        with phase("read"):
            weights = source.open()
            try:
                return matched_input(weights, file, table, rank)
            except BaseException:
                weights.close()
                raise

    def words_in(self, tensor: int, start: int, stop: int) -> Words:
        return self.weights.words_in(self.matched.sources[tensor], start, stop)


def matched_input(weights: NewWeights, file: ChannelFile, table: TensorTable, rank: Rank) -> Input:
    """Compares names, dtypes, shapes and ties with the run's. Raises Refused that lists all that is wrong."""
    matched = match(weights.table, table, file, partial=not rank.alone, by_flags=weights.by_flags)
    check_ties(weights, matched, table)
    for name in weights.pieces() if rank.alone else ():
        raise Refused(
            f"{name} is a shard of a distributed tensor, and this publisher has no other ranks",
            remedy="open a publisher on every rank, with rank= and world_size=",
        )
    return Input(weights, matched, replace(weights.facts, mapped=matched.mapped))


def check_ties(weights: NewWeights, matched: Matched, table: TensorTable) -> None:
    """Tied tensors that were given must be equal. Refused names the first that is not."""
    for name, tensor in matched.ties:
        spec = table[tensor]
        source = matched.sources.get(tensor, name)
        if weights.table.named(name).words != spec.words:
            raise Refused(f"{name} is tied to {spec.name} but has another shape", remedy="tie the weights")
        if not weights.equal(name, source):
            raise Refused(
                f"{name} is tied to {spec.name} but has other values",
                remedy="tie the weights before publishing, or make a channel without this alias",
            )


def has_root(
    given: Input,
    base: Base,
    wanted: str,
    position: Position | None,
    threads: int = 1,
    advance: Advance | None = None,
) -> bool:
    """Whether whole tensors of one process have the root `wanted`. `position`: of a local checkpoint; if it
    has that root, reading ends at the first tensor that differs. Raises Refused when the weights changed
    while they were read."""
    # tensors that may be left out are frozen, and keep the bytes of the base
    lanes = base.lanes.copy()
    at_wanted = position if position is not None and position.root == wanted else None
    expected = None if at_wanted is None else unpack_lanes(at_wanted.lanes)

    def digest(tensor: int) -> tuple[int, Lanes]:
        spec, found = base.table[tensor], Lanes()
        step = _HASHED_BYTES // spec.kind.width
        for start in range(0, spec.words, step):
            words = given.words_in(tensor, start, min(start + step, spec.words))
            found = found.plus(hash_bytes(words.view(np.uint8), start * spec.kind.width // 8))
        return tensor, found

    for tensor, found in ordered(digest, given.matched.sources, threads, each=SMALL_RESULTS):
        if expected is not None and found != Lanes(*expected[tensor].tolist()):
            return False
        lanes[tensor] = found
        if advance is not None:
            advance(base.table[tensor].nbytes)
    given.weights.finish()
    return root(base.table, lanes) == wanted
