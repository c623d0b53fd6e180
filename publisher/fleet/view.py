"""What the publisher shows of its fleet and its versions: read by one thread each, handed to HTTP as whole
snapshots, so that a channel that hangs keeps no request waiting."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from weightcast.publisher.fleet.lag_history import LagHistory
from weightcast.publisher.fleet.report_intake import ReportIntake
from weightcast.publisher.fleet.versions import (
    CatchUp,
    PrunePlan,
    VersionHistory,
    Versions,
    catch_up,
    prune_plan,
    version_rows,
)
from weightcast.publisher.maintenance.prune import ACTIVE_SECONDS
from weightcast.publisher.maintenance.retention import Retention, Situation
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.reports import forget
from weightcast.shared.channel.store import Store
from weightcast.shared.daemon.fleet import (
    Bounds,
    Fleet,
    FleetReader,
    Host,
    PublisherLine,
    Verdict,
    require_gone,
    verdict,
)
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.status import Snapshot

QUICK_SECONDS, IDLE_SECONDS = 1.0, 5.0
"""between two looks: while somebody watches, and while nobody does"""
STATS_PER_SECOND = 500
"""files of the channel that are looked at, at most"""
_WATCHED_SECONDS = 30.0
"""after the last request"""
_LOOK_SHARE = 20
"""after a look at versions, as many times as long without"""
_STOP_SECONDS = 2.0

log = get_log("fleet")


@dataclass(frozen=True)
class FleetPage:
    """`body`: as HTTP gives it; `serial` rises when more changed than the time."""

    fleet: Fleet
    body: bytes
    serial: int


class ChannelPage(BaseModel, frozen=True):
    versions: Versions = Versions()
    catch_up: CatchUp = CatchUp()
    prune_plan: PrunePlan = PrunePlan()


class FleetView:
    """`start` and `stop` belong to one thread, the rest to any."""

    def __init__(
        self,
        store: Store,
        retention: Retention,
        bounds: Bounds,
        publish_seconds: Callable[[], Mapping[int, float]],
        publisher: Callable[[], PublisherLine | None],
    ) -> None:
        self._store, self._retention = store, retention
        self.report_intake = ReportIntake(self._store)
        self._publish_seconds, self._publisher = publish_seconds, publisher
        self._reader = FleetReader(self._store, bounds, publisher=publisher)
        self._history = VersionHistory(self._store)
        place, unread = store.place(), Verdict(level="warning", text="the channel has not been read yet")
        empty = Fleet(now=time.time(), channel=place, run_id=None, latest=None, bounds=bounds, verdict=unread)
        self._fleet = Snapshot(_page(empty, 0))
        self._versions = Snapshot(ChannelPage())
        self.lag = Snapshot(LagHistory())
        self._asked = time.monotonic() - _WATCHED_SECONDS
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(look, pause), name=name, daemon=True)
            for name, look, pause in (
                ("fleet", self.read_hosts, lambda _: len(self._fleet.get().fleet.hosts) / STATS_PER_SECOND),
                ("versions", self.read_versions, lambda seconds: _LOOK_SHARE * seconds),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """A look that hangs in a mount is left to itself."""
        self._ending.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)

    def fleet(self) -> FleetPage:
        """The last look; keeps looks frequent for a while."""
        self._asked = time.monotonic()
        return self._fleet.get()

    def versions(self) -> ChannelPage:
        """As `fleet`."""
        self._asked = time.monotonic()
        return self._versions.get()

    def last_look(self) -> tuple[Fleet, ChannelPage]:
        """For those who ask all the time."""
        return self._fleet.get().fleet, self._versions.get()

    def forget(self, host: Host) -> None:
        """Deletes the report of a host that is gone: see `require_gone`. Raises Refused and OSError."""
        require_gone(host)
        forget(self._store, host.key)

    def read_hosts(self) -> None:
        """One look. Raises WeightcastError and OSError when the channel cannot be read."""
        # a channel that is full can still be looked at
        before_writing = self.report_intake.problem
        self.report_intake.write()
        if self.report_intake.problem and not before_writing:
            log.warning("posted reports not written", reason=self.report_intake.problem)
        try:
            fleet = self._reader.read()
        except (WeightcastError, OSError):
            # hosts as they were read last; the publisher knows of itself
            fleet = self._fleet.get().fleet.model_copy(update={"publisher": self._publisher()})
            if fleet.run_id is not None:  # it was read once
                fleet = fleet.model_copy(update={"verdict": verdict(fleet)})
            self._show(fleet)
            raise
        self._show(fleet)
        self.lag.set(self.lag.get().after(fleet))

    def _show(self, fleet: Fleet) -> None:
        before = self._fleet.get()
        self._fleet.set(_page(fleet, before.serial + (_said(fleet) != _said(before.fleet))))

    def read_versions(self) -> None:
        """As `read_hosts`."""
        page = self._history.read(look_around=self._is_watched())
        fleet = self._fleet.get().fleet
        living = [host for host in fleet.hosts if (host.heard_seconds_ago or 0.0) < ACTIVE_SECONDS]
        held = [host.local_version for host in living if host.local_version is not None]
        wanted = {*page.kept, *page.tags.values()}
        situation = Situation(page.pointer, page.versions, time.time(), held, wanted)
        self._versions.set(
            ChannelPage(
                versions=version_rows(page, self._publish_seconds(), fleet.hosts),
                catch_up=catch_up(page, [host for host in fleet.hosts if host.takes_part]),
                prune_plan=prune_plan(situation, self._retention),
            )
        )

    def _is_watched(self) -> bool:
        return time.monotonic() - self._asked < _WATCHED_SECONDS

    def _run(self, look: Callable[[], None], pause: Callable[[float], float]) -> None:
        """`pause`: from the seconds of a look to the least seconds until the next."""
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                # what was read last stays while the channel cannot be read, and grows old
                with contextlib.suppress(WeightcastError, OSError):
                    look()
            except Exception:
                log.exception("looking at the channel crashed")
            waited, least = 0.0, pause(time.monotonic() - began)
            while waited < max(least, QUICK_SECONDS if self._is_watched() else IDLE_SECONDS):
                if self._ending.wait(0.2):
                    return
                waited += 0.2


def _page(fleet: Fleet, serial: int) -> FleetPage:
    return FleetPage(fleet, fleet.page(), serial)


def _said(fleet: Fleet) -> object:
    """Everything but what only time changes."""
    hosts = [host.model_copy(update={"heard_seconds_ago": 0.0}) for host in fleet.hosts]
    line = fleet.publisher
    if line is not None and line.last_refused is not None:
        refused = line.last_refused.model_copy(update={"seconds_ago": None})
        line = line.model_copy(update={"last_refused": refused})
    return fleet.run_id, fleet.latest, hosts, fleet.verdict, line
