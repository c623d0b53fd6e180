"""Real processes, SIGKILLed while they seed, patch and undo; what the next process makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from core_cases import (
    Model,
    all_changed,
    bytes_of,
    kill,
    read_checkpoint,
    rot,
    start,
    tensor,
)
from local_cases import Run, catch_up, edit_state, following, phase_of, run_of, state_of
from waiting import wait_until

from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.verify.hashing import full_hash

CHILD = Path(__file__).with_name("patching_child.py")
TENSORS = 40
WHOLE_WORDS = 200_000
HALF_WORDS = 100_003


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(11)
    base: Model = {f"layer.{n}": tensor(rng, "BF16", 3, 29) for n in range(TENSORS)}
    base |= {f"large.{n}": tensor(rng, "F32", 1 << 18) for n in range(3)}
    # most of its words change, so that the journal has all of them; of the other half do, under masks
    whole, half = tensor(rng, "F16", WHOLE_WORDS), tensor(rng, "I16", HALF_WORDS)
    changed = all_changed(base, rng) | {"whole": tensor(rng, "F16", WHOLE_WORDS)}
    changed["half"] = half.flipped(rng, 0.5)
    return run_of(
        tmp_path_factory.mktemp("killed"), [{**base, "whole": whole, "half": half}, changed], files=2
    )


@pytest.fixture(scope="module")
def seeded(run: Run) -> Path:
    local = run.root / "seeded"
    with following(run, local) as updater:
        channel = Channel.open(open_store(run.channel))
        pointer = channel.pointer()
        assert pointer is not None
        updater.load(channel)
        route = updater.route(channel, pointer, 0, exact=True)
        updater.seed(channel, route, route.plan)  # type: ignore[arg-type]
    return local


@pytest.fixture
def local(seeded: Path, tmp_path: Path) -> Path:
    """At version 0."""
    shutil.copytree(seeded, tmp_path / "local")
    return tmp_path / "local"


def killed_in(run: Run, local: Path, way: str, phase: str, moment: str = "patch.record") -> None:
    child = start(CHILD, way, run.channel, local, run.base, moment)
    try:
        assert child.stdout is not None and child.stdout.readline() == "stopped\n"
    finally:
        kill(child)
    assert phase_of(local) == phase


def holds(run: Run, local: Path, version: int) -> None:
    assert read_checkpoint(local) == bytes_of(run.models[version])
    assert phase_of(local) == "clean"
    assert state_of(local)["position"]["version"] == version


def changed_so_far(run: Run, local: Path) -> int:
    now, old = read_checkpoint(local), bytes_of(run.models[0])
    return sum(now[name] != old[name] for name in old)


def test_patching_is_replayed_forward(run: Run, local: Path) -> None:
    killed_in(run, local, "patch", "patching")
    assert 0 < changed_so_far(run, local) < len(run.models[0])
    with following(run, local) as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert updater.local is not None and updater.local.state.position.version == 1
        assert full_hash(updater.local).intact
        assert updater.local.state.last_full_hash is not None
        assert len(updater.local.state.undo) == 1
    holds(run, local, 1)


def test_a_replay_that_is_killed_is_replayed(run: Run, local: Path) -> None:
    killed_in(run, local, "patch", "patching")
    for _ in range(2):
        child = start(CHILD, "patch", run.channel, local, run.base)
        mark = f"pid {child.pid} "
        wait_until(lambda mark=mark: (local / ".weightcast/owner").read_text().startswith(mark), what="owned")
        kill(child)
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 1)


def test_undoing_is_replayed_backwards(run: Run, local: Path) -> None:
    killed_in(run, local, "undo", "undoing")
    with following(run, local) as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert updater.local is not None and updater.local.state.position.version == 0
        assert updater.local.state.undo == () and full_hash(updater.local).intact
    holds(run, local, 0)
    assert list((local / ".weightcast/journal").iterdir()) == []


@pytest.mark.parametrize("name", ["layer.17", "large.2", "whole", "half"])
def test_a_word_changed_while_nobody_looked_is_found_at_the_replay(run: Run, local: Path, name: str) -> None:
    killed_in(run, local, "patch", "patching")
    new, old = bytes_of(run.models[1])[name], bytes_of(run.models[0])[name]
    rot(local, name, next(place for place in range(len(old)) if old[place] != new[place]))
    with following(run, local) as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert updater.local is None and name in updater.trouble
        assert phase_of(local) == "dirty"
        catch_up(updater)
    holds(run, local, 1)


def test_an_untouched_word_changed_is_found_by_the_full_hash(run: Run, local: Path) -> None:
    killed_in(run, local, "patch", "patching")
    new, old = bytes_of(run.models[1])["large.1"], bytes_of(run.models[0])["large.1"]
    same = next(place for place in range(0, len(old), 4) if old[place : place + 4] == new[place : place + 4])
    rot(local, "large.1", same)
    with following(run, local) as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert updater.local is None and "large.1" in updater.trouble
        catch_up(updater)
    holds(run, local, 1)


def test_after_a_reboot_half_a_patch_is_no_version(run: Run, local: Path) -> None:
    killed_in(run, local, "patch", "patching")
    edit_state(local, boot_id="another boot")
    with following(run, local) as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert updater.local is None and "restart of the machine" in updater.trouble
        catch_up(updater)
    holds(run, local, 1)


def test_repairing_starts_over(run: Run, local: Path) -> None:
    """Killed before the first word, with one of two tensors right by then."""
    with following(run, local) as updater:
        catch_up(updater)
    for name in ("large.1", "layer.7"):
        rot(local, name, 3)
    killed_in(run, local, "repair", "dirty")
    rot(local, "layer.7", 3)
    with following(run, local) as updater:
        channel = Channel.open(open_store(run.channel))
        updater.load(channel)
        done = updater.repair(channel)
        assert done is not None and (done.tensors, done.words) == (("large.1",), 1)
    holds(run, local, 1)


def test_seeding_starts_over(run: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    killed_in(run, local, "seed", "seeding", "seed.allocated")
    killed_in(run, local, "seed", "seeding", "seed.synced")
    inodes = {path.name: path.stat().st_ino for path in local.glob("*.safetensors")}
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 1)
    assert inodes.items() <= {path.name: path.stat().st_ino for path in local.glob("*.safetensors")}.items()
