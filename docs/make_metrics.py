"""Prints docs/metrics.md from the code: python docs/make_metrics.py > docs/metrics.md"""

from __future__ import annotations

from pathlib import Path

from weightcast.publisher.daemon.record import PublisherMetrics
from weightcast.publisher.fleet.metrics import FleetMetrics
from weightcast.publisher.fleet.view import ChannelPage
from weightcast.publisher.mirror.daemon import MirrorMetrics
from weightcast.publisher.mirror.mirror import MirrorStatus
from weightcast.shared.daemon.fleet import Fleet
from weightcast.shared.daemon.metrics import DiskMetrics, Labels, MetricDoc, Metrics, watch_loop
from weightcast.shared.daemon.status import LoopStatus, Snapshot
from weightcast.subscriber.daemon.metrics import SubscriberMetrics
from weightcast.subscriber.gate.gate import Gate
from weightcast.subscriber.gate.traffic import Traffic
from weightcast.subscriber.gateway.gateway import GatewayMetrics

HEAD = """\
# Metrics

What `/metrics` of the daemons shows, in Prometheus' text format; made from the code by
`python docs/make_metrics.py`. Units are part of the names: `_seconds`, `_bytes`, `_ratio` (1 is all),
`_timestamp_seconds` (unix time), `_total` (counts since the daemon's start). A histogram has `_bucket`,
`_sum` and `_count`.

Labels have closed sets of values, or values from this daemon's own settings and its channel: what hosts
report and what versions hold makes no series. Series of closed sets exist from the start. Scrape
configuration, alerts and a Grafana dashboard: [monitoring](monitoring.md#metrics-and-alerts).
"""
TABLE = "| metric | kind | labels | |\n|---|---|---|---|\n"
PROCESS = """
Both show their process too: `process_resident_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds`.
"""


def document() -> str:
    publisher, subscriber = _publisher(), _subscriber()
    both = [doc for doc in publisher if doc in subscriber]
    return "\n".join(
        (
            HEAD,
            "## Both daemons\n",
            _table(both) + PROCESS,
            "## The publisher\n",
            _table([doc for doc in publisher if doc not in both]),
            "## The subscriber\n",
            _table([doc for doc in subscriber if doc not in both]),
            "## The mirror\n",
            "Its loop and process as above, and\n",
            _table(_mirror()),
            "## The gateway\n",
            "Its loop and process as above, and\n",
            _table(_gateway()).rstrip("\n"),
        )
    )


def _publisher() -> list[MetricDoc]:
    registry = Metrics()
    PublisherMetrics(registry)
    FleetMetrics(registry, _no_look)
    return _with_furniture(registry)


def _no_look() -> tuple[Fleet, ChannelPage]:
    return Fleet(now=0.0, channel="", run_id=None, latest=None), ChannelPage()


def _subscriber() -> list[MetricDoc]:
    registry = Metrics()
    SubscriberMetrics(registry)
    traffic = Traffic((), policy="pass", drain_seconds=0, hold_seconds=0, most=1)
    registry.watch(Gate({}, traffic, token=None, run_id=str, wake=lambda: None))
    return _with_furniture(registry)


def _mirror() -> list[MetricDoc]:
    registry = Metrics()
    registry.watch(MirrorMetrics(lambda: MirrorStatus(channel="", local="")))
    return registry.docs


def _gateway() -> list[MetricDoc]:
    registry = Metrics()
    GatewayMetrics(registry)
    return registry.docs


def _with_furniture(registry: Metrics) -> list[MetricDoc]:
    DiskMetrics(registry, {"channel": Path(), "local": Path()})
    watch_loop(registry, Snapshot(LoopStatus()))
    return registry.docs


def _table(docs: list[MetricDoc]) -> str:
    return TABLE + "".join(
        f"| `{doc.name}` | {doc.kind} | {_labels(doc.labels)} | {doc.help} |\n" for doc in docs
    )


def _labels(labels: Labels) -> str:
    return "; ".join(f"`{name}`: {_values(values)}" for name, values in labels.items())


def _values(values: object) -> str:
    if isinstance(values, str):
        return values
    assert isinstance(values, tuple)
    return ", ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    print(document())
