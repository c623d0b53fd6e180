"""A publisher whose local disk something else fills: kept history gives way, as far as nobody needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
CHILD = Path(__file__).with_name("short_disk_child.py")
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def on_a_short_disk(what: str, root: Path) -> tuple[Any, ...]:
    (root / "mount").mkdir()
    command = [*UNSHARE, sys.executable, str(CHILD), what, str(root), str(root / "mount")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("what", ["publish", "submit", "follow"])
def test_history_gives_way_to_a_step(tmp_path: Path, what: str) -> None:
    errors, before, after, right, latest = on_a_short_disk(what, tmp_path)
    assert (errors, right, latest) == ([], True, "000009")
    assert before == [4, 5, 6, 7, 8]
    gone = [version for version in before if version not in after]
    assert gone and gone == before[: len(gone)], "the oldest"
    assert len(gone) < len(before), "no more than the step needs"


def test_what_a_rollback_goes_back_over_is_kept(tmp_path: Path) -> None:
    errors, _, _, right, latest = on_a_short_disk("rollback", tmp_path)
    assert len(errors) == 1 and "space" in errors[0]
    assert (right, latest) == (True, "000009")
