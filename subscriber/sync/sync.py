"""One pass of a host: local checkpoint and engines towards the target. The loop is elsewhere.

Order of a version: fetch and stage while engines serve and no lock is held; then, under the patch lock,
patch, reload, record. After any error the next pass starts from the disk. A follower of an engine group goes
by its leader's order instead: it gets ready, holds and goes back.
"""

from __future__ import annotations

from weightcast.shared.base.errors import NeedsReseed, Refused, RetryLater, Stopped, WeightcastError, WrongRun
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel, NoChannel
from weightcast.shared.channel.layout import LATEST, Pointer
from weightcast.shared.channel.skyrl import foreign_pointer
from weightcast.shared.checkpoint.local_checkpoint import grant_read
from weightcast.shared.checkpoint.state.locks import EngineLoads
from weightcast.shared.checkpoint.state.state import read_state
from weightcast.shared.checkpoint.update.plan import Patch, Refuse, Relabel, Seed, Stay
from weightcast.shared.checkpoint.update.sources import Route
from weightcast.shared.checkpoint.verify.hashing import Damaged, Scrub
from weightcast.shared.files.paths import is_file
from weightcast.subscriber.engines.host import Engines
from weightcast.subscriber.engines.live import EngineVerify
from weightcast.subscriber.engines.rules import in_doubt, without_served
from weightcast.subscriber.groups.lead import Lead
from weightcast.subscriber.groups.messages import Order
from weightcast.subscriber.status import HostStatus
from weightcast.subscriber.sync.adapters import Adapters
from weightcast.subscriber.sync.apply import Apply
from weightcast.subscriber.sync.draft import Draft
from weightcast.subscriber.sync.host import Callbacks, EnginesFirst, StepHost
from weightcast.subscriber.sync.options import SyncOptions, Target


class MissingBase(Refused):
    """No full weights lead to the target, and no base is given."""


class Sync:
    """One host. Used by one thread. An error leaves the local checkpoint at a version, or in a phase that the
    next load finishes or takes back."""

    def __init__(
        self,
        options: SyncOptions,
        engines: Engines | None = None,
        lead: Lead | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.options = options
        self.engines = Engines() if engines is None else engines
        self.lead = Lead() if lead is None else lead
        self.host = StepHost(
            options, self.engines, self.lead, Callbacks() if callbacks is None else callbacks
        )
        self.updater = self.host.updater
        self._apply = Apply(self.host)
        self.adapters = Adapters(self.host)
        self.draft = Draft(self.host)
        self._order: Order | None = None
        self._reads_all = False
        """the next load re-hashes every byte, and what is not the version's is repaired"""
        self._pointer_seen = False
        self._channel: Channel | None = None
        self._settled = False
        """the last pass ended at the target"""
        self._pointed: Pointer | None = None
        """read in this pass already"""
        self.is_prepared = False
        """of a follower: the ordered version is staged, is local already, or can come only when it is held"""

    @property
    def status(self) -> HostStatus:
        """As last shown. Read by any thread."""
        return self.host.shown

    def close(self) -> None:
        self.adapters.close()
        self.draft.close()
        self.updater.close()
        self.engines.close()
        self.lead.close()
        self.host.not_ready("stopped")
        self.host.enter("stopped")

    def sync_once(self, order: Order | None = None) -> HostStatus:
        """`order`: of a follower in an engine group, what its leader wants. Raises what keeps the local
        checkpoint from the target; what keeps an engine from it is part of the status."""
        self._order = order
        return self._pass()

    def _pass(self) -> HostStatus:
        self.host.begin()
        try:
            self._step()
        except BaseException as error:
            self.updater.release()
            self._apply.kept = None
            failure = self.host.failed(error)
            if isinstance(error, Refused):
                self.host.degrade(error.message)
            if isinstance(error, OSError):
                raise failure from error
            raise
        finally:
            self.host.note(waiting_for=None)
            self.host.judge_ready()
            self.host.tell_files()
            starting = isinstance(self.host.error, EngineLoads)
            self.host.enter("idle" if self.host.error is None else "starting" if starting else "waiting")
        return self.status

    def rehash(self) -> HostStatus:
        """A pass that reads every byte of the local checkpoint before anything else, and repairs what is not
        the version's. Raises what `sync_once` raises."""
        self._reads_all = True
        return self.sync_once()

    def verify_some(self, scrub: Scrub) -> None:
        """Reads a little of the local checkpoint. A fault is repaired by a pass at once: raises what
        `sync_once` raises."""
        local = self.updater.local
        if local is None:
            return
        try:
            scrub.turn(local)
        except NeedsReseed as error:
            self.updater.mark_damaged(error)
            self.host.usable = False
            self._pass()
        except OSError as error:
            self.updater.release()
            raise self.host.failed(error) from error
        finally:
            is_damaged = self.adapters.verify_some(scrub)
            self.host.note(verify=scrub.status)
            self.host.tell()
        if is_damaged:
            self._pass()

    def verify_engines(self, verify: EngineVerify) -> dict[str, str]:
        """Has engines that are patched read a little of their memory. An engine with other words is in doubt,
        and reloaded by a pass at once: raises what `sync_once` raises. Returns what was wrong, by name."""
        local = self.updater.local
        if local is None or not self.engines.lives:
            return {}
        in_sync = self.engines.in_sync(local.state)
        lives = {name: live for name, live in self.engines.lives.items() if name in in_sync}
        faults = verify.turn(local, lives)
        for name, live in lives.items():
            if name in faults:
                self.engines.doubt(local, name, faults[name])
            elif verify.is_confirmed(name, live, local):
                self.engines.confirm(local, name)
        self.host.tell()
        if faults:
            self._pass()
        return faults

    def _step(self) -> None:
        self.host.own()
        self.adapters.begin()
        self._recover_state()
        self.engines.look_if_due(self.host.state)
        failpoint("engine.looked")
        if self.updater.local is None and not self.lead.members:
            # an engine of a group is known again only by a reload: nobody saw what the other hosts did
            self.engines.resume_noted(read_state(self.updater.paths.state))
        try:
            self._bring_all()
        except Stopped:
            raise
        except (WeightcastError, OSError):
            # the channel's troubles are not the engines'
            state = self.host.state if self.host.usable else None
            self.draft.step(state, follow=False)
            self.adapters.step(state, follow=False)
            raise
        self.draft.step(self.host.state)
        # a leader waits for its order
        self.adapters.step(self.host.state, follow=self._order is None)

    def _bring_all(self) -> None:
        """Again after engines were reloaded in the middle of a wait, and once after damage was found here."""
        is_doubted = False
        while True:
            try:
                return self._bring()
            except EnginesFirst:
                self.host.judge_ready()
                self.host.tell()
            except Damaged as error:
                if is_doubted:
                    raise
                # repaired now: engines that were paused for the reload must not wait for the next pass
                is_doubted = True
                self.updater.mark_damaged(error)
                self._apply.kept = None
                self.host.usable = False
                self.host.move.begin()

    def _bring(self) -> None:
        """The local checkpoint to the target, then engines to the local checkpoint."""
        order = self._order
        try:
            self.updater.damaged_sources.run(lambda: self._follow(order), self._go_around)
        except NeedsReseed:
            self.host.usable = False
            raise
        except Stopped:
            raise
        except (WeightcastError, OSError):
            # the channel's troubles are not the engines'
            self._apply.bring_engines()
            raise
        self._apply.bring_engines()
        if order is not None and order.phase == "hold":
            self._apply.prove_held()

    def _go_around(self, damage: str) -> None:
        """What is damaged in the channel keeps a host only where no other way leads on."""
        self.host.around = (*self.host.around, damage)
        self.host.degrade(f"a damaged source is avoided: {damage}")
        self.updater.release()
        self._apply.kept = None

    def _recover_state(self) -> None:
        """Before the pass may read all: a state that cannot be read is an error otherwise."""
        if not self._reads_all:
            return
        channel = Channel.open(self.updater.store, self.options.trust)
        self.host.enter("hashing")
        if self.updater.recover_state(channel, self.host.advance):
            self.host.degrade("the local state could not be read; all weights were read instead")

    def _follow(self, order: Order | None) -> None:
        """The local checkpoint to the target, or as `order` says."""
        self.is_prepared = False
        was_settled, self._settled = self._settled, False
        if order is not None and order.phase == "hold":
            if self.updater.local is None:
                self._load(None)
            self.host.note(target_version=order.version)
            if self.host.position is not None and order.is_at(self.host.position):
                return  # the channel need not be there
        if order is None and was_settled and self._is_settled():
            return
        channel = self._open()
        self._drop_unwanted(order)
        if self.options.group_follower and (order is None or self._goes_back(order)):
            return
        local = self.updater.local
        if self.lead.members and local is not None and in_doubt(local.state.engines):
            # one may still be at a reload of the local version: other hosts hold it too, and are moved only
            # after a reload that was seen to end
            self._apply.bring_engines()
        self.host.enter("planning")
        with self.host.move.timed("plan"):
            route = self._route(channel, order)
        if order is not None and order.phase == "prepare" and self.host.usable:
            self._make_ready(channel, route)
        else:
            self._carry_out(channel, route)
        if order is not None and self.host.position is not None:
            self.is_prepared |= self.host.position.version == order.version

    def _is_settled(self) -> bool:
        """Whether the target is still where the last pass ended. Of a store in which every look is a request
        nothing else is read then. Any error has the next pass read all."""
        self._pointed, channel = None, self._channel
        if channel is None or self._reads_all or self.updater.local is None:
            return False
        pointer = foreign_pointer(channel.store) if channel.foreign else channel.pointer()
        here, state = self.host.position, self.host.state
        if pointer is not None and here is not None and state is not None:
            version = self.options.target.resolve(channel.store, pointer)
            self._settled = version == here.version and pointer.run in (None, state.run_id)
        self._pointed = None if channel.foreign else pointer
        return self._settled

    def _open(self) -> Channel:
        """The local checkpoint is opened also when the channel cannot be, and repaired when it can."""
        if self.updater.local is None:
            self.host.enter("loading")
        known, self._channel = self._channel, None
        try:
            channel = Channel.open(self.updater.store, self.options.trust, known)
            self.updater.require_mounted(channel)
        except (WeightcastError, OSError) as error:
            self._load(None)
            if isinstance(error, NoChannel) and self.updater.state is not None:
                error.remedy = "mount it, or correct --channel"  # made anew, it would be another run's
            raise
        self._load(channel)
        if self.updater.repairable:
            self._repair(channel)
        if not channel.store.renames:
            self._channel = channel
        return channel

    def _load(self, channel: Channel | None) -> None:
        before = self.host.usable
        self.host.usable = False
        try:
            self.updater.load(channel, self.host.advance)
        except OSError:
            # a disk that fails says nothing of what lies on it, nor of what engines took from it
            self.host.usable = before
            raise
        if self._reads_all:
            self.host.enter("hashing")
            self.updater.rehash(self.host.advance)
            self._reads_all = False
        self.host.usable = self.updater.local is not None
        self._grant_read()

    def _grant_read(self) -> None:
        if self.updater.local is not None and self.options.readable_by is not None:
            grant_read(self.updater.local, self.options.readable_by)

    def _repair(self, channel: Channel) -> None:
        """Seeding is left for what cannot be repaired."""
        before = self._stand_back(f"repairing: {self.updater.trouble}")
        self.host.enter("repairing")
        with self.host.move.timed("repair"):
            repaired = self.updater.repair(channel, self.host.advance)
        if repaired is None:
            return
        self.host.usable = True
        self.host.move.changed(repaired.words)
        self.host.read_for("repair", repaired.nbytes)
        self.host.moved("repair", before, 0)

    def _stand_back(self, reason: str) -> int | None:
        """Other bytes come here: nothing that engines confirmed holds any longer. Returns the version from
        before."""
        self.updater.release()
        state = self.updater.state
        if state is not None:
            self.updater.state = state.but(engines=without_served(state.engines))
            self.engines.pause_mapping(self.host.note_doubt)
        self.host.not_ready(reason)
        return None if state is None else state.position.version

    def _route(self, channel: Channel, order: Order | None) -> Route:
        pointer = self._pointer(channel)
        target = self.options.target
        if order is not None:
            if channel.file is not None and channel.file.run_id != order.run_id:
                raise WrongRun(
                    f"{channel.place} is of run {channel.file.run_id}, the group's leader follows run "
                    f"{order.run_id or 'of a foreign channel'}",
                    remedy="give every host of a group the same channel",
                )
            target = Target(str(order.version), order.version)
        version = target.resolve(channel.store, pointer)
        self.host.note(target_version=version)
        if self.updater.local is not None:
            self._apply.blocklist.unblock_due()
        return self.updater.route(channel, pointer, version, exact=target.exact)

    def _pointer(self, channel: Channel) -> Pointer:
        """Before the first version the target is the base, so that a host is ready when that comes."""
        pointer, self._pointed = self._pointed or channel.pointer(), None
        if pointer is not None:
            self._pointer_seen = True
            return pointer
        if channel.foreign:
            raise NoChannel.within(channel.place)
        state = self.host.state
        if self._pointer_seen or (state is not None and state.position.version > 0):
            raise RetryLater(
                f"{channel.store.place(LATEST)} is gone",
                remedy="check the channel mount; local state was left unchanged",
            )
        return Pointer(0)

    def _carry_out(self, channel: Channel, route: Route) -> None:
        match route.plan:
            case Stay(reason):
                self.host.degrade(reason)
            case Relabel() as plan:
                self._relabel(route, plan)
            case Seed() as plan:
                self._seed(channel, route, plan)
            case Patch() as plan:
                self._apply.versions(route, plan)
            case Refuse(reason, _, True):
                self.host.degrade(reason)
            case Refuse(reason, remedy, _):
                without = self.options.base is None and not self.updater.damaged_sources.damaged
                raise (MissingBase if without else Refused)(reason, remedy=remedy)
        here = self.host.position
        self._settled = here is not None and here.version == self.host.status.target_version

    def _relabel(self, route: Route, plan: Relabel) -> None:
        local = self.host.local()
        before = local.state.position.version
        with self.host.patching(local):
            self.updater.relabel(route, plan)
            if not self.updater.side_files.changed:  # else they are reloaded, as some read these then
                self.engines.relabel(local, before)
        self.host.moved("relabel", before, 1)
        if plan.then.legs:
            self._apply.versions(route, plan.then)

    def _seed(self, channel: Channel, route: Route, plan: Seed) -> None:
        before = self._stand_back(f"seeding: {plan.reason}")
        self.host.usable = False
        self.host.enter("seeding")
        with self.host.move.timed("seed"):
            self.updater.seed(channel, route, plan, self.host.advance)
        self.host.usable = True
        self._grant_read()
        nbytes = self.host.local().table.nbytes
        self.host.move.read(nbytes)
        if plan.version != route.base_version:
            self.host.read_for("anchor", nbytes)
        self.host.moved("seed", before, 1)
        if plan.then.legs:
            self._apply.versions(route, plan.then)

    def _goes_back(self, order: Order) -> bool:
        """Undoes what engines elsewhere in the group refused, if that is what the order wants."""
        local = self.updater.local
        if local is None or order.phase != "hold" or not local.state.undo:
            return False
        if not order.is_at(local.state.undo[0].base):
            return False
        before = local.state.position.version
        with self.host.patching(local):
            self._apply.undo()
        self.host.moved("undo", before, 0)
        return True

    def _make_ready(self, channel: Channel, route: Route) -> None:
        """What can be done while engines serve: nothing of the local checkpoint is written."""
        match route.plan:
            case Patch() as plan:
                self._apply.kept = staged = self._apply.prepare(route, plan.legs[0])
                if self.options.group_patch:
                    # for the part of an engine that reads this host's files
                    self._apply.stage_patch((*self.host.local().state.undo, staged.step))
                self.is_prepared = True
            case Seed() | Relabel():
                self.is_prepared = True
            case _:
                self._carry_out(channel, route)

    def _drop_unwanted(self, order: Order | None) -> None:
        """What was staged for an order that has ended, or was lost in a repair."""
        kept, local = self._apply.kept, self.updater.local
        if kept is None or local is None:
            return
        wanted = order is not None and order.version >= kept.step.target.version
        is_there = is_file(local.paths.journal(kept.step.journal))
        if not wanted or not is_there or kept.step.base != local.state.position:
            self._apply.drop_kept()
