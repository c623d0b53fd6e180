"""A short campaign of the crash harness; `make crash` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HARNESS = Path(__file__).with_name("crash_run.py")
KILLS = 60


IN_A_BUCKET = ("publish", "start publisher", "make beside", "follow", "take over")


def campaign(results: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(HARNESS), "--minutes", "10", "--json", str(results), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout[-20_000:], done.stderr[-4000:])
    assert done.returncode == 0, "the output names the seed, the scenario and the failpoint"
    found: dict[str, Any] = json.loads(results.read_text())
    assert found["violations"] == []
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixty_kills_leave_nothing_illegal(tmp_path: Path) -> None:
    assert campaign(tmp_path / "results.json", "--kills", str(KILLS))["kills"] >= KILLS


@pytest.mark.s3
@pytest.mark.timeout(900)
def test_kills_leave_nothing_illegal_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    scenarios = [word for name in IN_A_BUCKET for word in ("--scenario", name)]
    found = campaign(tmp_path / "results.json", "--channel", bucket, "--strikes", "20", *scenarios)
    assert found["strikes"] >= 20 and found["kills"] >= 12
