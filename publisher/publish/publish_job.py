"""One publication as it passes through the steps: what is read, which rank, with which options."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from weightcast.publisher.publish.commit import PostWrite
from weightcast.publisher.publish.diff import SegmentSums, check_ties, write_difference
from weightcast.publisher.publish.draft import Frame, draft
from weightcast.publisher.publish.report import PublishReport
from weightcast.publisher.ranks.rendezvous import Rank, shard_name
from weightcast.publisher.weights.device_side import OnDevice
from weightcast.publisher.weights.match import Matched, match
from weightcast.publisher.weights.precision import NonFinite
from weightcast.publisher.weights.tensors import Adapted, NewWeights
from weightcast.shared.base.elements import Chunk, Part, TensorTable, Words, grid
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.delta_writer import open_shard_writer
from weightcast.shared.channel.index import INDEX_NAME, Encoding, Index
from weightcast.shared.channel.run_files import Base, ChannelFile
from weightcast.shared.channel.signing import PrivateKey, Trust
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Position, Step, unpack_lanes
from weightcast.shared.checkpoint.verify.hashing import hash_tensor
from weightcast.shared.digest.checksums import Lanes
from weightcast.shared.digest.root import root
from weightcast.shared.kernels.parallel import SMALL_RESULTS, ordered

Until = Literal["patched", "out"]
"""when a publication returns: its local checkpoint is at the version, or the pointer is"""
Watching = Callable[[str], None]
"""Called with the name of each phase as it begins."""


@dataclass(frozen=True)
class PublishOptions:
    """`threads`: low by default beside a trainer. `deadline_seconds`: for ranks to meet. `anchor_every`: an
    anchor beside every Nth version, 0: none. `keep` is called with each step that was patched, while its
    journal is still there."""

    encoding: Encoding = "fast"
    threads: int = 1
    deadline_seconds: float = 600.0
    anchor_every: int = 0
    post_write: PostWrite | None = None
    on_device: OnDevice = field(default_factory=OnDevice)
    keep: Callable[[Step, float], None] | None = None
    """called with the step and the seconds that staging and patching it took"""
    key: PrivateKey | None = None
    """signs what is published"""
    trust: Trust | None = None
    """whose versions are continued; None: anybody's"""
    non_finite: NonFinite = "allow"
    until: Until = "patched"
    carry_config: bool = False
    """versions carry config files that are not the base's"""
    give_up: Callable[[], bool] = lambda: False
    """drops the next of what lies on the local disk for no more than speed; False when nothing is left"""


@dataclass
class Work:
    """`read` opens the new weights. `root`: what the version's root must be, where that is known before."""

    read: Callable[[], NewWeights]
    step: int | None
    advance: Advance | None = None
    watching: Watching | None = None
    root: str | None = None
    allowed: Callable[[], None] | None = None
    """called before anything is written to the channel; raises what forbids it"""
    on_device: bool = False
    """they are compared where they live, not on the host"""
    copied: bool = False
    """the new weights are a copy: their owner may change them from the start"""
    carried_of: int | None = None
    """the version whose config files it carries; None: the one before, with those of the new weights"""
    told: Mapping[str, str] = field(default_factory=dict)
    """`configs` of the last publication from files"""
    request: str = ""
    """written into the version's index: by it whoever asked for the version knows it again"""

    compared: Callable[[], None] | None = field(default=None, init=False)
    """set by who waits for it: called when the new weights are read for the last time, and their owner may
    change them"""
    out: Callable[[PublishReport], None] | None = field(default=None, init=False)
    """set by who waits for it: called when the pointer names the version; what is left to do concerns the
    publisher's own files"""

    seconds: dict[str, float] = field(default_factory=dict, init=False)
    """by phase, up to now"""
    mapped: Mapping[str, int] = field(default_factory=dict, init=False)
    """what was done to given names, and to how many"""
    adapted: Adapted = field(default=Adapted(), init=False)
    configs: Mapping[str, str] | None = field(default=None, init=False)
    """as of the new weights"""
    carry: Mapping[str, bytes] = field(default_factory=dict, init=False)
    """config files of the new weights that the version carries"""
    notes: tuple[str, ...] = field(default=(), init=False)
    """of the new weights"""
    non_finite: Mapping[str, int] = field(default_factory=dict, init=False)
    """elements by tensor that became NaN or infinite, where this rank compared"""
    changeable: bool = field(default=False, init=False)
    """the new weights may have changed since they were compared: never to be read again"""
    is_committed: bool = field(default=False, init=False)
    """its version exists: never to be published again"""

    def tell_out(self, report: PublishReport) -> None:
        if self.out is not None:
            self.out(report)

    def let_go(self) -> None:
        """The new weights are their owner's again."""
        if self.compared is not None:
            self.changeable = True
            self.read = _let_go
            self.compared()

    def drop(self) -> None:
        """Nothing keeps the new weights in memory any longer. For when all is done with them."""
        self.read = _let_go

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.watching is not None:
            self.watching(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def _let_go() -> NewWeights:
    raise RetryLater("the tensors may have changed since they were compared", remedy="submit them again")


def check_root(work: Work, index: Index) -> None:
    """Raises DamagedFile when other bytes are about to be published than were asked for."""
    if work.root is not None and index.root != work.root:
        raise DamagedFile(
            f"version {index.version} would have root {index.root[:16]} where {work.root[:16]} was asked for",
            remedy="nothing was published; run `weightcast channel verify`",
        )


def matched_to_run(channel: Channel, weights: NewWeights, rank: Rank, work: Work) -> Matched:
    """Names, dtypes, shapes and ties against the run. Raises Refused that lists everything that is wrong."""
    file, base = channel.require_ours()
    return matched_to(file, base.table, weights, rank, work)


def matched_to(file: ChannelFile, table: TensorTable, weights: NewWeights, rank: Rank, work: Work) -> Matched:
    matched = match(
        weights.table,
        table,
        frozen=file.frozen,
        aliases=file.aliases,
        partial=not rank.alone,
        by_flags=weights.by_flags,
    )
    check_ties(weights, matched, table)
    work.mapped, work.adapted, work.notes = matched.mapped, weights.adapted, weights.notes
    work.configs, work.carry = weights.configs, weights.carry
    if rank.alone:
        _check_whole(weights)
    return matched


def _check_whole(weights: NewWeights) -> None:
    for name in weights.pieces():
        raise Refused(
            f"{name} is a shard of a distributed tensor and this publisher has no other ranks",
            remedy="open a publisher on every rank, with rank= and world_size=",
        )


@dataclass(frozen=True)
class PartWriter:
    """Writes one rank's part of a version into the attempt's directory."""

    local: LocalCheckpoint
    frame: Frame
    directory: Path
    rank: Rank
    threads: int
    durable: bool = True
    """False for files that are copied on, and worth nothing after a loss of power"""
    non_finite: NonFinite = "allow"

    def write(
        self,
        weights: NewWeights,
        matched: Matched,
        part: Part,
        advance: Advance | None,
        merged: Callable[[Chunk], Words] | None = None,
    ) -> Written:
        """The diff pass. `merged`: the part's new words where `weights` has not all of them. Nothing is left
        behind when it raises."""
        table = self.local.table
        path = self.directory / shard_name(self.rank.number)
        chunks = sum(1 for _ in grid(table, part))
        writer = open_shard_writer(self.frame.encoding, path, table, chunks, durable=self.durable)
        try:
            with self.local.reading():
                difference = write_difference(
                    self.local,
                    part,
                    weights,
                    matched,
                    writer,
                    threads=self.threads,
                    advance=advance,
                    non_finite=self.non_finite,
                    merged=merged,
                )
            weights.finish()
        except BaseException:
            writer.abandon()
            raise
        odd = {table[tensor].name: count for tensor, count in sorted(difference.non_finite.items())}
        return Written(draft(self.frame, table, part, difference), difference.split, odd)


@dataclass(frozen=True)
class Written:
    draft: Index
    sums: Mapping[int, SegmentSums]
    """of tensors that other ranks write too"""
    non_finite: Mapping[str, int]
    """elements by tensor that became NaN or infinite in this part"""


def step_of_version(channel: Channel, version: int) -> int | None:
    """None where the version's index has none, or cannot be read."""
    pointer = channel.pointer()
    with contextlib.suppress(WeightcastError, OSError):
        index = None if pointer is None else channel.index(pointer, version, channel.require_ours()[1].table)
        return index.step if isinstance(index, Index) else None
    return None


def report_of(
    index: Index, table: TensorTable, work: Work, directory: Path, step_before: int | None = None
) -> PublishReport:
    """`directory`: the version's, for the size of its index. `step_before`: of the version before."""
    resumed = step_before is not None and index.step is not None and index.step < step_before
    return PublishReport(
        run_id=index.run_id,
        version=index.version,
        base_version=index.base_version,
        kind=index.kind,
        step=index.step,
        resumed_from_step=step_before if resumed else None,
        root=index.root,
        encoding=index.encoding,
        elements=table.elements,
        changed_elements=index.totals.changed,
        full_bytes=table.nbytes,
        changed_bytes=_changed_bytes(index, table),
        delta_bytes=index.totals.delta_bytes + (directory / INDEX_NAME).stat().st_size,
        tensors_changed=len(index.tensors),
        seconds=dict(work.seconds),
        mapped=dict(work.mapped),
        cast=work.adapted.cast,
        renamed=work.adapted.renamed,
        dropped=work.adapted.dropped,
        notes=work.notes,
        config_changed=tuple(
            name for name, digest in (work.configs or {}).items() if digest and digest != work.told.get(name)
        ),
        carried=tuple(record.name for record in index.carried),
        non_finite=dict(work.non_finite),
    )


def _changed_bytes(index: Index, table: TensorTable) -> int:
    numbers = index.tensors.numbers(table)
    widths = table.sizes[numbers] // np.maximum(1, table.counts[numbers])
    return int((index.tensors.changed * widths).sum())


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
