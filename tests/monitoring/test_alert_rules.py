"""The shipped files of deploy/monitoring, as Prometheus' own tools and the code see them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from promkit import SHIPPED, dashboard_queries, shipped

from weightcast.shared.daemon.metrics import PREFIX

pytestmark = pytest.mark.monitoring
ROOT = SHIPPED.parents[1]
RULES = [rule for group in shipped("alerts.yml")["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
CASES = Path(__file__).with_name("alerts_test.yml")


def documented() -> set[str]:
    """Names of series as docs/metrics.md has them, those of histograms with their suffixes."""
    names = set()
    for name, kind in re.findall(
        r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M
    ):
        names |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=SHIPPED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_configuration_and_rules() -> None:
    run("promtool", "check", "config", "--syntax-only", "prometheus.yml")
    run("promtool", "check", "rules", "alerts.yml")


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    run("promtool", "test", "rules", str(CASES))


def test_every_alert_is_tested_both_ways() -> None:
    tests: list[dict[str, Any]] = yaml.safe_load(CASES.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for fires in (True, False):
        tested = {case["alertname"] for case in cases if bool(case["exp_alerts"]) == fires}
        assert {rule["alert"] for rule in ALERTS} == tested


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_metrics_that_exist(rule: dict[str, Any]) -> None:
    recorded = {one["record"] for one in RULES if "record" in one}
    used = set(re.findall(rf"\b{PREFIX}[_:]\w+", rule["expr"])) - recorded
    assert used <= documented()


def test_the_dashboard_uses_metrics_that_exist() -> None:
    recorded = {one["record"] for one in RULES if "record" in one}
    used = {name for _, expr in dashboard_queries() for name in re.findall(rf"\b{PREFIX}[_:]\w+", expr)}
    assert len(used) > 20 and used - recorded <= documented()


def test_the_dashboard_is_the_generators() -> None:
    made = runpy.run_path(str(ROOT / "deploy" / "make_dashboard.py"))["dashboard"]()
    message = "run: python deploy/make_dashboard.py > deploy/monitoring/dashboard.json"
    assert json.loads((SHIPPED / "dashboard.json").read_text()) == made, message
    panels = [panel["gridPos"] for panel in made["panels"]]
    taken = {
        (x, y)
        for at in panels
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    }
    assert len(taken) == sum(at["w"] * at["h"] for at in panels) and max(x for x, _ in taken) < 24


def test_every_alert_has_a_line_in_the_operators_page() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in ALERTS:
        assert f"\n| `{rule['alert']}` |" in page
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
