"""A small tmpfs that is full: what seeding and staging leave there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, all_changed, tensor, write_checkpoint
from local_cases import Run, run_of

CHILD = Path(__file__).with_name("full_disk_child.py")
SEEDING_OVER = Path(__file__).with_name("seeding_over_child.py")
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
    return run_of(tmp_path_factory.mktemp("run"), [base, all_changed(base, rng, 40_000)])


def on_a_full_disk(
    run: Run, mount: Path, what: str, *, free_kib: int, moment: str = ""
) -> tuple[str, bool, int]:
    """What the attempt raised, whether the local checkpoint was left as it was, and the version reached once
    there was room. `moment`: the failpoint at which the disk is filled."""
    where = what, run.channel, run.base, mounted(mount)
    outcome, same, version = in_namespaces(CHILD, *where, 24, free_kib, moment)
    return outcome, same, version


def mounted(mount: Path) -> Path:
    mount.mkdir()
    if not namespaces_work(mount):
        pytest.fail("user and mount namespaces are needed here")
    return mount


def in_namespaces(child: Path, *arguments: object) -> tuple[Any, ...]:
    command = [*UNSHARE, sys.executable, str(child), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("free_kib", [0, 200, 6000])
def test_seeding(run: Run, tmp_path: Path, free_kib: int) -> None:
    outcome, same, version = on_a_full_disk(run, tmp_path / "mount", "seed", free_kib=free_kib)
    assert "free" in outcome and same and version == 1


@pytest.mark.parametrize("free_kib", [0, 300, 2000])
def test_staging(run: Run, tmp_path: Path, free_kib: int) -> None:
    outcome, same, version = on_a_full_disk(run, tmp_path / "mount", "stage", free_kib=free_kib)
    assert "MiB free, staging version 1 needs" in outcome and same and version == 1


def test_versions_are_staged_a_few_at_a_time(tmp_path: Path) -> None:
    """There is room for one, not for three."""
    rng = np.random.default_rng(7)
    models: list[Model] = [{f"w{n}": tensor(rng, "BF16", 1 << 19) for n in range(8)}]
    for _ in range(3):
        models.append(all_changed(models[-1], rng, 40_000))
    run = run_of(tmp_path / "run", models)
    outcome, _, version = on_a_full_disk(run, tmp_path / "mount", "stage", free_kib=8000)
    assert outcome == "no error" and version == 3


LATE = {
    "seed": ("seed.checked", "/local/model.safetensors: No space left"),
    "stage": ("fetch.begun", "/model-00000-of-00001.safetensors: No space left"),
    "repair": ("repair.noted", "/local/.weightcast/spool/repair: File too large"),
}


@pytest.mark.parametrize("what", LATE)
def test_a_disk_that_fills_up_after_the_look_at_its_room(run: Run, tmp_path: Path, what: str) -> None:
    """The file that could not be written is named."""
    moment, told = LATE[what]
    outcome, _, version = on_a_full_disk(run, tmp_path / "mount", what, free_kib=100, moment=moment)
    assert told in outcome and version == 1
    assert str(tmp_path / "mount" / "local") in outcome


def test_a_spare_gives_way(run: Run, tmp_path: Path) -> None:
    outcome, _, version = on_a_full_disk(run, tmp_path / "mount", "spare", free_kib=300)
    assert outcome == "no error" and version == 1


@pytest.fixture(scope="module")
def anchored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Version 1 has full weights beside it, in a file of another name than the base's."""
    rng = np.random.default_rng(6)
    base: Model = {f"w{n}": tensor(rng, "BF16", (n + 1) << 17) for n in range(8)}
    run = run_of(tmp_path_factory.mktemp("anchored"), [base, all_changed(base, rng, 1000)], anchor_every=1)
    return run


def seeded_over(run: Run, mount: Path, how: str, base: Path | None = None) -> tuple[Any, ...]:
    """With 2 MiB free beside weights of 9 MiB."""
    first = run.base if base is None else base
    return in_namespaces(SEEDING_OVER, how, run.channel, first, run.root / "other", mounted(mount), 24, 2000)


def test_weights_take_the_room_of_those_before(anchored: Run, tmp_path: Path) -> None:
    assert seeded_over(anchored, tmp_path / "mount", "anchor") == ("no error", False, True)


def test_files_of_the_same_names_and_other_sizes(anchored: Run, tmp_path: Path) -> None:
    """The one that shrinks makes room for the one that grows, whichever is written first."""
    orders = {"first": "01234567", "other": "50162374"}
    for directory, order in orders.items():
        model = {f"w{n}": anchored.models[0][f"w{n}"] for n in order}
        write_checkpoint(anchored.root / directory, model, files=3)
    found = seeded_over(anchored, tmp_path / "mount", "others", anchored.root / "first")
    assert found == ("no error", False, True)


@pytest.mark.parametrize("how", ["linked", "open", "holes"])
def test_room_that_is_not_given_back_does_not_count(anchored: Run, tmp_path: Path, how: str) -> None:
    outcome, same, _ = seeded_over(anchored, tmp_path / "mount", how)
    assert "free" in outcome and same
