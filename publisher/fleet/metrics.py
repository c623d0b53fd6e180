"""The fleet and the versions as Prometheus metrics: numbers of hosts, never their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weightcast.publisher.fleet.catch_up_cost import CatchUp, Versions
from weightcast.publisher.fleet.view import ChannelPage
from weightcast.shared.daemon.fleet import Fleet, Standing
from weightcast.shared.daemon.metrics import PREFIX, MetricDoc, Metrics

LAGS = {"0": 0, "1": 1, "2-3": 3, "4-15": 15, "16-63": 63}
"""labels of lags, by the most that they hold"""
MORE, UNKNOWN = "64+", "unknown"
COSTS = ("1", "8", "64", "new")
"""lags whose cost is shown, and a host that joins with the base at hand"""
_NAN = float("nan")

HOSTS = MetricDoc(
    f"{PREFIX}_hosts", "gauge", "Hosts that reported, by where they stand.", {"standing": get_args(Standing)}
)
BEHIND = MetricDoc(
    f"{PREFIX}_hosts_behind",
    "gauge",
    "Hosts that neither stopped nor are lost, by versions behind.",
    {"behind": (*LAGS, MORE, UNKNOWN)},
)
COST_BYTES = MetricDoc(
    f"{PREFIX}_catch_up_bytes",
    "gauge",
    "What a host that many versions behind, or a new one, would read; NaN where nothing leads on.",
    {"behind": COSTS},
)
COST_SECONDS = MetricDoc(
    f"{PREFIX}_catch_up_seconds",
    "gauge",
    "And how long it would take, estimated from what hosts report; NaN until one did.",
    {"behind": COSTS},
)
CHAIN_VERSIONS = MetricDoc(
    f"{PREFIX}_chain_versions", "gauge", "Versions since the last full weights in the channel, or the base."
)
CHAIN_BYTES = MetricDoc(f"{PREFIX}_chain_bytes", "gauge", "Bytes of their deltas.")


class FleetMetrics(Collector):
    """`last_look` is asked at every scrape and must not block."""

    def __init__(self, registry: Metrics, last_look: Callable[[], tuple[Fleet, ChannelPage]]) -> None:
        self._last_look = last_look
        registry.docs += [HOSTS, BEHIND, COST_BYTES, COST_SECONDS, CHAIN_VERSIONS, CHAIN_BYTES]
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        fleet, page = self._last_look()
        yield _family(HOSTS, Counter(host.standing for host in fleet.hosts))
        lags = (lag_label(host.lag) for host in fleet.hosts if host.takes_part)
        yield _family(BEHIND, Counter(lags))
        yield from _costs(page.catch_up)
        yield from _chain(page.versions)


def lag_label(lag: int | None) -> str:
    if lag is None:
        return UNKNOWN
    return next((label for label, most in LAGS.items() if lag <= most), MORE)


def _costs(catch_up: CatchUp) -> Iterable[Metric]:
    rows = {str(row.lag): row for row in catch_up.rows}
    nbytes: dict[str, float | None] = {lag: row.bytes for lag, row in rows.items()}
    seconds = {lag: row.seconds for lag, row in rows.items()}
    yield _family(COST_BYTES, {**nbytes, "new": catch_up.joiner.bytes}, _NAN)
    yield _family(COST_SECONDS, {**seconds, "new": catch_up.joiner.seconds}, _NAN)


def _chain(versions: Versions) -> Iterable[Metric]:
    count = nbytes = 0
    for row in versions.versions:
        if row.anchor:
            break
        count, nbytes = count + 1, nbytes + row.bytes
    yield GaugeMetricFamily(CHAIN_VERSIONS.name, CHAIN_VERSIONS.help, value=count)
    yield GaugeMetricFamily(CHAIN_BYTES.name, CHAIN_BYTES.help, value=nbytes)


def _family(doc: MetricDoc, values: Mapping[str, float | None], unknown: float = 0.0) -> Metric:
    """A series for every value of the one label."""
    [(label, known)] = doc.labels.items()
    family = GaugeMetricFamily(doc.name, doc.help, labels=(label,))
    for each in known:
        value = values.get(each)
        family.add_metric((each,), unknown if value is None else value)
    return family
