"""Prints the Grafana dashboard: python deploy/make_dashboard.py > deploy/monitoring/dashboard.json

Import it in Grafana (10 or newer) and choose the Prometheus that scrapes the daemons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
RUN = '* on (instance, job) group_left (run_id) weightcast_run_info{run_id=~"$run"}'
"""only what belongs to the chosen runs"""


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = "{{instance}}"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12
    says: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def of_run(metric: str) -> str:
    return f"{metric} {RUN}"


def quantile(share: float, histogram: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({histogram}_bucket[$__rate_interval])))"


def rate(counter: str, by: str) -> str:
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))"


ROWS = (
    Row(
        "Fleet",
        (
            Panel(
                "Newest version",
                "none",
                (Query('weightcast:newest_version{run_id=~"$run"}', "{{run_id}}"),),
                "stat",
                4,
            ),
            Panel(
                "Since the newest version",
                "s",
                (Query("time() - weightcast_version_created_timestamp_seconds"),),
                "stat",
                4,
            ),
            Panel(
                "Hosts",
                "none",
                (Query("sum by (standing) (weightcast_hosts)", "{{standing}}"),),
                "stat",
                12,
            ),
            Panel(
                "Firing alerts",
                "none",
                (Query('count(ALERTS{alertname=~"Weightcast.*"}) or vector(0)', ""),),
                "stat",
                4,
            ),
            Panel(
                "Versions behind the newest",
                "none",
                (Query('weightcast:host_behind_versions{run_id=~"$run"}'),),
                says="Of hosts that follow latest.",
            ),
            Panel(
                "Hosts by versions behind",
                "none",
                (Query("sum by (behind) (weightcast_hosts_behind)", "{{behind}}"),),
                says="From the hosts' reports.",
            ),
            Panel("Version served", "none", (Query(of_run("weightcast_served_version")),)),
            Panel(
                "Engines by state",
                "none",
                (Query("sum by (state) (weightcast_engine_state)", "{{state}}"),),
            ),
        ),
    ),
    Row(
        "Publishing",
        (
            Panel(
                "Publications",
                "ops",
                (Query(rate("weightcast_publications_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                "Time of a publication by phase, 90 %",
                "s",
                (Query(quantile(0.9, "weightcast_publish_phase_seconds", "phase"), "{{phase}}"),),
            ),
            Panel(
                "Density",
                "percentunit",
                (
                    Query("weightcast_density_elements_ratio", "elements"),
                    Query("weightcast_density_bytes_ratio", "bytes"),
                ),
            ),
            Panel("Full weights over delta", "none", (Query("weightcast_compression_ratio"),)),
            Panel(
                "Bytes written to the channel",
                "Bps",
                (Query(rate('weightcast_channel_bytes_total{direction="written"}', "cause"), "{{cause}}"),),
            ),
            Panel(
                "What waits",
                "none",
                (
                    Query("weightcast_queue_length", "queue"),
                    Query("weightcast_inbox_waiting", "inbox"),
                ),
            ),
            Panel(
                "Catching up costs",
                "bytes",
                (Query("weightcast_catch_up_bytes", "{{behind}} behind"),),
            ),
            Panel(
                "Deltas since the last full weights",
                "none",
                (Query("weightcast_chain_versions", "versions"),),
            ),
        ),
    ),
    Row(
        "Updates on the hosts",
        (
            Panel(
                "Time of an update by phase, 90 %",
                "s",
                (Query(quantile(0.9, "weightcast_update_phase_seconds", "phase"), "{{phase}}"),),
            ),
            Panel(
                "Engine pauses",
                "s",
                (
                    Query(quantile(0.5, "weightcast_engine_pause_seconds", "job"), "50 %"),
                    Query(quantile(0.99, "weightcast_engine_pause_seconds", "job"), "99 %"),
                ),
            ),
            Panel(
                "Bytes read from the channel",
                "Bps",
                (Query(rate('weightcast_channel_bytes_total{direction="read"}', "cause"), "{{cause}}"),),
            ),
            Panel("Updates", "ops", (Query(rate("weightcast_updates_total", "kind"), "{{kind}}"),)),
        ),
    ),
    Row(
        "Health",
        (
            Panel(
                "Free space",
                "percentunit",
                (Query("weightcast_disk_free_bytes / weightcast_disk_size_bytes", "{{instance}} {{place}}"),),
            ),
            Panel("Errors by kind", "ops", (Query(rate("weightcast_errors_total", "kind"), "{{kind}}"),)),
            Panel(
                "Damage met",
                "none",
                (
                    Query(
                        "sum by (place) (increase(weightcast_digest_mismatches_total[$__rate_interval]))",
                        "{{place}}",
                    ),
                    Query("sum(increase(weightcast_verify_faults_total[$__rate_interval]))", "verify"),
                    Query(
                        "sum(increase(weightcast_engine_verify_faults_total[$__rate_interval])) or vector(0)",
                        "engines' memory",
                    ),
                ),
            ),
            Panel("Verify, share of the pass", "percentunit", (Query("weightcast_verify_progress_ratio"),)),
            Panel("Memory", "bytes", (Query("process_resident_memory_bytes"),)),
            Panel("CPU", "percentunit", (Query("rate(process_cpu_seconds_total[$__rate_interval])"),)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "title": "weightcast",
        "uid": "weightcast",
        "tags": ["weightcast"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_datasource(), _runs()]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(weightcast_run_info, run_id)", "refId": "run"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Left to right, then down; rows and panels are numbered through."""
    number, top = 0, 0
    for row in ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": []} | _at(
            0, top, COLUMNS, 1
        )
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            height = 4 if panel.kind == "stat" else 8
            yield {"id": number} | _panel(panel) | _at(left, top, panel.width, height)
            left, tallest = left + panel.width, max(tallest, height)
        top += tallest


def _at(left: int, top: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
