"""HTTP routes of the publisher: ask for a publication, and look how it went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header
from pydantic import BaseModel, ConfigDict, Field

from weightcast.publisher.daemon.sources.queue import Job, Queue
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel import pins
from weightcast.shared.daemon.http import Answer, StrictRoute
from weightcast.shared.daemon.status import Failure
from weightcast.shared.files.disk_errors import disk_text

_PATH_LIMIT = 4096
_KEY_LIMIT = 255


class PublishRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    checkpoint: str = Field(
        min_length=1, max_length=_PATH_LIMIT, description="Absolute path of a checkpoint."
    )
    step: int | None = Field(None, ge=0, lt=1 << 63, description="The trainer's step: information only.")
    key: str | None = Field(
        None, min_length=1, max_length=_KEY_LIMIT, description="Idempotency key, if the header is not set."
    )


def publication_routes(queue: Callable[[], Queue | None], wake: Callable[[], None]) -> APIRouter:
    """`queue`: None until the daemon has taken its channel."""
    router = APIRouter(route_class=StrictRoute)

    def opened() -> Queue:
        found = queue()
        if found is None:
            raise RetryLater("the publisher is starting", remedy="try again when /readyz is 200")
        return found

    @router.post("/v1/publish", status_code=202, responses={409: {"model": Failure}, 429: {"model": Failure}})
    def publish(
        request: PublishRequest,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=_KEY_LIMIT)] = None,
    ) -> Job:
        """Queues a publication. The same key (header `Idempotency-Key`, or `key`) gives the same one while
        the checkpoint has the same content, which is compared first. Other content is a new version."""
        key = request.key if idempotency_key is None else idempotency_key
        job = opened().request(request.checkpoint, request.step, key)
        wake()
        return job

    @router.get("/v1/publications/{id}", responses={404: {"model": Failure}})
    def show(id: str) -> Job:
        """State or result of a requested publication."""
        job = opened().get(id)
        if job is None:
            raise Answer(
                404,
                "unknown publication id",
                "only recent ones are kept: `weightcast channel log` lists published versions",
            )
        return job

    return router


class RepairOrder(BaseModel):
    ordered: bool = True


def repair_routes(channel: Path, wake: Callable[[], None]) -> APIRouter:
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/repair", status_code=202)
    def repair() -> RepairOrder:
        """Orders the publisher to repair its channel; `repair` in the status has the result."""
        try:
            pins.order_repair(channel)
        except OSError as error:
            raise RetryLater(disk_text(error, channel), remedy="check the channel's mount") from error
        wake()
        return RepairOrder()

    return router
