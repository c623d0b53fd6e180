"""Where the ranks of one publication meet: a directory of parts in the channel. No collectives.

Rank 0 opens an attempt; every rank leaves its shard and draft there, or says that it failed; rank 0 commits
exactly the drafts it has verified. The other ranks learn the outcome from the channel alone.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from weightcast.publisher.draft import Frame
from weightcast.shared.channel.index import INDEX_LIMIT, Index, parse_index, write_index
from weightcast.shared.channel.layout import Layout
from weightcast.shared.errors import NeedsReseed, NotInTime, Refused, WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import Members, parse_object
from weightcast.shared.words import TensorTable

_POLL_SECONDS = 0.05
_LIMIT = 1 << 20
_OPEN = "open.json"
_CLOSED = "closed.json"


@dataclass(frozen=True)
class Attempt:
    """One try at a version, as rank 0 opened it. `base_digest` is that of the index it starts from."""

    version: int
    epoch: int
    base_digest: str
    step: int | None
    world_size: int
    encoding: str
    created: float

    @classmethod
    def of(cls, frame: Frame, world_size: int) -> Attempt:
        return cls(
            version=frame.version,
            epoch=frame.epoch,
            base_digest=frame.base.digest,
            step=frame.step,
            world_size=world_size,
            encoding=frame.encoding,
            created=frame.created,
        )


def shard_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def open_attempt(directory: Path, attempt: Attempt) -> None:
    durable.replace(directory / _OPEN, json.dumps(asdict(attempt)).encode())


def close_attempt(directory: Path, reason: str) -> None:
    """Tells the other ranks that this attempt is over without a version."""
    durable.replace(directory / _CLOSED, json.dumps({"reason": reason}).encode())


def leave_draft(directory: Path, rank: int, draft: Index, table: TensorTable) -> None:
    durable.replace(_draft(directory, rank), write_index(draft, table))


def leave_failure(directory: Path, rank: int, error: BaseException, drifted: bool) -> None:
    """`drifted`: rank 0's local checkpoint, which this rank shares, is not what it claims."""
    facts = {"reason": reason_of(error), "drifted": drifted}
    durable.replace(_failure(directory, rank), json.dumps(facts).encode())


def reason_of(error: BaseException) -> str:
    kind = "" if isinstance(error, WeightcastError) else f"{type(error).__name__}: "
    return _printable(f"{kind}{error}"[:500])


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _draft(directory: Path, rank: int) -> Path:
    return directory / f"part-{rank:05d}.json"


def _failure(directory: Path, rank: int) -> Path:
    return directory / f"part-{rank:05d}.failed.json"


def collect_drafts(directory: Path, attempt: Attempt, table: TensorTable, deadline: float) -> list[Index]:
    """All other ranks' drafts, in rank order. NotInTime names the ranks that are missing, Refused the one
    that failed."""
    drafts: dict[int, Index] = {}

    def complete() -> bool:
        for rank in range(1, attempt.world_size):
            _raise_failure(directory, rank)
            if rank not in drafts:
                data = _read(_draft(directory, rank), INDEX_LIMIT)
                if data is not None:
                    drafts[rank] = _checked(parse_index(data, table), attempt, rank)
        return len(drafts) == attempt.world_size - 1

    if not _until(complete, deadline):
        missing = [str(rank) for rank in range(1, attempt.world_size) if rank not in drafts]
        raise NotInTime(
            f"version {attempt.version}: rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} of "
            f"{attempt.world_size} left no part in time",
            remedy="are all ranks alive, and do they publish the same step? nothing was published",
        )
    return [drafts[rank] for rank in sorted(drafts)]


def _checked(draft: Index, attempt: Attempt, rank: int) -> Index:
    same = (draft.version, draft.parent, draft.step, draft.encoding) == (
        attempt.version,
        attempt.base_digest,
        attempt.step,
        attempt.encoding,
    )
    if not same or any(file.name != shard_name(rank) for file in draft.files):
        raise Refused(
            f"rank {rank} left a part of version {draft.version}, step {draft.step}; "
            f"rank 0 publishes version {attempt.version}, step {attempt.step}",
            remedy="all ranks publish the same step with the same encoding",
        )
    return draft


def _raise_failure(directory: Path, rank: int) -> None:
    failure = _members(_failure(directory, rank))
    if failure is not None:
        text = f"rank {rank} failed: {_printable(failure.text('reason'))}"
        if failure.boolean("drifted"):
            raise NeedsReseed(text, remedy="nothing was published; publish again on all ranks")
        raise Refused(text, remedy="nothing was published")


def find_attempt(
    layout: Layout, step: int | None, rank: int, world_size: int, above: int, deadline: float
) -> tuple[Path, Attempt]:
    """The newest open attempt at a version above `above` for this step, where the rank took no part yet."""
    found: list[tuple[Path, Attempt]] = []

    def look() -> bool:
        found[:] = sorted(
            (one for one in _open_attempts(layout, rank) if one[1].version > above and one[1].step == step),
            key=lambda one: (one[1].epoch, one[1].created),
        )
        return bool(found)

    if not _until(look, deadline):
        raise NotInTime(
            f"rank 0 opened no version above {above} for step {step} in time",
            remedy="is rank 0 alive, and does it publish the same step?",
        )
    directory, attempt = found[-1]
    if attempt.world_size != world_size:
        raise Refused(
            f"rank 0 publishes with {attempt.world_size} ranks, this rank with {world_size}",
            remedy="give all ranks the same world_size",
        )
    return directory, attempt


def _open_attempts(layout: Layout, rank: int) -> list[tuple[Path, Attempt]]:
    attempts = []
    for directory in _entries(layout.channel, "weight_v*.parts/*"):
        facts = _members(directory / _OPEN)
        over = (directory / _CLOSED, _draft(directory, rank), _failure(directory, rank))
        if facts is not None and not any(path.exists() for path in over):
            attempts.append((directory, _attempt(facts)))
    return attempts


def _entries(directory: Path, pattern: str) -> list[Path]:
    """Rank 0 clears attempts away while others look."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(directory.glob(pattern))
    return []


def _attempt(facts: Members) -> Attempt:
    return Attempt(
        version=facts.integer("version"),
        epoch=facts.integer("epoch"),
        base_digest=facts.text("base_digest", 64),
        step=facts.optional_integer("step"),
        world_size=facts.integer("world_size", 1),
        encoding=facts.text("encoding", 32),
        created=facts.number("created"),
    )


def wait_for_commit(
    directory: Path, attempt: Attempt, committed: Callable[[], Index | None], deadline: float
) -> Index:
    """Success is the version's index seen, with this attempt's step, and the pointer at it."""
    seen: list[Index] = []

    def done() -> bool:
        index = committed()
        if index is not None:
            seen[:] = [index]
            return True
        closed = _members(directory / _CLOSED)
        if closed is not None:
            reason = _printable(closed.text("reason"))
            raise Refused(f"rank 0 gave up: {reason}", remedy="nothing was published")
        return False

    if not _until(done, deadline):
        raise NotInTime(
            f"version {attempt.version} was not committed in time",
            remedy="look at rank 0; this rank catches up by itself at the next publish",
        )
    if (seen[0].parent, seen[0].step) != (attempt.base_digest, attempt.step):
        raise Refused(
            f"version {attempt.version} was committed by another attempt (step {seen[0].step})",
            remedy="publish again",
        )
    return seen[0]


def _until(done: Callable[[], bool], deadline: float) -> bool:
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _members(path: Path) -> Members | None:
    """None when the file is not there. Raises DamagedFile."""
    data = _read(path, _LIMIT)
    return None if data is None else Members(parse_object(data, str(path)), str(path))


def _read(path: Path, limit: int) -> bytes | None:
    try:
        return durable.read_file(path, limit)
    except (FileNotFoundError, NotADirectoryError):
        return None
