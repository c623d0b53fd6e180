"""`channel log`, `show` and `verify` over channels that a publisher wrote, and then somebody else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_cases import pack
from in_process import Command

from weightcast.publisher.api import Publisher, PublisherOptions
from weightcast.publisher.channel_init import init_channel

INDEX = "model.safetensors.index.json"


def write_checkpoint(directory: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    directory.mkdir()
    packed = pack({name: ("F32", array.shape, array.tobytes()) for name, array in tensors.items()})
    (directory / "model.safetensors").write_bytes(packed)
    (directory / "config.json").write_text("{}")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions: 10 elements of 1,000 changed, none, 10; an anchor beside the second."""
    root = tmp_path_factory.mktemp("published")
    tensors = {"a": np.arange(900, dtype=np.float32), "b": np.ones(100, np.float32)}
    write_checkpoint(root / "base", tensors)
    init_channel(root / "channel", root / "base", run_id="run-1")
    with Publisher.open(
        root / "channel",
        local=root / "publisher",
        base=root / "base",
        options=PublisherOptions(anchor_every=2),
    ) as publisher:
        for step, shift in ((10, 1), (11, 0), (12, 1)):
            tensors["a"][:10] += shift
            publisher.publish(tensors, step=step)
    return root / "channel"


@pytest.fixture
def channel(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "channel"))


def test_a_rollback_that_nobody_carried_out_is_shown(channel: Path, weightcast: Command) -> None:
    assert weightcast("channel", "rollback", "--to", 1, "--channel", channel).code == 0
    assert "already" in weightcast("channel", "rollback", "--to", 1, "--channel", channel).err
    facts = weightcast("channel", "log", "--channel", channel, "--json").json["rollback"]
    assert (facts["to"], facts["done_as"]) == (1, None)
    for view in (("fleet",), ("channel", "log")):
        shown = weightcast(*view, "--channel", channel)
        assert "rollback to version 1 is not published yet, ordered" in shown.out


def test_log_lists_versions(channel: Path, weightcast: Command) -> None:
    done = weightcast("channel", "log", "--channel", channel, "--json")
    assert done.code == 0
    facts = done.json
    assert (facts["run_id"], facts["latest"], facts["foreign"]) == ("run-1", 3, False)
    rows = facts["versions"]
    assert [(row["version"], row["step"], row["changed"], row["density"]) for row in rows] == [
        (1, 10, 10, 0.01),
        (2, 11, 0, 0.0),
        (3, 12, 10, 0.01),
    ]
    assert [row["anchor"] for row in rows] == [False, True, False]
    files = (channel / "weight_v000001").iterdir()
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in files)
    assert rows[0]["ratio"] == pytest.approx(4000 / rows[0]["bytes"]) and rows[1]["ratio"] is None
    newest = weightcast("channel", "log", "--channel", channel, "--last", "1", "--json").json["versions"]
    assert [row["version"] for row in newest] == [3]


def test_log_as_a_table(channel: Path, weightcast: Command) -> None:
    out = weightcast("channel", "log", "--channel", channel).out
    assert "run run-1, latest 3" in out and "1.000%" in out and "+anchor" in out


def test_log_marks_a_step_that_was_published_again(tmp_path: Path, weightcast: Command) -> None:
    tensors = {"a": np.zeros(9, np.float32)}
    write_checkpoint(tmp_path / "base", tensors)
    init_channel(tmp_path / "channel", tmp_path / "base")
    with Publisher.open(tmp_path / "channel", local=tmp_path / "pub", base=tmp_path / "base") as publisher:
        for step in (10, 10):
            tensors["a"] += 1
            publisher.publish(tensors, step=step)
    out = weightcast("channel", "log", "--channel", tmp_path / "channel").out
    assert "step 10 again, after version 1" in out


def test_a_channel_without_versions(tmp_path: Path, weightcast: Command) -> None:
    write_checkpoint(tmp_path / "base", {"a": np.zeros(3, np.float32)})
    init_channel(tmp_path / "channel", tmp_path / "base")
    done = weightcast("channel", "log", "--channel", tmp_path / "channel", "--json")
    assert done.code == 0 and done.json["versions"] == [] and done.json["latest"] is None
    assert weightcast("channel", "verify", "--channel", tmp_path / "channel").code == 0


def test_show_a_version_and_the_base(channel: Path, weightcast: Command) -> None:
    facts = weightcast("channel", "show", "3", "--channel", channel, "--json").json
    assert (facts["version"], facts["base_version"], facts["step"]) == (3, 2, 12)
    assert facts["tensors"] == {"a": 10} and facts["elements_changed"] == 10
    before = weightcast("channel", "show", "2", "--channel", channel, "--json").json
    assert (facts["parent"], facts["base_root"]) == (before["digest"], before["root"])
    rows = weightcast("channel", "log", "--channel", channel, "--json").json["versions"]
    assert [one["delta_bytes"] for one in (before, facts)] == [
        one["bytes"] for one in rows if one["version"] > 1
    ]
    base = weightcast("channel", "show", "0", "--channel", channel, "--json").json
    assert (base["kind"], base["tensors"], base["elements"]) == ("base", 2, 1000)
    assert "elements_changed" in weightcast("channel", "show", "3", "--channel", channel).out


def test_show_what_is_not_there(channel: Path, weightcast: Command) -> None:
    assert weightcast("channel", "show", "4", "--channel", channel).code == 3
    (channel / "weight_v000002" / INDEX).unlink()
    done = weightcast("channel", "show", "2", "--channel", channel)
    assert done.code == 3 and "its index is missing" in done.err
    assert weightcast("channel", "show", "1", "--channel", channel / "nowhere").code == 75


def test_verify_finds_nothing_in_a_sound_channel(channel: Path, weightcast: Command) -> None:
    done = weightcast("channel", "verify", "--channel", channel, "--json")
    assert (done.code, done.json["problems"]) == (0, [])
    assert "no problem found" in weightcast("channel", "verify", "--channel", channel).out


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _shard(channel: Path, version: int) -> Path:
    return next((channel / f"weight_v{version:06d}").glob("*.safetensors"))


DAMAGES: dict[str, tuple[Callable[[Path], object], int | None, str]] = {
    "flipped shard": (lambda c: _flip(_shard(c, 3)), 3, "its index says"),
    "shard gone": (lambda c: _shard(c, 1).unlink(), 1, "is missing"),
    "index gone": (lambda c: (c / "weight_v000002" / INDEX).unlink(), 2, "its index is missing"),
    "index cut": (lambda c: (c / "weight_v000002" / INDEX).write_bytes(b"{"), 2, "cut short"),
    "version gone": (lambda c: shutil.rmtree(c / "weight_v000002"), 3, "which is not there"),
    "newest gone": (lambda c: shutil.rmtree(c / "weight_v000003"), 3, "the pointer names it"),
    "anchor flipped": (
        lambda c: _flip(next((c / "weight_v000002" / "anchor").glob("*.safetensors"))),
        2,
        "anchor: ",
    ),
    "pointer": (lambda c: (c / "latest").write_text("soon"), None, "can't be parsed"),
    "rewritten version": (
        lambda c: (c / "weight_v000002" / INDEX).write_bytes(
            (c / "weight_v000002" / INDEX).read_bytes().replace(b'"step":11', b'"step":19')
        ),
        3,
        "continues another version 2",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_every_damage(channel: Path, damage: str, weightcast: Command) -> None:
    do, version, told = DAMAGES[damage]
    do(channel)
    done = weightcast("channel", "verify", "--channel", channel, "--json")
    assert done.code == 3
    assert any(p["version"] == version and told in p["message"] for p in done.json["problems"])
    assert told in weightcast("channel", "verify", "--channel", channel).out


def test_verify_tells_all_of_it(channel: Path, weightcast: Command) -> None:
    _flip(_shard(channel, 1))
    _flip(_shard(channel, 3))
    problems = weightcast("channel", "verify", "--channel", channel, "--json").json["problems"]
    assert [problem["version"] for problem in problems] == [1, 3]


def test_a_foreign_channel_is_listed(tmp_path: Path, weightcast: Command) -> None:
    directory = tmp_path / "weight_v000001"
    directory.mkdir()
    metadata = {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "blake3",
    }
    index = {"metadata": metadata, "weight_map": {"a": "model-00000-of-00001.safetensors"}}
    (directory / INDEX).write_text(json.dumps(index))
    shard = directory / "model-00000-of-00001.safetensors"
    shard.write_bytes(len(b"{}      ").to_bytes(8, "little") + b"{}      ")
    (tmp_path / "latest").write_text("000001")
    done = weightcast("channel", "log", "--channel", tmp_path, "--json")
    assert done.code == 0 and done.json["foreign"] and done.json["versions"][0]["kind"] == "foreign delta"
    assert weightcast("channel", "show", "1", "--channel", tmp_path, "--json").json["encoding"] == "xor"
    shard.unlink()
    checked = weightcast("channel", "verify", "--channel", tmp_path)
    assert checked.code == 3 and shard.name in checked.out and "is missing" in checked.out


@pytest.mark.parametrize("words", ["channel log", "channel verify", "channel repair", "fleet"])
def test_a_directory_that_is_no_channel(tmp_path: Path, words: str, weightcast: Command) -> None:
    done = weightcast(*words.split(), "--channel", tmp_path, "--json")
    assert done.code == 75 and "has neither channel.json nor a pointer" in str(done.json)
    (tmp_path / "hosts").mkdir()
    (tmp_path / "weight_v000001").mkdir()
    assert weightcast(*words.split(), "--channel", tmp_path, "--json").code == 75
    (tmp_path / "config.json").write_text("{}")
    done = weightcast(*words.split(), "--channel", tmp_path, "--json")
    assert done.code == 3 and "is not a channel" in done.json["message"]
