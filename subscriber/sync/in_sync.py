"""Brings engines, and the other hosts of their group, to the local version."""

from __future__ import annotations

from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Phase
from weightcast.subscriber.sync.apply import Apply
from weightcast.subscriber.sync.host import StepHost


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
        mapping = {engine.spec.name for engine in self._engines.mapping}
        if seen.astray and seen.differs and mapping & set(local.state.engines):
            kept = {name: one for name, one in local.state.engines.items() if name not in mapping}
            local.save(local.state.but(engines=kept))
        return seen.astray
