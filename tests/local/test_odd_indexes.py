"""Indexes that parse and lie, or do not lie there wholly yet."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_cases import bytes_of, read_checkpoint, snapshot
from local_cases import Run, catch_up, following, make_run, step_to

from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=["fast", "xor"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), 2, encoding=request.param)


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
    refused(run, tmp_path / "local", "weight_v000002")


def test_lanes_that_a_tensor_does_not_get(run: Run, tmp_path: Path) -> None:
    tensors = json.loads(newest(run).read_text())["weightcast"]["tensors"]
    name = sorted(tensors)[1]
    tensors[name][0] = "0" * 32
    edited(run, tensors=tensors)
    refused(run, tmp_path / "local", f"{re.escape(name)} does not get the stated lanes")


def test_a_changed_tensor_that_is_not_listed(run: Run, tmp_path: Path) -> None:
    facts = json.loads(newest(run).read_text())
    name = sorted(facts["weight_map"])[1]
    del facts["weight_map"][name], facts["weightcast"]["tensors"][name]
    newest(run).write_text(json.dumps(facts))
    by_chunks = facts["metadata"]["delta_encoding"] == "step"
    told = f"{re.escape(name)} changes and is not listed" if by_chunks else None
    refused(run, tmp_path / "local", told)


def test_a_listed_tensor_that_does_not_change(run: Run, tmp_path: Path) -> None:
    facts = json.loads(newest(run).read_text())
    name = min(run.models[0].keys() - facts["weight_map"].keys())
    shard = next(iter(facts["weight_map"].values()))
    rows = json.loads((run.channel / "base.json").read_text())["tensors"]
    lanes = next(row[4] for row in rows if row[0] == name)
    by_chunks = facts["metadata"]["delta_encoding"] == "step"
    facts["weight_map"][name] = shard
    facts["weightcast"]["tensors"][name] = [lanes, 0] if by_chunks else [lanes, 0, "0" * 32]
    newest(run).write_text(json.dumps(facts))
    told = f"{re.escape(name)} changes and is not listed, or the reverse" if by_chunks else None
    refused(run, tmp_path / "local", told)


@pytest.mark.parametrize("member", ["root", "base_root", "parent"])
def test_digests_of_something_else(run: Run, tmp_path: Path, member: str) -> None:
    edited(run, **{member: "0" * 64})
    refused(run, tmp_path / "local", None)


def refused(run: Run, local: Path, told: str | None) -> None:
    """Nothing of version 1 is changed, however often it is tried."""
    with following(run, local) as updater:
        step_to(updater, 1)
    before = snapshot(local)
    for _ in range(2):
        with following(run, local) as updater, pytest.raises(Refused, match=told):
            catch_up(updater)
        assert read_checkpoint(local) == bytes_of(run.models[1])
        assert snapshot(local).keys() == before.keys()


@pytest.mark.parametrize("left", [0, 1, 100, 2000])
def test_an_index_that_is_not_wholly_visible_is_waited_for(run: Run, tmp_path: Path, left: int) -> None:
    whole = newest(run).read_bytes()
    newest(run).write_bytes(whole[:left])
    with following(run, tmp_path / "local") as updater:
        with pytest.raises(RetryLater, match=r"weight_v000002/.* is cut short"):
            catch_up(updater)
        newest(run).write_bytes(whole)
        catch_up(updater)
    assert read_checkpoint(tmp_path / "local") == bytes_of(run.latest)


DAMAGES: dict[str, Any] = {
    "no JSON": lambda text: text.replace('"format":1', '"format":}'),
    "no object": lambda text: "[1]",
    "another format": lambda text: text.replace('"format":1', '"format":2'),
    "another run": lambda text: text.replace("run-under-test", "run-elsewhere"),
    "a member of another type": lambda text: text.replace('"run_id":"run-under-test"', '"run_id":7'),
    "a file's name that leads out": lambda text: text.replace(
        '"files":[', '"files":[["..",1,"' + "0" * 64 + '"],'
    ),
}


@pytest.mark.parametrize("name", ["channel.json", "base.json", f"weight_v000002/{INDEX}"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_a_remedy_given(
    run: Run, tmp_path: Path, name: str, damage: Callable[[str], str]
) -> None:
    path = run.channel / name
    whole = path.read_text()
    if damage(whole) == whole:
        pytest.skip(f"{name} has no such member")
    path.write_text(damage(whole))
    with following(run, tmp_path / "local") as updater, pytest.raises(Refused) as told:
        catch_up(updater)
    assert str(path) in told.value.message or (name == "channel.json" and "base.json" in told.value.message)
    assert told.value.remedy and "mount" not in told.value.remedy


def test_an_index_too_large_to_be_read(run: Run, tmp_path: Path) -> None:
    os.truncate(newest(run), (128 << 20) + 1)
    with (
        following(run, tmp_path / "local") as updater,
        pytest.raises(DamagedFile, match="exceeds the") as told,
    ):
        catch_up(updater)
    assert str(newest(run)) in told.value.message and told.value.remedy


def test_an_index_of_another_run_names_both(run: Run, tmp_path: Path) -> None:
    """Before anything that it says of tensors is held against this run's table."""
    text = newest(run).read_text().replace("run-under-test", "run-elsewhere")
    newest(run).write_text(text.replace("bf16", "renamed"))
    refused(run, tmp_path / "local", "run 'run-elsewhere'.*run 'run-under-test'")


def test_a_damaged_index_on_the_way_is_not_taken_for_a_pruned_one(run: Run, tmp_path: Path) -> None:
    path = run.channel / "weight_v000001" / INDEX
    path.write_text("[1]")
    with following(run, tmp_path / "local") as updater, pytest.raises(Refused) as told:
        catch_up(updater)
    assert "the index of version 1 is damaged" in told.value.message and str(path) in told.value.message
    assert "channel repair" in told.value.remedy and "--base" not in told.value.remedy


def test_a_foreign_pointer_in_a_channel_of_ours_is_an_error_of_the_pointer(run: Run, tmp_path: Path) -> None:
    (run.channel / "latest").write_text("run/weight_v000002")
    with following(run, tmp_path / "local") as updater, pytest.raises(DamagedFile, match="latest names run"):
        catch_up(updater)
