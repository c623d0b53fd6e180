"""The order of a version: local checkpoint and engines, under one lock. `Apply.versions` is the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Blocked, Phase, Position, Step
from weightcast.shared.checkpoint.update.fetch import staging_bytes, staging_room
from weightcast.shared.checkpoint.update.patch import prove, require_readable
from weightcast.shared.checkpoint.update.plan import Patch
from weightcast.shared.checkpoint.update.sources import Route
from weightcast.shared.checkpoint.update.stage import Staged
from weightcast.shared.checkpoint.verify.hashing import Damaged
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.engines.live import Offer, write_patch
from weightcast.subscriber.engines.reload import Reload
from weightcast.subscriber.engines.rules import (
    REASON_LIMIT,
    EngineResult,
    block,
    is_confirmed,
    needs_undo,
    retry_delay,
    rolls_back,
    without_served,
)
from weightcast.subscriber.status import ReloadProof
from weightcast.subscriber.sync.host import StepHost

MOST_UNDO_STEPS = 8
"""journals kept for engines that neither confirm nor refuse the local version"""
ALWAYS_BYTES = 1 << 30
"""a local checkpoint up to this size is hashed in full before every reload; that takes about 0.1 s"""


class Apply:
    """Patches the local checkpoint and reloads engines; goes back from a version that they refuse. An error
    leaves the local checkpoint at a version, or in a phase that the next load finishes or takes back."""

    def __init__(self, host: StepHost) -> None:
        self._host, self._move, self._options = host, host.move, host.options
        self._engines, self._lead, self._updater = host.engines, host.lead, host.updater
        self.blocklist, self._prover = Blocklist(host), Prover(host)
        self.kept: Staged | None = None
        """staged ahead, for the patch that follows; the next load deletes its journal"""
        self._failures: dict[str, int] = {}
        """reloads in a row that left no engine on the version with this digest"""

    def versions(self, route: Route, plan: Patch) -> None:
        """To the plan's target, leg by leg. Engines that map the files are paused for every leg; the others
        are reloaded at the last, and earlier where the next leg needs the space of the journals that are kept
        until they confirm a version."""
        local = self._host.local()
        before, folded = local.state.position.version, 0
        self._engines.retry_at_once()
        for leg, after in zip(plan.legs, (*plan.legs[1:], ()), strict=True):
            folded += len(leg)
            with self._lead.gathering(leg[-1], local.state):
                staged = self.prepare(route, leg)
                last = not after or self._needs_room(route, staged, after)
                with self._asking_group():
                    self._lead.await_prepared()
                self._fetch_ahead(route.channel, staged, last)
                if last:
                    self._offer(staged)
                    self._host.bring_draft(staged.step.target)
                with self._locked(local):
                    self._engines.look()
                    try:
                        with self._reloading(leg[-1], only=None if last else ()) as reload:
                            reload.pause_mapping()
                            self.hold(staged.step.target)
                            self._patch(staged)
                            self._reload(reload)
                    except Damaged:
                        # bytes that it did not touch: it is on disk, and engines load it after the repair
                        self._host.moved("patch", before, folded)
                        raise
                    if last:
                        self._host.moved("patch", before, folded)
                        self._settle(reload.results)
                        if local.state.undo or local.state.position != staged.step.target:
                            return
                        before, folded = leg[-1], 0

    def _needs_room(self, route: Route, staged: Staged, after: Sequence[int]) -> bool:
        """Whether engines have to confirm what is staged before the leg `after` can be."""
        wanted = sum(staging_bytes(route.delta(version).index) for version in after)
        blocked = {one.digest for one in self._host.local().state.blocked}
        is_asked = bool(self._engines.engines) and staged.step.target.digest not in blocked
        return is_asked and wanted > staging_room(self._updater.paths)

    def _local_version(self, due: Sequence[HostEngine]) -> None:
        """Brings these engines to the local version: the files are right already."""
        self._prover.ahead()
        self._host.enter("reloading")
        local = self._host.local()
        self._host.bring_draft(local.state.position)
        with self._locked(local):
            version = local.state.position.version
            with self._reloading(version, only=due) as reload:
                self._reload(reload)
            taken = any(result.confirmed_by is not None for result in reload.results)
            self._host.moved("reload", version, 0, taken)
            self._settle(reload.results)

    def _version_before(self, local: LocalCheckpoint, results: Sequence[EngineResult]) -> None:
        """Back from a version that the engines refused. The patch lock is held."""
        refused = local.state.position
        reason = "; ".join(f"{result.name}: {result.reason}" for result in results if result.reason)
        blocked = self.blocklist.blocked_with(refused, reason)
        local.save(local.state.but(blocked=blocked, engines=without_served(local.state.engines)))
        failpoint("refused.blocked")
        self._host.degrade(f"the engines refused version {refused.version}: {reason}")
        self._engines.retry_at_once()
        self._move.begin()
        base = local.state.undo[0].base
        with self._reloading(base.version) as reload:
            reload.pause_mapping()
            self.hold(base)
            self.undo()
            self._reload(reload)
        failpoint("refused.served")
        self._host.moved("undo", refused.version, 0)

    @contextmanager
    def _locked(self, local: LocalCheckpoint) -> Iterator[None]:
        """The patch lock. What an operator must fix is raised before engines are paused."""
        self._move.enter("lock")
        with self._host.patching(local):
            self._move.enter("")
            require_readable(local)
            yield

    def _reloading(self, version: int, only: Sequence[HostEngine] | None = None) -> Reload:
        return Reload(self._engines, self._host.local(), version, only=only, report=self._host.tell_reload)

    def _reload(self, reload: Reload) -> None:
        """Engines load only files that were proven right before. Raises Damaged."""
        for batch in reload.batches():
            self._prover.now()
            reload.run(batch)
        self._move.reloaded(reload.results)

    def prepare(self, route: Route, leg: Sequence[int]) -> Staged:
        """Fetched and staged, while engines serve."""
        if self.kept is not None and self.kept.step.target.version == leg[-1]:
            kept, self.kept = self.kept, None
            return kept
        self.drop_kept()
        if self._may_be_refused:
            self._prover.ahead()
        before = self._host.bytes_read
        last = route.delta(leg[-1]).index
        if isinstance(last, Index):
            self._host.fetch_bytes = sum(_size(route.delta(version).index) for version in leg)
        try:
            staged = self._updater.prepare(route, leg, self._host.advance_fetch)
        finally:
            self._divide(route, leg, self._host.bytes_read - before)
        self._move.enter("")
        self._move.changed(staged.changes, last.step if isinstance(last, Index) else None)
        return staged

    def drop_kept(self) -> None:
        """What was staged ahead and is not wanted any more, with its journal."""
        kept, self.kept = self.kept, None
        if kept is not None:
            self._host.local().paths.journal(kept.step.journal).unlink(missing_ok=True)

    def _divide(self, route: Route, leg: Sequence[int], nbytes: int) -> None:
        """Among single steps and deltas from older versions, by the sizes that their indexes state."""
        if not nbytes:
            return
        sizes = {version: _size(route.delta(version).index) for version in leg}
        older = sum(size for version, size in sizes.items() if route.leads_from(version) != version - 1)
        skipped = nbytes * older // max(1, sum(sizes.values()))
        self._host.read_for("skip", skipped, fetched=True)
        self._host.read_for("step", nbytes - skipped, fetched=True)

    def _fetch_ahead(self, channel: Channel, staged: Staged, last: bool) -> None:
        if self._options.fetch_ahead or not last:
            limit = self._host.status.target_version if self._options.target.exact else None
            self._updater.fetch_ahead(channel, staged.step.target.version, limit)

    def _offer(self, staged: Staged) -> None:
        if not (self._engines.lives or self._options.transfer_patch):
            return
        self._host.enter("staging")
        with self._move.timed("offer"):
            if self._options.transfer_patch:
                self.stage_patch((staged.step,))
            else:
                self._engines.offer(self._host.local(), staged.step, self._options.readable_by)

    def stage_patch(self, steps: Sequence[Step]) -> None:
        """For engines that others bring to the version."""
        made = write_patch(self._host.local(), steps, steps[0].base.version, self._options.readable_by)
        if isinstance(made, Offer):
            self._host.degrade(f"no patch of version {steps[-1].target.version}: {made.reason}")

    def hold(self, position: Position) -> None:
        """The group's other hosts come to `position` and keep still."""
        with self._asking_group():
            self._lead.hold(position)

    @contextmanager
    def _asking_group(self) -> Iterator[None]:
        if self._lead.members:
            self._host.enter("gathering")
        with self._move.timed("group"):
            yield

    def _patch(self, staged: Staged) -> None:
        with self._patching():
            undoable = self._may_be_refused
            self._updater.patch(staged, undoable=undoable)
            if not undoable:
                self._updater.drop_journal(staged)

    def undo(self) -> None:
        with self._patching():
            self._updater.undo()

    @contextmanager
    def _patching(self) -> Iterator[None]:
        self._host.enter("patching")
        with self._move.timed("patch"):
            yield
        self._host.enter("reloading")

    def _settle(self, results: Sequence[EngineResult]) -> None:
        """After a reload, under its lock: is the way back taken, kept or dropped?"""
        local = self._host.local()
        position = local.state.position
        if self._confirmed():
            self._failures.clear()
            self._lead.serves()
            self._updater.forget_undo()
            self.blocklist.unblock(position.digest)
            return
        if self._lead.hindered or self._options.group_follower:
            # no engine is at fault, or none is known here
            return
        failures = self._failures.get(position.digest, 0) + any(r.attempts > 0 for r in results)
        self._failures = {position.digest: failures}
        if local.state.undo and rolls_back(results, failures, self._engines.order):
            self._version_before(local, results)
        elif not needs_undo(results) or len(local.state.undo) > MOST_UNDO_STEPS:
            self._updater.forget_undo()

    @property
    def _may_be_refused(self) -> bool:
        """Whether anybody is asked to take the local version: an engine, or the leader's for a follower."""
        return bool(self._engines.engines) or self._options.group_follower

    def _confirmed(self) -> bool:
        """Whether an engine took the local version; without engines nobody is asked. A follower's leader says
        so."""
        state = self._host.local().state
        if self._options.group_follower:
            return len(state.undo) > MOST_UNDO_STEPS
        names = [engine.name for engine in self._engines.engines]
        return not names or is_confirmed(state.engines, names, state.position.version)

    def bring_engines(self) -> None:
        """Brings engines that do not hold the local version to it, and hosts of the group that strayed. Not
        any more when the process is to end."""
        local = self._updater.local
        if local is None or local.state.phase is not Phase.CLEAN:
            return
        self._engines.resume_late(local)
        if self._host.stop(0.0):
            return
        astray = self._astray(local)
        due = self._engines.due(local.state)
        if due or astray:
            with self._lead.gathering(local.state.position.version, local.state):
                self.hold(local.state.position)
                if due:
                    self._local_version(due)
        elif self._confirmed():
            self._updater.forget_undo()

    def prove_held(self) -> None:
        """Engines elsewhere are about to read the local version."""
        self._prover.ahead()
        with self._locked(self._host.local()):
            self._prover.now()

    def _astray(self, local: LocalCheckpoint) -> bool:
        """Whether a host of the group is elsewhere. Engines that map its files are then in doubt."""
        seen = self._lead.look(local.state.position)
        for trouble in seen.troubles:
            self._host.degrade(trouble)
        mapping = {engine.name for engine in self._engines.mapping}
        if seen.astray and seen.differs and mapping & set(local.state.engines):
            kept = {name: one for name, one in local.state.engines.items() if name not in mapping}
            local.save(local.state.but(engines=kept))
        return seen.astray


def _size(index: Index | ForeignIndex) -> int:
    """A foreign index states none: all its versions count alike."""
    return sum(file.size for file in index.files) if isinstance(index, Index) else 1


class Prover:
    """What is proven of the local bytes before a reload. Raises Damaged: the caller repairs first."""

    def __init__(self, host: StepHost) -> None:
        self._host = host

    @property
    def _bound(self) -> float:
        is_small = self._host.local().table.nbytes <= ALWAYS_BYTES
        return 0.0 if is_small else self._host.options.verified_within

    def ahead(self) -> None:
        """While engines serve and nothing is locked. At half the bound, so that the reload that follows finds
        little or nothing to hash."""
        if self._bound:
            self._host.enter("hashing")
            self._prove(self._bound / 2, self._host.advance)

    def now(self) -> None:
        """Under the patch lock, right before a reload. A stop is not obeyed: engines may be paused."""
        self._prove(self._bound, None)
        age = round(self._host.local().proofs.age, 3)
        self._note(bound_seconds=self._bound, age_seconds=age, at=self._host.now())

    def _prove(self, seconds: float, advance: Advance | None) -> None:
        try:
            with self._host.move.timed("verify"):
                prove(self._host.local(), seconds, advance=advance)
        except Damaged as found:
            known = self._host.status.reload_proof
            faults = len(found.tensors) + (0 if known is None else known.faults)
            self._note(faults=faults, last_fault=found.message, last_fault_at=self._host.now())
            raise

    def _note(self, **facts: Any) -> None:
        known = self._host.status.reload_proof or ReloadProof(bound_seconds=self._bound)
        self._host.note(reload_proof=known.but(**facts))


class Blocklist:
    """The list itself is part of the local state, by digest; here is when each is due."""

    def __init__(self, host: StepHost) -> None:
        self._host = host
        self._retry_at: dict[str, float] = {}
        self._attempts: dict[str, int] = {}

    def unblock_due(self) -> None:
        """Versions whose time has come are taken again."""
        now, due = self._host.clock(), set[str]()
        for one in self._host.local().state.blocked:
            if self._retry_at.setdefault(one.digest, now + retry_delay(one.attempts)) <= now:
                self._attempts[one.digest] = one.attempts
                del self._retry_at[one.digest]
                due.add(one.digest)
        self.unblock(*due)

    def unblock(self, *digests: str) -> None:
        local = self._host.local()
        kept = tuple(one for one in local.state.blocked if one.digest not in digests)
        if kept != local.state.blocked:
            local.save(local.state.but(blocked=kept))

    def blocked_with(self, refused: Position, reason: str) -> tuple[Blocked, ...]:
        """The list with the local version."""
        attempts = self._attempts.pop(refused.digest, 0) + 1
        one = Blocked(refused.version, refused.digest, reason[:REASON_LIMIT], attempts)
        return block(self._host.local().state.blocked, one)
