"""The whole demo, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


def start_demo(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.demo", *map(str, arguments)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **environment}, **streams)


def run_demo(directory: Path, *arguments: str) -> tuple[subprocess.Popen[str], str, dict[str, Any]]:
    report = directory / "summary.json"
    demo = start_demo("--run-dir", directory / "run", "--json", report, *arguments)
    try:
        output, _ = demo.communicate(timeout=500)
    finally:
        demo.kill()
    return demo, output, json.loads(report.read_text())


def processes_of(directory: Path) -> list[str]:
    """Command lines that name the directory; /proc shows those of zombies as empty."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [command] if str(directory) in command else []
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trains_serves_and_proves_it_bit_for_bit(tmp_path: Path) -> None:
    demo, output, summary = run_demo(tmp_path)
    assert demo.returncode == 0, output
    assert summary["failures"] == {}
    assert summary["versions_published"] >= 20
    assert min(summary["versions_served"].values()) >= 20
    assert summary["publisher_kills"] == 1
    assert summary["reward"]["rise"] > 3 * summary["reward"]["standard_error"] > 0
    assert len(summary["bit_exact"]) == 4 and all(summary["bit_exact"].values())
    assert 0.01 < summary["density"] < 0.15
    assert summary["delta_bytes"] < 0.1 * summary["full_bytes"]
    assert summary["lag_max"] <= summary["lag_allowed"] == 4
    assert sum(summary["versions_per_answer"].values()) == pytest.approx(1)
    assert "publish to served" in output
    assert processes_of(tmp_path) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_weight_updates_the_reward_check_fails(tmp_path: Path) -> None:
    demo, output, summary = run_demo(tmp_path, "--freeze", "--steps", "4")
    assert demo.returncode == 1, output
    assert {"versions", "reward", "bits"} == set(summary["failures"])
    assert summary["versions_published"] == 0
    assert summary["lag_max"] == 0
    assert (tmp_path / "run" / "logs" / "publisher.log").exists()
    assert processes_of(tmp_path) == []


@pytest.mark.trainers
@pytest.mark.timeout(600)
def test_adapters_over_a_frozen_base(tmp_path: Path) -> None:
    # a busy host skips versions where rollouts may be one version old
    demo, output, summaries = run_demo(tmp_path, "--lora", "--max-lag", "0", "--steps", "22")
    assert demo.returncode == 0, output
    assert list(summaries) == ["ascending", "descending"]
    for summary in summaries.values():
        assert summary["failures"] == {}
        assert summary["versions_published"] == 23
        assert min(summary["versions_served"].values()) >= 20
        assert summary["publisher_kills"] == 1
        assert summary["reward"]["rise"] > 3 * summary["reward"]["standard_error"] > 0
        assert len(summary["bit_exact"]) == 4 and all(summary["bit_exact"].values())
        assert summary["delta_bytes"] < summary["full_bytes"]
        assert summary["lag_max"] == summary["lag_allowed"] == 0
        assert list(summary["versions_per_answer"]) == ["1"]
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_it(tmp_path: Path, number: signal.Signals) -> None:
    demo = start_demo("--run-dir", tmp_path / "run")
    try:
        wait_until(lambda: any("prepare" in command for command in processes_of(tmp_path)))
        demo.send_signal(number)
        demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.communicate()
    assert demo.returncode != 0
    wait_until(lambda: processes_of(tmp_path) == [])


def test_leaves_foreign_directories_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    demo = start_demo("--run-dir", tmp_path)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2, output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_missing_s3_server_is_named_with_its_packages(tmp_path: Path) -> None:
    demo = start_demo("--run-dir", tmp_path / "run", "--channel", "s3", PATH=str(tmp_path))
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2, output
    assert "apt-get install radosgw" in output and "s3://BUCKET" in output
    assert not (tmp_path / "run").exists()
