"""A short campaign of the crash harness; `make crash` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("crash_run.py")
KILLS = 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixty_kills_leave_nothing_illegal(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(HARNESS), "--kills", str(KILLS), "--minutes", "10", "--json", str(results)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    print(done.stdout[-20_000:], done.stderr[-4000:])
    assert done.returncode == 0, "the output names the seed, the scenario and the failpoint"
    found = json.loads(results.read_text())
    assert found["kills"] >= KILLS and found["violations"] == []
