"""A publication: what is asked for (the job), what was given (the input), how long each phase took, and what
came of it (the report), for callers, `--json` and status."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np

from weightcast.publisher.publish.commit import PostWrite, Signer
from weightcast.publisher.ranks.rendezvous import Rank
from weightcast.publisher.weights.match import Matched, match
from weightcast.publisher.weights.tensors import NO_FACTS, InputFacts, NewWeights
from weightcast.shared.base.choices import NonFinite
from weightcast.shared.base.elements import MAIN, TensorTable, Words
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, WeightcastError, on_error
from weightcast.shared.base.options import check_options
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import Encoding, Index
from weightcast.shared.channel.run_files import Base, ChannelFile
from weightcast.shared.checkpoint.state.state import Position, Step, unpack_lanes
from weightcast.shared.daemon.status import Facts
from weightcast.shared.digest.checksums import Lanes, hash_bytes, root
from weightcast.shared.kernels.parallel import SMALL_RESULTS, ordered


class Publication(Facts):
    """A committed version as status and answers show it; sizes in bytes, `seconds` by phase."""

    version: int
    component: str = MAIN
    main_version: int | None = None
    """of an adapter: the version of main that it was trained on"""
    kind: str = ""
    """delta or anchor"""
    step: int | None = None
    resumed_from_step: int | None = None
    """the step of the version before, where this one's is lower"""
    root: str = ""
    """digest of all tensors, by which a retry is compared"""
    source: str = ""
    """the checkpoint's name or path"""
    changed_elements: int = 0
    density_elements: float = 0.0
    density_bytes: float = 0.0
    delta_bytes: int = 0
    full_bytes: int = 0
    bits_per_change: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    mapped: dict[str, int] = field(default_factory=dict)
    """what was done to the names that were given, and to how many"""
    cast: int = 0
    """tensors that were rounded to the run's dtype"""
    renamed: int = 0
    dropped: int = 0
    """tensors of the checkpoint that were left out"""
    notes: tuple[str, ...] = ()
    """what was tolerated in the checkpoint, and options that had no effect on it"""
    config_changed: tuple[str, ...] = ()
    """config files of the checkpoint that differ from the base's; once per change"""
    carried: tuple[str, ...] = ()
    """config files that hosts of this version have in place of the base's"""
    non_finite_elements: int = 0
    """that became NaN or infinite with this version"""
    at: float = 0.0
    """unix time of the publisher's clock"""

    @property
    def total_seconds(self) -> float:
        return self.seconds["total"] if "total" in self.seconds else sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """Bytes of the weights per byte of the version; 0 for a version without bytes."""
        return self.full_bytes / self.delta_bytes if self.delta_bytes else 0.0

    @property
    def not_carried(self) -> tuple[str, ...]:
        """Changed config files that hosts do not get."""
        return tuple(name for name in self.config_changed if name not in self.carried)

    @property
    def adapted(self) -> dict[str, int]:
        """Tensors by what options did to them."""
        return {"cast": self.cast, "renamed": self.renamed, "dropped": self.dropped}


class PublishReport(Publication):
    """One committed version, for who published it. Counts are of elements."""

    run_id: str
    base_version: int
    encoding: str | None
    elements: int
    changed_bytes: int
    """bytes of the changed elements"""
    tensors_changed: int
    non_finite: Mapping[str, int]
    """elements by tensor that became NaN or infinite with this version: of all ranks in rank 0's report, of
    its own part in another rank's; empty for an anchor, which is compared with nothing"""
    anchor_problem: str = ""
    """why an anchor that was due could not be written; it is tried again beside the next version"""

    def shown(self, source: str) -> Publication:
        """As status and answers show it. `source`: the checkpoint's name or path."""
        facts = {each.name: getattr(self, each.name) for each in fields(Publication)}
        return Publication(**facts).but(source=source, at=time.time())


def report_of(
    index: Index,
    table: TensorTable,
    index_bytes: int,
    facts: InputFacts = NO_FACTS,
    *,
    seconds: Mapping[str, float] | None = None,
    step_before: int | None = None,
    configs_before: Mapping[str, str] | None = None,
    non_finite: Mapping[int, int] | None = None,
) -> PublishReport:
    """`step_before`: of the previous version; `configs_before`: `facts.configs` of the previous input from
    files."""
    resumed = step_before is not None and index.step is not None and index.step < step_before
    known = configs_before or {}
    changed = {name: digest for name, digest in (facts.configs or {}).items() if digest}
    numbers = index.tensors.numbers(table)
    widths = table.sizes[numbers] // np.maximum(1, table.counts[numbers])
    changed_elements, changed_bytes = index.totals.changed, int((index.tensors.changed * widths).sum())
    delta_bytes = index.totals.delta_bytes + index_bytes
    found = {table[tensor].name: count for tensor, count in sorted((non_finite or {}).items())}
    return PublishReport(
        run_id=index.run_id,
        version=index.version,
        component=table.component,
        main_version=None if table.component == MAIN else index.main_version,
        base_version=index.base_version,
        kind=index.kind,
        step=index.step,
        resumed_from_step=step_before if resumed else None,
        root=index.root,
        encoding=index.encoding,
        elements=table.elements,
        changed_elements=changed_elements,
        density_elements=changed_elements / table.elements if table.elements else 0.0,
        full_bytes=table.nbytes,
        changed_bytes=changed_bytes,
        density_bytes=changed_bytes / table.nbytes if table.nbytes else 0.0,
        delta_bytes=delta_bytes,
        bits_per_change=8 * delta_bytes / changed_elements if changed_elements else 0.0,
        tensors_changed=len(index.tensors),
        seconds=dict(seconds or {}),
        mapped=dict(facts.mapped),
        **facts.adapted._asdict(),
        notes=facts.notes,
        config_changed=tuple(name for name, digest in changed.items() if digest != known.get(name)),
        carried=tuple(record.name for record in index.carried),
        non_finite=found,
        non_finite_elements=sum(found.values()),
    )


def step_of_version(channel: Channel, version: int) -> int | None:
    """None where the version's index has none, or cannot be read."""
    with contextlib.suppress(WeightcastError, OSError):
        index = channel.own_index(version)
        return None if index is None else index.step
    return None


Until = Literal["patched", "out"]
"""when a publication returns: its local checkpoint is at the version, or the pointer is"""
Watching = Callable[[str], None]
"""Called with the name of each phase as it begins."""
_HASHED_BYTES = 16 << 20
"""of a tensor that are hashed at a time; a multiple of 8"""


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Settings of every publication that most runs leave at their defaults."""

    threads: int = 1
    """worker threads that compare and encode"""
    deadline_seconds: float = 600.0
    """ranks wait for each other this long"""
    anchor_every: int = 0
    """an anchor (full weights) with every Nth version; 0: none"""
    post_write: PostWrite | None = None
    """called as `post_write(version, directory, phase)`, with the phase `version` when the files are there
    and `pointer` when `latest` names them, for adapters too; in a bucket `directory` is a URL, as text"""
    non_finite: NonFinite = "allow"
    """`refuse`: a delta in which elements become NaN or infinite is not published"""

    def __post_init__(self) -> None:
        check_options(self, threads=1)


@dataclass(frozen=True, kw_only=True)
class PublishOptions(CommonOptions):
    """What all publications of one publisher have in common."""

    encoding: Encoding
    signer: Signer
    keep_journal: Callable[[Step, float], None] | None = None
    """called with each patched step, while its journal exists, and the seconds that staging and patching
    took"""
    free_space: Callable[[], bool] = lambda: False
    """drops one of the files that the local disk holds for speed alone; False when none is left"""


@dataclass(eq=False)
class WeightSource:
    """`read` opens the new weights for as long as they may be read."""

    read: Callable[[], NewWeights]
    lent: bool = False
    """their owner waits for `free` before it changes them"""
    copied: bool = False
    """they are a copy, so that their owner is free from the start"""
    spent: bool = False
    """the weights may have changed since they were compared: they must not be read again"""
    free: threading.Event = field(default_factory=threading.Event)
    """set once the owner may change the weights"""

    def __post_init__(self) -> None:
        if self.copied:
            self.free.set()

    def release_tensors(self) -> None:
        """Lent weights belong to their owner again."""
        if self.lent:
            self.spent = True
            self.drop()
            self.free.set()

    def drop(self) -> None:
        """Keeps the new weights in memory no longer."""
        self.read = _spent


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
    trained_on: tuple[int, str] | None = None
    """of an adapter: the version of main that it belongs to, and its root; None: as version `carried_of` or
    the previous one"""
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
            weights = source.read()
            with on_error(weights.close):
                return matched_input(weights, file, table, rank)

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
