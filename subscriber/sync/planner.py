"""Plans the way to the target, and goes it: seeds, relabels, or applies deltas."""

from __future__ import annotations

from weightcast.shared.base.errors import Refused, RetryLater, WrongRun
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.layout import LATEST, Pointer
from weightcast.shared.checkpoint.update.plan import Patch, Refuse, Relabel, Seed, Stay
from weightcast.shared.checkpoint.update.sources import Route
from weightcast.subscriber.groups.order import Order
from weightcast.subscriber.sync.apply import Apply
from weightcast.subscriber.sync.host import StepHost
from weightcast.subscriber.sync.loader import Loader
from weightcast.subscriber.sync.step_log import Aimed, NotReady, ReadFor, Seeded, Usable
from weightcast.subscriber.sync.target import Blocklist, Target, resolve


class MissingBase(Refused):
    """No full weights lead to the target, and no base is given."""


class Planner:
    """Plans the way of the local checkpoint to a version, and goes it. An error leaves it at a version, or in
    a phase that the next load finishes or takes back."""

    def __init__(self, host: StepHost, loader: Loader, apply: Apply, blocklist: Blocklist) -> None:
        self._host, self._loader, self._apply, self._blocklist = host, loader, apply, blocklist
        self._engines, self._updater = host.engines, host.updater
        self._options, self._log = host.options, host.log
        self._pointer_seen = False

    def route(self, channel: Channel, order: Order | None) -> Route:
        pointer = self._pointer(channel)
        target = self._options.target
        if order is not None:
            _require_run(channel, order)
            target = Target(str(order.version), order.version)
        version = resolve(target, channel.store, pointer)
        self._log.append(Aimed(version))
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
            raise NoChannel.within(channel.place)
        state = self._host.state
        if self._pointer_seen or (state is not None and state.position.version > 0):
            raise RetryLater(
                f"{channel.store.place(LATEST)} is gone",
                remedy="is the channel mounted? nothing is changed here",
            )
        return Pointer(0)

    def carry_out(self, channel: Channel, route: Route) -> None:
        match route.plan:
            case Stay(reason):
                self._host.degrade(reason)
            case Relabel() as plan:
                self._relabel(route, plan)
            case Seed() as plan:
                self._seed(channel, route, plan)
            case Patch() as plan:
                self._apply.versions(route, plan)
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
            if not self._updater.side_files.changed:  # else they are reloaded, as some read these then
                self._engines.relabel(local, before)
        self._host.moved("relabel", before, 1)
        if plan.then.legs:
            self._apply.versions(route, plan.then)

    def _seed(self, channel: Channel, route: Route, plan: Seed) -> None:
        before = self._host.state
        self._loader.stand_back()
        self._log.append(Usable(False))
        self._log.append(NotReady((f"seeding: {plan.reason}",)))
        self._host.enter("seeding")
        with self._log.timed("seed"):
            self._updater.seed(channel, route, plan, self._host.advance)
        self._log.append(Usable(True))
        self._loader.grant_read()
        nbytes = self._host.local().table.nbytes
        self._log.append(Seeded(nbytes))
        if plan.version:
            self._log.append(ReadFor("anchor", nbytes))
        self._host.moved("seed", None if before is None else before.position.version, 1)
        if plan.then.legs:
            self._apply.versions(route, plan.then)


def _require_run(channel: Channel, order: Order) -> None:
    if channel.file is not None and channel.file.run_id != order.run_id:
        raise WrongRun(
            f"{channel.place} is of run {channel.file.run_id}, the group's leader follows run "
            f"{order.run_id or 'of a foreign channel'}",
            remedy="give every host of a group the same channel",
        )
