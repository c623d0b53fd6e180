"""A follower's door: its leader's orders over HTTP. No handler waits for work."""

from __future__ import annotations

from fastapi import APIRouter

from weightcast.shared.daemon.http import StrictRoute
from weightcast.subscriber.groups.messages import Hold, HoldRequest, ReleaseRequest
from weightcast.subscriber.groups.order import HOLD_PATH, RELEASE_PATH
from weightcast.subscriber.sync.group_follower import Post


def group_routes(post: Post) -> APIRouter:
    router = APIRouter(tags=["group"], route_class=StrictRoute)

    @router.post(HOLD_PATH)
    def hold(request: HoldRequest) -> Hold:
        """Come to a version and stand still there, or only prepare for it, until the lease ends. Repeated by
        the leader, which renews the lease and tells how far it is."""
        return post.take(request.order(), request.seconds)

    @router.get(HOLD_PATH)
    def look() -> Hold:
        """The order that is here and where the local checkpoint is."""
        return post.look()

    @router.post(RELEASE_PATH)
    def release(request: ReleaseRequest) -> Hold:
        """The leader's order of this term ends before its lease does."""
        return post.release(request.leader, request.term, request.served)

    return router
