"""What the publisher says of itself, and the numbers it exports."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, computed_field

from weightcast.publisher.daemon.sources.layouts import Unpublished
from weightcast.publisher.daemon.sources.queue import Job
from weightcast.publisher.daemon.sources.watched import InboxStatus, RefusedStatus
from weightcast.publisher.publish.publish_job import Publication
from weightcast.publisher.weights.config import config_text
from weightcast.shared.base.elements import MAIN
from weightcast.shared.checkpoint.verify.hashing import ScrubStatus
from weightcast.shared.daemon.fleet import TEXT_SHOWN, Host, PublisherLine, RefusedCheckpoint
from weightcast.shared.daemon.status import Failure, KernelStatus, LoopStatus, Readiness
from weightcast.shared.files.paths import printable

PUBLICATIONS_SHOWN = 20


class Progress(BaseModel, frozen=True):
    """The running publication."""

    source: str
    phase: str
    done_bytes: int = 0
    """read in this phase"""
    total_bytes: int
    """of a whole checkpoint"""
    since: float
    """unix time of the publisher's clock"""


class ReportedHost(BaseModel, frozen=True):
    """A host as its report shows it; reports are not authenticated."""

    host: str
    local: str
    state: str
    local_version: int | None
    served_version: int | None
    lag: int | None
    last_error: str
    age_seconds: float | None
    """since the report last changed; null where that is not known"""


class UpkeepStatus(BaseModel, frozen=True):
    """Anchors, multi-step deltas and pruning."""

    busy: bool = False
    """something is being made, or about to be"""
    made: str = ""
    """the last thing"""
    problem: str = ""
    """why the last step made nothing; empty when all is well"""


class RepairStatus(BaseModel, frozen=True):
    """The last repair of the channel, ordered or not."""

    at: float
    """unix time of the publisher's clock"""
    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """what is still damaged"""
    notes: tuple[str, ...] = ()


class DatedFailure(Failure):
    at: float
    """unix time of the publisher's clock"""


class DatedRefusal(DatedFailure):
    source: str
    """name or path of the checkpoint"""
    component: str = MAIN


class ComponentStatus(BaseModel, frozen=True):
    """An adapter of the run; sizes in bytes."""

    name: str
    state: str
    """active or retired"""
    version: int | None = None
    main_version: int | None = None
    """of main, on which the newest version was trained"""
    bytes: int | None = None
    """of the newest version"""
    full_bytes: int | None = None
    problem: str = ""
    """why it cannot be read, or is not published"""
    waiting: tuple[Unpublished, ...] = ()
    """in the watched directory"""
    refused: tuple[RefusedStatus, ...] = ()


class Totals(BaseModel, frozen=True):
    """Since the daemon started; sizes in bytes."""

    publications: int = 0
    failures: int = 0
    changed_elements: int = 0
    delta_bytes: int = 0
    full_bytes: int = 0
    seconds: float = 0.0

    def plus(self, done: Publication) -> Totals:
        return Totals(
            publications=self.publications + 1,
            failures=self.failures,
            changed_elements=self.changed_elements + done.changed_elements,
            delta_bytes=self.delta_bytes + done.delta_bytes,
            full_bytes=self.full_bytes + done.full_bytes,
            seconds=self.seconds + done.total_seconds,
        )


class PublisherStatus(BaseModel, frozen=True):
    role: str = "publisher"
    run_id: str | None = None
    channel: str
    local: str
    version: int | None = None
    epoch: int | None = None
    encoding: str
    queue: tuple[Job, ...] = ()
    publishing: Progress | None = None
    publications: tuple[Publication, ...] = ()
    """newest first"""
    totals: Totals = Totals()
    hosts: tuple[ReportedHost, ...] = ()
    report_error: str = ""
    """why what hosts posted does not get into the channel; empty when it does"""
    inbox: InboxStatus | None = None
    components: tuple[ComponentStatus, ...] = ()
    """adapters"""
    verify: ScrubStatus | None = None
    last_error: DatedFailure | None = None
    last_refused: DatedRefusal | None = None
    """the last checkpoint that failed permanently"""
    held: str | None = None
    repair: RepairStatus | None = None
    config_changed: tuple[str, ...] = ()
    """config files of the checkpoint published last that are not the base's"""
    config_carried: tuple[str, ...] = ()
    """those that hosts of the version published last have in place of the base's"""
    left_behind: tuple[str, ...] = ()
    """files of the base that hosts do not get: other formats of the weights, trainer state, hidden ones"""
    upkeep: UpkeepStatus = UpkeepStatus()
    now: float | None = None
    """unix time of the publisher's clock"""
    ready: bool = False
    not_ready_reasons: tuple[str, ...] = ("starting",)
    kernels: KernelStatus = KernelStatus()
    loop: LoopStatus = LoopStatus()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def refused_since_version(self) -> bool:
        """no version of its component was published after the last refusal"""
        refused = self.last_refused
        same = [each.at for each in self.publications if refused and each.component == refused.component]
        return refused is not None and refused.at > max(same, default=0.0)

    def readiness(self) -> Readiness:
        return Readiness(ready=self.ready, reasons=self.not_ready_reasons)

    def line(self, now: float) -> PublisherLine:
        """For the fleet. `now`: unix time of the publisher's clock."""
        inbox = {} if self.inbox is None else self.inbox.model_dump()
        counts = {name.removesuffix("_count"): n for name, n in inbox.items() if name.endswith("_count")}
        waiting = () if self.inbox is None else tuple(each.name for each in self.inbox.waiting)
        doing = self.publishing
        return PublisherLine(
            ready=self.ready,
            reasons=self.not_ready_reasons,
            publishing="" if doing is None else f"{doing.source}: {doing.phase}",
            queue=len(self.queue),
            inbox=counts,
            held=self.held or "",
            waiting=(*(job.checkpoint for job in self.queue), *waiting) if self.held else (),
            notes=tuple(self._notes()),
            last_refused=self._refused(now),
            refused_since_version=self.refused_since_version,
        )

    def _notes(self) -> Iterator[str]:
        for last in self.publications[:1]:
            if last.resumed_from_step is not None:
                yield f"version {last.version} is of step {last.step}, after step {last.resumed_from_step}"
        if kept := tuple(name for name in self.config_changed if name not in self.config_carried):
            yield f"changed: {config_text(kept)}"
        if self.config_carried:
            names = printable(", ".join(self.config_carried))
            yield f"carried to hosts: {names} (restart the engines in their engines_to_restart)"
        if self.inbox is not None:
            stuck = [each for each in self.inbox.waiting if each.remedy and not self.held]
            for each in (*stuck, *self.inbox.left_alone):
                yield f"{each.name} is not published: {each.reason} ({each.remedy})"
        yield from (f"{one.name}: {one.problem}" for one in self.components if one.problem)
        if self.upkeep.problem:
            yield f"maintenance: {self.upkeep.problem}"
        if self.report_error:
            yield f"reports: {self.report_error}"

    def _refused(self, now: float) -> RefusedCheckpoint | None:
        ago: float | None = None
        failure: Failure
        if (last := self.last_refused) is not None:
            source, failure, ago = last.source, last, max(0.0, now - last.at)
        elif self.inbox is not None and self.inbox.refused:
            # refused before this process started
            source, failure = self.inbox.refused[-1].name, self.inbox.refused[-1].error
        else:
            return None
        return RefusedCheckpoint(
            source=source, message=failure.message, remedy=failure.remedy, seconds_ago=ago
        )


def host_status(host: Host) -> ReportedHost:
    same = {name: getattr(host, name) for name in ReportedHost.model_fields.keys() & Host.model_fields.keys()}
    cut = {"local": host.local[:TEXT_SHOWN], "last_error": host.last_error[:TEXT_SHOWN]}
    return ReportedHost(**{**same, **cut}, age_seconds=host.heard_seconds_ago)
