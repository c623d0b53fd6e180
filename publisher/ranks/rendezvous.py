"""Where the ranks of one publication meet: a directory of parts in the channel. No collectives.

Rank 0 opens an attempt; every rank says what it holds, and rank 0 tells all of it to all. Every rank sends
changes to those that write what it holds, then leaves its shard and draft, or says that it failed. Rank 0
commits exactly the drafts it has verified. The other ranks learn the outcome from the channel alone.

What ranks tell each other lives as long as the attempt: all run the same release, and hosts never see it.

`holds-<rank>.json`   the rank's process, and which boxes it holds, before anything is compared
`step-<rank>.json`    the rank's step, where it is another one than rank 0's
`plan.json`           all ranks' holds, from rank 0: each rank computes the same division from it
`sent-<rank>.json`    changes to what others write, chunk by chunk of theirs; digests of what it holds doubly
`sent-<rank>.bin`     the blobs of those chunks
`sums-<rank>.json`    sums over its segments of tensors that are split, so that rank 0 can prove the whole
"""

from __future__ import annotations

import contextlib
import json
import logging
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple, TypeVar

from annotated_types import Ge, Le

from weightcast.publisher.ranks.shard_assignment import Holds, ShardAssignment
from weightcast.publisher.weights.shard_spec import Box
from weightcast.shared.base.elements import CHUNK_WORDS, ChunkKey, TensorTable
from weightcast.shared.base.errors import (
    DamagedFile,
    NeedsReseed,
    NotInTime,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.channel.claims import Claimant, is_dead, owner_of, this_process
from weightcast.shared.channel.delta import read_exactly
from weightcast.shared.channel.index import Encoding, Index, parse_index, write_index
from weightcast.shared.channel.layout import ATTEMPTS
from weightcast.shared.channel.store import Store, read_if_there
from weightcast.shared.digest.checksums import Lanes
from weightcast.shared.files.paths import printable
from weightcast.shared.files.strict_json import MAX_INTEGER

_log = logging.getLogger("weightcast.ranks")
_POLL_SECONDS = 0.05
_QUIET_SECONDS = 10.0
"""a wait that takes longer is logged, then every minute"""
_LOGGED_SECONDS = 60.0
_STEP_SECONDS = 5.0
"""how long a rank that is ahead waits for rank 0 to come to its step"""
_LIMIT = 1 << 20
_OPEN = "open.json"
_CLOSED = "closed.json"

_MESSAGE_LIMIT = 128 << 20
_BLOB_LIMIT = 4 * CHUNK_WORDS + 4096
"""bytes; a blob is no longer than its words, but for its header"""
PLAN = "plan.json"
_SAME_STEP = "publish the same step on all ranks"

Found = TypeVar("Found")


def rank_file(kind: str, rank: int, suffix: str = "json") -> str:
    """The name of what a rank leaves."""
    return f"{kind}-{rank:05d}.{suffix}"


def blobs_name(rank: int) -> str:
    return rank_file("sent", rank, "bin")


@lru_cache
def _adapter(kind: Any) -> Any:
    # here: it costs a fifth of a second that a publisher without other ranks need not pay
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _parsed(data: bytes, what: str, kind: Any) -> Any:
    """A message of this type. Raises DamagedFile."""
    try:
        return _adapter(kind).validate_json(data, strict=True)
    except ValueError as error:
        problem = " ".join(str(error).partition(" [type=")[0].split())
        raise DamagedFile(f"{what}: {printable(problem)[:160]}") from error


def _packed(message: object) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


_Natural = Annotated[int, Ge(0), Le(MAX_INTEGER)]
_Rows = list[tuple[tuple[_Natural, ...], tuple[_Natural, ...], tuple[_Natural, ...]]]
"""tensors, offsets and sizes of a box: layers are alike"""


def write_holds(holds: Holds) -> bytes:
    return _packed([asdict(this_process()), _rows(holds)])


def write_plan(holds: Sequence[Holds]) -> bytes:
    return _packed([_rows(one) for one in holds])


def parse_holds(data: bytes, what: str, table: TensorTable) -> tuple[Claimant, Holds]:
    """Raises DamagedFile."""
    process, rows = _parsed(data, what, tuple[Claimant, _Rows])
    return process, _holds(rows, table, what)


def parse_plan(data: bytes, what: str, table: TensorTable) -> list[Holds]:
    """Raises DamagedFile."""
    return [_holds(rows, table, what) for rows in _parsed(data, what, list[_Rows])]


def _rows(holds: Holds) -> list[object]:
    alike: dict[Box, list[int]] = {}
    for tensor, box in sorted(holds.items()):
        alike.setdefault(box, []).append(tensor)
    return [(tensors, box.offsets, box.sizes) for box, tensors in alike.items()]


def _holds(rows: _Rows, table: TensorTable, what: str) -> Holds:
    holds: dict[int, Box] = {}
    for tensors, offsets, sizes in rows:
        box = Box(offsets, sizes)
        for tensor in tensors:
            if tensor in holds or tensor >= len(table) or not box.fits(table[tensor].shape):
                raise DamagedFile(f"{what}: impossible piece of tensor {tensor}")
            holds[tensor] = box
    return holds


class SegmentSums(NamedTuple):
    """Over one part's segments of a tensor that other parts have segments of too: the touched 8-byte words
    before and after, and all words after."""

    old: Lanes
    new: Lanes
    full: Lanes

    def plus(self, other: SegmentSums) -> SegmentSums:
        return SegmentSums(self.old.plus(other.old), self.new.plus(other.new), self.full.plus(other.full))

    def proves(self, recorded: Lanes) -> bool:
        """Over the whole tensor: whether these bytes are the recorded ones with these changes."""
        return recorded.minus(self.old).plus(self.new) == self.full


class Share(NamedTuple):
    """What a rank holds of a chunk of another's: the blob's place, length 0 where nothing changed; lanes of
    the packed words before and after."""

    offset: _Natural
    length: Annotated[int, Ge(0), Le(_BLOB_LIMIT)]
    old: Lanes
    new: Lanes


@dataclass(frozen=True)
class Sent:
    """`shares`: by part (the writing rank) and chunk. `digests`: of tensors that another rank holds too."""

    shares: Mapping[ChunkKey, Share] = field(default_factory=dict)
    digests: Mapping[int, str] = field(default_factory=dict)


_Shares = list[tuple[ChunkKey, Share]]
_Digests = list[tuple[_Natural, str]]
_Sums = list[tuple[_Natural, SegmentSums]]
_Counts = list[tuple[_Natural, _Natural]]


def write_sent(sent: Sent) -> bytes:
    return _packed([list(sent.shares.items()), list(sent.digests.items())])


def parse_sent(data: bytes, what: str) -> Sent:
    """Raises DamagedFile."""
    shares, digests = _parsed(data, what, tuple[_Shares, _Digests])
    return Sent(dict(shares), dict(digests))


def write_sums(sums: Mapping[int, SegmentSums], non_finite: Mapping[int, int]) -> bytes:
    return _packed([list(sums.items()), list(non_finite.items())])


def parse_sums(data: bytes, what: str, table: TensorTable) -> tuple[dict[int, SegmentSums], dict[int, int]]:
    """What `write_sums` was given. Raises DamagedFile."""
    sums, non_finite = map(dict, _parsed(data, what, tuple[_Sums, _Counts]))
    if max(*sums, *non_finite, 0, 0) >= len(table):
        raise DamagedFile(f"{what}: unknown tensor")
    return sums, non_finite


def read_blob(files: Store, rank: int, share: Share) -> bytes:
    """Of a rank's blobs. Raises DamagedFile when they end too early."""
    name = blobs_name(rank)
    return read_exactly(files, name, share.offset, share.length, files.place(name))


@dataclass(frozen=True)
class Rank:
    number: int
    world_size: int

    @property
    def alone(self) -> bool:
        return self.world_size == 1


@dataclass(frozen=True)
class Attempt:
    """One try at a version, as rank 0 opened it. `base_digest` is that of the index it starts from."""

    version: _Natural
    epoch: _Natural
    base_digest: str
    step: _Natural | None
    world_size: Annotated[int, Ge(1)]
    encoding: Encoding
    created: float


def shard_name(rank: int) -> str:
    return rank_file("part", rank, "safetensors")


def open_attempt(files: Store, attempt: Attempt) -> None:
    files.replace(_OPEN, _packed(asdict(attempt)))


def leave_failure(files: Store, rank: int, error: BaseException) -> None:
    """Of rank 0: the attempt is over without a version."""
    # where a local checkpoint is not what it claims, nobody knows for sure whose
    files.replace(_failure(rank), _packed([reason_of(error), isinstance(error, NeedsReseed)]))


@dataclass(frozen=True)
class RankPart:
    """What a rank wrote: its draft, and what else rank 0 has to know of it."""

    draft: Index
    sums: Mapping[int, SegmentSums] = field(default_factory=dict)
    """of tensors that other ranks write too"""
    sent: Sent = field(default_factory=Sent)
    non_finite: Mapping[int, int] = field(default_factory=dict)
    """elements by tensor that became NaN or infinite"""


def leave_part(files: Store, rank: int, part: RankPart, table: TensorTable) -> None:
    """The draft is what the others wait for. Raises RetryLater where nobody waits any more."""
    _raise_cleared(files)
    files.replace(rank_file("sums", rank), write_sums(part.sums, part.non_finite))
    files.replace(rank_file("part", rank), write_index(part.draft, table))


def reason_of(error: BaseException) -> str:
    kind = "" if isinstance(error, WeightcastError) else f"{type(error).__name__}: "
    return printable(textwrap.shorten(f"{kind}{error}", 500, placeholder=" ..."))


def _failure(rank: int) -> str:
    return rank_file("part", rank, "failed.json") if rank else _CLOSED


def await_plan(files: Store, attempt: Attempt, table: TensorTable, deadline: float) -> list[Holds]:
    """All ranks' holds as rank 0 told them."""
    for _ in looks(deadline):
        _raise_over(files)
        plan = _read(files, PLAN, partial(parse_plan, table=table))
        if plan is None:
            continue
        if len(plan) != attempt.world_size:
            raise DamagedFile(f"{files.place(PLAN)}: {len(plan)} ranks in a world of {attempt.world_size}")
        return plan
    raise NotInTime(
        f"version {attempt.version}: rank 0 did not send the plan in time",
        remedy="check rank 0, then publish again; nothing was published",
    )


def collect_parts(
    files: Store,
    attempt: Attempt,
    assignment: ShardAssignment,
    table: TensorTable,
    deadline: float,
    processes: dict[int, Claimant],
) -> list[RankPart]:
    """What all other ranks leave, in rank order. Raises as `collect`."""

    def read(rank: int) -> RankPart | None:
        draft = _read(files, rank_file("part", rank), lambda data, what: parse_index(data, table))
        if draft is None:
            return None
        _check(draft, attempt, rank, assignment)
        sums, sent = rank_file("sums", rank), rank_file("sent", rank)
        known, non_finite = parse_sums(files.read(sums, _MESSAGE_LIMIT), files.place(sums), table)
        found = parse_sent(files.read(sent, _MESSAGE_LIMIT), files.place(sent))
        return RankPart(draft, known, found, non_finite)

    return collect(files, attempt, range(1, attempt.world_size), read, deadline, processes)


def collect(
    files: Store,
    attempt: Attempt,
    ranks: Sequence[int],
    read: Callable[[int], Found | None],
    deadline: float,
    processes: dict[int, Claimant] | None = None,
) -> list[Found]:
    """What each of `ranks` leaves. NotInTime names the ranks that are missing, Refused the one that failed,
    that ended (`processes`: as last known, less those that were named) or has another step, or why rank 0
    gave up; NeedsReseed where that was a drifted local checkpoint, RetryLater where the attempt was cleared
    away."""
    found: dict[int, Found] = {}
    known = {} if processes is None else processes

    def missing() -> str:
        numbers = [str(rank) for rank in ranks if rank not in found]
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} of {attempt.world_size}"

    observer = this_process()
    for _ in looks(deadline, missing):
        _raise_over(files)
        for rank in ranks:
            # before its files are read: a rank that left all of them may end
            has_ended = rank not in found and rank in known and is_dead(known[rank], observer)
            _raise_failed(files, rank)
            if rank in found:
                continue
            one = read(rank)
            if one is None:
                _raise_absent(files, attempt, rank, known.pop(rank) if has_ended else None)
            else:
                found[rank] = one
        if len(found) == len(ranks):
            return [found[rank] for rank in ranks]
    raise NotInTime(
        f"version {attempt.version}: {missing()} left no part in time",
        remedy="check that all ranks run and publish the same step; nothing was published",
    )


def _raise_absent(files: Store, attempt: Attempt, rank: int, ended: Claimant | None) -> None:
    step = _read(files, rank_file("step", rank), partial(_parsed, kind=_Natural), _LIMIT)
    if step is not None:
        raise Refused(f"rank 0 publishes step {attempt.step}, rank {rank} step {step}", remedy=_SAME_STEP)
    if ended is not None:
        raise Refused(
            f"version {attempt.version}: rank {rank} of {attempt.world_size} has ended ({ended})",
            remedy="start that rank again, then publish on all ranks; nothing was published",
        )


def _rank_0(store: Store) -> str:
    """For the log: whom other ranks wait for. It may start again, and they go on with it."""
    owner = owner_of(store)
    return f"rank 0: {owner.name} has ended" if owner is not None and owner.dead else "rank 0"


def _check(draft: Index, attempt: Attempt, rank: int, assignment: ShardAssignment) -> None:
    same = (draft.version, draft.parent, draft.step, draft.encoding) == (
        attempt.version,
        attempt.base_digest,
        attempt.step,
        attempt.encoding,
    )
    if not same or any(not file.name.endswith(shard_name(rank)) for file in draft.files):
        raise Refused(
            f"rank {rank} left a part of version {draft.version}, step {draft.step}; "
            f"rank 0 publishes version {attempt.version}, step {attempt.step}",
            remedy="publish the same step with the same encoding on all ranks",
        )
    if len(draft.parts) != 1 or draft.parts[0].segments != assignment.parts[rank].segments:
        raise Refused(
            f"rank {rank} left a part that is not its own", remedy="run the same release on all ranks"
        )


def _raise_failed(files: Store, rank: int = 0) -> None:
    said = _read(files, _failure(rank), partial(_parsed, kind=tuple[str, bool]), _LIMIT)
    if said is not None:
        text = f"rank {rank} {'failed' if rank else 'gave up'}: {printable(said[0])}"
        if said[1]:
            raise NeedsReseed(text, remedy="nothing was published; publish again on all ranks")
        raise Refused(text, remedy="nothing was published")


def is_cleared(files: Store) -> bool:
    """Whether an attempt that was open is there no more: rank 0 has begun again, or has committed it."""
    return files.stat(_OPEN) is None


def _raise_over(files: Store) -> None:
    """While there can be no version of it yet: one that was committed is cleared away too."""
    _raise_failed(files)
    _raise_cleared(files)


def _raise_cleared(files: Store) -> None:
    if is_cleared(files):
        raise RetryLater(
            "the attempt was deleted: rank 0 restarted, or another publisher took over",
            remedy="publish again on this rank; nothing was published",
        )


def find_attempt(
    store: Store,
    step: int | None,
    rank: Rank,
    above: int,
    deadline: float,
    seen: set[str],
) -> tuple[str, Attempt]:
    """Key of the newest open attempt at a version above `above` for this step, where the rank took no part
    yet. Raises Refused when rank 0 gave up one that is not in `seen`, which is then added there; in the end
    for one in `seen` too: this rank came late."""
    closed: list[str] = []
    told: dict[str, float] = {}
    for _ in looks(deadline, lambda: _rank_0(store)):
        newer = [one for one in _attempts(store, rank.number) if one[1].version > above]
        fitting = sorted(
            (one for one in newer if one[1].step == step), key=lambda one: (one[1].epoch, one[1].created)
        )
        found = [one for one in fitting if store.stat(f"{one[0]}/{_CLOSED}") is None]
        if found:
            key, attempt = found[-1]
            if attempt.world_size != rank.world_size:
                raise Refused(
                    f"rank 0 publishes with {attempt.world_size} ranks, this rank with {rank.world_size}",
                    remedy="give all ranks the same world_size",
                )
            return key, attempt
        closed = [key for key, _ in fitting]
        for key in closed:
            if key not in seen:
                seen.add(key)
                _raise_failed(store.within(key))
        for key, attempt in newer:
            if step is not None and attempt.step != step and attempt.world_size == rank.world_size:
                _raise_differs(store.within(key), attempt, step, rank.number, told)
    for key in reversed(closed):
        _raise_failed(store.within(key))
    raise NotInTime(
        f"rank 0 opened no version above {above} for step {step} in time",
        remedy="check that rank 0 runs and publishes the same step",
    )


def _raise_differs(files: Store, attempt: Attempt, step: int, rank: int, told: dict[str, float]) -> None:
    """Tells rank 0, if it still runs, that this rank has another step. Raises Refused once rank 0 has given
    up its own; a rank that is ahead first waits for rank 0 to come to its step. `told`: until when, by place;
    0: rank 0 did not answer yet."""
    place, now = files.place(), time.monotonic()
    if files.stat(_CLOSED) is None:
        if place not in told:
            with contextlib.suppress(OSError):  # rank 0 may clear it away
                files.replace(rank_file("step", rank), _packed(step))
                told[place] = 0.0
    elif place in told:
        told[place] = told[place] or now + (_STEP_SECONDS if step > (attempt.step or 0) else 0)
        if now >= told[place]:
            raise Refused(f"rank 0 publishes step {attempt.step}, this rank step {step}", remedy=_SAME_STEP)


def _attempts(store: Store, rank: int) -> list[tuple[str, Attempt]]:
    """Without those in which the rank took part."""
    found = []
    for key in attempts(store):
        files = store.within(key)
        attempt = _read(files, _OPEN, partial(_parsed, kind=Attempt), _LIMIT)
        if attempt is not None and not any(
            files.stat(name) for name in (rank_file("part", rank), _failure(rank))
        ):
            found.append((key, attempt))
    return found


def attempts(store: Store) -> list[str]:
    """Keys of those that are there now: rank 0 clears them away while others look."""
    parts = sorted(name for name in store.names() if fnmatchcase(name, f"weight_v*{ATTEMPTS}"))
    return [f"{name}/{attempt}" for name in parts for attempt in sorted(store.names(name))]


def wait_for_commit(
    files: Store, attempt: Attempt, committed: Callable[[], Index | None], deadline: float
) -> Index:
    """Success is the version's index seen, with this attempt's step, and the pointer at it."""
    for _ in looks(deadline):
        index = committed()
        if index is None:
            _raise_failed(files)
            continue
        if (index.parent, index.step) != (attempt.base_digest, attempt.step):
            raise Refused(
                f"version {attempt.version} was committed by another attempt (step {index.step})",
                remedy="publish again",
            )
        return index
    raise NotInTime(
        f"version {attempt.version} was not committed in time",
        remedy="check rank 0; this rank catches up at the next publish",
    )


def looks(deadline: float, awaited: Callable[[], str] = lambda: "rank 0") -> Iterator[None]:
    """One step for each look: one at least, the last one about at the deadline. A long wait is logged, with
    what is awaited."""
    began = time.monotonic()
    logged = began + _QUIET_SECONDS
    while True:
        yield
        now = time.monotonic()
        if now >= deadline:
            return
        if now >= logged:
            _log.warning("waiting for %s (%.0f s of %.0f s)", awaited(), now - began, deadline - began)
            logged = now + _LOGGED_SECONDS
        time.sleep(_POLL_SECONDS)


def message(files: Store, kind: str, parse: Callable[[bytes, str], Found]) -> Callable[[int], Found | None]:
    """For `collect`: reads what a rank leaves of this kind."""
    return lambda rank: _read(files, rank_file(kind, rank), parse)


def _read(
    files: Store, name: str, parse: Callable[[bytes, str], Found], limit: int = _MESSAGE_LIMIT
) -> Found | None:
    """None when the file is not there."""
    data = read_if_there(files, name, limit)
    return None if data is None else parse(data, files.place(name))
