"""Bugs planted into a copy of the tree are caught by the harness; each patch must go on applying."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "publisher", "subscriber")
CAUGHT = {
    "pointer_before_index": (("publish", "index"), ["which has no index"]),
    "cleared_in_finally": (
        ("disturb host", "patch.record"),
        ["state: clean at version", "served weights that were not whole"],
    ),
    "journal_without_base": (("refuse", "undo.recorded"), ["did not recover"]),
    "shard_not_synced": (("power of publisher", "pointer.moved"), ["is committed and not whole"]),
}
"""patch to the scenario and rows that meet it, and what the harness says: whatever it sees first"""


def copied(target: Path, name: str) -> Path:
    """The tree with one bug. Without numba: nothing is compiled anew for it."""
    for package in (*PACKAGES, "tests"):
        left_out = shutil.ignore_patterns("golden", "e2e", "planted", ".pytest_cache")
        shutil.copytree(ROOT / package, target / package, ignore=left_out)
    (target / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "failpoints.md", target / "docs")
    patch = Path(__file__).parent / "planted" / f"{name}.patch"
    apply = ["git", "apply", "--verbose", str(patch)]
    # not as a part of a repository around the copy
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.parent)}
    done = subprocess.run(apply, cwd=target, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{patch.name} does not apply any more: make it anew\n{done.stderr}"
    links = target / "path" / "weightcast"
    links.mkdir(parents=True)
    for package in PACKAGES:
        (links / package).symlink_to(target / package)
    (links.parent / "numba.py").write_text("raise ImportError('left out')\n")
    return target


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_bug_is_caught(name: str, tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree", name)
    (scenario, row), said = CAUGHT[name]
    meeting = ("--scenario", scenario, "--row", row, "--strikes", "15")
    arguments = (*meeting, "--first", "--seed", "1", "--patience", "1")
    done = subprocess.run(
        [sys.executable, str(tree / "tests" / "crash" / "crash_run.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree / "path")},
    )
    print(done.stdout[-8000:], done.stderr[-4000:])
    assert done.returncode == 1 and "VIOLATION" in done.stdout
    words = " ".join(done.stdout.split())
    assert any(each in words for each in said)
