"""What is wrong with a local checkpoint, file by file, and what that means for its host. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import (
    DamagedFile,
    NeedsReseed,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import check_files
from weightcast.shared.channel.run_files import BASE_LIMIT, Base, parse_base
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.state.side_files import Carried
from weightcast.shared.checkpoint.state.state import (
    LANES_BYTES,
    LocalState,
    Phase,
    Step,
    check_roots,
    read_state,
)
from weightcast.shared.checkpoint.update.journal import JournalReader
from weightcast.shared.checkpoint.verify.hashing import HashReport, full_hash
from weightcast.shared.checkpoint.verify.seed import table_problems
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.shared.files.paths import is_directory

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


@dataclass(frozen=True)
class Inspection:
    """`report`: what reading all weights said; None where they cannot be read at all."""

    faults: tuple[Fault, ...]
    state: LocalState | None
    report: HashReport | None


def inspect(directory: Path, *, threads: int = 1, advance: Advance | None = None) -> Inspection:
    """The caller holds the patch lock, shared. Raises nothing for what the files say."""
    paths = LocalPaths(directory)
    state, faults = _state(paths)
    base, base_faults = _base(paths, state)
    faults += base_faults
    report: HashReport | None = None
    if state is not None and base is not None:
        found = list(_checkpoint(directory, base))
        faults += found
        faults += _others(paths, base, state)
        faults += _journals(paths, state, base)
        if not found and not base_faults:
            report, wrong = _weights(directory, threads, advance)
            faults += wrong
    return Inspection(tuple(faults), state, report)


def _state(paths: LocalPaths) -> tuple[LocalState | None, list[Fault]]:
    try:
        state = read_state(paths.state)
    except (WeightcastError, OSError) as error:
        return None, [Fault(_name(paths.state), error_text(error), _STUCK)]
    if state is None:
        return None, [Fault(_name(paths.state), "is missing", "the host seeds it at its next start")]
    if state.phase is not Phase.CLEAN:
        return state, [Fault(_name(paths.state), f"says {state.phase.value}", _UNFINISHED)]
    return state, []


def _base(paths: LocalPaths, state: LocalState | None) -> tuple[Base | None, list[Fault]]:
    try:
        base = parse_base(durable.read_file(paths.base, BASE_LIMIT))
    except FileNotFoundError:
        return None, [Fault(_name(paths.base), "is missing", _SEEDED)]
    except (WeightcastError, OSError) as error:
        return None, [Fault(_name(paths.base), error_text(error), _SEEDED)]
    if state is not None and base.run_id != state.run_id:
        return base, [Fault(_name(paths.base), f"is of run {base.run_id}, state.json is not", _SEEDED)]
    if state is not None and len(state.position.lanes) != LANES_BYTES * len(base.table):
        return base, [Fault(_name(paths.state), "has lanes of other tensors than base.json", _SEEDED)]
    try:
        if state is not None:
            check_roots(paths.state, state, base.table)
    except DamagedFile as error:
        return base, [Fault(_name(paths.state), error.message, _STUCK)]
    return base, []


def _checkpoint(directory: Path, base: Base) -> Iterator[Fault]:
    try:
        checkpoint = open_checkpoint(directory, follow_links=False)
    except (WeightcastError, OSError) as error:
        yield Fault("weights", error_text(error), _SEEDED)
        return
    for problem in table_problems(checkpoint.table, base.table)[:50]:
        yield Fault("weights", problem, _SEEDED)
    for path in checkpoint.weight_files:
        if path.stat().st_nlink > 1:
            yield Fault(path.name, "has several links", "the host refuses to patch it")


def _others(paths: LocalPaths, base: Base, state: LocalState) -> Iterator[Fault]:
    for record in Carried(paths).expected(base, state.position):
        for flaw in check_files(paths.directory, [record]):
            yield Fault(record.name, flaw.message, _OTHER)


def _journals(paths: LocalPaths, state: LocalState, base: Base) -> Iterator[Fault]:
    for step in state.steps:
        path = paths.journal(step.journal)
        problem = _journal(path, step, base)
        # a host forgets its way back at any time, and its next journal is written over this one
        if problem is not None and _is_named(paths, step):
            yield Fault(_name(path), problem, _NO_WAY_BACK)
    kept = {step.journal for step in state.steps}
    for path in sorted(paths.journals.iterdir()) if is_directory(paths.journals) else ():
        if path.stem not in kept:
            yield Fault(_name(path), "is named by no state", "nothing; the next start drops it")


def _is_named(paths: LocalPaths, step: Step) -> bool:
    """By the current state."""
    state, _ = _state(paths)
    return state is not None and step in state.steps


def _journal(path: Path, step: Step, base: Base) -> str | None:
    """What is wrong with it."""
    try:
        with JournalReader(path, base.table) as journal:
            header = journal.header
            for _ in journal.records():
                pass
    except (WeightcastError, OSError) as error:
        return error_text(error)
    same = (header.journal, header.target_digest) == (step.journal, step.target.digest)
    return None if same else "is the journal of another step"


def _weights(directory: Path, threads: int, advance: Advance | None) -> tuple[HashReport | None, list[Fault]]:
    try:
        opened = LocalCheckpoint.open(directory, threads=threads)
    except (WeightcastError, OSError) as error:
        return None, [Fault("weights", error_text(error), _SEEDED)]
    if opened is None:
        return None, []
    with opened:
        report = full_hash(opened, advance=advance)
        places = opened.checkpoint.places
        faults = [
            Fault(places[opened.table.numbers[name]].file.name, f"{name} differs", _WRONG_WEIGHTS)
            for name in report.differing
        ]
    return report, faults


def _name(path: Path) -> str:
    """As seen from the checkpoint's directory."""
    room = next((parent for parent in path.parents if parent.name == ".weightcast"), path.parent)
    return str(path.relative_to(room.parent))


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
        base = parse_base(durable.read_file(paths.base, BASE_LIMIT))
        found = open_checkpoint(directory, follow_links=False)
    except (FileNotFoundError, Refused) as error:
        raise NeedsReseed(f"{directory} cannot be loaded: {error}", remedy=_SYNC) from error
    problems = table_problems(found.table, base.table)
    if problems:
        raise NeedsReseed(f"{directory} cannot be loaded: {'; '.join(problems[:5])}", remedy=_SYNC)
    carried = Carried(paths).unsettled(directory, base, state.position)
    if carried is not None:
        version = state.position.version
        raise RetryLater(f"{directory / carried} does not match version {version} yet", remedy=_SYNC)
    return state
