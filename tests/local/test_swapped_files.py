"""Files of a local checkpoint that were touched while nobody followed: found at the next start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from core_cases import bytes_of, flip, read_checkpoint
from local_cases import Run, catch_up, following, make_run, state_of, step_to

from weightcast.shared.base import failpoints
from weightcast.shared.base.errors import NeedsReseed, Refused, RetryLater, WrongRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), 2, files=2)


@pytest.fixture
def local(run: Run, tmp_path: Path) -> Path:
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 1)
    return tmp_path / "local"


def shard(local: Path) -> Path:
    return sorted(local.glob("model-*.safetensors"))[0]


def swap_old(run: Run, local: Path) -> None:
    shutil.copy(run.base / shard(local).name, local / "aside")
    (local / "aside").rename(shard(local))


def copy_over(run: Run, local: Path) -> None:
    shard(local).write_bytes((run.base / shard(local).name).read_bytes())


def one_byte(run: Run, local: Path) -> None:
    flip(local, "f64.matrix", 40)


@pytest.mark.parametrize("damage", [swap_old, copy_over, one_byte])
@pytest.mark.parametrize("behind", [True, False])
def test_other_bytes_are_never_followed_on(
    run: Run, local: Path, damage: Callable[[Run, Path], None], behind: bool
) -> None:
    """Also where no word that changes is touched, and where there is nothing to patch."""
    if not behind:
        with following(run, local) as updater:
            catch_up(updater)
    damage(run, local)
    with following(run, local) as updater:
        catch_up(updater)
    assert read_checkpoint(local) == bytes_of(run.latest)
    assert state_of(local)["phase"] == "clean"


def test_the_same_bytes_in_another_file_are_kept(run: Run, local: Path) -> None:
    before = state_of(local)
    path = shard(local)
    shutil.copy(path, local / "aside")
    (local / "aside").rename(path)
    with following(run, local) as updater:
        updater.load(None)
        assert updater.local is not None
    after = state_of(local)
    assert after["generation"] == before["generation"] and after["files"] != before["files"]
    assert after["last_full_hash"] > before["last_full_hash"]


def test_untouched_files_are_not_read_again(run: Run, local: Path) -> None:
    """After patches through mappings too."""
    for _ in range(2):
        before = state_of(local)
        with following(run, local) as updater:
            updater.load(None)
        assert state_of(local) == before
        with following(run, local) as updater:
            catch_up(updater)


@pytest.mark.parametrize("name", ["epoch", "files"])
def test_a_state_says_which_files_and_epoch(local: Path, name: str) -> None:
    assert state_of(local)[name]


def test_a_file_swapped_while_it_is_patched_is_not_recorded(run: Run, local: Path) -> None:
    """The words went into the mapped file, which nobody finds by its name any more."""

    def swap(name: str, where: Path | None) -> None:
        if name == "patch.written":
            swap_old(run, local)

    with following(run, local) as updater:
        updater.load(None)
        try:
            failpoints.watch(swap)
            with pytest.raises(NeedsReseed, match="was replaced"):
                step_to(updater, 2)
        finally:
            failpoints.watch(None)
        assert state_of(local)["phase"] == "dirty"
        catch_up(updater)
    assert read_checkpoint(local) == bytes_of(run.latest)


def test_weights_that_engines_would_load_too_stop_a_patch(run: Run, local: Path) -> None:
    before, other = read_checkpoint(local), local / "other.safetensors"
    shutil.copy(shard(local), other)
    with following(run, local) as updater:
        with pytest.raises(RetryLater, match=r"other\.safetensors is not part of the checkpoint"):
            catch_up(updater)
        other.unlink()
        assert read_checkpoint(local) == before
        catch_up(updater)
    assert read_checkpoint(local) == bytes_of(run.latest)


def test_a_removed_directory_is_made_anew_and_owned(run: Run, local: Path) -> None:
    with following(run, local) as updater:
        catch_up(updater)
        shutil.rmtree(local)
        catch_up(updater)
        assert read_checkpoint(local) == bytes_of(run.latest)
        with following(run, local) as other, pytest.raises(RetryLater, match="already has a writer"):
            catch_up(other)


def test_a_removed_directory_that_another_writer_took_is_left_to_it(run: Run, local: Path) -> None:
    with following(run, local) as updater:
        catch_up(updater)
        shutil.rmtree(local)
        with following(run, local) as other:
            catch_up(other)
            with pytest.raises(RetryLater, match="already has a writer"):
                catch_up(updater)
            catch_up(other)
    assert read_checkpoint(local) == bytes_of(run.latest)


def test_another_base_in_the_channel_is_not_followed(run: Run, local: Path, tmp_path: Path) -> None:
    """The same run_id over other tensors."""
    other = make_run(tmp_path / "other", 1, seed=8)
    before = read_checkpoint(local)
    moved = Run(tmp_path / "moved", run.models)
    shutil.copytree(run.channel, moved.channel)
    shutil.copytree(run.base, moved.base)
    shutil.copy(other.channel / "base.json", moved.channel / "base.json")
    with following(moved, local) as updater, pytest.raises(WrongRun, match=r"base\.json"):
        catch_up(updater)
    assert read_checkpoint(local) == before


def test_the_room_is_not_reached_through_links(run: Run, tmp_path: Path) -> None:
    local = tmp_path / "local"
    (local / ".weightcast").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", local / ".weightcast" / "journal")
    with following(run, local) as updater, pytest.raises(Refused, match="symbolic link"):
        catch_up(updater)
    assert list((tmp_path / "elsewhere").iterdir()) == []
