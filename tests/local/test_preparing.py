"""Fetching and staging side by side, and fetching ahead."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from core_cases import bytes_of, read_checkpoint
from disk_errors import watched
from local_cases import Run, catch_up, following, make_run, state_of, step_to

from weightcast.shared.base.errors import DamagedFile, RetryLater
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.index import Index
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.update.fetch import Delta, Incoming
from weightcast.shared.checkpoint.update.stage import stage

WAIT = 20.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"))


def index_of(run: Run, version: int) -> Index:
    channel = Channel.open(open_store(run.channel))
    pointer = channel.pointer()
    assert pointer is not None and channel.base is not None
    index = channel.index(pointer, version, channel.base.table)
    assert isinstance(index, Index)
    return index


def shard(run: Run, version: int) -> Path:
    (found,) = run.channel.glob(f"weight_v{version:06d}/*.safetensors")
    return found


def test_chunks_are_staged_while_others_are_still_on_their_way(run: Run, tmp_path: Path) -> None:
    index, path = index_of(run, 1), shard(run, 1)
    chunks = sorted(index.chunks, key=lambda chunk: chunk.offset)
    data, first_end = path.read_bytes(), chunks[0].offset + chunks[0].length
    arrived, incoming, staged_one = tmp_path / "spool", Incoming(), threading.Event()
    arrived.mkdir()
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 0)
        assert updater.local is not None

        def watcher(name: str, where: Path | None) -> None:
            if name == "journal.record":
                staged_one.set()

        with watched(watcher), ThreadPoolExecutor(1) as pool:
            staging = pool.submit(stage, updater.local, [Delta(index, open_store(arrived), incoming)])
            (arrived / path.name).write_bytes(data[:first_end])
            incoming.extend(path.name, first_end)
            assert staged_one.wait(WAIT)
            (arrived / path.name).write_bytes(data)
            incoming.extend(path.name, len(data))
            assert not staging.done()
            incoming.complete()
            assert staging.result(WAIT).step.target.root == index.root


def test_a_journal_is_not_complete_before_the_shard_is_verified(run: Run, tmp_path: Path) -> None:
    index, path, incoming = index_of(run, 1), shard(run, 1), Incoming()
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 0)
        assert updater.local is not None
        incoming.extend(path.name, path.stat().st_size)
        incoming.fail(DamagedFile("another digest"))
        with pytest.raises(DamagedFile, match="another digest"):
            stage(updater.local, [Delta(index, open_store(path.parent), incoming)])
        assert list(updater.paths.journals.iterdir()) == []


def test_a_shard_that_heals_is_staged_from_its_second_copy(run: Run, tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    shutil.copytree(run.channel, channel)
    damaged = channel / shard(run, 1).relative_to(run.channel)
    whole = damaged.read_bytes()
    at = index_of(run, 1).chunks[0].offset + 20
    damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    looks = []

    def heal(seconds: float) -> None:
        looks.append(seconds)
        damaged.write_bytes(whole)

    local = tmp_path / "local"
    updater = LocalUpdater(
        open_store(channel), local, run.base, UpdaterOptions(visible_seconds=WAIT, wait=heal)
    )
    try:
        catch_up(updater)
    finally:
        updater.close()
    assert looks and read_checkpoint(local) == bytes_of(run.latest)


def test_a_copy_that_was_not_the_published_one_does_not_count_where_nothing_in_it_is_wrong(
    run: Run, tmp_path: Path
) -> None:
    """Lanes tell damage. Only the digest tells what somebody made to have the same ones."""
    channel = tmp_path / "channel"
    shutil.copytree(run.channel, channel)
    other = channel / shard(run, 1).relative_to(run.channel)
    whole = other.read_bytes()
    other.write_bytes(
        whole[:9] + bytes([whole[9] ^ 1]) + whole[10:]
    )  # in a header that staging does not read
    passed = []

    def heal(seconds: float) -> None:
        other.write_bytes(whole)

    local = tmp_path / "local"
    updater = LocalUpdater(
        open_store(channel), local, run.base, UpdaterOptions(visible_seconds=WAIT, wait=heal)
    )
    try:
        step_to(updater, 0)
        with watched(lambda name, path: passed.append(name)):
            step_to(updater, 1)
    finally:
        updater.close()
    assert (passed.count("fetch.copied"), passed.count("journal.begun")) == (2, 2)
    assert read_checkpoint(local) == bytes_of(run.models[1])


def test_what_was_fetched_ahead_is_not_read_again(run: Run, tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    shutil.copytree(run.channel, channel)
    updater = LocalUpdater(
        open_store(channel), tmp_path / "local", run.base, UpdaterOptions(visible_seconds=0.0)
    )
    try:
        step_to(updater, 1)
        updater.fetch_ahead(Channel.open(updater.store), 1)
        updater._stop_prefetch(finish=True)
        shutil.rmtree(channel / "weight_v000003")
        shard_of_2 = channel / shard(run, 2).relative_to(run.channel)
        shard_of_2.unlink()
        step_to(updater, 2)
        assert read_checkpoint(tmp_path / "local") == bytes_of(run.models[2])
        assert list(updater.paths.spool.iterdir()) == []
    finally:
        updater.close()


@pytest.mark.parametrize("most", [None, 1])
def test_fetching_ahead_past_the_end_does_nothing(run: Run, tmp_path: Path, most: int | None) -> None:
    with following(run, tmp_path / "local") as updater:
        step_to(updater, 3 if most is None else 1)
        updater.fetch_ahead(Channel.open(updater.store), 3 if most is None else 1, most)
        catch_up(updater)
        assert state_of(tmp_path / "local")["position"]["version"] == 3


def test_a_failed_fetch_ahead_is_told_by_the_step_that_needs_it(run: Run, tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    shutil.copytree(run.channel, channel)
    (channel / shard(run, 2).relative_to(run.channel)).unlink()
    updater = LocalUpdater(
        open_store(channel), tmp_path / "local", run.base, UpdaterOptions(visible_seconds=0.0)
    )
    try:
        step_to(updater, 1)
        updater.fetch_ahead(Channel.open(updater.store), 1)
        with pytest.raises(RetryLater, match="is missing"):
            step_to(updater, 2)
        assert state_of(tmp_path / "local")["position"]["version"] == 1
        assert list(updater.paths.spool.iterdir()) == []
    finally:
        updater.close()
