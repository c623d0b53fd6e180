"""Patch and undo: a journal's absolute words into the mapped files, under the patch lock.

Order: state says `patching` (durable), words are compared, written and read back, state says the new
position. Killed in between, the journal is replayed: each word is old or new, else the checkpoint is dirty.
"""

from __future__ import annotations

import time

import numpy as np

from weightcast.shared.base.errors import DamagedFile, NeedsReseed, counted
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, empty_spool
from weightcast.shared.checkpoint.state.state import LocalState, Phase, Position, Step
from weightcast.shared.checkpoint.update import buffer_reuse
from weightcast.shared.checkpoint.update.engine_patch import drop_engine_patches
from weightcast.shared.checkpoint.update.journal import Direction, JournalReader, Lists, PackedRecord
from weightcast.shared.checkpoint.verify.hashing import Damaged, Differs, differing, full_hash, hash_tensors
from weightcast.shared.kernels.parallel import SMALL_RESULTS, ordered


def patch(local: LocalCheckpoint, step: Step, *, undoable: bool = True) -> None:
    """Moves the checkpoint from `step.base` to `step.target`. The caller holds the patch lock.

    The journal is kept. It is the undo until `forget_undo`; without `undoable`, where nobody could refuse the
    version, nothing before it can be undone and no state names the journal: the caller removes it
    (`drop_journal`). Raises NeedsReseed, with state `dirty`, when a word is not what the journal expects.
    """
    if local.state.phase is not Phase.CLEAN or local.state.position.root != step.base.root:
        raise NeedsReseed("the checkpoint is no longer at the version that was staged")
    require_readable(local)
    local.save(local.state.but(phase=Phase.PATCHING, active=step))
    failpoint("patch.begun", local.directory)
    _write_all(local, step, Direction.FORWARD, replay=False)
    failpoint("patch.written", local.directory)
    require_files(local)
    before = local.state.undo
    local.save(arrived(local, step.target, (*before, step) if undoable else ()))
    failpoint("patch.recorded", local.directory)
    if not undoable:
        for one in before:
            drop_journal(local, one)


def require_files(local: LocalCheckpoint) -> None:
    """Raises NeedsReseed, with state `dirty`, when a file is no longer the mapped one: its bytes were never
    checked. The caller holds the patch lock."""
    try:
        local.check_files()
    except NeedsReseed:
        local.save(local.state.but(phase=Phase.DIRTY))
        raise


def require_readable(local: LocalCheckpoint) -> None:
    """As `require_files`, and RetryLater when an engine that loads the directory would find more than the
    checkpoint in it."""
    require_files(local)
    local.check_alone()


def relabel(local: LocalCheckpoint, target: Position) -> None:
    """Records a version with the same bytes: equal roots need no patch."""
    if target.root != local.state.position.root:
        raise DamagedFile(f"version {target.version} has another root than the local checkpoint")
    state = local.state
    local.save(state.but(position=target, epoch=state.followed(target), generation=state.generation + 1))


def undo(local: LocalCheckpoint) -> None:
    """Goes back over all kept steps, newest first. The caller holds the patch lock."""
    while local.state.undo:
        step = local.state.undo[-1]
        require_files(local)
        local.save(local.state.but(phase=Phase.UNDOING, active=step))
        failpoint("undo.begun", local.directory)
        _write_all(local, step, Direction.BACK, replay=False)
        failpoint("undo.written", local.directory)
        require_files(local)
        local.save(arrived(local, step.base, local.state.undo[:-1]))
        failpoint("undo.recorded", local.directory)
        drop_journal(local, step)


def drop_journal(local: LocalCheckpoint, step: Step) -> None:
    """Of a step that the state does not name any more."""
    buffer_reuse.keep_journal(local.paths, local.paths.journal(step.journal))
    failpoint("journal.removed", local.directory)


def forget_undo(local: LocalCheckpoint) -> None:
    """Every engine serves the position: the way back is dropped."""
    if local.state.undo:
        steps = local.state.undo
        local.save(local.state.but(undo=()))
        failpoint("undo.forgotten", local.directory)
        for step in steps:
            drop_journal(local, step)


def arrived(local: LocalCheckpoint, position: Position, undo_steps: tuple[Step, ...]) -> LocalState:
    """Its state at `position`, from which `undo_steps` lead back."""
    state = local.state
    return state.but(
        phase=Phase.CLEAN,
        active=None,
        position=position,
        undo=undo_steps,
        epoch=state.followed(position),
        files=local.file_identities(),
        generation=state.generation + 1,
    )


def _write_all(local: LocalCheckpoint, step: Step, way: Direction, *, replay: bool) -> None:
    with JournalReader(local.paths.journal(step.journal), local.table) as journal:
        journal.require(local.state.run_id, step)
        try:
            compare_and_swap(local, journal, way, again=replay)
        except UnexpectedWordError as found:  # no thread writes any more
            local.save(local.state.but(phase=Phase.DIRTY))
            name = local.table[found.tensor].name
            raise NeedsReseed(
                f"{local.directory}: word {found.word} of {name} is not what the journal expects",
                remedy="stop whatever else writes to the local checkpoint; the next sync seeds it again",
            ) from found


def is_replayed(local: LocalCheckpoint) -> bool:
    """Whether `recover` writes words."""
    return local.state.phase in (Phase.PATCHING, Phase.UNDOING) and local.state.host.same_boot(local.host)


def recover(local: LocalCheckpoint, *, advance: Advance | None = None) -> None:
    """Finishes what a kill left behind. The caller holds the patch lock.

    After a kill while patching or undoing in the same boot, the journal is replayed and everything is
    re-hashed. After a reboot (or where the boot is unknown) no journal is trusted: everything is re-hashed,
    also when the files are not the ones that were left.
    Raises NeedsReseed when the bytes match no version that the state knows.
    """
    state = local.state
    if state.phase in (Phase.SEEDING, Phase.DIRTY):
        raise NeedsReseed(f"{local.directory} is {state.phase.value}", remedy="the next sync seeds it again")
    rebooted = not state.host.same_boot(local.host)
    if rebooted:
        _after_reboot(local, advance)
    elif is_replayed(local):
        _replay(local, advance)
    elif state.files != local.file_identities():
        rehash(local, advance=advance)
    drop_strays(local)


def _replay(local: LocalCheckpoint, advance: Advance | None) -> None:
    step = local.state.active
    if step is None:
        raise NeedsReseed(f"{local.directory}: its state names no journal")
    forward = local.state.phase is Phase.PATCHING
    try:
        _write_all(local, step, Direction.FORWARD if forward else Direction.BACK, replay=True)
    except DamagedFile as error:
        local.save(local.state.but(phase=Phase.DIRTY))
        raise NeedsReseed(error.message, remedy="the next sync seeds it again") from error
    failpoint("replay.written", local.directory)
    position = step.target if forward else step.base
    began = _require_bytes(local, position, advance)
    kept = tuple(known for known in local.state.undo if known != step)
    undo_steps = (*kept, step) if forward else kept
    local.save(arrived(local, position, undo_steps).but(last_full_hash=began))


def _after_reboot(local: LocalCheckpoint, advance: Advance | None) -> None:
    """Unsynced pages and journals may be gone: only the bytes themselves say where the checkpoint is."""
    report = full_hash(local, advance=advance)
    for position in known_positions(local.state):
        if report.root == position.root:
            local.save(arrived(local, position, ()).but(last_full_hash=report.began))
            return
    # no way back leads over a journal that was not synced, once this boot counts as the state's
    local.save(local.state.but(phase=Phase.DIRTY, undo=()))
    near = report.nearest(repairable(local.state))
    raise Differs(
        f"{local.directory}: other bytes in {counted(len(near.differing), 'tensor')} "
        "after a restart of the machine",
        near.position,
        near.differing,
    )


def known_positions(state: LocalState) -> tuple[Position, ...]:
    """Versions that the bytes may be, the likeliest first."""
    step = state.active
    return (state.position,) if step is None else (step.target, step.base)


def repairable(state: LocalState) -> tuple[Position, ...]:
    """Versions to repair towards: none that engines refused, where there is another."""
    blocked = {one.digest for one in state.blocked}
    known = known_positions(state)
    return tuple(position for position in known if position.digest not in blocked) or known


def _require_bytes(local: LocalCheckpoint, position: Position, advance: Advance | None) -> float:
    """Returns the unix time at which it began to read."""
    report = full_hash(local, position, advance=advance)
    if not report.intact:
        local.save(local.state.but(phase=Phase.DIRTY))
        names = report.differing
        raise Differs(
            f"{local.directory}: {', '.join(names[:3])} differ from version {position.version}",
            position,
            names,
        )
    return report.began


def rehash(local: LocalCheckpoint, *, advance: Advance | None = None) -> None:
    """Reads every byte and records that it agrees. Raises NeedsReseed, with state `dirty`, when it does not.
    The caller holds the patch lock."""
    require_files(local)
    began = _require_bytes(local, local.state.position, advance)
    local.save(local.state.but(last_full_hash=began, files=local.file_identities()))


def prove(local: LocalCheckpoint, seconds: float, *, advance: Advance | None = None) -> None:
    """Hashes every tensor whose last hash is more than `seconds` old. Raises Damaged, with state `dirty`,
    when one is not the version's. The time is not made durable here: the next save of the state does that."""
    proofs, began = local.proofs, local.proofs.clock()
    proofs.add_full_hash(local.state.last_full_hash)
    stale = proofs.before(began - seconds)
    if not stale.size:
        return
    found = hash_tensors(local.table, local, only=stale.tolist(), threads=local.threads, advance=advance)
    position = local.state.position
    wrong = differing(local.table, found, position.lanes, only=stale.tolist())
    # the path may lead to another file by now
    require_files(local)
    if wrong:
        local.save(local.state.but(phase=Phase.DIRTY))
        message = f"{local.directory}: damaged bytes in {', '.join(wrong[:3])} of version {position.version}"
        raise Damaged(message, position, wrong, whole=stale.size == len(local.table))
    proofs.add(stale, began)
    local.state = local.state.but(last_full_hash=time.time() - proofs.age)


def drop_strays(local: LocalCheckpoint) -> None:
    """Journals that no state names, spares, patches for engines, everything in the spool: leftovers of a
    kill."""
    named = {step.journal for step in local.state.steps}
    for path in local.paths.journals.iterdir():
        if path.stem not in named:
            path.unlink()
    buffer_reuse.drop(local.paths)
    drop_engine_patches(local.paths)
    empty_spool(local.paths)


class UnexpectedWordError(Exception):
    """A word that is none of those that the journal expects."""

    def __init__(self, tensor: int, word: int) -> None:
        self.tensor, self.word = tensor, word


def compare_and_swap(local: LocalCheckpoint, journal: JournalReader, way: Direction, *, again: bool) -> None:
    """Every record, as `JournalReader.compare_and_swap`. Raises UnexpectedWordError once no thread writes any
    more; some words are written then."""
    begin = local.begin_writing

    def swap(batch: PackedRecord | Lists) -> None:
        if isinstance(batch, PackedRecord):
            words = local.words(batch.tensor)
            word = journal.compare_and_swap(batch, words, way, again=again, begin=begin)
            failed = None if word is None else (batch.tensor, word)
        else:
            failed = swap_many(batch)
        if failed is not None:
            raise UnexpectedWordError(*failed)
        failpoint("patch.record", local.directory)

    def swap_many(lists: Lists) -> tuple[int, int] | None:
        tensors = lists.rows[:, 0]
        owners, homes = local.homes[tensors, 0], local.homes[tensors, 1:]
        for owner in np.unique(owners).tolist():
            own = owners == owner
            words = local.files[owner]
            failed = journal.compare_and_swap_many(
                lists.only(own), homes[own], words, way, again=again, begin=begin
            )
            if failed is not None:
                return failed
        return None

    for _ in ordered(swap, journal.batches(), local.threads, each=SMALL_RESULTS):
        pass
