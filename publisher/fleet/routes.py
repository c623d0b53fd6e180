"""HTTP routes that show fleet and versions, and take reports. Everything is answered from snapshots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel

from weightcast.publisher.fleet.lag_history import LagHistory
from weightcast.publisher.fleet.report_intake import TooMany
from weightcast.publisher.fleet.versions import ROWS_LIMIT, CatchUp, PrunePlan, Versions
from weightcast.publisher.fleet.view import FleetView
from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel.reports import REPORT_LIMIT
from weightcast.shared.daemon.fleet import REPORTS_PATH, Fleet, Host
from weightcast.shared.daemon.http import Answer
from weightcast.shared.daemon.status import Failure

MOST_STREAMS = 64
REFRESH_SECONDS = 10.0
"""after which the fleet is sent again, though only the time changed"""
_LOOK_SECONDS = 0.2
_PIECE_BYTES = 64 << 10
"""of an answer: whoever does not read it keeps no more than that in a buffer of its own"""
_REPORT_LATER = "send the newest once the time of Retry-After has passed"
_EVENT_SECONDS = 1.0
"""between two events of a kind"""


class Accepted(BaseModel, frozen=True):
    """`now`: unix time of the publisher's clock."""

    now: float


def fleet_routes(
    view: FleetView, run_id: Callable[[], str | None], is_stopping: Callable[[], bool]
) -> APIRouter:
    """`run_id`: None until the channel is known."""
    router = APIRouter(tags=["fleet"])
    streams = _Streams(view, is_stopping)

    @router.get("/v1/fleet", responses={200: {"model": Fleet}})
    async def fleet() -> Response:
        """Hosts as they report themselves: hints. Above 100 hosts without updates, and long texts are cut."""
        body = view.fleet().body
        headers = {"Cache-Control": "no-store", "Content-Length": str(len(body))}
        return StreamingResponse(_pieces(body), media_type="application/json", headers=headers)

    @router.get("/v1/hosts/{key}", responses={404: {"model": Failure}})
    async def host(key: str) -> Host:
        """One host with its last updates."""
        return found(key)

    @router.delete("/v1/hosts/{key}", responses={404: {"model": Failure}, 422: {"model": Failure}})
    def forget(key: str) -> Host:
        """Forgets a host that stopped or is lost: deletes its report, and answers with what it said last."""
        host = found(key)
        view.forget(host)
        return host

    def found(key: str) -> Host:
        for each in view.fleet().fleet.hosts:
            if each.key == key:
                return each
        raise Answer(404, "unknown host key", "/v1/fleet lists the keys of all hosts")

    @router.get("/v1/versions")
    async def versions(limit: Annotated[int, Query(ge=1, le=ROWS_LIMIT)] = 200) -> Versions:
        """Newest first."""
        found = view.versions().versions
        return found.model_copy(update={"versions": found.versions[:limit]})

    @router.get("/v1/catch-up")
    async def catch_up() -> CatchUp:
        """What a host that is so many versions behind, or joins, reads and takes."""
        return view.versions().catch_up

    @router.get("/v1/lag-history")
    async def lag_history() -> LagHistory:
        """How far behind hosts were in the last hour, since this publisher started."""
        return view.lag.get()

    @router.get("/v1/prune-plan")
    async def prune_plan() -> PrunePlan:
        """What pruning would take away now, and why the rest is kept."""
        return view.versions().prune_plan

    @router.get("/v1/events", responses={200: {"content": {"text/event-stream": {}}}})
    async def events() -> Response:
        """Server-sent events: `fleet` as /v1/fleet, on change; `versions` when one appears."""
        return streams.open()

    @router.post(REPORTS_PATH, status_code=202, responses={413: {"model": Failure}, 429: {"model": Failure}})
    async def report(request: Request) -> Accepted:
        """A host's report, as docs/FORMAT.md has it, of a host that cannot write to the channel."""
        body = await request.body()
        if len(body) > REPORT_LIMIT:
            raise Answer(
                413, f"the report exceeds the {REPORT_LIMIT}-byte limit", "leave out its oldest updates"
            )
        try:
            await run_in_threadpool(view.report_intake.take, body, run_id())
        except TooMany as error:
            raise Answer(429, "too many reports", _REPORT_LATER, {"Retry-After": "1"}) from error
        return Accepted(now=time.time())

    return router


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """All receivers share `body`: the next piece is taken when the one before is on its way."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


class _Streams:
    """On the event loop alone."""

    def __init__(self, view: FleetView, is_stopping: Callable[[], bool]) -> None:
        self._view, self._is_stopping = view, is_stopping
        self._open = 0

    def open(self) -> Response:
        if self._open >= MOST_STREAMS:
            raise RetryLater(
                f"too many event streams ({MOST_STREAMS})", remedy="close a page, or poll /v1/fleet"
            )
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[bytes]:
        serial, newest, said = -1, -1, 0.0
        self._open += 1
        try:
            while not self._is_stopping():
                now = time.monotonic()
                page, versions = self._view.fleet(), self._view.versions().versions.versions
                if now - said >= (_EVENT_SECONDS if page.serial != serial else REFRESH_SECONDS):
                    serial, said = page.serial, now
                    yield b"event: fleet\ndata: "
                    async for piece in _pieces(page.body):
                        yield piece
                    yield b"\n\n"
                if versions and versions[0].version != newest:
                    newest = versions[0].version
                    yield b'event: versions\ndata: {"newest":%d}\n\n' % newest
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._open -= 1


PAGE_PATHS = frozenset({"/", "/page/page.js", "/page/page.css", "/page/icon.svg", "/page/licenses.txt"})
_HEADERS = {
    # Scripts, styles, fonts, pictures and requests: from this publisher or not at all.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept, but asked for each time: an upgraded publisher shows its own page at once.
    "Cache-Control": "no-cache",
}


class _Page(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def page_routes() -> APIRouter:
    """Fails where the package was installed without the page."""
    router = APIRouter(include_in_schema=False)
    page = _Page(packages=[("weightcast.publisher", "page/dist")])

    async def serve(request: Request) -> Response:
        name = request.url.path.removeprefix("/page/").removeprefix("/")
        return await page.get_response(name or "index.html", request.scope)

    for path in PAGE_PATHS:
        router.add_api_route(path, serve, methods=["GET", "HEAD"], response_class=Response)
    return router
