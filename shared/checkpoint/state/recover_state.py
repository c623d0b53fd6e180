"""A local checkpoint with an unreadable or contradictory state: every byte is read to find its version.

What only the state knew is gone: engines count as unknown, and are reloaded; versions that they refused are
tried again; the way back by journals is lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater, UnknownFormat, WrongRun
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import entries
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.run_files import BASE_LIMIT, Base, parse_base, write_base
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.state.state import (
    Boot,
    LocalState,
    Phase,
    Position,
    check_roots,
    pack_lanes,
    read_state,
    unpack_lanes,
    write_state,
)
from weightcast.shared.checkpoint.verify.hashing import distance_from, hash_tensors
from weightcast.shared.checkpoint.verify.seed import start_of
from weightcast.shared.digest.checksums import LanesArray
from weightcast.shared.digest.root import root
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import open_checkpoint

_KEPT_BYTES = 1 << 20
"""of the unreadable state, for whoever wants to know what happened"""


def sound_state(paths: LocalPaths) -> LocalState | None:
    """As `read_state`. Raises DamagedFile also where it contradicts itself or base.json."""
    state, base = read_state(paths.state), _base_here(paths)
    if state is not None and base is not None:
        check_roots(paths.state, state, base.table)
    return state


def is_lost(paths: LocalPaths) -> bool:
    """Whether there is a state that is not sound. Raises UnknownFormat for another release's."""
    try:
        sound_state(paths)
    except UnknownFormat:
        raise
    except DamagedFile:
        return True
    return False


def recover_state(
    paths: LocalPaths, channel: Channel, *, threads: int = 1, advance: Advance | None = None
) -> Position | None:
    """Writes a new state: `clean` at the local version, `dirty` at the nearest one where none matches, no
    state at all without weights of this run. The caller owns the checkpoint and holds the patch
    lock. Returns the position; None: it is to be seeded.

    Raises WrongRun when it is another run's, RetryLater when the channel leads to no version."""
    if channel.foreign:
        raise Refused(
            f"{paths.state} is unreadable, and {channel.place} is in slime format, without digests",
            remedy="move the local checkpoint away and seed it again",
        )
    state = _found(paths, channel, _base(paths, channel), threads, advance)
    _set_aside(paths)
    if state is None:
        paths.state.unlink()
        durable.sync_directory(paths.room)
        return None
    write_state(paths.state, state)
    return state.position


def _base_here(paths: LocalPaths) -> Base | None:
    try:
        return parse_base(durable.read_file(paths.base, BASE_LIMIT))
    except (DamagedFile, FileNotFoundError):
        return None


def _base(paths: LocalPaths, channel: Channel) -> Base:
    """The run's, which the local checkpoint must not contradict."""
    _, base = channel.require_ours()
    here = _base_here(paths)
    if here is None:
        durable.replace(paths.base, write_base(base))
        return base
    if here.run_id != base.run_id or here.root != base.root:
        raise WrongRun(
            f"{paths.directory} belongs to run {here.run_id}, the channel to run {base.run_id}",
            remedy="use another --local directory, or remove this one",
        )
    return base


def _found(
    paths: LocalPaths, channel: Channel, base: Base, threads: int, advance: Advance | None
) -> LocalState | None:
    try:
        checkpoint = open_checkpoint(paths.directory, follow_links=False)
    except (Refused, FileNotFoundError):
        return None
    if checkpoint.table != base.table:
        return None
    unknown = LocalState(base.run_id, start_of(base), Phase.DIRTY, host=Boot.here())
    with LocalCheckpoint(paths, base, unknown, checkpoint) as local:
        began = time.time()
        lanes = hash_tensors(local.table, local, threads=threads, advance=advance)
        nearest, epoch = _nearest(channel, base, lanes)
        exact = nearest.root == root(base.table, lanes)
        return unknown.but(
            position=nearest,
            phase=Phase.CLEAN if exact else Phase.DIRTY,
            epoch=epoch,
            generation=1,
            files=local.file_identities(),
            last_full_hash=began if exact else None,
        )


def _nearest(channel: Channel, base: Base, lanes: LanesArray) -> tuple[Position, int]:
    """The version from which the fewest bytes differ, the newest of equals; the highest epoch met."""
    best: tuple[int, Position] | None = None
    epoch = 0
    for position in positions(channel, base):
        epoch = max(epoch, position.epoch)
        distance = distance_from(base.table, lanes, position)
        if best is None or distance <= best[0]:
            best = distance, position
    if best is None:
        raise RetryLater(f"{channel.place} has no version", remedy="check the channel mount")
    return best[1], epoch


def positions(channel: Channel, base: Base) -> Iterator[Position]:
    """Every version up to the pointer whose lanes the channel states without a gap, oldest first."""
    at = start_of(base)
    yield at
    whole = True
    for entry in entries(channel, channel.pointer()):
        index = entry.index
        if isinstance(index, Index):
            after = _after(at if whole else None, index, base)
            after = _beside(channel, index, base) if after is None else after
            whole = after is not None
            if after is not None:
                at = after
                yield at
        else:
            whole = False


def _after(at: Position | None, index: Index, base: Base) -> Position | None:
    """None when it continues another version than `at`."""
    if index.kind == "delta" and (at is None or index.parent != at.digest):
        return None
    lanes = base.lanes.copy() if at is None else unpack_lanes(at.lanes)
    return _position(index, base, index.tensors.put(base.table, lanes))


def _beside(channel: Channel, index: Index, base: Base) -> Position | None:
    try:
        anchor = channel.anchor(index.version, base.table)
    except Refused:
        return None
    if anchor is None:
        return None
    return _position(index, base, anchor.tensors.put(base.table, np.zeros((len(base.table), 2), np.uint64)))


def _position(index: Index, base: Base, lanes: LanesArray) -> Position | None:
    """None when the lanes are not those of the version's root."""
    if root(base.table, lanes) != index.root:
        return None
    return Position(index.version, index.digest, index.root, index.epoch, pack_lanes(lanes))


def _set_aside(paths: LocalPaths) -> None:
    with contextlib.suppress(DamagedFile):
        # a link, or more than anybody would read
        durable.replace(paths.room / "state.json.unreadable", durable.read_file(paths.state, _KEPT_BYTES))
