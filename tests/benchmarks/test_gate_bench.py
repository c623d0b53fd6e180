"""The benchmark of the gate, in a short run of its own processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_short_run_has_a_row_for_every_load_and_route() -> None:
    command = [sys.executable, "-m", "benchmarks.gate", "--seconds", "0.2", "--streams", "2"]
    done = subprocess.run(
        [*command, "--through", "gateway"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if "loop, " in line]
    routes = ("direct", "gate", "gateway + gate")
    loads = (
        "closed loop, JSON, whole",
        "closed loop, stream, whole",
        "open loop, each event",
        "open loop, first event",
    )
    assert [(row[0].removeprefix("| "), row[2]) for row in rows] == [
        (load, route) for load in loads for route in routes
    ]
    assert all(float(row[3]) > 0 for row in rows)
    assert all(float(row[-1].rstrip(" |")) > 0 for row in rows if row[2] != "direct")
