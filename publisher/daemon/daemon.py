"""The publisher's daemon: its routes, the watched directory and one work thread around the publish loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated

from fastapi import APIRouter, Header

from weightcast.publisher.daemon.publish_loop import PublishLoop
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources.queue import KEY_LIMIT, Job, PublishRequest, Queue
from weightcast.publisher.daemon.sources.source import new_request
from weightcast.publisher.daemon.status import PublisherStatus, host_status
from weightcast.publisher.fleet.metrics import FleetMetrics
from weightcast.publisher.fleet.routes import PAGE_PATHS, fleet_routes, page_routes
from weightcast.publisher.fleet.view import FleetView
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel import pins
from weightcast.shared.channel.claims import process_began
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.daemon.fleet import REPORTS_PATH
from weightcast.shared.daemon.http import Answer, StrictRoute, make_app
from weightcast.shared.daemon.loop import Stop, Wakeup, Watcher, run_daemon
from weightcast.shared.daemon.metrics import new_registry, watch_loop
from weightcast.shared.daemon.status import STATUS, Failure, LoopStatus, Snapshot, warm_up_in_background
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import ChannelAddress

_RENAMED_KEPT = 4096
"""names, until the next step: an older one has to settle"""


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
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=KEY_LIMIT)] = None,
    ) -> Job:
        """Queues a publication. The same key (header `Idempotency-Key`, or `key`) gives the same one while
        the checkpoint has the same content, which is compared first. Other content is a new version."""
        key = request.key if idempotency_key is None else idempotency_key
        asked = {**request.model_dump(), "key": key}
        job = opened().request(Job(id=new_request(), **asked))
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


def repair_routes(channel: ChannelAddress, wake: Callable[[], None]) -> APIRouter:
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/repair", status_code=202)
    def repair() -> dict[str, bool]:
        """Orders the publisher to repair its channel; `repair` in the status has the result."""
        try:
            pins.order(open_store(channel), "repair")
        except OSError as error:
            raise RetryLater(disk_text(error, channel), remedy="check the channel's mount") from error
        wake()
        return {"ordered": True}

    return router


def run_publisher(settings: PublisherSettings) -> None:
    """Runs until SIGTERM. Raises what ends the daemon: see `run_daemon`, and Refused once another publisher
    has taken the channel."""
    registry, wakeup, stop = new_registry(), Wakeup(), Stop()
    loop = Snapshot(LoopStatus())
    watch_loop(registry, loop)
    renamed = deque[str](maxlen=_RENAMED_KEPT)
    view = FleetView(
        open_store(settings.channel),
        settings.upkeep.retention,
        settings.bounds,
        lambda: publish_loop.record.publish_seconds,
        lambda: publish_loop.status().line(time.time()),
    )
    FleetMetrics(registry, view.last_look)
    publish_loop = PublishLoop(settings, registry, wakeup, stop, renamed, process_began())

    def status() -> PublisherStatus:
        hosts = tuple(map(host_status, view.last_look()[0].hosts))
        facts = {"loop": loop.get(), "kernels": STATUS.get(), "hosts": hosts, "now": time.time()}
        return publish_loop.status().model_copy(update={**facts, "report_error": view.report_intake.problem})

    app = make_app(
        "weightcast publisher",
        status,
        lambda: publish_loop.status().readiness(),
        registry,
        None if settings.token is None else settings.token.get_secret_value(),
        wakeup.set,
        PublisherStatus,
        PAGE_PATHS,
        {} if settings.report_token is None else {REPORTS_PATH: settings.report_token.get_secret_value()},
    )
    app.include_router(page_routes())
    app.include_router(publication_routes(lambda: publish_loop.queue, wakeup.set))
    app.include_router(repair_routes(settings.channel, wakeup.set))
    app.include_router(
        fleet_routes(view, lambda: publish_loop.status().run_id, lambda: bool(app.state.stopping()))
    )
    warm_up_in_background()
    with ExitStack() as around:
        view.start()
        around.callback(view.stop)
        if settings.watch is not None:
            around.enter_context(Watcher(settings.watch, wakeup, renamed.append))
        run_daemon(
            app, publish_loop.step, wakeup, settings, publish_loop.start, publish_loop.close, loop, stop
        )
    if publish_loop.superseded is not None:
        raise publish_loop.superseded
