"""What a publisher shows as Prometheus metrics, taken from its status and from what it published."""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.publisher.daemon.status import PublisherStatus
from weightcast.publisher.publish.report import Publication
from weightcast.shared.daemon.metrics import CRASH, OTHER, Metrics, VerifyMetrics, error_kinds, one_of
from weightcast.shared.daemon.status import SOFTWARE

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
