"""Prometheus metrics of one daemon, in a registry of its own: `weightcast_<name>_<unit>`.

What a label may be is declared with its metric: a closed set, whose series exist from the start, or names
from this daemon's own settings. So no report and no channel makes series.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.checkpoint.verify.hashing import ScrubStatus
from weightcast.shared.daemon.status import LoopStatus, Snapshot
from weightcast.shared.daemon.timing import Due
from weightcast.shared.files.paths import ChannelAddress
from weightcast.shared.files.system import nearest_directory, space_of

PREFIX = "weightcast"
OTHER = "other"
"""label of values outside a closed set"""
CRASH = "crash"
"""an error that nobody foresaw"""
NONE = -1
"""shown for a version or a time where there is none"""
_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

Labels = Mapping[str, Sequence[str] | str]
"""By name: all values that there are, or a text that says where they come from."""
NO_LABELS: Labels = MappingProxyType({})


@dataclass(frozen=True)
class MetricDoc:
    """One metric as documentation shows it. `name`: as Prometheus stores it, without the suffixes of a
    histogram's series."""

    name: str
    kind: str
    help: str
    labels: Labels = field(default_factory=dict)


class Metrics(CollectorRegistry):
    """A registry that knows what is in it. `what` is a metric's name with its unit, without `weightcast_` and
    the suffix of its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.docs: list[MetricDoc] = []

    def count(self, what: str, help: str, labels: Labels = NO_LABELS) -> Counter:
        metric = Counter(f"{PREFIX}_{what}", help, tuple(labels), registry=self)
        self._declare(metric, MetricDoc(f"{PREFIX}_{what}_total", "counter", help, labels))
        return metric

    def number(self, what: str, help: str, labels: Labels = NO_LABELS) -> Gauge:
        """A version, a number of hosts, bytes, a share (`_ratio`), a unix time (`_timestamp_seconds`)."""
        metric = Gauge(f"{PREFIX}_{what}", help, tuple(labels), registry=self)
        self._declare(metric, MetricDoc(f"{PREFIX}_{what}", "gauge", help, labels))
        return metric

    def duration(self, what: str, help: str, labels: Labels = NO_LABELS) -> Histogram:
        """`weightcast_<what>_seconds` with buckets from a millisecond to half an hour."""
        name = f"{PREFIX}_{what}_seconds"
        metric = Histogram(name, help, tuple(labels), buckets=_SECONDS, registry=self)
        self._declare(metric, MetricDoc(name, "histogram", help, labels))
        return metric

    def facts(self, what: str, help: str, labels: Labels = NO_LABELS) -> Info:
        """`weightcast_<what>_info` with labels for values."""
        self.docs.append(MetricDoc(f"{PREFIX}_{what}_info", "gauge", help, labels))
        return Info(f"{PREFIX}_{what}", help, registry=self)

    def watch(self, collector: Collector) -> None:
        """Metrics that `collector` makes when asked; documented by what it makes now."""
        self.docs += map(_doc_of, collector.collect())
        self.register(collector)

    def _declare(self, metric: Counter | Gauge | Histogram, doc: MetricDoc) -> None:
        """Series that exist from the start: a rate over the first increment sees it."""
        self.docs.append(doc)
        if doc.labels and not any(isinstance(values, str) for values in doc.labels.values()):
            for values in product(*doc.labels.values()):
                metric.labels(*values)


def new_registry() -> Metrics:
    """A registry with the process's memory, descriptors and CPU time."""
    # a second series for every counter, which nothing here asks for
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = Metrics()
    ProcessCollector(registry=registry)
    return registry


def one_of(value: str, known: Sequence[str]) -> str:
    """`value` as a label: what is not in the closed set is `other`."""
    return value if value in known else OTHER


def error_kinds() -> tuple[str, ...]:
    """The classes of the tree in `shared/base/errors.py`, and `crash`."""
    return (*_names(WeightcastError), CRASH)


def _names(root: type[WeightcastError]) -> tuple[str, ...]:
    below = [each for each in root.__subclasses__() if each.__module__ == WeightcastError.__module__]
    return (root.__name__, *(name for each in below for name in _names(each)))


def error_kind(error: BaseException) -> str:
    """Its nearest class in the tree; `crash` outside of it."""
    known = error_kinds()
    return next((each.__name__ for each in type(error).__mro__ if each.__name__ in known), CRASH)


def watch_loop(registry: Metrics, loop: Snapshot[LoopStatus]) -> None:
    """Shows the counts of a daemon's loop as metrics, read from its snapshot when asked."""
    registry.watch(_LoopCollector(loop))


def _doc_of(metric: Metric) -> MetricDoc:
    labels: dict[str, tuple[str, ...]] = {}
    for sample in metric.samples:
        labels |= {name: (*labels.get(name, ()), value) for name, value in sample.labels.items()}
    return MetricDoc(metric.samples[0].name, metric.type, metric.documentation, labels)


class _LoopCollector(Collector):
    def __init__(self, loop: Snapshot[LoopStatus]) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        status = self._loop.get()
        outcomes = {
            "ok": status.steps - status.failures - status.crashes,
            "failed": status.failures,
            "crashed": status.crashes,
        }
        errors = {kind: status.errors.get(kind, 0) for kind in error_kinds()}
        yield counted("steps", "Steps of the daemon's loop.", "outcome", outcomes)
        yield counted("errors", "Errors that ended a step, by kind.", "kind", errors)
        help = "Steps begun because the one before had failed."
        yield CounterMetricFamily(f"{PREFIX}_retries", help, value=status.retries)
        help = "Steps failed since the last good one."
        yield GaugeMetricFamily(f"{PREFIX}_failures_in_a_row", help, value=status.failures_in_a_row)
        help = "When the running step began; 0 between steps. One that lasts: a mount or an engine hangs."
        began = f"{PREFIX}_step_began_timestamp_seconds"
        yield GaugeMetricFamily(began, help, value=status.step_began or 0.0)


def counted(what: str, help: str, label: str, counts: Mapping[str, int]) -> Metric:
    """A counter that is made when it is asked for."""
    family = CounterMetricFamily(f"{PREFIX}_{what}", help, labels=(label,))
    for value, number in counts.items():
        family.add_metric((value,), number)
    return family


EVERY_SECONDS = 5.0


class DiskMetrics:
    """`places`: directories by name; a missing directory is judged by where it will be. A URL has no
    size, and gets no series."""

    def __init__(
        self,
        registry: Metrics,
        places: Mapping[str, ChannelAddress],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = {name: path for name, path in places.items() if isinstance(path, Path)}
        place = {"place": tuple(self._places)}
        self._free = registry.number("disk_free_bytes", "Free space on the file system.", place)
        self._size = registry.number("disk_size_bytes", "Size of the file system.", place)
        self._due = Due(EVERY_SECONDS, clock)

    def show(self) -> None:
        """Called by the thread that reads these places anyway: a mount may hang."""
        if not self._due.take():
            return
        for name, directory in self._places.items():
            with contextlib.suppress(OSError):
                space = space_of(nearest_directory(directory))
                self._free.labels(name).set(space.free_bytes)
                self._size.labels(name).set(space.total_bytes)


class VerifyMetrics:
    def __init__(self, registry: Metrics) -> None:
        self._progress = registry.number(
            "verify_progress_ratio", "Share of this pass of the verify that is done."
        )
        self._faults = registry.count("verify_faults", "Tensors that the verify found wrong.")
        self._hashed = registry.number(
            "last_full_hash_timestamp_seconds", "Unix time since which every byte was read; -1: never."
        )
        self._seen = 0

    def show(self, status: ScrubStatus | None, last_full_hash: float | None) -> None:
        self._hashed.set(NONE if last_full_hash is None else last_full_hash)
        if status is not None:
            self._progress.set(status.done_bytes / max(status.total_bytes, 1))
            self._faults.inc(status.faults - self._seen)
            self._seen = status.faults
