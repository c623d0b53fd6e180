"""What became of publications: for the status, the Prometheus metrics and the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from weightcast.publisher.daemon.status import (
    PUBLICATIONS_SHOWN,
    DatedFailure,
    DatedRefusal,
    Progress,
    PublisherStatus,
    RepairStatus,
)
from weightcast.publisher.fleet.versions import ROWS_LIMIT
from weightcast.publisher.maintenance.repair import Repairs
from weightcast.publisher.publish.publish_job import Publication, PublishReport
from weightcast.publisher.weights.config import CONFIG_REMEDY
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import NON_FINITE
from weightcast.shared.daemon.logs import get_log, size_text
from weightcast.shared.daemon.metrics import CRASH, OTHER, Metrics, VerifyMetrics, error_kinds, one_of
from weightcast.shared.daemon.status import SOFTWARE, Failure
from weightcast.shared.files.hf_checkpoint import HOLE

_WENT_BACK = "if it is a copy: keep copies out of --watch, and publish the newest checkpoint again"
_OLDER = "if a retry did this, publish the newest checkpoint again; give rewritten checkpoints new keys"
PHASES = ("recover", "read", "diff", "ranks", "copy", "stage", "commit", "patch", "anchor", OTHER)
CAUSES = ("step", "skip", "anchor")
_NUMBERS = {
    "version": "Version that the pointer names.",
    "epoch": "Number of this publisher's claim to the channel.",
    "held": "1 while a rollback keeps this publisher from publishing.",
    "upkeep_failing": "1 when the last maintenance work failed.",
    "queue_length": "Publications asked for and not ended.",
    "inbox_waiting": "Watched checkpoints not yet complete.",
    "inbox_refused": "Watched checkpoints that were refused and have not changed since.",
    "version_created_timestamp_seconds": "When the newest version came to be.",
    "channel_epoch": "Highest claim to the channel; above epoch: another publisher's.",
    "density_elements_ratio": "Share of elements that the last publication changed.",
    "density_bytes_ratio": "Share of bytes whose elements the last publication changed.",
    "compression_ratio": "Bytes of full weights over bytes of the last delta.",
}

log = get_log("publisher")


class PublisherMetrics:
    """`show` is called with every status, `published` and `failed` once for each publication: a checkpoint
    that was refused unread counts as failed."""

    def __init__(self, registry: Metrics) -> None:
        self._run = registry.facts(
            "run",
            "The run that is published here; always 1.",
            {"run_id": "the channel's", "role": ("publisher",), "software": "this daemon's"},
        )
        self._numbers = {what: registry.number(what, text) for what, text in _NUMBERS.items()}
        self._ended = registry.count(
            "publications", "Publications that ended.", {"outcome": ("done", "failed")}
        )
        self._errors = registry.count(
            "publication_errors", "Publications that failed, by error.", {"kind": error_kinds()}
        )
        self._written = registry.count(
            "channel_bytes",
            "Bytes of versions, by direction and by what they were for.",
            {"direction": ("written",), "cause": CAUSES},
        )
        self._full = registry.count("full_bytes", "Bytes that full checkpoints would have had.")
        self._changed = registry.count("changed_elements", "Elements changed by publications.")
        self._seconds = registry.duration("publish", "A publication, until the pointer names it.")
        self._phases = registry.duration(
            "publish_phase", "Time of a publication by phase.", {"phase": PHASES}
        )
        self._verify = VerifyMetrics(registry)
        self._beside: dict[str, int] = {}

    def published(self, done: Publication) -> None:
        self._ended.labels("done").inc()
        self._written.labels("written", "anchor" if done.kind == "anchor" else "step").inc(done.delta_bytes)
        self._full.inc(done.full_bytes)
        self._changed.inc(done.changed_elements)
        self._seconds.observe(done.total_seconds)
        for phase, seconds in done.seconds.items():
            if phase != "total":
                self._phases.labels(one_of(phase, PHASES)).observe(seconds)
        if done.component != MAIN:
            return
        self._set(
            density_elements_ratio=done.density_elements,
            density_bytes_ratio=done.density_bytes,
            compression_ratio=done.full_bytes / done.delta_bytes if done.delta_bytes else 0.0,
        )

    def followed(self, seconds: float) -> None:
        """The local checkpoint is at the last publication, so many seconds after its pointer moved."""
        self._phases.labels("patch").observe(seconds)

    def failed(self, kind: str) -> None:
        """`kind`: the error's class."""
        self._ended.labels("failed").inc()
        self._errors.labels(kind if kind in error_kinds() else CRASH).inc()

    def show(self, status: PublisherStatus) -> None:
        self._run.info({"run_id": status.run_id or "", "role": "publisher", "software": SOFTWARE})
        self._set(
            version=status.version or 0,
            epoch=status.epoch or 0,
            held=status.held is not None,
            upkeep_failing=bool(status.upkeep.problem),
            queue_length=len(status.queue),
            inbox_waiting=0 if status.inbox is None else status.inbox.waiting_count,
            inbox_refused=0 if status.inbox is None else status.inbox.refused_count,
        )
        self._verify.show(status.verify, None if status.verify is None else status.verify.full_pass)

    def show_written(self, written: Mapping[str, int]) -> None:
        """`written`: bytes of anchors and multi-step deltas since the start, by cause."""
        for cause, nbytes in written.items():
            self._written.labels("written", cause).inc(nbytes - self._beside.get(cause, 0))
            self._beside[cause] = nbytes

    def show_channel(self, created: float, claimed: int) -> None:
        """`created`: unix time of the newest version; `claimed`: the highest epoch."""
        self._set(version_created_timestamp_seconds=created, channel_epoch=claimed)

    def _set(self, **values: float) -> None:
        for what, value in values.items():
            self._numbers[what].set(value)


class Record:
    """The daemon's status with its metrics and log. One thread writes; any may read `status`, which is
    replaced as a whole."""

    def __init__(self, metrics: PublisherMetrics, status: PublisherStatus) -> None:
        self._metrics = metrics
        self.status = status
        self.publish_seconds: Mapping[int, float] = {}

    def show(self, **facts: object) -> None:
        self.status = self.status.model_copy(update=facts)

    def error(self, failure: Failure) -> None:
        self.show(last_error=DatedFailure(**failure.by_name(), at=time.time()))

    def failed(self, kind: str, failure: Failure, source: str, component: str) -> None:
        """A publication. `kind`: the error's class."""
        self._metrics.failed(kind)
        self.error(failure)
        totals = self.status.totals
        self.show(
            totals=totals.model_copy(update={"failures": totals.failures + 1}),
            last_refused=DatedRefusal(
                **failure.by_name(), at=time.time(), source=source, component=component
            ),
        )

    def repaired(self, repairs: Repairs | None) -> None:
        if repairs is None:
            return
        left = tuple(problem.message for problem in repairs.left)
        done, notes = tuple(repairs.done), tuple(repairs.notes)
        self.show(repair=RepairStatus(at=time.time(), done=done, left=left, notes=notes))
        report = log.warning if left or notes else log.info
        report("channel repaired", done=repairs.done, left=list(left), notes=repairs.notes)

    def patched(self, report: PublishReport | None) -> None:
        """The local checkpoint followed the newest version."""
        last, *others = self.status.publications or (None,)
        if report is None or last is None:
            return
        if (report.component, report.version) != (last.component, last.version):
            return
        if "patch" in report.seconds and "patch" not in last.seconds:
            self.show(publications=(last.but(seconds=dict(report.seconds)), *others))
            self._metrics.followed(report.seconds["patch"])

    def version_with(self, root: str) -> int | None:
        return next((each.version for each in self.status.publications if each.root == root), None)

    def published(
        self, done: Publication, same: int | None, facts: Mapping[str, object], key: str | None = None
    ) -> Publication:
        """As it is shown. `same`: an earlier version with the same content; `facts`: what it changed in the
        status, shown at the same time; `key`: as of SourceJob."""
        goes_back = same is not None and same < done.version - 1
        if goes_back:
            done = done.but(notes=(*done.notes, f"goes back to the content of version {same}"))
        carried = done.carried if done.component == MAIN else self.status.config_carried
        self.show(
            **facts,
            config_carried=carried,
            publications=(done, *self.status.publications)[:PUBLICATIONS_SHOWN],
            totals=self.status.totals.plus(done),
        )
        self._metrics.published(done)
        if done.component == MAIN:
            known = {**self.publish_seconds, done.version: done.total_seconds}
            self.publish_seconds = dict(list(known.items())[-ROWS_LIMIT:])
        if same is not None:
            report = log.warning if goes_back else log.info
            report(
                "content equals an earlier version",
                version=done.version,
                earlier=same,
                source=done.source,
                **({"remedy": _WENT_BACK} if goes_back else {}),
            )
        _log_published(done, key)
        return done


def _log_published(done: Publication, key: str | None) -> None:
    about = log.bind(version=done.version, source=done.source)
    if done.component != MAIN:
        about = about.bind(component=done.component, main_version=done.main_version)
    for note in done.notes:
        (about.warning if HOLE in note else about.info)("publication note", note=note)
    about.info(
        "version published",
        sentence=_published(done),
        step=done.step,
        root=done.root,
        density=round(done.density_elements, 6),
        delta_bytes=done.delta_bytes,
        full_bytes=done.full_bytes,
        **{what: count for what, count in done.adapted.items() if count},
        **{f"{phase}_s": round(seconds, 4) for phase, seconds in done.seconds.items()},
    )
    if done.non_finite_elements:
        reason = "elements became NaN or infinite"
        about.warning(reason, elements=done.non_finite_elements, remedy=NON_FINITE)
    if done.not_carried:
        reason = "config changed next to the weights: hosts keep the base's"
        about.warning(reason, files=list(done.not_carried), remedy=CONFIG_REMEDY)
    if len(done.not_carried) < len(done.config_changed):
        about.info("config carried", files=list(done.carried))
    if (before := done.resumed_from_step) is not None:
        steps = {"step": done.step, "previous_step": before}
        if key is None:
            about.warning("step went back: the trainer resumed from an earlier step", **steps)
        else:
            reason = "step went back: an HTTP request published an older step"
            about.warning(reason, key=key, remedy=_OLDER, **steps)


def _published(done: Publication) -> str:
    step = "" if done.step is None else f" (step {done.step})"
    facts = f"{size_text(done.delta_bytes)}, {done.density_elements:.1%} changed"
    whose = "" if done.component == MAIN else f" of {done.component}"
    return f"published version {done.version}{whose}{step}: {facts}, {done.total_seconds:.2f} s"


class Meter:
    """How far the running publication is: counted by many threads, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: Progress | None = None

    def get(self) -> Progress | None:
        return self._now

    def begin(self, source: str, total_bytes: int) -> None:
        with self._lock:
            self._now = Progress(source=source, phase="start", total_bytes=total_bytes, since=time.time())

    def end(self) -> None:
        with self._lock:
            self._now = None

    def phase(self, name: str) -> None:
        with self._lock:
            if self._now is not None:
                self._now = self._now.model_copy(update={"phase": name, "done_bytes": 0})

    def advance(self, nbytes: int) -> None:
        with self._lock:
            if self._now is not None:
                self._now = self._now.model_copy(update={"done_bytes": self._now.done_bytes + nbytes})
