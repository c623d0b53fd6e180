"""Brings engines, and the other hosts of their group, to the version that lies here; goes back from one
that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Blocked, Phase, Position
from weightcast.shared.checkpoint.update.patch import require_readable
from weightcast.subscriber.engines.base import Engine
from weightcast.subscriber.engines.rules import (
    REASON_LIMIT,
    EngineResult,
    block,
    is_confirmed,
    needs_undo,
    retry_delay,
    rolls_back,
    unaligned,
)
from weightcast.subscriber.sync.host import StepHost, Stopwatch
from weightcast.subscriber.sync.loader import Prover

MOST_UNDO_STEPS = 8
"""journals kept for engines that neither take nor refuse what lies here"""


class Aligner:
    """Brings the engines to the local version, and the host back from one that they do not take."""

    def __init__(self, host: StepHost, blocklist: Blocklist, prover: Prover) -> None:
        self._host, self._blocklist, self._prover = host, blocklist, prover
        self._engines, self._lead, self._updater = host.engines, host.lead, host.updater
        self._failures: dict[str, int] = {}
        """reloads in a row that left no engine on the version with this digest"""

    def bring(
        self, version: int, patch: Callable[[], None] | None, everyone: bool
    ) -> tuple[EngineResult, ...]:
        results = self._engines.reload(
            self._host.local(),
            version,
            patch=patch,
            only=None if everyone else (),
            prove=self._prover.now,
            report=self._host.tell_reload,
        )
        self._host.watch.take(results)
        return results

    def align(self) -> None:
        """Brings engines that do not hold the local version to it, and hosts of the group that strayed. Not
        any more when the process is to end."""
        local = self._updater.local
        if local is None or local.state.phase is not Phase.CLEAN:
            return
        self._engines.resume_late(local)
        if self._host.calls.stop(0.0):
            return
        astray = self._astray(local)
        due = self._engines.due(local.state)
        if due or astray:
            with self._lead.gathering(local.state.position.version, local.state):
                self.hold(local.state.position)
                if due:
                    self._reload(local, due)
        elif self._confirmed():
            self._updater.forget_undo()

    def _astray(self, local: LocalCheckpoint) -> bool:
        """Whether a host of the group is elsewhere. Engines that map its files are then in doubt."""
        seen = self._lead.look(local.state.position)
        for trouble in seen.troubles:
            self._host.degrade(trouble)
        mapping = {engine.spec.name for engine in self._engines.mapping}
        if seen.astray and seen.differs and mapping & set(local.state.engines):
            kept = {name: one for name, one in local.state.engines.items() if name not in mapping}
            local.save(local.state.but(engines=kept))
        return seen.astray

    def _reload(self, local: LocalCheckpoint, due: Sequence[Engine]) -> None:
        self._prover.ahead()
        self._host.enter("reloading")
        self._host.watch.enter("lock")
        with local.patching(wait=self._host.wait):
            self._host.watch.enter("")
            require_readable(local)
            version = local.state.position.version
            results = self._engines.reload(
                local, version, only=due, prove=self._prover.now, report=self._host.tell_reload
            )
            self._host.watch.take(results)
            taken = any(result.confirmed_by is not None for result in results)
            self._host.moved("reload", version, 0, taken)
            self.settle(results)

    def settle(self, results: Sequence[EngineResult]) -> None:
        """After a reload, under its lock: is the way back taken, kept or dropped?"""
        local = self._host.local()
        position = local.state.position
        if self._confirmed():
            self._failures.clear()
            self._lead.serves()
            self._updater.forget_undo()
            self._blocklist.unblock(local, position.digest)
            return
        if self._lead.hindered or self._host.options.group_follower:
            # no engine is at fault, or none is known here
            return
        failures = self._failures.get(position.digest, 0) + any(r.attempts > 0 for r in results)
        self._failures = {position.digest: failures}
        if local.state.undo and rolls_back(results, failures, self._engines.order):
            self._go_back(local, results)
        elif not needs_undo(results) or len(local.state.undo) > MOST_UNDO_STEPS:
            self._updater.forget_undo()

    @property
    def may_be_refused(self) -> bool:
        """Whether anybody is asked to take what lies here: an engine, or the leader's for a follower."""
        return bool(self._engines.engines) or self._host.options.group_follower

    def _confirmed(self) -> bool:
        """Whether an engine took the version that lies here; without engines nobody is asked. A follower's
        leader says so."""
        if self._host.options.group_follower:
            return len(self._host.local().state.undo) > MOST_UNDO_STEPS
        state = self._host.local().state
        names = [engine.spec.name for engine in self._engines.engines]
        return not names or is_confirmed(state.engines, names, state.position.version)

    def _go_back(self, local: LocalCheckpoint, results: Sequence[EngineResult]) -> None:
        """To the version before the refused one."""
        refused = local.state.position
        reason = "; ".join(f"{result.name}: {result.reason}" for result in results if result.reason)
        blocked = self._blocklist.blocked_with(local, reason)
        local.save(local.state.but(blocked=blocked, engines=unaligned(local.state.engines)))
        failpoint("refused.blocked")
        self._host.degrade(f"version {refused.version} was refused by the engines: {reason}")
        self._engines.retry_at_once()
        self._host.watch = Stopwatch()
        self.bring(local.state.undo[0].base.version, self._undo_everywhere, everyone=True)
        failpoint("refused.served")
        self._host.moved("undo", refused.version, 0)

    def _undo_everywhere(self) -> None:
        self.hold(self._host.local().state.undo[0].base)
        self.undo()

    def await_prepared(self) -> None:
        if self._lead.members:
            self._host.enter("gathering")
        with self._host.watch.timed("group"):
            self._lead.await_prepared()

    def hold(self, position: Position) -> None:
        if self._lead.members:
            self._host.enter("gathering")
        with self._host.watch.timed("group"):
            self._lead.hold(position)

    def undo(self) -> None:
        self._host.enter("patching")
        with self._host.watch.timed("patch"):
            self._updater.undo()
        self._host.enter("reloading")


class Blocklist:
    """The list itself is part of the local state, by digest; here is when each is due."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._retry_at: dict[str, float] = {}
        self._attempts: dict[str, int] = {}

    def unblock_due(self, local: LocalCheckpoint) -> None:
        """Versions whose time has come are taken again."""
        now = self._clock()
        kept: list[Blocked] = []
        for one in local.state.blocked:
            if self._retry_at.setdefault(one.digest, now + retry_delay(one.attempts)) > now:
                kept.append(one)
            else:
                self._attempts[one.digest] = one.attempts
                del self._retry_at[one.digest]
        if len(kept) < len(local.state.blocked):
            local.save(local.state.but(blocked=tuple(kept)))

    def unblock(self, local: LocalCheckpoint, digest: str) -> None:
        kept = tuple(one for one in local.state.blocked if one.digest != digest)
        if kept != local.state.blocked:
            local.save(local.state.but(blocked=kept))

    def blocked_with(self, local: LocalCheckpoint, reason: str) -> tuple[Blocked, ...]:
        """The list with the version that lies here."""
        refused = local.state.position
        attempts = self._attempts.pop(refused.digest, 0) + 1
        one = Blocked(refused.version, refused.digest, reason[:REASON_LIMIT], attempts)
        return block(local.state.blocked, one)
