"""Patching and undoing in several threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_cases import Model, all_changed, bytes_of, read_checkpoint, rot, tensor
from local_cases import Run, catch_up, following, phase_of, run_of, staged, step_to

from weightcast.shared.base.errors import NeedsReseed
from weightcast.shared.checkpoint.local_updater import LocalUpdater

THREADS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Large tensors, so that threads take their records one by one, and many small ones, taken together."""
    rng = np.random.default_rng(12)
    base: Model = {f"large.{n}": tensor(rng, "BF16", 90_000) for n in range(6)}
    base |= {f"small.{n}": tensor(rng, "F32", 7) for n in range(60)}
    return run_of(tmp_path_factory.mktemp("run"), [base, all_changed(base, rng)], files=2)


def patched(updater: LocalUpdater, run: Run, damage: str | None = None) -> None:
    """To version 1, with the undo kept. `damage`: a tensor of which a word is written to before."""
    updater.options = replace(updater.options, threads=THREADS)
    step_to(updater, 0)
    assert updater.local is not None
    step = staged(updater, 1)
    if damage is not None:
        old, new = (bytes_of(model)[damage] for model in run.models)
        rot(updater.local.directory, damage, next(n for n in range(len(old)) if old[n] != new[n]))
    with updater.local.patching():
        updater.patch(step)


def test_there_and_back(run: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    with following(run, local) as updater:
        patched(updater, run)
        assert read_checkpoint(local) == bytes_of(run.models[1])
        assert updater.local is not None
        with updater.local.patching():
            updater.undo()
        assert read_checkpoint(local) == bytes_of(run.models[0])
        assert phase_of(local) == "clean"


@pytest.mark.parametrize("name", ["large.0", "large.5", "small.31"])
def test_an_unexpected_word_makes_it_dirty(run: Run, tmp_path: Path, name: str) -> None:
    local = tmp_path / "local"
    with following(run, local) as updater:
        with pytest.raises(NeedsReseed, match=f"of {name} is not what"):
            patched(updater, run, damage=name)
        assert phase_of(local) == "dirty"
        updater.release()
        catch_up(updater)
    assert read_checkpoint(local) == bytes_of(run.models[1])
