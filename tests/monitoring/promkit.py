"""A real Prometheus on a free port, with the shipped configuration and rules in quick motion."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from faultkit import until

SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
SECONDS = {"s": 1, "m": 60, "h": 3600}
WAITS = 1 / 40
"""what `for: 2m` becomes: three seconds, three scrapes"""


def quick(rules: dict[str, Any], still_seconds: float = 3600.0) -> dict[str, Any]:
    """The rules with short waits, and `still_seconds` without a version until that is an alert."""
    groups = []
    for group in rules["groups"]:
        quickened = [_quick_rule(rule, still_seconds) for rule in group["rules"]]
        groups.append({**group, "interval": "500ms", "rules": quickened})
    return {"groups": groups}


def _quick_rule(rule: dict[str, Any], still_seconds: float) -> dict[str, Any]:
    rule = dict(rule)
    if "for" in rule:
        number, unit = re.fullmatch(r"(\d+)([smh])", rule["for"]).groups()  # type: ignore[union-attr]
        rule["for"] = f"{max(1, round(int(number) * SECONDS[unit] * WAITS))}s"
    if rule.get("alert") == "WeightcastNoNewVersion":
        assert rule["expr"].count("> 1800") == 1
        rule["expr"] = rule["expr"].replace("> 1800", f"> {still_seconds:g}")
    return rule


def shipped(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((SHIPPED / name).read_text())
    return found


@dataclass
class Prometheus:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls, root: Path, jobs: Mapping[str, Sequence[str]], token: str, still_seconds: float = 3600.0
    ) -> Prometheus:
        """`jobs`: addresses by the names of the shipped scrape configuration."""
        root.mkdir()
        (root / "weightcast-token").write_text(token)
        (root / "alerts.yml").write_text(yaml.safe_dump(quick(shipped("alerts.yml"), still_seconds)))
        (root / "prometheus.yml").write_text(yaml.safe_dump(_config(jobs)))
        binary = shutil.which("prometheus")
        assert binary is not None, "prometheus is needed here: apt-get install prometheus"
        log = root / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [
                    binary,
                    *(f"--config.file={root}/prometheus.yml", f"--storage.tsdb.path={root}/data"),
                    "--web.listen-address=127.0.0.1:0",
                ],
                stderr=stream,
                stdout=stream,
            )
        made = cls("", process, log)
        try:
            made.url = f"http://127.0.0.1:{until(made._port, 'Prometheus listens', 60)}"
            until(lambda: httpx.get(f"{made.url}/-/ready", trust_env=False).is_success, "ready", 60)
        except BaseException:
            made.end()
            raise
        return made

    def _port(self) -> int | None:
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r'Listening on" address=127\.0\.0\.1:(\d+)', self.log.read_text())
        return int(found[1]) if found else None

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """An instant vector. What Prometheus does not understand fails the test."""
        answer = httpx.get(
            f"{self.url}/api/v1/query", params={"query": expr}, trust_env=False, timeout=20
        ).json()
        assert answer["status"] == "success", (expr, answer)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expr: str) -> float | None:
        """Of the one series that there is; None while there is none."""
        found = self.query(expr)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None

    def firing(self, name: str, **labels: str) -> bool:
        wanted = ",".join(f"{label}={json.dumps(value)}" for label, value in labels.items())
        return bool(self.query(f'ALERTS{{alertname="{name}",alertstate="firing",{wanted}}}'))

    def all_firing(self) -> set[str]:
        """But that a disk is nearly full: the machine's own may be."""
        firing = self.query('ALERTS{alertstate="firing"}')
        return {one["metric"]["alertname"] for one in firing} - {"WeightcastDiskNearlyFull"}


def _config(jobs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    config = shipped("prometheus.yml")
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
    del config["alerting"]
    assert {job["job_name"] for job in config["scrape_configs"]} == set(jobs)
    for job in config["scrape_configs"]:
        job.pop("file_sd_configs", None)
        job["static_configs"] = [{"targets": list(jobs[job["job_name"]])}]
    return config


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel, expression) of the shipped dashboard, with its variables filled in."""
    board = json.loads((SHIPPED / "dashboard.json").read_text())
    found = [
        (panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$run", ".*"))
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    assert not [expr for _, expr in found if "$" in expr]
    return found
