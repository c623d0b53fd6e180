"""One step of a host: local checkpoint and engines towards the target. The loop is elsewhere.

Order of a version: fetch and stage while engines serve and no lock is held; then, under the patch lock,
patch, reload, record. After any error the next step starts from the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weightcast.shared.base.errors import NeedsReseed, Refused, Stopped, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.checkpoint.verify.hashing import Damaged, Scrub
from weightcast.shared.files.paths import is_directory, require_no_overlap
from weightcast.subscriber.engines.host import Engines
from weightcast.subscriber.engines.rules import in_doubt
from weightcast.subscriber.engines.verify import EngineVerify
from weightcast.subscriber.groups.lead import Lead
from weightcast.subscriber.groups.order import Order
from weightcast.subscriber.sync.apply import Apply, InSync
from weightcast.subscriber.sync.group_member import GroupMember
from weightcast.subscriber.sync.host import EnginesFirst, Outcome, StepHost, SyncOptions, known
from weightcast.subscriber.sync.loader import Loader, Prover
from weightcast.subscriber.sync.planner import Planner
from weightcast.subscriber.sync.step_log import (
    EnginesVerified,
    Failed,
    NotReady,
    Scrubbed,
    Usable,
    Waits,
    WentAround,
    WriterTaken,
)
from weightcast.subscriber.sync.target import Blocklist


def _never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class Sync:
    """One host. Used by one thread; `show` is called whenever the log has news;
    `stop(seconds)` waits, or returns True as soon as the process is to end."""

    def __init__(
        self,
        options: SyncOptions,
        engines: Engines | None = None,
        lead: Lead | None = None,
        *,
        show: Callable[[Sync], None] = lambda sync: None,
        stop: Callable[[float], bool] = _never,
        advance: Callable[[int], None] = lambda nbytes: None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.engines = Engines() if engines is None else engines
        self.lead = Lead() if lead is None else lead
        self.host = StepHost(
            options,
            self.engines,
            self.lead,
            show=lambda: show(self),
            stop=stop,
            advance=advance,
            now=now,
            clock=clock,
        )
        self.log, self.updater = self.host.log, self.host.updater
        blocklist = Blocklist(clock)
        self._loader = Loader(self.host)
        prover = Prover(self.host)
        self._apply = Apply(self.host, blocklist, prover)
        self._in_sync = InSync(self.host, self._apply)
        self._planner = Planner(self.host, self._loader, self._apply, blocklist)
        self._member = GroupMember(self.host, self._loader, self._apply, self._planner, prover)

    @property
    def order(self) -> Order | None:
        """Of a follower in an engine group: what its leader wants."""
        return self._member.order

    @order.setter
    def order(self, order: Order | None) -> None:
        self._member.order = order

    @property
    def is_prepared(self) -> bool:
        """Of a follower: its order is prepared as far as it can be."""
        return self._member.is_prepared

    @property
    def position(self) -> Position | None:
        """The local version, if it is whole."""
        return self.host.position

    def outcome(self) -> Outcome:
        """As of the last step."""
        return self.host.outcome()

    def close(self) -> None:
        self.updater.close()
        self.engines.close()
        self.lead.close()
        self.log.append(NotReady(("stopped",)))
        self.host.enter("stopped")

    def sync_once(self) -> Outcome:
        """Raises what keeps the local checkpoint from the target; what keeps an engine from it is part of the
        outcome."""
        self.log.begin()
        try:
            self._step()
        except BaseException as error:
            self.updater.release()
            self._apply.forget_kept()
            failure = self._failed(error)
            if isinstance(error, Refused):
                self.host.degrade(error.message)
            if isinstance(error, OSError):
                raise failure from error
            raise
        finally:
            self.log.append(Waits(None))
            self.log.append(NotReady(self.host.reasons_not_ready()))
            self.host.tell_files()
            self.host.enter("idle" if self.log.view.error is None else "waiting")
        return self.outcome()

    def _failed(self, error: BaseException) -> WeightcastError:
        failure = known(error)
        self.log.append(Failed(failure, self.host.now()))
        return failure

    def rehash(self) -> Outcome:
        """A step that reads every byte of the local checkpoint before anything else, and repairs what is not
        the version's. Raises what `sync_once` raises."""
        self._loader.reads_all = True
        return self.sync_once()

    def verify_some(self, scrub: Scrub) -> None:
        """Reads a little of the local checkpoint. A fault is repaired by a step at once: raises what
        `sync_once` raises."""
        local = self.updater.local
        if local is None:
            return
        try:
            scrub.turn(local)
        except NeedsReseed as error:
            self.updater.mark_damaged(error)
            self.log.append(Usable(False))
            self.sync_once()
        except OSError as error:
            self.updater.release()
            raise self._failed(error) from error
        finally:
            self.log.append(Scrubbed(scrub.status))
            self.host.tell()

    def verify_engines(self, verify: EngineVerify) -> dict[str, str]:
        """Has engines that are patched read a little of their memory. An engine with other words is in doubt,
        and reloaded by a step at once: raises what `sync_once` raises. Returns what was wrong, by name."""
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
        found = {name: verify.facts(name) for name in lives}
        self.log.append(EnginesVerified({name: facts for name, facts in found.items() if facts is not None}))
        self.host.tell()
        if faults:
            self.sync_once()
        return faults

    def take_local(self) -> None:
        """Makes the local checkpoint this process's. Raises HasWriter, Refused for a directory that will not
        do, and OSError."""
        if not is_directory(self.updater.paths.room):
            # the first time: nothing is made in a channel, whatever it is called here
            require_no_overlap(
                "--local", self.updater.paths.directory, "--channel", self.host.options.channel
            )
        self.updater.own()

    def _step(self) -> None:
        self.take_local()
        # not before: reports are its writer's
        self.log.append(WriterTaken())
        if self._loader.reads_all:
            self._loader.adopt()
        self.engines.look_if_due(self.host.state)
        failpoint("engine.looked")
        if self.updater.local is None and not self.lead.members:
            # an engine of a group is known again only by a reload: nobody saw what the other hosts did
            self._loader.resume_noted()
        self._bring_all()

    def _bring_all(self) -> None:
        """Again after engines were reloaded in the middle of a wait, and once after damage was found here."""
        is_doubted = False
        while True:
            try:
                return self._bring()
            except EnginesFirst:
                self.log.append(NotReady(self.host.reasons_not_ready()))
                self.host.tell()
            except Damaged as error:
                if is_doubted:
                    raise
                # repaired now: engines that were paused for the reload must not wait for the next step
                is_doubted = True
                self.updater.mark_damaged(error)
                self._apply.forget_kept()
                self.log.append(Usable(False))
                self.log.begin_move()

    def _bring(self) -> None:
        """The local checkpoint to the target, then engines to the local checkpoint."""
        try:
            self._follow()
        except NeedsReseed:
            self.log.append(Usable(False))
            raise
        except Stopped:
            raise
        except (WeightcastError, OSError):
            # the channel's troubles are not the engines'
            self._in_sync.bring()
            raise
        self._in_sync.bring()
        if self._member.order is not None and self._member.order.phase == "hold":
            self._member.require_readable()

    def _follow(self) -> None:
        self.updater.damaged_sources.run(self._go_one_way, self._go_around)

    def _go_around(self, damage: str) -> None:
        """What is damaged in the channel keeps a host only where no other way leads on."""
        self.log.append(WentAround(damage))
        self.host.degrade(f"another way is taken: {damage}")
        self.updater.release()
        self._apply.forget_kept()

    def _go_one_way(self) -> None:
        if self._member.order is not None and self._member.lies_as_ordered(self._member.order):
            return
        channel = self._loader.open_and_load()
        self._member.is_prepared = False
        self._member.drop_kept()
        if self.host.options.group_follower and (
            self._member.order is None or self._member.goes_back(self._member.order)
        ):
            return
        if self.lead.members and self._local_in_doubt():
            self._in_sync.bring()
        self.host.enter("planning")
        with self.log.timed("plan"):
            route = self._planner.route(channel, self._member.order)
        if self._member.order is not None and self._member.order.phase == "prepare" and self.log.view.usable:
            self._member.make_ready(channel, route)
        else:
            self._planner.carry_out(channel, route)
        if self._member.order is not None and self.host.position is not None:
            self._member.is_prepared |= self.host.position.version == self._member.order.version

    def _local_in_doubt(self) -> bool:
        """Whether an engine may still be at a reload of the local version: other hosts hold it too, and are
        moved only after a reload that was seen to end."""
        local = self.updater.local
        return local is not None and bool(in_doubt(local.state.engines))
