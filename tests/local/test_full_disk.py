"""A small tmpfs that is full: what seeding and staging leave there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, tensor, write_checkpoint
from local_cases import Run, publish

from weightcast.publisher import init_channel

CHILD = Path(__file__).with_name("full_disk_child.py")
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def namespaces_work(directory: Path) -> bool:
    command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", str(directory)]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(5)
    base: Model = {f"w{n}": tensor(rng, "BF16", 1 << 19) for n in range(8)}
    run = Run(tmp_path_factory.mktemp("run"), [base, all_changed(base, rng, 40_000)])
    write_checkpoint(run.base, base)
    init_channel(run.channel, run.base)
    publish(run)
    return run


def on_a_full_disk(run: Run, mount: Path, what: str, *, free_kib: int) -> tuple[str, bool, int]:
    """What the attempt raised, whether the local checkpoint was left as it was, and the version reached once
    there was room."""
    mount.mkdir()
    if not namespaces_work(mount):
        pytest.fail("user and mount namespaces are needed here")
    command = [*UNSHARE, sys.executable, str(CHILD), what, run.channel, run.base, mount, "24", str(free_kib)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    outcome, same, version = json.loads(done.stdout.splitlines()[-1])
    return outcome, same, version


@pytest.mark.parametrize("free_kib", [0, 200, 6000])
def test_seeding(run: Run, tmp_path: Path, free_kib: int) -> None:
    outcome, same, version = on_a_full_disk(run, tmp_path / "mount", "seed", free_kib=free_kib)
    assert "free" in outcome and same and version == 1


@pytest.mark.parametrize("free_kib", [0, 300, 2000])
def test_staging(run: Run, tmp_path: Path, free_kib: int) -> None:
    outcome, same, version = on_a_full_disk(run, tmp_path / "mount", "stage", free_kib=free_kib)
    assert "free" in outcome and same and version == 1


def test_a_spare_gives_way(run: Run, tmp_path: Path) -> None:
    outcome, _, version = on_a_full_disk(run, tmp_path / "mount", "spare", free_kib=300)
    assert outcome == "no error" and version == 1
