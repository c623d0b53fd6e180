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
from weightcast.shared.daemon.backoff import Due
from weightcast.shared.daemon.status import LoopStatus, Snapshot, VerifyStatus
from weightcast.shared.files.system import nearest_directory, space_of

PREFIX = "weightcast"
OTHER = "other"
"""label of values outside a closed set"""
CRASH = "crash"
"""an error that nobody foresaw"""
NONE = -1
"""shown for a version where there is none"""
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
    """A registry that knows what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.docs: list[MetricDoc] = []


def new_registry() -> Metrics:
    """A registry with the process's memory, descriptors and CPU time."""
    # a second series for every counter, which nothing here asks for
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = Metrics()
    ProcessCollector(registry=registry)
    return registry


def count(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Counter:
    """`weightcast_<what>_total`"""
    metric = Counter(f"{PREFIX}_{what}", help, tuple(labels), registry=registry)
    _declare(registry, metric, MetricDoc(f"{PREFIX}_{what}_total", "counter", help, labels))
    return metric


def byte_count(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Counter:
    """`weightcast_<what>_bytes_total`"""
    return count(registry, f"{what}_bytes", help, labels)


def number(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Gauge:
    """`weightcast_<what>`: a version, a number of hosts."""
    metric = Gauge(f"{PREFIX}_{what}", help, tuple(labels), registry=registry)
    _declare(registry, metric, MetricDoc(f"{PREFIX}_{what}", "gauge", help, labels))
    return metric


def byte_size(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Gauge:
    """`weightcast_<what>_bytes`"""
    return number(registry, f"{what}_bytes", help, labels)


def share(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Gauge:
    """`weightcast_<what>_ratio`"""
    return number(registry, f"{what}_ratio", help, labels)


def age(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Gauge:
    """`weightcast_<what>_seconds`"""
    return number(registry, f"{what}_seconds", help, labels)


def moment(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Gauge:
    """`weightcast_<what>_timestamp_seconds`: unix time"""
    return number(registry, f"{what}_timestamp_seconds", help, labels)


def duration(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Histogram:
    """`weightcast_<what>_seconds` with buckets from a millisecond to half an hour."""
    name = f"{PREFIX}_{what}_seconds"
    metric = Histogram(name, help, tuple(labels), buckets=_SECONDS, registry=registry)
    _declare(registry, metric, MetricDoc(name, "histogram", help, labels))
    return metric


def facts(registry: Metrics, what: str, help: str, labels: Labels = NO_LABELS) -> Info:
    """`weightcast_<what>_info` with labels for values."""
    registry.docs.append(MetricDoc(f"{PREFIX}_{what}_info", "gauge", help, labels))
    return Info(f"{PREFIX}_{what}", help, registry=registry)


def one_of(value: str, known: Sequence[str]) -> str:
    """`value` as a label: what is not in the closed set is `other`."""
    return value if value in known else OTHER


def _declare(registry: Metrics, metric: Counter | Gauge | Histogram, doc: MetricDoc) -> None:
    """Series that exist from the start: a rate over the first increment sees it."""
    registry.docs.append(doc)
    closed = [values for values in doc.labels.values() if not isinstance(values, str)]
    if doc.labels and len(closed) == len(doc.labels):
        for values in product(*closed):
            metric.labels(*values)


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


_LOOP = (
    MetricDoc(
        f"{PREFIX}_steps_total",
        "counter",
        "Steps of the daemon's loop.",
        {"outcome": ("ok", "failed", "crashed")},
    ),
    MetricDoc(
        f"{PREFIX}_errors_total", "counter", "Errors that ended a step, by kind.", {"kind": error_kinds()}
    ),
    MetricDoc(f"{PREFIX}_retries_total", "counter", "Steps begun because the one before had failed."),
    MetricDoc(f"{PREFIX}_failures_in_a_row", "gauge", "Steps failed since the last good one."),
    MetricDoc(
        f"{PREFIX}_step_began_timestamp_seconds",
        "gauge",
        "When the running step began; 0 between steps. One that lasts: a mount or an engine hangs.",
    ),
)


def watch_loop(registry: Metrics, loop: Snapshot[LoopStatus]) -> None:
    """Shows the counts of a daemon's loop as metrics, read from its snapshot when asked."""
    registry.docs += _LOOP
    registry.register(_LoopCollector(loop))


class _LoopCollector(Collector):
    def __init__(self, loop: Snapshot[LoopStatus]) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        status = self._loop.get()
        steps, errors, retries, in_a_row, began = _LOOP
        outcomes = {
            "ok": status.steps - status.failures - status.crashes,
            "failed": status.failures,
            "crashed": status.crashes,
        }
        yield _counted(steps, outcomes)
        yield _counted(errors, {kind: status.errors.get(kind, 0) for kind in error_kinds()})
        yield CounterMetricFamily(retries.name, retries.help, value=status.retries)
        yield GaugeMetricFamily(in_a_row.name, in_a_row.help, value=status.failures_in_a_row)
        yield GaugeMetricFamily(
            began.name, began.help, value=0.0 if status.step_began is None else status.step_began
        )


def _counted(doc: MetricDoc, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(doc.name, doc.help, labels=tuple(doc.labels))
    for value, number in counts.items():
        family.add_metric((value,), number)
    return family


EVERY_SECONDS = 5.0
PLACES = ("channel", "local")


class DiskMetrics:
    """`places`: a directory for each of PLACES; one that is not there yet is judged by where it will be."""

    def __init__(
        self, registry: Metrics, places: Mapping[str, Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        place = {"place": PLACES}
        self._free = byte_size(registry, "disk_free", "Free space on the file system.", place)
        self._size = byte_size(registry, "disk_size", "Size of the file system.", place)
        self._places = dict(places)
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


_NEVER = -1


class VerifyMetrics:
    def __init__(self, registry: Metrics) -> None:
        self._progress = share(registry, "verify_progress", "Share of this pass of the verify that is done.")
        self._faults = count(registry, "verify_faults", "Tensors that the verify found wrong.")
        self._hashed = moment(
            registry, "last_full_hash", "Unix time since which every byte was read; -1: never."
        )
        self._seen = 0

    def show(self, status: VerifyStatus | None, last_full_hash: float | None) -> None:
        self._hashed.set(_NEVER if last_full_hash is None else last_full_hash)
        if status is not None:
            self._progress.set(status.done_bytes / max(status.total_bytes, 1))
            self._faults.inc(status.faults - self._seen)
            self._seen = status.faults
