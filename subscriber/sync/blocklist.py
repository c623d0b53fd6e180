"""Versions that engines refused, and when each is tried again."""

from __future__ import annotations

from collections.abc import Callable

from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Blocked
from weightcast.subscriber.engines.rules import REASON_LIMIT, block, retry_delay


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
