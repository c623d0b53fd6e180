"""Pipes and links where files should be, in channels and local checkpoints: told at once, never followed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from core_cases import bytes_of, read_checkpoint
from local_cases import Run, catch_up, following, make_run

from weightcast.publisher import Publisher
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store

INDEX = "model.safetensors.index.json"
IN_CHANNEL = [
    "latest",
    "channel.json",
    "base.json",
    f"weight_v000001/{INDEX}",
    "weight_v000001/model-00000-of-00001.safetensors",
]
IN_LOCAL = ["model.safetensors", ".weightcast/state.json", ".weightcast/base.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), 1)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("hangs on a pipe")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(path: Path, what: str) -> None:
    if what == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.rename(path.with_name("aside"))
        path.symlink_to("aside")


@pytest.mark.parametrize("what", ["pipe", "link"])
@pytest.mark.parametrize("name", IN_CHANNEL)
def test_in_a_channel(run: Run, tmp_path: Path, name: str, what: str) -> None:
    put(run.channel / name, what)
    local = tmp_path / "local"
    with following(run, local) as updater, pytest.raises(WeightcastError, match="not a regular file"):
        catch_up(updater)
    if local.is_dir():
        assert read_checkpoint(local) in ({}, bytes_of(run.models[0]))


@pytest.mark.parametrize("what", ["pipe", "link"])
@pytest.mark.parametrize("name", IN_CHANNEL)
def test_a_check_tells_them(run: Run, name: str, what: str) -> None:
    put(run.channel / name, what)
    try:
        problems = [problem.message for problem in verify(Channel.open(open_store(run.channel)))]
    except WeightcastError as error:
        problems = [error.message]
    assert Path(name).name in problems[0]


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_version_is_not_finished_with_a_link_for_its_shard(run: Run, tmp_path: Path, what: str) -> None:
    (run.channel / "latest").unlink()
    put(run.channel / IN_CHANNEL[-1], what)
    with Publisher.open(run.channel, local=tmp_path / "pub", base=run.base) as publisher:
        assert publisher.version == 0


@pytest.mark.parametrize("what", ["pipe", "link"])
@pytest.mark.parametrize("name", IN_LOCAL)
def test_in_a_local_checkpoint(run: Run, tmp_path: Path, name: str, what: str) -> None:
    local = tmp_path / "local"
    with following(run, local) as updater:
        catch_up(updater)
    put(local / name, what)
    aside = (local / name).with_name("aside")
    before = aside.read_bytes() if what == "link" else None
    with following(run, local) as updater, contextlib.suppress(WeightcastError):
        catch_up(updater)
        assert read_checkpoint(local) == bytes_of(run.latest)
    assert before is None or aside.read_bytes() == before
