"""Patches for engines' memory: what the file says against what lies on disk before and after."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import Model, all_changed, bytes_of, tensor
from local_cases import Run, following, make_run, patch_keeping_undo, run_of, staged, step_to

from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.checkpoint.update import engine_patch
from weightcast.shared.checkpoint.update.engine_patch import (
    NAME,
    EnginePatch,
    NoPatch,
    drop_engine_patches,
    write_engine_patch,
)
from weightcast.shared.digest.checksums import hash_bytes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), 4)


def opened(updater: LocalUpdater) -> LocalCheckpoint:
    assert updater.local is not None
    return updater.local


def read(local: LocalCheckpoint, patch: EnginePatch) -> tuple[dict[str, Any], bytes]:
    """Header and payload, by the document."""
    data = (local.paths.room / "engine" / patch.name).read_bytes()
    assert data[:8] == b"wcpatch1" and hashlib.sha256(data[:-32]).digest() == data[-32:]
    assert patch.nbytes == len(data)
    end = 16 + int.from_bytes(data[8:16], "little")
    start = -(-end // 64) * 64
    assert data[end:start] == bytes(start - end)
    header: dict[str, Any] = json.loads(data[16:end])
    return header, data[start:-32]


def patched(before: dict[str, bytes], header: dict[str, Any], payload: bytes) -> dict[str, bytes]:
    after, at = dict(before), 0
    for one in header["tensors"]:
        assert one["offset"] == at and one["index_width"] == 4
        array = np.frombuffer(before[one["name"]], np.uint8)
        width = array.size // int(np.prod(one["shape"]))
        index = np.frombuffer(payload, "<u4", one["changes"], at).astype(np.int64)
        at += -(-4 * len(index) // 8) * 8
        assert (np.diff(index) > 0).all()
        words = np.frombuffer(payload, np.uint8, len(index) * width, at).reshape(-1, width)
        at += -(-words.size // 8) * 8
        assert hash_bytes(array).hex() == one["lanes_old"]
        new = array.reshape(-1, width).copy()
        new[index] = words
        assert hash_bytes(new.reshape(-1)).hex() == one["lanes_new"]
        after[one["name"]] = new.tobytes()
    assert at == len(payload)
    return after


def test_a_staged_version_is_a_patch_before_it_lies_on_disk(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 1)
        local, step = opened(updater), staged(updater, 2).step
        patch = write_engine_patch(local, [step], 1)
        header, payload = read(local, patch)
        assert NAME.fullmatch(patch.name) and patch.name == f"2-{step.target.digest[:8]}.patch"
        assert header["format"] == 1 and header["run_id"] == local.state.run_id
        assert header["base"] == {"version": 1, "root": step.base.root}
        assert header["target"] == {"version": 2, "root": step.target.root, "digest": step.target.digest}
        assert patched(bytes_of(run.models[1]), header, payload) == bytes_of(run.models[2])
        assert patch.changes == sum(one["changes"] for one in header["tensors"])
        assert patch.tensors == tuple(one["name"] for one in header["tensors"])


def test_several_versions_are_one_patch_on_disk_or_not(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 1)
        for version in (2, 3):
            step = staged(updater, version)
            with opened(updater).patching():
                updater.patch(step)
        local, last = opened(updater), staged(updater, 4).step
        assert len(local.state.undo) == 2
        both = write_engine_patch(local, [*local.state.undo, last], 7)
        header, payload = read(local, both)
        assert header["base"]["version"] == 7
        assert patched(bytes_of(run.models[1]), header, payload) == bytes_of(run.models[4])
        on_disk = write_engine_patch(local, local.state.undo, 1)
        assert patched(bytes_of(run.models[1]), *read(local, on_disk)) == bytes_of(run.models[3])


def test_folded_versions(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        patch_keeping_undo(updater, 4)
        local = opened(updater)
        patch = write_engine_patch(local, local.state.undo, 0)
        assert patched(bytes_of(run.models[0]), *read(local, patch)) == bytes_of(run.models[4])


def test_a_patch_that_would_be_as_large_as_the_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_patch, "ALWAYS_BYTES", 0)
    monkeypatch.setattr(engine_patch, "MOST_SHARE", 0.001)
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        with pytest.raises(NoPatch, match="not faster"):
            write_engine_patch(opened(updater), [staged(updater, 1).step], 0)
        assert not (tmp_path / "host/.weightcast/engine").exists()


def test_a_journal_of_another_step_is_refused(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        one, two = staged(updater, 1).step, staged(updater, 1).step
        paths = opened(updater).paths
        paths.journal(two.journal).rename(paths.journal(one.journal))
        with pytest.raises(DamagedFile, match="another run or version"):
            write_engine_patch(opened(updater), [one], 0)


def test_nothing_is_left_of_a_patch_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        step = staged(updater, 1).step
        (tmp_path / "host/.weightcast/engine").write_text("a file in its place")
        with pytest.raises(OSError):
            write_engine_patch(opened(updater), [step], 0)
        assert (tmp_path / "host/.weightcast/engine").read_text() == "a file in its place"


def test_old_patches_go_and_links_stay_where_they_are(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        paths = opened(updater).paths
        write_engine_patch(opened(updater), [staged(updater, 1).step], 0)
        (paths.room / "engine" / "1-00000000.tmp").touch()
        drop_engine_patches(paths)
        assert list((paths.room / "engine").iterdir()) == []
        (paths.room / "engine").rmdir()
        drop_engine_patches(paths)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "mine").touch()
        (paths.room / "engine").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(RetryLater, match="symbolic link"):
            drop_engine_patches(paths)
        with pytest.raises(RetryLater, match="symbolic link"):
            write_engine_patch(opened(updater), [staged(updater, 1).step], 0)
        assert (tmp_path / "elsewhere" / "mine").exists()


def test_a_start_drops_what_a_kill_left(run: Run, tmp_path: Path) -> None:
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        write_engine_patch(opened(updater), [staged(updater, 1).step], 0)
    with following(run, tmp_path / "host") as updater:
        updater.load(Channel.open(open_store(run.channel)))
        assert list((tmp_path / "host/.weightcast/engine").iterdir()) == []


def test_memory_grows_with_the_change_and_not_with_the_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base: Model = {"large": tensor(rng, "BF16", 16 << 20)}
    run = run_of(tmp_path, [base, all_changed(base, rng, 5000)])
    with following(run, tmp_path / "host") as updater:
        step_to(updater, 0)
        local, step = opened(updater), staged(updater, 1).step
        tracemalloc.start()
        try:
            patch = write_engine_patch(local, [step], 0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert patch.changes == 5000 and peak < 1 << 20
