"""A short soak; `make soak` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak_run.py")


def soak(*options: str) -> None:
    command = [sys.executable, str(SOAK), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]


@pytest.mark.timeout(900)
def test_versions_arrive_whatever_goes_wrong_and_nothing_grows() -> None:
    soak("--versions", "60", "--seconds", "12")


@pytest.mark.s3
@pytest.mark.timeout(900)
def test_versions_arrive_whatever_becomes_of_requests(bucket: str) -> None:
    soak("--versions", "40", "--channel", bucket)
