"""HTTP from a group's leader to another host's subscriber."""

from __future__ import annotations

from pydantic import ValidationError

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.base import Timeouts
from weightcast.subscriber.engines.wire import NO_ROUTE, Reply, Wire, one_key
from weightcast.subscriber.groups.messages import Hold, HoldRequest, ReleaseRequest
from weightcast.subscriber.groups.order import HOLD_PATH, RELEASE_PATH, Order

MOST_SECONDS = 5.0
"""for an answer, which needs no work"""


class MemberClient:
    def __init__(self, url: str, token: str | None, lease: float) -> None:
        self.url = url.rstrip("/")
        # an answer that comes when the lease is over is of no use
        self._seconds = min(MOST_SECONDS, lease / 3)
        keys = one_key(token, "WEIGHTCAST_GROUP_TOKEN")
        self._wire = Wire(self.url, Timeouts(connect=self._seconds), keys)

    def order(self, order: Order, seconds: float) -> Hold:
        request = HoldRequest(
            leader=order.leader,
            term=order.term,
            phase=order.phase,
            version=order.version,
            run_id=order.run_id,
            digest=order.digest,
            root=order.root,
            seconds=seconds,
        )
        return self._hold(self._wire.post_once(HOLD_PATH, request.model_dump(), self._seconds))

    def release(self, leader: str, term: int, served: bool) -> Hold:
        request = ReleaseRequest(leader=leader, term=term, served=served)
        return self._hold(self._wire.post(RELEASE_PATH, request.model_dump(), self._seconds))

    def look(self) -> Hold:
        return self._hold(self._wire.get(HOLD_PATH, self._seconds))

    def close(self) -> None:
        self._wire.close()

    def _hold(self, reply: Reply) -> Hold:
        if reply.status in NO_ROUTE:
            raise EngineFailed(f"{self.url} is not a follower", remedy="start it with --group-follower")
        try:
            return Hold.model_validate(reply.require_ok("see that host's subscriber").fields())
        except ValidationError:
            raise EngineFailed(
                f"{self.url} did not answer as a follower", remedy="run the same release on every host"
            ) from None
