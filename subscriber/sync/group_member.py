"""What a follower of an engine group does differently: it gets ready, holds and goes back by order."""

from __future__ import annotations

from weightcast.shared.channel.channel import Channel
from weightcast.shared.checkpoint.update.patch import require_readable
from weightcast.shared.checkpoint.update.plan import Patch, Relabel, Seed
from weightcast.shared.checkpoint.update.sources import Route
from weightcast.shared.checkpoint.update.stage import Staged
from weightcast.shared.files.paths import is_file
from weightcast.subscriber.engines.live import Offer, write_patch
from weightcast.subscriber.groups.order import Order
from weightcast.subscriber.sync.apply import Apply
from weightcast.subscriber.sync.host import StepHost
from weightcast.subscriber.sync.loader import Loader, Prover
from weightcast.subscriber.sync.planner import Planner
from weightcast.subscriber.sync.step_log import Aimed


class GroupMember:
    """Changes what a step does, by `order`; without one it changes nothing."""

    def __init__(
        self, host: StepHost, loader: Loader, apply: Apply, planner: Planner, prover: Prover
    ) -> None:
        self._host, self._loader, self._apply, self._planner = host, loader, apply, planner
        self._prover = prover
        self._updater, self._log, self._options = host.updater, host.log, host.options
        self.order: Order | None = None
        """what the leader wants"""
        self.is_prepared = False
        """the ordered version is staged, is local already, or can come only when it is held"""

    def require_readable(self) -> None:
        """Engines elsewhere are about to read the local version."""
        local = self._host.local()
        self._prover.ahead()
        with local.patching(wait=self._host.wait):
            require_readable(local)
            self._prover.now()

    def lies_as_ordered(self, order: Order) -> bool:
        """Then the channel need not be there."""
        if order.phase != "hold":
            return False
        if self._updater.local is None:
            self._loader.load(None)
        self._log.append(Aimed(order.version))
        return self._host.position is not None and order.is_at(self._host.position)

    def goes_back(self, order: Order) -> bool:
        """Undoes what engines elsewhere in the group refused, if that is what the order wants."""
        local = self._updater.local
        if local is None or order.phase != "hold" or not local.state.undo:
            return False
        if not order.is_at(local.state.undo[0].base):
            return False
        before = local.state.position.version
        with local.patching(wait=self._host.wait):
            self._apply.undo()
        self._host.moved("undo", before, 0)
        return True

    def make_ready(self, channel: Channel, route: Route) -> None:
        """What can be done while engines serve: nothing of the local checkpoint is written."""
        match route.plan:
            case Patch() as plan:
                staged = self._apply.prepare_ahead(route, plan.legs[0])
                if self._options.group_patch:
                    self._stage_patch(staged)
                self.is_prepared = True
            case Seed() | Relabel():
                self.is_prepared = True
            case _:
                self._planner.carry_out(channel, route)

    def _stage_patch(self, staged: Staged) -> None:
        """For the part of an engine that reads this host's files; without it the engine loads from disk."""
        local = self._host.local()
        steps = (*local.state.undo, staged.step)
        made = write_patch(local, steps, steps[0].base.version, self._options.readable_by)
        if isinstance(made, Offer):
            self._host.degrade(f"no patch for the group's engines: {made.reason}")

    def drop_kept(self) -> None:
        """What was staged for an order that has ended, or was lost in a repair."""
        kept, order, local = self._apply.kept, self.order, self._updater.local
        if kept is None or local is None:
            return
        wanted = order is not None and order.version >= kept.step.target.version
        is_there = is_file(local.paths.journal(kept.step.journal))
        if not wanted or not is_there or kept.step.base != local.state.position:
            self._apply.drop_kept()
