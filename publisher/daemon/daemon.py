"""The publisher's daemon: HTTP, the watched directory and one work thread around the desk."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack

from weightcast.publisher.daemon.publish_loop import PublishLoop
from weightcast.publisher.daemon.routes import publication_routes, repair_routes
from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.status import PublisherStatus, host_status
from weightcast.publisher.fleet.metrics import FleetMetrics
from weightcast.publisher.fleet.routes import PAGE_PATHS, fleet_routes, page_routes
from weightcast.publisher.fleet.view import FleetView
from weightcast.shared.channel.claims import process_began
from weightcast.shared.daemon.fleet import REPORTS_PATH
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.loop import Stop, Wakeup, run_daemon
from weightcast.shared.daemon.metrics import new_registry, watch_loop
from weightcast.shared.daemon.status import STATUS, LoopStatus, Snapshot, warm_up_in_background
from weightcast.shared.daemon.watch import Watcher

_RENAMED_KEPT = 4096
"""names, until the next step: an older one has to settle"""


def run_publisher(settings: PublisherSettings) -> None:
    """Runs until SIGTERM. Raises what ends the daemon: see `run_daemon`, and Refused once another publisher
    has taken the channel."""
    registry, wakeup, stop = new_registry(), Wakeup(), Stop()
    loop = Snapshot(LoopStatus())
    watch_loop(registry, loop)
    renamed = deque[str](maxlen=_RENAMED_KEPT)
    view = FleetView(
        settings.channel,
        settings.upkeep.retention,
        settings.bounds,
        lambda: publish_loop.record.publish_seconds,
        publisher=lambda: publish_loop.status().line(time.time()),
    )
    FleetMetrics(registry, view.hosts, view.page)
    publish_loop = PublishLoop(settings, registry, wakeup, stop, renamed, process_began())

    def status() -> PublisherStatus:
        hosts = tuple(map(host_status, view.hosts().hosts))
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
