"""What is wrong with a local checkpoint, file by file, and what that means for its host. Where its state is
lost, its version is found by reading every byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from weightcast.shared.base.errors import (
    DamagedFile,
    NeedsReseed,
    Refused,
    RetryLater,
    WeightcastError,
    WrongRun,
)
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import check_files, entries
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.run_files import Base, write_base
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths, read_base
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.state.side_files import SideFiles
from weightcast.shared.checkpoint.state.state import (
    LANES_BYTES,
    Boot,
    LocalState,
    Phase,
    Position,
    Step,
    check_roots,
    pack_lanes,
    read_state,
    unpack_lanes,
    write_state,
)
from weightcast.shared.checkpoint.update.journal import JournalReader
from weightcast.shared.checkpoint.verify.hashing import HashReport, full_hash
from weightcast.shared.checkpoint.verify.seed import start_of, table_problems
from weightcast.shared.digest.checksums import LanesArray, root
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.shared.files.paths import matching

_SEEDED = "the host cannot patch it; its next start seeds it again"
_STUCK = "the host stops until `sync --rehash` or `local verify --repair` finds its version"
_OTHER = "engines that start here read another model's settings; run `local verify --repair`"
_NO_WAY_BACK = "this update cannot be undone; where that is needed the host repairs or seeds"
_UNFINISHED = "the next start finishes, repairs or seeds it; engines must not load it before"
_WRONG_WEIGHTS = "engines that load from here get wrong weights; the next sync with --rehash repairs them"


@dataclass(frozen=True)
class Fault:
    """`file`: its name in the local checkpoint; `meaning`: for the host and its engines."""

    file: str
    problem: str
    meaning: str


@dataclass
class Inspection:
    """`report`: what reading all weights said; None where they cannot be read at all."""

    paths: LocalPaths
    faults: list[Fault] = field(default_factory=list)
    state: LocalState | None = None
    report: HashReport | None = None

    def add(self, file: Path | str, problem: str | Exception, meaning: str) -> None:
        """`file`: its path, or what else is wrong."""
        name = str(file.relative_to(self.paths.directory)) if isinstance(file, Path) else file
        text = error_text(problem) if isinstance(problem, Exception) else problem
        self.faults.append(Fault(name, text, meaning))


def inspect(directory: Path, *, threads: int = 1, advance: Advance | None = None) -> Inspection:
    """The caller holds the patch lock, shared. Raises nothing for what the files say."""
    found = Inspection(LocalPaths(directory))
    state = found.state = _state(found)
    faults = len(found.faults)
    base = _base(found)
    if state is not None and base is not None:
        _checkpoint(found, base)
        can_be_read = len(found.faults) == faults
        for record in SideFiles(found.paths).expected(base, state.position):
            for flaw in check_files(DirectoryStore(directory), [record]):
                found.add(record.name, flaw.message, _OTHER)
        _journals(found, state, base)
        if can_be_read:
            _weights(found, threads, advance)
    return found


def _state(found: Inspection) -> LocalState | None:
    path = found.paths.state
    try:
        state = read_state(path)
    except (WeightcastError, OSError) as error:
        found.add(path, error, _STUCK)
        return None
    if state is None:
        found.add(path, "is missing", "the host seeds it at its next start")
    elif state.phase is not Phase.CLEAN:
        found.add(path, f"says {state.phase.value}", _UNFINISHED)
    return state


def _base(found: Inspection) -> Base | None:
    paths, state = found.paths, found.state
    try:
        base = read_base(paths)
    except FileNotFoundError:
        found.add(paths.base, "is missing", _SEEDED)
        return None
    except (WeightcastError, OSError) as error:
        found.add(paths.base, error, _SEEDED)
        return None
    if state is None:
        return base
    if base.run_id != state.run_id:
        found.add(paths.base, f"is of run {base.run_id}, state.json is not", _SEEDED)
    elif len(state.position.lanes) != LANES_BYTES * len(base.table):
        found.add(paths.state, "has lanes of other tensors than base.json", _SEEDED)
    else:
        try:
            check_roots(paths.state, state, base.table)
        except DamagedFile as error:
            found.add(paths.state, error, _STUCK)
    return base


def _checkpoint(found: Inspection, base: Base) -> None:
    try:
        checkpoint = open_checkpoint(found.paths.directory, follow_links=False, adapter=base.is_adapter)
    except (WeightcastError, OSError) as error:
        return found.add("weights", error, _SEEDED)
    for problem in table_problems(checkpoint.table, base.table)[:50]:
        found.add("weights", problem, _SEEDED)
    for path in checkpoint.weight_files:
        if path.stat().st_nlink > 1:
            found.add(path, "has several links", "the host refuses to patch it")


def _journals(found: Inspection, state: LocalState, base: Base) -> None:
    paths = found.paths
    for step in state.steps:
        problem = _journal(paths.journal(step.journal), state.run_id, step, base)
        # a host forgets its way back at any time, and its next journal is written over this one
        if problem is not None and _is_named(paths, step):
            found.add(paths.journal(step.journal), problem, _NO_WAY_BACK)
    kept = {step.journal for step in state.steps}
    for path in matching(paths.journals, "*"):
        if path.stem not in kept:
            # a daemon that runs, and has the lock, staged it
            with contextlib.suppress(RetryLater), FileLock(paths.owner).holding(shared=True):
                found.add(path, "left by an interrupted update", "the next start removes it")


def _is_named(paths: LocalPaths, step: Step) -> bool:
    """By the current state."""
    with contextlib.suppress(WeightcastError, OSError):
        state = read_state(paths.state)
        return state is not None and step in state.steps
    return False


def _journal(path: Path, run_id: str, step: Step, base: Base) -> Exception | None:
    """What is wrong with it."""
    try:
        with JournalReader(path, base.table) as journal:
            journal.require(run_id, step)
            for _ in journal.records():
                pass
    except (WeightcastError, OSError) as error:
        return error
    return None


def _weights(found: Inspection, threads: int, advance: Advance | None) -> None:
    try:
        opened = LocalCheckpoint.open(found.paths.directory, threads=threads)
    except (WeightcastError, OSError) as error:
        return found.add("weights", error, _SEEDED)
    if opened is not None:
        with opened:
            found.report = full_hash(opened, advance=advance)
            for name in found.report.differing:
                file = opened.places[opened.table.numbers[name]].file
                found.add(file, f"{name} differs", _WRONG_WEIGHTS)


_SYNC = "run `weightcast sync`, or start the subscriber"


def require_loadable(directory: Path) -> LocalState:
    """The state of a checkpoint that is one version, complete in names, shapes and sizes. The caller holds
    the patch lock, at least shared. Raises RetryLater while it is not there or being written, NeedsReseed
    when the weights do not match the state."""
    paths = LocalPaths(directory)
    state = read_state(paths.state)
    if state is None:
        raise RetryLater(f"{directory} is not seeded yet", remedy=_SYNC)
    if state.phase is not Phase.CLEAN:
        raise RetryLater(f"{directory} is unfinished: {state.phase.value}", remedy=_SYNC)
    try:
        base = read_base(paths)
        found = open_checkpoint(directory, follow_links=False, adapter=base.is_adapter)
    except (FileNotFoundError, Refused) as error:
        raise NeedsReseed(f"{directory} cannot be loaded: {error}", remedy=_SYNC) from error
    problems = table_problems(found.table, base.table)
    if problems:
        raise NeedsReseed(f"{directory} cannot be loaded: {'; '.join(problems[:5])}", remedy=_SYNC)
    carried = SideFiles(paths).unsettled(directory, base, state.position)
    if carried is not None:
        version = state.position.version
        raise RetryLater(f"{directory / carried} does not match version {version} yet", remedy=_SYNC)
    return state


# -- a lost state: engines count as unknown, and are reloaded; versions that they refused are tried again; the
# way back by journals is gone


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
    except DamagedFile:
        return True
    return False


def recover_state(
    paths: LocalPaths, channel: Channel, *, threads: int = 1, advance: Advance | None = None
) -> Position | None:
    """Writes a new state: `clean` at the local version, `dirty` at the nearest one where none matches, no
    state at all without weights of this run. The caller owns the checkpoint and holds the patch
    lock. Returns the position; None: it is to be seeded.

    Raises WrongRun when it is another run's."""
    if channel.foreign:
        raise Refused(
            f"{paths.state} is unreadable, and {channel.place} is foreign, without digests",
            remedy="move the local checkpoint away and seed it again",
        )
    state = _found(paths, channel, _base_of(paths, channel), threads, advance)
    with contextlib.suppress(DamagedFile):
        # a link, or more than anybody would read
        durable.replace(paths.room / "state.json.unreadable", durable.read_file(paths.state, _KEPT_BYTES))
    if state is None:
        paths.state.unlink()
        durable.sync_directory(paths.room)
        return None
    write_state(paths.state, state)
    return state.position


def _base_here(paths: LocalPaths) -> Base | None:
    try:
        return read_base(paths)
    except (DamagedFile, FileNotFoundError):
        return None


def restore_base(paths: LocalPaths, base: Base) -> None:
    """Writes base.json of a local checkpoint of this run that lost its own. The caller owns it."""
    state = read_state(paths.state)
    ours = state is not None and not state.foreign and state.run_id == base.run_id
    if ours and _base_here(paths) is None:
        durable.replace(paths.base, write_base(base))


def _base_of(paths: LocalPaths, channel: Channel) -> Base:
    """The run's, which the local checkpoint must not contradict."""
    _, base = channel.require_ours()
    here = _base_here(paths)
    if here is None:
        durable.replace(paths.base, write_base(base))
    elif here.run_id != base.run_id or here.root != base.root:
        raise WrongRun(
            f"{paths.directory} belongs to run {here.run_id}, the channel to run {base.run_id}",
            remedy="use another --local directory, or remove this one",
        )
    return base


def _found(
    paths: LocalPaths, channel: Channel, base: Base, threads: int, advance: Advance | None
) -> LocalState | None:
    try:
        checkpoint = open_checkpoint(paths.directory, follow_links=False, adapter=base.is_adapter)
    except (Refused, FileNotFoundError):
        return None
    if checkpoint.table.specs != base.table.specs:
        return None
    unknown = LocalState(base.run_id, start_of(base), Phase.DIRTY, host=Boot.here())
    epochs: list[int] = []

    def known() -> Iterator[Position]:
        for position in _positions(channel, base):
            epochs.append(position.epoch)
            yield position

    with LocalCheckpoint(paths, base, unknown, checkpoint, threads=threads) as local:
        report = full_hash(local, advance=advance).nearest(known())
        return unknown.but(
            position=report.position,
            phase=Phase.CLEAN if report.intact else Phase.DIRTY,
            epoch=max(epochs),
            generation=1,
            files=local.file_identities(),
            last_full_hash=report.began if report.intact else None,
        )


def _positions(channel: Channel, base: Base) -> Iterator[Position]:
    """Every version up to the pointer whose lanes the channel states without a gap, oldest first."""
    at: Position | None = start_of(base)
    yield start_of(base)
    for entry in entries(channel, channel.pointer()):
        at = _next(channel, base, at, entry.index) if isinstance(entry.index, Index) else None
        if at is not None:
            yield at


def _next(channel: Channel, base: Base, at: Position | None, index: Index) -> Position | None:
    """`at`: the version before; None: unknown."""
    if index.kind == "anchor" or (at is not None and index.parent == at.digest):
        lanes = base.lanes.copy() if at is None else unpack_lanes(at.lanes)
        found = _position(index, base, index.tensors.put(base.table, lanes))
        if found is not None:
            return found
    with contextlib.suppress(Refused):
        anchor = channel.anchor(index.version, base.table)
        if anchor is not None:
            return _position(index, base, anchor.tensors.put(base.table, np.zeros_like(base.lanes)))
    return None


def _position(index: Index, base: Base, lanes: LanesArray) -> Position | None:
    """None when the lanes are not those of the version's root."""
    if root(base.table, lanes) != index.root:
        return None
    return Position(index.version, index.digest, index.root, index.epoch, pack_lanes(lanes))
