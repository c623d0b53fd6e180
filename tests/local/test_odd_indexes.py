"""Indexes that parse and lie, or do not lie there wholly yet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from core_cases import bytes_of, read_checkpoint, snapshot
from local_cases import Run, catch_up, following, make_run, step_to

from weightcast.shared.errors import Refused, RetryLater

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=["fast", "xor"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), 2, encoding=request.param)


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    shutil.copytree(made.channel, tmp_path / "channel")
    shutil.copytree(made.base, tmp_path / "base")
    return Run(tmp_path, made.models)


def newest(run: Run) -> Path:
    return run.channel / "weight_v000002" / INDEX


def edited(run: Run, **members: Any) -> None:
    facts = json.loads(newest(run).read_text())
    facts["weightcast"].update(members)
    newest(run).write_text(json.dumps(facts))


def test_chunks_that_no_part_has(run: Run, tmp_path: Path) -> None:
    facts = json.loads(newest(run).read_text())
    chunks = facts["weightcast"]["chunks"]
    number, offset, length = 1 << 40, 0, 8 if facts["metadata"]["delta_encoding"] == "step" else 0
    edited(run, chunks=[*chunks, [0, "BF16", number, 0, offset, length, 1, "0" * 32, "0" * 32]])
    refused(run, tmp_path / "local", "chunk.0.BF16.1099511627776")


def test_a_chunk_too_few(run: Run, tmp_path: Path) -> None:
    chunks = json.loads(newest(run).read_text())["weightcast"]["chunks"]
    edited(run, chunks=chunks[1:])
    refused(run, tmp_path / "local", "version 2")


@pytest.mark.parametrize("member", ["root", "base_root", "parent"])
def test_digests_of_something_else(run: Run, tmp_path: Path, member: str) -> None:
    edited(run, **{member: "0" * 64})
    refused(run, tmp_path / "local", None)


def refused(run: Run, local: Path, told: str | None) -> None:
    """Nothing of version 1 is changed, however often it is tried."""
    with following(run, local) as follower:
        step_to(follower, 1)
    before = snapshot(local)
    for _ in range(2):
        with following(run, local) as follower, pytest.raises(Refused, match=told):
            catch_up(follower)
        assert read_checkpoint(local) == bytes_of(run.models[1])
        assert snapshot(local).keys() == before.keys()


@pytest.mark.parametrize("left", [0, 1, 100, 2000])
def test_an_index_that_is_not_wholly_visible_is_waited_for(run: Run, tmp_path: Path, left: int) -> None:
    whole = newest(run).read_bytes()
    newest(run).write_bytes(whole[:left])
    with following(run, tmp_path / "local") as follower:
        with pytest.raises(RetryLater, match="not there"):
            catch_up(follower)
        newest(run).write_bytes(whole)
        catch_up(follower)
    assert read_checkpoint(tmp_path / "local") == bytes_of(run.latest)
