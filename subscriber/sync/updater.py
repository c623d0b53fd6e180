"""Moves the local checkpoint: chooses the way to the target, then seeds, patches or relabels along it."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.shared.base.errors import Refused, RetryLater, WrongRun
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.index import ForeignIndex, Index
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.checkpoint.update.patch import require_readable
from weightcast.shared.checkpoint.update.plan import Patch, Refuse, Relabel, Seed, Stay
from weightcast.shared.checkpoint.update.sources import Route
from weightcast.shared.checkpoint.update.stage import Staged
from weightcast.shared.checkpoint.verify.hashing import Damaged
from weightcast.subscriber.groups.order import Order
from weightcast.subscriber.sync.host import StepHost
from weightcast.subscriber.sync.in_sync import Aligner, Blocklist
from weightcast.subscriber.sync.loader import Opener, Prover
from weightcast.subscriber.sync.target import Target, resolve


class MissingBase(Refused):
    """No full weights lead to the target, and no base is given."""


class Mover:
    """Brings the local checkpoint to a version, by the plan of a route. An error leaves it at a version, or
    in a phase that the next load finishes or takes back."""

    def __init__(
        self, host: StepHost, opener: Opener, aligner: Aligner, blocklist: Blocklist, prover: Prover
    ) -> None:
        self._host, self._opener, self._aligner, self._blocklist = host, opener, aligner, blocklist
        self._prover = prover
        self._engines, self._lead, self._updater = host.engines, host.lead, host.updater
        self._options, self._view = host.options, host.view
        self._pointer_seen = False
        self.kept: Staged | None = None
        """staged ahead, for the patch that follows"""

    def route(self, channel: Channel, order: Order | None) -> Route:
        pointer = self._pointer(channel)
        target = self._options.target
        if order is not None:
            _require_run(channel, order)
            target = Target(str(order.version), order.version)
        version = resolve(target, channel.directory, pointer)
        self._view.target_version = version
        if self._updater.local is not None:
            self._blocklist.unblock_due(self._updater.local)
        return self._updater.route(channel, pointer, version, exact=target.exact)

    def _pointer(self, channel: Channel) -> Pointer:
        """Before the first version the target is the base, so that a host is ready when that comes."""
        pointer = channel.pointer()
        if pointer is not None:
            self._pointer_seen = True
            return pointer
        if channel.foreign:
            raise NoChannel.within(channel.directory)
        state = self._host.state
        if self._pointer_seen or (state is not None and state.position.version > 0):
            raise RetryLater(
                f"{channel.layout.latest} is gone", remedy="is the channel mounted? nothing is changed here"
            )
        return Pointer(0, None, channel.directory)

    def carry_out(self, channel: Channel, route: Route) -> None:
        match route.plan:
            case Stay(reason):
                self._host.degrade(reason)
            case Relabel() as plan:
                self._relabel(route, plan)
            case Seed() as plan:
                self._seed(channel, route, plan)
            case Patch() as plan:
                self._patch(route, plan)
            case Refuse(reason, _, True):
                self._host.degrade(reason)
            case Refuse(reason, remedy, _):
                without = self._host.options.base is None and not self._updater.damaged_sources.damaged
                raise (MissingBase if without else Refused)(reason, remedy=remedy)

    def _relabel(self, route: Route, plan: Relabel) -> None:
        local = self._host.local()
        before = local.state.position.version
        with local.patching(wait=self._host.wait):
            self._updater.relabel(route, plan)
            if not self._updater.changed_configs:  # else they are reloaded, as some read these then
                self._engines.relabel(local, before)
        self._host.moved("relabel", before, 1)
        if plan.then.legs:
            self._patch(route, plan.then)

    def _seed(self, channel: Channel, route: Route, plan: Seed) -> None:
        before = self._host.state
        self._opener.stand_back()
        self._host.usable, self._view.not_ready = False, (f"seeding: {plan.reason}",)
        self._host.enter("seeding")
        with self._host.watch.timed("seed"):
            self._updater.seed(channel, route, plan, self._host.advance)
        self._host.usable = True
        self._opener.let_read()
        self._host.watch.bytes = self._host.local().table.nbytes
        if plan.version:
            self._host.count_read("anchor", self._host.watch.bytes)
        self._host.moved("seed", None if before is None else before.position.version, 1)
        if plan.then.legs:
            self._patch(route, plan.then)

    def _patch(self, route: Route, plan: Patch) -> None:
        before = self._host.local().state.position.version
        self._engines.retry_at_once()
        folded = sum(len(leg) for leg in plan.legs)
        for leg in plan.legs:
            with self._lead.gathering(leg[-1], self._host.local().state):
                staged = self.prepare(route, leg)
                self._aligner.await_prepared()
                self._apply(staged, last=leg is plan.legs[-1], before=before, folded=folded)

    def prepare(self, route: Route, leg: Sequence[int]) -> Staged:
        if self.kept is not None and self.kept.step.target.version == leg[-1]:
            kept, self.kept = self.kept, None
            return kept
        self.drop_kept()
        if self._aligner.may_be_refused:
            self._prover.ahead()
        before = self._view.bytes_read
        try:
            staged = self._updater.prepare(route, leg, self._host.advance_fetch)
        finally:
            self._divide(route, leg, self._view.bytes_read - before)
        self._host.watch.enter("")
        self._host.watch.changes += staged.changes
        last, _ = route.delta(leg[-1])
        self._host.watch.step = last.step if isinstance(last, Index) else None
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
        sizes = {version: _size(route.delta(version)[0]) for version in leg}
        older = sum(size for version, size in sizes.items() if route.leads_from(version) != version - 1)
        skipped = nbytes * older // max(1, sum(sizes.values()))
        self._view.bytes_by_cause["skip"] += skipped
        self._view.bytes_by_cause["step"] += nbytes - skipped

    def _apply(self, staged: Staged, *, last: bool, before: int = 0, folded: int = 0) -> None:
        """Engines that map the files are paused for every leg; the others are reloaded once, at the last."""
        if self._options.fetch_ahead or not last:
            target = self._options.target
            limit = self._view.target_version if target.exact else None
            self._updater.fetch_ahead(staged.step.target.version, limit)
        if last:
            self._offer(staged)
        self._host.watch.enter("lock")
        with self._host.local().patching(wait=self._host.wait):
            self._host.watch.enter("")
            # what an operator must mend is told before engines are paused for it
            require_readable(self._host.local())
            self._engines.look()
            try:
                results = self._aligner.bring(staged.step.target.version, lambda: self._write(staged), last)
            except Damaged:
                # the version is here; engines load it after the repair
                self._host.moved("patch", before, folded)
                raise
            if last:
                self._host.moved("patch", before, folded)
                self._aligner.settle(results)

    def _offer(self, staged: Staged) -> None:
        if self._engines.lives:
            self._host.enter("staging")
            with self._host.watch.timed("offer"):
                self._engines.offer(self._host.local(), staged.step, self._options.readable_by)

    def _write(self, staged: Staged) -> None:
        self._aligner.hold(staged.step.target)
        self._host.enter("patching")
        with self._host.watch.timed("patch"):
            undoable = self._aligner.may_be_refused
            self._updater.patch(staged, undoable=undoable)
            if not undoable:
                self._updater.drop_journal(staged)
        self._host.enter("reloading")


def _size(index: Index | ForeignIndex) -> int:
    """A foreign index states none: all its versions count alike."""
    return sum(file.size for file in index.files) if isinstance(index, Index) else 1


def _require_run(channel: Channel, order: Order) -> None:
    if channel.file is not None and channel.file.run_id != order.run_id:
        raise WrongRun(
            f"{channel.directory} is of run {channel.file.run_id}, the group's leader follows run "
            f"{order.run_id or 'of a foreign channel'}",
            remedy="give every host of a group the same channel",
        )
