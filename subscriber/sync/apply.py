"""The order of a version: local checkpoint and engines, under one lock. `Apply.versions` is the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Phase, Position
from weightcast.shared.checkpoint.update.patch import require_readable
from weightcast.shared.checkpoint.update.plan import Patch
from weightcast.shared.checkpoint.update.sources import Route
from weightcast.shared.checkpoint.update.stage import Staged
from weightcast.shared.checkpoint.verify.hashing import Damaged
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.engines.reload import Reload
from weightcast.subscriber.engines.rules import (
    EngineResult,
    is_confirmed,
    needs_undo,
    rolls_back,
    without_served,
)
from weightcast.subscriber.sync.host import StepHost
from weightcast.subscriber.sync.loader import Prover
from weightcast.subscriber.sync.step_log import Changed, ReadFor, Reloaded
from weightcast.subscriber.sync.target import Blocklist

MOST_UNDO_STEPS = 8
"""journals kept for engines that neither confirm nor refuse the local version"""


class Apply:
    """Patches the local checkpoint and reloads engines; goes back from a version that they refuse. An error
    leaves the local checkpoint at a version, or in a phase that the next load finishes or takes back."""

    def __init__(self, host: StepHost, blocklist: Blocklist, prover: Prover) -> None:
        self._host, self._blocklist, self._prover = host, blocklist, prover
        self._engines, self._lead, self._updater = host.engines, host.lead, host.updater
        self._options, self._log = host.options, host.log
        self.kept: Staged | None = None
        """staged ahead, for the patch that follows"""
        self._failures: dict[str, int] = {}
        """reloads in a row that left no engine on the version with this digest"""

    def versions(self, route: Route, plan: Patch) -> None:
        """To the plan's target, leg by leg. Engines that map the files are paused for every leg; the others
        are reloaded once, at the last."""
        local = self._host.local()
        before, folded = local.state.position.version, sum(map(len, plan.legs))
        self._engines.retry_at_once()
        for leg in plan.legs:
            last = leg is plan.legs[-1]
            with self._lead.gathering(leg[-1], local.state):
                staged = self.prepare(route, leg)
                self._await_prepared()
                self._fetch_ahead(staged, last)
                if last:
                    self._offer(staged)
                with self._locked(local):
                    self._engines.look()
                    with (
                        self._recorded_if_damaged(before, folded),
                        self._reloading(leg[-1], only=None if last else ()) as reload,
                    ):
                        reload.pause_mapping()
                        self.hold(staged.step.target)
                        self._patch(staged)
                        self._reload(reload)
                    if last:
                        self._host.moved("patch", before, folded)
                        self._settle(reload.results)

    def local_version(self, due: Sequence[HostEngine]) -> None:
        """Brings these engines to the local version: the files are right already."""
        self._prover.ahead()
        self._host.enter("reloading")
        local = self._host.local()
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
        blocked = self._blocklist.blocked_with(local, reason)
        local.save(local.state.but(blocked=blocked, engines=without_served(local.state.engines)))
        failpoint("refused.blocked")
        self._host.degrade(f"the engines refused version {refused.version}: {reason}")
        self._engines.retry_at_once()
        self._log.begin_move()
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
        self._log.begin_phase("lock")
        with local.patching(wait=self._host.wait):
            self._log.end_phase()
            require_readable(local)
            yield

    def _reloading(self, version: int, only: Sequence[HostEngine] | None = None) -> Reload:
        return Reload(self._engines, self._host.local(), version, only=only, report=self._host.tell_reload)

    def _reload(self, reload: Reload) -> None:
        """Engines load only files that were proven right before. Raises Damaged."""
        for batch in reload.batches():
            self._prover.now()
            reload.run(batch)
        self._log.append(Reloaded(reload.results))

    @contextmanager
    def _recorded_if_damaged(self, before: int, folded: int) -> Iterator[None]:
        """The version is on disk where bytes that it did not touch are damaged; engines load it after the
        repair."""
        try:
            yield
        except Damaged:
            self._host.moved("patch", before, folded)
            raise

    def prepare(self, route: Route, leg: Sequence[int]) -> Staged:
        """Fetched and staged, while engines serve."""
        if self.kept is not None and self.kept.step.target.version == leg[-1]:
            kept, self.kept = self.kept, None
            return kept
        self.drop_kept()
        if self._may_be_refused:
            self._prover.ahead()
        before = self._log.view.bytes_read
        try:
            staged = self._updater.prepare(route, leg, self._host.advance_fetch)
        finally:
            self._divide(route, leg, self._log.view.bytes_read - before)
        self._log.end_phase()
        last = route.delta(leg[-1]).index
        self._log.append(Changed(staged.changes, last.step if isinstance(last, Index) else None))
        return staged

    def prepare_ahead(self, route: Route, leg: Sequence[int]) -> Staged:
        """For the patch that follows in a later step."""
        self.kept = self.prepare(route, leg)
        return self.kept

    def forget_kept(self) -> None:
        """The local checkpoint is not open any more: the next load deletes the journal."""
        self.kept = None

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
        self._log.append(ReadFor("skip", skipped, fetched=True))
        self._log.append(ReadFor("step", nbytes - skipped, fetched=True))

    def _fetch_ahead(self, staged: Staged, last: bool) -> None:
        if self._options.fetch_ahead or not last:
            limit = self._log.view.target_version if self._options.target.exact else None
            self._updater.fetch_ahead(staged.step.target.version, limit)

    def _offer(self, staged: Staged) -> None:
        if self._engines.lives:
            self._host.enter("staging")
            with self._log.timed("offer"):
                self._engines.offer(self._host.local(), staged.step, self._options.readable_by)

    def _await_prepared(self) -> None:
        if self._lead.members:
            self._host.enter("gathering")
        with self._log.timed("group"):
            self._lead.await_prepared()

    def hold(self, position: Position) -> None:
        """The group's other hosts come to `position` and keep still."""
        if self._lead.members:
            self._host.enter("gathering")
        with self._log.timed("group"):
            self._lead.hold(position)

    def _patch(self, staged: Staged) -> None:
        self._host.enter("patching")
        with self._log.timed("patch"):
            undoable = self._may_be_refused
            self._updater.patch(staged, undoable=undoable)
            if not undoable:
                self._updater.drop_journal(staged)
        self._host.enter("reloading")

    def undo(self) -> None:
        self._host.enter("patching")
        with self._log.timed("patch"):
            self._updater.undo()
        self._host.enter("reloading")

    def _settle(self, results: Sequence[EngineResult]) -> None:
        """After a reload, under its lock: is the way back taken, kept or dropped?"""
        local = self._host.local()
        position = local.state.position
        if self.confirmed():
            self._failures.clear()
            self._lead.serves()
            self._updater.forget_undo()
            self._blocklist.unblock(local, position.digest)
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

    def confirmed(self) -> bool:
        """Whether an engine took the local version; without engines nobody is asked. A follower's leader says
        so."""
        state = self._host.local().state
        if self._options.group_follower:
            return len(state.undo) > MOST_UNDO_STEPS
        names = [engine.name for engine in self._engines.engines]
        return not names or is_confirmed(state.engines, names, state.position.version)


def _size(index: Index | ForeignIndex) -> int:
    """A foreign index states none: all its versions count alike."""
    return sum(file.size for file in index.files) if isinstance(index, Index) else 1


class InSync:
    """Who does not hold the local version is brought to it."""

    def __init__(self, host: StepHost, apply: Apply) -> None:
        self._host, self._apply = host, apply
        self._engines, self._lead, self._updater = host.engines, host.lead, host.updater

    def bring(self) -> None:
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
                self._apply.hold(local.state.position)
                if due:
                    self._apply.local_version(due)
        elif self._apply.confirmed():
            self._updater.forget_undo()

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
