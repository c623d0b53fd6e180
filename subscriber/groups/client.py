"""HTTP from a group's leader to another host's subscriber."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.base import NO_ROUTE, Timeouts
from weightcast.subscriber.engines.wire import Key, Keys, Reply, Wire
from weightcast.subscriber.groups.messages import (
    ADAPTERS_PATH,
    HOLD_PATH,
    RELEASE_PATH,
    AdaptersUsed,
    Hold,
    Order,
    Release,
)

MOST_SECONDS = 5.0
"""for an answer, which needs no work"""
_HOLD = TypeAdapter(Hold)
_TOKEN = "WEIGHTCAST_GROUP_TOKEN"


class MemberClient:
    """Another host's subscriber. Raises EngineFailed when it does not answer, or not as a follower does."""

    def __init__(
        self, url: str, token: str | None, lease: float, trust: ssl.SSLContext | None = None
    ) -> None:
        self.url = url.rstrip("/")
        # an answer that comes when the lease is over is of no use
        self._seconds = min(MOST_SECONDS, lease / 3)
        key = Key(token or "", _TOKEN, f"set {_TOKEN} to the token of that daemon")
        self._wire = Wire(self.url, Timeouts(connect=self._seconds), Keys(key, key), trust)

    def order(self, order: Order) -> Hold:
        return self._hold(self._wire.post(HOLD_PATH, asdict(order), self._seconds, again=False))

    def release(self, release: Release) -> Hold:
        return self._hold(self._wire.post(RELEASE_PATH, asdict(release), self._seconds))

    def look(self) -> Hold:
        return self._hold(self._wire.get(HOLD_PATH, self._seconds))

    def adapters(self, used: AdaptersUsed) -> Mapping[str, object]:
        reply = self._wire.post(ADAPTERS_PATH, asdict(used), self._seconds)
        return reply.require_ok("see that host's subscriber; run the same release on every host").fields()

    def close(self) -> None:
        self._wire.close()

    def _hold(self, reply: Reply) -> Hold:
        if reply.status in NO_ROUTE:
            raise EngineFailed(f"{self.url} is not a follower", remedy="start it with --group-follower")
        try:
            return _HOLD.validate_python(reply.require_ok("see that host's subscriber").fields())
        except ValidationError:
            raise EngineFailed(
                f"{self.url} did not answer as a follower", remedy="run the same release on every host"
            ) from None
