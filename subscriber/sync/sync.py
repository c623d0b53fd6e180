"""One pass of a host: local checkpoint and engines towards the target. The loop is elsewhere.

Order of a version: fetch and stage while engines serve and no lock is held; then, under the patch lock,
patch, reload, record. After any error the next pass starts from the disk.
"""

from __future__ import annotations

from weightcast.shared.base.errors import NeedsReseed, Refused, Stopped, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.verify.hashing import Damaged, Scrub
from weightcast.subscriber.engines.host import Engines
from weightcast.subscriber.engines.verify import EngineVerify
from weightcast.subscriber.groups.lead import Lead
from weightcast.subscriber.groups.messages import Order
from weightcast.subscriber.status import HostStatus
from weightcast.subscriber.sync.apply import Apply
from weightcast.subscriber.sync.follow import Follow
from weightcast.subscriber.sync.host import Callbacks, EnginesFirst, StepHost
from weightcast.subscriber.sync.options import SyncOptions


class Sync:
    """One host. Used by one thread."""

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
        self._follow = Follow(self.host, self._apply)
        self._order: Order | None = None

    @property
    def status(self) -> HostStatus:
        """As last shown. Read by any thread."""
        return self.host.shown

    @property
    def is_prepared(self) -> bool:
        """Of a follower in an engine group: its order is prepared as far as it can be."""
        return self._follow.is_prepared

    def close(self) -> None:
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
            self._apply.forget_kept()
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
            self.host.enter("idle" if self.host.error is None else "waiting")
        return self.status

    def rehash(self) -> HostStatus:
        """A pass that reads every byte of the local checkpoint before anything else, and repairs what is not
        the version's. Raises what `sync_once` raises."""
        self._follow.read_all()
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
            self.host.mark_usable(False)
            self._pass()
        except OSError as error:
            self.updater.release()
            raise self.host.failed(error) from error
        finally:
            self.host.note(verify=scrub.status)
            self.host.tell()

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
            live.note_read(verify.facts(name))
        self.host.tell()
        if faults:
            self._pass()
        return faults

    def _step(self) -> None:
        self.host.own()
        self._follow.recover_state()
        self.engines.look_if_due(self.host.state)
        failpoint("engine.looked")
        if self.updater.local is None and not self.lead.members:
            # an engine of a group is known again only by a reload: nobody saw what the other hosts did
            self._follow.resume_noted()
        self._bring_all()

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
                self._apply.forget_kept()
                self.host.mark_usable(False)
                self.host.move.begin()

    def _bring(self) -> None:
        """The local checkpoint to the target, then engines to the local checkpoint."""
        order = self._order
        try:
            self.updater.damaged_sources.run(lambda: self._follow.once(order), self._go_around)
        except NeedsReseed:
            self.host.mark_usable(False)
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
        self.host.go_around(damage)
        self.updater.release()
        self._apply.forget_kept()
