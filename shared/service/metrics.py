"""Prometheus metrics of one daemon, in a registry of its own: `weightcast_<name>_<unit>`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.shared.service.snapshot import LoopStatus, Snapshot

PREFIX = "weightcast"
_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


def new_registry() -> CollectorRegistry:
    """A registry with the process's memory, descriptors and CPU time."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def count(registry: CollectorRegistry, what: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """`weightcast_<what>_total`"""
    return Counter(f"{PREFIX}_{what}", help, labels, registry=registry)


def byte_count(registry: CollectorRegistry, what: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """`weightcast_<what>_bytes_total`"""
    return Counter(f"{PREFIX}_{what}_bytes", help, labels, registry=registry)


def number(registry: CollectorRegistry, what: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """`weightcast_<what>`: a version, a number of hosts."""
    return Gauge(f"{PREFIX}_{what}", help, labels, registry=registry)


def byte_size(registry: CollectorRegistry, what: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """`weightcast_<what>_bytes`"""
    return Gauge(f"{PREFIX}_{what}_bytes", help, labels, registry=registry)


def age(registry: CollectorRegistry, what: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """`weightcast_<what>_seconds`"""
    return Gauge(f"{PREFIX}_{what}_seconds", help, labels, registry=registry)


def duration(registry: CollectorRegistry, what: str, help: str, labels: Sequence[str] = ()) -> Histogram:
    """`weightcast_<what>_seconds` with buckets from a millisecond to half an hour."""
    return Histogram(f"{PREFIX}_{what}_seconds", help, labels, buckets=_SECONDS, registry=registry)


def facts(registry: CollectorRegistry, what: str, help: str) -> Info:
    """`weightcast_<what>_info` with labels for values."""
    return Info(f"{PREFIX}_{what}", help, registry=registry)


def watch_loop(registry: CollectorRegistry, loop: Snapshot[LoopStatus]) -> None:
    """Shows the counts of a daemon's loop as metrics, read from its snapshot when asked."""
    registry.register(_LoopCollector(loop))


class _LoopCollector(Collector):
    def __init__(self, loop: Snapshot[LoopStatus]) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        status = self._loop.get()
        steps = CounterMetricFamily(f"{PREFIX}_steps", "Steps of the daemon's loop.", labels=("outcome",))
        steps.add_metric(("ok",), status.steps - status.failures - status.crashes)
        steps.add_metric(("failed",), status.failures)
        steps.add_metric(("crashed",), status.crashes)
        yield steps
        yield GaugeMetricFamily(
            f"{PREFIX}_failures_in_a_row",
            "Steps failed since the last good one.",
            value=status.failures_in_a_row,
        )
