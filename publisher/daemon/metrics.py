"""What a publisher shows as Prometheus metrics, taken from its status and from what it published."""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.publisher.daemon.status import PublisherStatus
from weightcast.publisher.publish.report import Publication, total_seconds
from weightcast.shared.daemon import metrics
from weightcast.shared.daemon.metrics import CRASH, OTHER, Metrics, VerifyMetrics, error_kinds, one_of
from weightcast.shared.daemon.status import SOFTWARE

PHASES = ("recover", "read", "diff", "ranks", "copy", "stage", "commit", "patch", "anchor", OTHER)
CAUSES = ("step", "skip", "anchor")


class PublisherMetrics:
    """`show` is called with every status, `published` and `failed` once for each publication: a checkpoint
    that was refused unread counts as failed."""

    def __init__(self, registry: Metrics) -> None:
        self._run = metrics.facts(
            registry,
            "run",
            "The run that is published here; always 1.",
            {"run_id": "the channel's", "role": ("publisher",), "software": "this daemon's"},
        )
        self._version = metrics.number(registry, "version", "Version that the pointer names.")
        self._created = metrics.moment(registry, "version_created", "When the newest version came to be.")
        self._epoch = metrics.number(registry, "epoch", "Number of this publisher's claim to the channel.")
        self._claimed = metrics.number(
            registry, "channel_epoch", "Highest claim to the channel; above epoch: another publisher's."
        )
        self._held = metrics.number(
            registry, "held", "1 while a rollback keeps this publisher from publishing."
        )
        self._upkeep = metrics.number(registry, "upkeep_failing", "1 when the last maintenance work failed.")
        self._queue = metrics.number(registry, "queue_length", "Publications asked for and not ended.")
        self._waiting = metrics.number(registry, "inbox_waiting", "Watched checkpoints not yet complete.")
        self._refused = metrics.number(
            registry, "inbox_refused", "Watched checkpoints that were refused and have not changed since."
        )
        self._publications = _Publications(registry)
        self._verify = VerifyMetrics(registry)
        self._beside: dict[str, int] = {}

    def published(self, done: Publication) -> None:
        self._publications.published(done)

    def followed(self, seconds: float) -> None:
        """The local checkpoint is at the last publication, so many seconds after its pointer moved."""
        self._publications.followed(seconds)

    def failed(self, kind: str) -> None:
        """`kind`: the error's class."""
        self._publications.failed(kind)

    def show_written(self, written: Mapping[str, int]) -> None:
        """`written`: bytes of anchors and multi-step deltas since the start, by cause."""
        for cause, nbytes in written.items():
            self._publications.written.labels("written", cause).inc(nbytes - self._beside.get(cause, 0))
            self._beside[cause] = nbytes

    def show(self, status: PublisherStatus) -> None:
        self._run.info({"run_id": status.run_id or "", "role": "publisher", "software": SOFTWARE})
        self._version.set(0 if status.version is None else status.version)
        self._epoch.set(0 if status.epoch is None else status.epoch)
        self._held.set(status.held is not None)
        self._upkeep.set(bool(status.upkeep.problem))
        self._queue.set(len(status.queue))
        self._waiting.set(0 if status.inbox is None else status.inbox.waiting_count)
        self._refused.set(0 if status.inbox is None else status.inbox.refused_count)
        self._verify.show(status.verify, None if status.verify is None else status.verify.full_pass)

    def show_channel(self, created: float, claimed: int) -> None:
        """`created`: unix time of the newest version; `claimed`: the highest epoch."""
        self._created.set(created)
        self._claimed.set(claimed)


class _Publications:
    def __init__(self, registry: Metrics) -> None:
        self._ended = metrics.count(
            registry, "publications", "Publications that ended.", {"outcome": ("done", "failed")}
        )
        self._errors = metrics.count(
            registry, "publication_errors", "Publications that failed, by error.", {"kind": error_kinds()}
        )
        self.written = metrics.byte_count(
            registry,
            "channel",
            "Bytes of versions, by direction and by what they were for.",
            {"direction": ("written",), "cause": CAUSES},
        )
        self._full = metrics.byte_count(registry, "full", "Bytes that full checkpoints would have had.")
        self._changed = metrics.count(registry, "changed_elements", "Elements changed by publications.")
        self._seconds = metrics.duration(registry, "publish", "A publication, until the pointer names it.")
        self._phases = metrics.duration(
            registry, "publish_phase", "Time of a publication by phase.", {"phase": PHASES}
        )
        self._elements = metrics.share(
            registry, "density_elements", "Share of elements that the last publication changed."
        )
        self._bytes = metrics.share(
            registry, "density_bytes", "Share of bytes whose elements the last publication changed."
        )
        self._compression = metrics.share(
            registry, "compression", "Bytes of full weights over bytes of the last delta."
        )

    def published(self, done: Publication) -> None:
        self._ended.labels("done").inc()
        self.written.labels("written", "anchor" if done.kind == "anchor" else "step").inc(done.delta_bytes)
        self._full.inc(done.full_bytes)
        self._changed.inc(done.changed_elements)
        self._seconds.observe(total_seconds(done.seconds))
        for phase, seconds in done.seconds.items():
            if phase != "total":
                self._phases.labels(one_of(phase, PHASES)).observe(seconds)
        self._elements.set(done.density_elements)
        self._bytes.set(done.density_bytes)
        self._compression.set(done.full_bytes / done.delta_bytes if done.delta_bytes else 0.0)

    def followed(self, seconds: float) -> None:
        self._phases.labels("patch").observe(seconds)

    def failed(self, kind: str) -> None:
        self._ended.labels("failed").inc()
        self._errors.labels(kind if kind in error_kinds() else CRASH).inc()
