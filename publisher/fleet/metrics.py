"""The fleet and the versions as Prometheus metrics: numbers of hosts, never their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.publisher.fleet.lag_history import LAGS, MORE, UNKNOWN, lag_counts
from weightcast.publisher.fleet.versions import CatchUpRow, Joiner
from weightcast.publisher.fleet.view import ChannelPage
from weightcast.shared.daemon.fleet import Fleet, Standing
from weightcast.shared.daemon.metrics import PREFIX, Metrics

COSTS = ("1", "8", "64", "new")
"""lags whose cost is shown, and a host that joins with the base at hand"""
_NAN = float("nan")


class FleetMetrics(Collector):
    """`last_look` is asked at every scrape and must not block."""

    def __init__(self, registry: Metrics, last_look: Callable[[], tuple[Fleet, ChannelPage]]) -> None:
        self._last_look = last_look
        registry.watch(self)

    def collect(self) -> Iterator[Metric]:
        fleet, page = self._last_look()
        text = "Hosts that reported, by where they stand."
        counts = Counter(host.standing for host in fleet.hosts)
        yield _family("hosts", text, "standing", {each: counts[each] for each in get_args(Standing)})
        text = "Hosts that neither stopped nor are lost, by versions behind."
        lags = lag_counts(fleet)
        yield _family("hosts_behind", text, "behind", {each: lags[each] for each in (*LAGS, MORE, UNKNOWN)})
        rows: dict[str, CatchUpRow | Joiner] = {str(row.lag): row for row in page.catch_up.rows}
        rows["new"] = page.catch_up.joiner
        costs = {lag: rows.get(lag, Joiner()) for lag in COSTS}
        text = "What a host that many versions behind, or a new one, would read; NaN where nothing leads on."
        yield _family("catch_up_bytes", text, "behind", {lag: cost.bytes for lag, cost in costs.items()})
        text = "And how long it would take, estimated from what hosts report; NaN until one did."
        yield _family("catch_up_seconds", text, "behind", {lag: cost.seconds for lag, cost in costs.items()})
        chain = list(takewhile(lambda row: not row.anchor, page.versions.versions))
        text = "Versions since the last full weights in the channel, or the base."
        yield GaugeMetricFamily(f"{PREFIX}_chain_versions", text, value=len(chain))
        nbytes = sum(row.bytes for row in chain)
        yield GaugeMetricFamily(f"{PREFIX}_chain_bytes", "Bytes of their deltas.", value=nbytes)


def _family(what: str, help: str, label: str, values: Mapping[str, float | None]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{what}", help, labels=(label,))
    for name, value in values.items():
        family.add_metric((name,), _NAN if value is None else value)
    return family
