"""Seeding and patching of local checkpoints: what lies on disk afterwards, and after a refusal."""

from __future__ import annotations

import contextlib
import os
from errno import EIO
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from core_cases import (
    bytes_of,
    every_dtype,
    place_of,
    read_checkpoint,
    rot,
    snapshot,
    write_checkpoint,
)
from disk_errors import watched
from local_cases import (
    Run,
    catch_up,
    edit_state,
    following,
    in_memory,
    make_run,
    patch_keeping_undo,
    phase_of,
    staged,
    state_of,
    step_to,
)

from weightcast.shared.base.errors import NeedsReseed, Refused, RetryLater, WrongRun
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.checkpoint.verify.hashing import full_hash


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def at_version(run: Run, local: Path, version: int) -> None:
    with following(run, local) as updater:
        step_to(updater, version)
        assert updater.local is not None and full_hash(updater.local).intact
    holds(run, local, version)


def holds(run: Run, local: Path, version: int) -> None:
    assert read_checkpoint(local) == bytes_of(run.models[version])
    state = state_of(local)
    assert (state["phase"], state["position"]["version"]) == ("clean", version)


def test_every_dtype_arrives(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    for name in ("config.json", "tokenizer.json"):
        assert (local / name).read_bytes() == (run.base / name).read_bytes()
    at_version(run, local, 3)


def test_several_versions_fold_into_one_journal(run: Run, local: Path) -> None:
    at_version(run, local, 0)
    with following(run, local) as updater:
        patch_keeping_undo(updater, 3)
        assert updater.local is not None and len(updater.local.state.undo) == 1
    holds(run, local, 3)


def test_going_back_when_asked(run: Run, local: Path) -> None:
    at_version(run, local, 3)
    at_version(run, local, 1)


def test_undo_over_several_steps(run: Run, local: Path) -> None:
    at_version(run, local, 0)
    with following(run, local) as updater:
        for version in (1, 2, 3):
            patch_keeping_undo(updater, version)
        assert updater.local is not None and len(list(updater.local.paths.journals.iterdir())) == 3
        with updater.local.patching():
            updater.undo()
        assert full_hash(updater.local).intact
    holds(run, local, 0)
    assert list((local / ".weightcast/journal").iterdir()) == []


def test_without_a_way_back_nothing_before_can_be_undone(run: Run, local: Path) -> None:
    at_version(run, local, 0)
    with following(run, local) as updater:
        patch_keeping_undo(updater, 1)
        assert updater.local is not None
        second = staged(updater, 2)
        with updater.local.patching():
            updater.patch(second, undoable=False)
        assert state_of(local)["undo"] == []
        assert [path.stem for path in updater.local.paths.journals.iterdir()] == [second.step.journal]
        updater.drop_journal(second)
        assert list(updater.local.paths.journals.iterdir()) == []
        assert full_hash(updater.local).intact
    holds(run, local, 2)


@pytest.mark.parametrize("files", [2, 5])
def test_several_files_with_an_index(tmp_path: Path, files: int) -> None:
    run = make_run(tmp_path, 2, files=files)
    at_version(run, tmp_path / "local", 2)
    name = "model.safetensors.index.json"
    assert (tmp_path / "local" / name).read_bytes() == (run.base / name).read_bytes()


def test_a_hub_cache_snapshot_as_base(run: Run, local: Path, tmp_path: Path) -> None:
    blobs, hub = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    hub.mkdir(parents=True)
    for number, path in enumerate(sorted(run.base.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (hub / path.name).symlink_to(f"../../blobs/{number}")
    before = snapshot(blobs)
    with following(run, local, hub) as updater:
        catch_up(updater)
    holds(run, local, 3)
    assert not any(path.is_symlink() for path in local.iterdir())
    assert snapshot(blobs) == before


# what is refused, and leaves everything as it was


def test_a_foreign_directory_is_left_alone(run: Run, local: Path) -> None:
    write_checkpoint(local, run.models[0])
    before = snapshot(local)
    with following(run, local) as updater, pytest.raises(Refused, match="not empty"):
        catch_up(updater)
    assert snapshot(local) == before


def test_another_run_s_local_checkpoint_is_left_alone(run: Run, local: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 1, seed=8)
    edit_channel_run(other)
    with following(other, local) as updater:
        catch_up(updater)
    before = snapshot(local)
    with following(run, local) as updater, pytest.raises(WrongRun, match="run-of-others"):
        catch_up(updater)
    assert snapshot(local) == before


def edit_channel_run(run: Run) -> None:
    """Gives the channel a run of its own and takes its versions away."""
    for name in ("channel.json", "base.json"):
        path = run.channel / name
        path.write_text(path.read_text().replace("run-under-test", "run-of-others"))
    (run.channel / "latest").unlink()


@pytest.mark.parametrize("name", ["long", "odd.first", "scalar"])
def test_a_base_with_another_byte_is_refused(run: Run, local: Path, tmp_path: Path, name: str) -> None:
    base = write_checkpoint(tmp_path / "base", run.models[0])
    rot(base, name)
    with following(run, local, base) as updater, pytest.raises(WrongRun, match=name):
        catch_up(updater)
    assert read_checkpoint(local) == {}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_base_with_other_files_is_refused(run: Run, local: Path, tmp_path: Path, name: str) -> None:
    base = write_checkpoint(tmp_path / "base", run.models[0])
    (base / name).write_text('{"other": 1}')
    with following(run, local, base) as updater, pytest.raises(WrongRun, match=name):
        catch_up(updater)
    (base / name).unlink()
    with following(run, local, base) as updater, pytest.raises(WrongRun, match="missing"):
        catch_up(updater)
    assert read_checkpoint(local) == {}


def test_a_base_that_lists_everything_that_does_not_fit(run: Run, local: Path, tmp_path: Path) -> None:
    model = dict(run.models[0])
    rng = np.random.default_rng(0)
    del model["long"]
    model["extra"] = every_dtype(rng)["scalar"]
    model["scalar"] = every_dtype(rng)["wide.scalar"]
    base = write_checkpoint(tmp_path / "base", model)
    with following(run, local, base) as updater, pytest.raises(WrongRun) as caught:
        catch_up(updater)
    for text in ("long is missing", "extra is not part", "scalar is F64 [], expected F32 []"):
        assert text in str(caught.value)


def test_a_hardlinked_file_is_never_written(run: Run, local: Path, tmp_path: Path) -> None:
    at_version(run, local, 1)
    os.link(local / "model.safetensors", tmp_path / "also")
    before = snapshot(local)
    with following(run, local) as updater, pytest.raises(Refused, match="2 links"):
        catch_up(updater)
    assert snapshot(local) == before
    (tmp_path / "also").unlink()
    at_version(run, local, 3)


@pytest.mark.parametrize("phase", ["seeding", "dirty"])
def test_seeding_does_not_write_through_links(run: Run, local: Path, tmp_path: Path, phase: str) -> None:
    at_version(run, local, 1)
    edit_state(local, phase=phase)
    (local / "model.safetensors").rename(tmp_path / "elsewhere")
    (local / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    with following(run, local) as updater, pytest.raises(Refused, match="link"):
        catch_up(updater)
    assert snapshot(tmp_path) == before


# drift, replacement, reboot


def test_a_drifted_word_inside_a_change_is_found_and_seeded_again(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    changed = next(n for n in run.models[1] if bytes_of(run.models[2])[n] != bytes_of(run.models[1])[n])
    old, new = (bytes_of(run.models[v])[changed] for v in (1, 2))
    with following(run, local) as updater:
        updater.load(None)
        rot(local, changed, next(i for i in range(len(old)) if old[i] != new[i]))
        with pytest.raises(NeedsReseed):
            catch_up(updater)
        assert phase_of(local) == "dirty"
        updater.release()
        catch_up(updater)
    holds(run, local, 3)


def test_a_word_changed_between_stage_and_patch_makes_it_dirty(run: Run, local: Path) -> None:
    at_version(run, local, 2)
    with following(run, local) as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert updater.local is not None
        step = staged(updater, 3)
        old, new = bytes_of(run.models[2]), bytes_of(run.models[3])
        name = next(n for n in old if old[n] != new[n])
        rot(local, name, next(i for i in range(len(old[name])) if old[name][i] != new[name][i]))
        with updater.local.patching(), pytest.raises(NeedsReseed, match=name):
            updater.patch(step)
        assert phase_of(local) == "dirty"
        updater.release()
        catch_up(updater)
    holds(run, local, 3)


def test_files_replaced_while_mapped_are_not_patched(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    with following(run, local) as updater:
        step_to(updater, 1)
        copy = (local / "model.safetensors").read_bytes()
        (local / "new").write_bytes(copy)
        (local / "new").rename(local / "model.safetensors")
        with pytest.raises(NeedsReseed, match="replaced"):
            catch_up(updater)
        assert (local / "model.safetensors").read_bytes() == copy
        assert phase_of(local) == "dirty"
        updater.release()
        catch_up(updater)
    holds(run, local, 3)


def test_files_replaced_before_an_undo_are_not_written(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    with following(run, local) as updater:
        patch_keeping_undo(updater, 2)
        copy = (local / "model.safetensors").read_bytes()
        (local / "new").write_bytes(copy)
        (local / "new").rename(local / "model.safetensors")
        assert updater.local is not None
        with updater.local.patching(), pytest.raises(NeedsReseed, match="replaced"):
            updater.undo()
        assert (local / "model.safetensors").read_bytes() == copy
        updater.release()
        catch_up(updater)
    holds(run, local, 3)


@pytest.mark.parametrize("moment", ["patch.begun", "undo.begun"])
def test_files_replaced_while_they_are_written_make_it_dirty(run: Run, local: Path, moment: str) -> None:
    """The words go into the file that is mapped, and which nobody finds any more."""
    at_version(run, local, 1)

    def replace_it(name: str, path: Path | None) -> None:
        if name == moment:
            (local / "new").write_bytes((local / "model.safetensors").read_bytes())
            (local / "new").rename(local / "model.safetensors")

    with following(run, local) as updater:
        step_to(updater, 1)
        if moment == "undo.begun":
            patch_keeping_undo(updater, 2)
        assert updater.local is not None
        move = updater.undo if moment == "undo.begun" else partial(updater.patch, staged(updater, 2))
        with updater.local.patching(), watched(replace_it), pytest.raises(NeedsReseed, match="replaced"):
            move()
        assert phase_of(local) == "dirty"
        updater.release()
        catch_up(updater)
    holds(run, local, 3)


def test_after_a_reboot_intact_bytes_are_kept(run: Run, local: Path) -> None:
    at_version(run, local, 2)
    edit_state(local, boot_id="another boot", last_full_hash=None)
    inode = (local / "model.safetensors").stat().st_ino
    with following(run, local) as updater:
        step_to(updater, 2)
        assert updater.local is not None and updater.local.state.last_full_hash is not None
    holds(run, local, 2)
    assert (local / "model.safetensors").stat().st_ino == inode


def test_what_could_not_be_recovered_is_recovered_by_the_next_load(run: Run, local: Path) -> None:
    at_version(run, local, 2)
    edit_state(local, boot_id="another boot", last_full_hash=None)
    channel = Channel.open(open_store(run.channel))

    def fail(name: str, path: Path | None) -> None:
        if name == "lock.taken" and path is not None and path.name == "patch":
            raise OSError(EIO, os.strerror(EIO), str(path))

    with following(run, local) as updater:
        with watched(fail), pytest.raises(OSError, match=os.strerror(EIO)):
            updater.load(channel)
        updater.load(channel)
        assert updater.local is not None and updater.local.state.last_full_hash is not None


@pytest.mark.parametrize("boot_id", ["another boot", ""])
def test_after_a_reboot_lost_pages_are_found(run: Run, local: Path, boot_id: str) -> None:
    at_version(run, local, 2)
    rot(local, "long", 4000)
    edit_state(local, boot_id=boot_id)
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 3)


@pytest.mark.parametrize("lies", [1, 2])
def test_a_reboot_while_patching_trusts_no_journal(run: Run, local: Path, lies: int) -> None:
    """The pages say where the checkpoint is: wholly old or wholly new."""
    at_version(run, local, 1)
    with following(run, local) as updater:
        patch_keeping_undo(updater, 2)
    step = state_of(local)["undo"][0]
    for name, data in bytes_of(run.models[lies]).items():
        path, offset = place_of(local, name)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)
    (local / ".weightcast/journal" / f"{step['journal']}.journal").write_bytes(b"torn")
    edit_state(local, phase="patching", active=step, position=step["base"], undo=[], boot_id="another")
    with following(run, local) as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert updater.local is not None and updater.local.state.position.version == lies
    holds(run, local, lies)


def test_a_lost_journal_while_patching_is_seeded_again(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    with following(run, local) as updater:
        patch_keeping_undo(updater, 2)
    step = state_of(local)["undo"][0]
    (local / ".weightcast/journal" / f"{step['journal']}.journal").unlink()
    edit_state(local, phase="patching", active=step, position=step["base"], undo=[])
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 3)


def test_strays_of_a_kill_are_dropped(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    room = local / ".weightcast"
    (room / "journal/0123.journal").write_bytes(b"wcjrnl1\n")
    (room / "spool/2-abc").mkdir()
    (room / "spool/2-abc/model-00000-of-00001.safetensors.part").write_bytes(b"half")
    with following(run, local) as updater:
        step_to(updater, 1)
    assert list((room / "journal").iterdir()) == list((room / "spool").iterdir()) == []


def test_a_journal_of_another_step_is_not_replayed(run: Run, local: Path) -> None:
    """A complete journal under a name that the state names, but of another version."""
    at_version(run, local, 0)
    with following(run, local) as updater:
        for version in (1, 2):
            patch_keeping_undo(updater, version)
    first, second = state_of(local)["undo"]
    journals = local / ".weightcast/journal"
    (journals / f"{first['journal']}.journal").rename(journals / f"{second['journal']}.journal")
    edit_state(local, phase="undoing", active=second, undo=[second])
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 3)


# what a kill while seeding leaves


def kill_points(local: Path) -> dict[str, list[Path]]:
    return {
        "no weights yet": [local / "model.safetensors"],
        "no files at all": [local / n for n in ("model.safetensors", "config.json", "tokenizer.json")],
    }


@pytest.mark.parametrize("point", ["no weights yet", "no files at all", "a file of zeros", "half a file"])
def test_seeding_continues_after_a_kill(run: Run, local: Path, point: str) -> None:
    at_version(run, local, 0)
    edit_state(local, phase="seeding")
    weights = local / "model.safetensors"
    if point in kill_points(local):
        for path in kill_points(local)[point]:
            path.unlink()
    elif point == "a file of zeros":
        weights.write_bytes(bytes(weights.stat().st_size))
    else:
        os.truncate(weights, weights.stat().st_size // 2)
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 3)


@pytest.mark.parametrize("name", ["model.safetensors", ".weightcast/base.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_lost_or_damaged_file_is_seeded_again(run: Run, local: Path, name: str, damage: str) -> None:
    at_version(run, local, 1)
    path = local / name
    if damage == "missing":
        path.unlink()
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size - 1)
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 3)


def test_an_earlier_run_s_shards_do_not_stay(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    edit_state(local, phase="seeding")
    (local / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (local / "model.safetensors.index.json").write_text("{}")
    with following(run, local) as updater:
        catch_up(updater)
    holds(run, local, 3)


def test_an_open_checkpoint_needs_lanes_of_all_tensors(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    position = dict(state_of(local)["position"])
    edit_state(local, position={**position, "lanes": ""})
    with pytest.raises(NeedsReseed):
        LocalCheckpoint.open(local)


# the field's own directory


def test_the_field_s_state_is_taken_away_and_its_lock_held(run: Run, local: Path) -> None:
    at_version(run, local, 1)
    room = local / ".weight_sync"
    room.mkdir()
    (room / "state.json").write_text('{"version": "000001"}')
    at_version(run, local, 2)
    assert not (room / "state.json").exists()
    opened = LocalCheckpoint.open(local)
    assert opened is not None
    with opened.patching(), pytest.raises(RetryLater):
        FileLock(room / "lock").acquire()
    with FileLock(room / "lock").holding(), pytest.raises(RetryLater), opened.patching(seconds=0.05):
        pass
    opened.close()


# a channel that is not in a directory


def test_an_anchor_that_cannot_be_mapped_is_streamed(tmp_path: Path) -> None:
    run, local = make_run(tmp_path / "run", 3, anchor_every=2), tmp_path / "local"
    store = in_memory(run)
    with contextlib.closing(LocalUpdater(store, local, None)) as updater:
        updater.update_to(Channel.open(store))
        assert updater.local is not None and full_hash(updater.local).intact
    assert read_checkpoint(local) == bytes_of(run.models[3])
    assert list((local / ".weightcast/spool").iterdir()) == []
