"""A local checkpoint whose state cannot be read: what lies there is found out by reading it."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from core_cases import bytes_of, flip, read_checkpoint
from local_cases import Run, catch_up, edit_state, following, make_run, phase_of, state_of, step_to

from weightcast.publisher import Publisher
from weightcast.shared.base.errors import DamagedFile, UnknownFormat, WrongRun
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater
from weightcast.shared.cli.main import run as weightcast

GARBLED = [b"", b"{", b"\x00" * 4096, b'{"format": 1}', b'{"format": 1, "format": 1}', b"[]"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three versions, full weights beside the second; a host at 2."""
    run = make_run(tmp_path_factory.mktemp("run"), 3, anchor_every=2)
    with following(run, run.root / "host") as updater:
        step_to(updater, 2)
    return run


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    for name in ("channel", "base", "host"):
        shutil.copytree(made.root / name, tmp_path / name)
    return Run(tmp_path, made.models)


def host(run: Run) -> Path:
    return run.root / "host"


def garble(run: Run, data: bytes = b"{") -> None:
    (host(run) / ".weightcast/state.json").write_bytes(data)


def adopt(updater: LocalUpdater) -> bool:
    return updater.recover_state(Channel.open(updater.store))


@pytest.mark.parametrize("data", GARBLED)
def test_the_version_that_lies_there_is_recognised(run: Run, data: bytes) -> None:
    before = state_of(host(run))
    garble(run, data)
    with following(run, host(run)) as updater:
        with pytest.raises(DamagedFile, match="sync --rehash"):
            catch_up(updater)
        assert adopt(updater) and not adopt(updater)
    after = state_of(host(run))
    kept = ("run_id", "position", "phase", "epoch", "foreign", "boot_id")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert (host(run) / ".weightcast/state.json.unreadable").read_bytes() == data
    with following(run, host(run)) as updater:
        catch_up(updater)
    assert read_checkpoint(host(run)) == bytes_of(run.latest)


def test_what_differs_is_repaired(run: Run) -> None:
    garble(run)
    flip(host(run), "f32.matrix", 8)
    inode = (host(run) / "model.safetensors").stat().st_ino
    with following(run, host(run)) as updater:
        adopt(updater)
        assert (phase_of(host(run)), state_of(host(run))["position"]["version"]) == ("dirty", 2)
        updater.load(Channel.open(open_store(run.channel)))
        repaired = updater.repair(Channel.open(open_store(run.channel)))
        assert repaired is not None and (repaired.tensors, repaired.words) == (("f32.matrix",), 1)
        catch_up(updater)
    assert read_checkpoint(host(run)) == bytes_of(run.latest)
    assert (host(run) / "model.safetensors").stat().st_ino == inode, "never replaced"


def test_behind_a_gap_full_weights_tell(run: Run) -> None:
    shutil.rmtree(run.channel / "weight_v000001")
    garble(run)
    with following(run, host(run)) as updater:
        adopt(updater)
    assert (phase_of(host(run)), state_of(host(run))["position"]["version"]) == ("clean", 2)


def test_indexes_that_lie_are_not_believed(run: Run) -> None:
    """Lanes that are not those of the root name no version."""
    shutil.rmtree(run.channel / "weight_v000002/anchor")
    index = run.channel / "weight_v000002/model.safetensors.index.json"
    facts = json.loads(index.read_text())
    facts["weightcast"]["root"] = "0" * 64
    index.write_text(json.dumps(facts))
    garble(run)
    with following(run, host(run)) as updater:
        adopt(updater)
    assert (phase_of(host(run)), state_of(host(run))["position"]["version"]) == ("dirty", 1)


def test_weights_of_nothing_known_are_seeded(run: Run) -> None:
    garble(run)
    (host(run) / "model.safetensors").write_bytes(b"none")
    with following(run, host(run)) as updater:
        assert adopt(updater)
        assert not (host(run) / ".weightcast/state.json").exists()
        catch_up(updater)
    assert read_checkpoint(host(run)) == bytes_of(run.latest)


def test_another_run_s_is_left_alone(run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 1, seed=9)
    garble(run)
    before = read_checkpoint(host(run))
    with following(other, host(run)) as updater, pytest.raises(WrongRun):
        adopt(updater)
    assert (host(run) / ".weightcast/state.json").read_bytes() == b"{"
    assert read_checkpoint(host(run)) == before


def test_a_lost_base_is_the_channel_s(run: Run) -> None:
    garble(run)
    (host(run) / ".weightcast/base.json").write_bytes(b"{")
    with following(run, host(run)) as updater:
        adopt(updater)
        catch_up(updater)
    assert read_checkpoint(host(run)) == bytes_of(run.latest)


def test_another_release_s_state_is_not_touched(run: Run) -> None:
    garble(run, json.dumps({**state_of(host(run)), "format": 99}).encode())
    with following(run, host(run)) as updater, pytest.raises(UnknownFormat):
        adopt(updater)


def flip_a_lane(local: Path) -> None:
    position = state_of(local)["position"]
    lanes = bytearray(base64.b64decode(position["lanes"]))
    lanes[3] ^= 4
    edit_state(local, position={**position, "lanes": base64.b64encode(lanes).decode()})


def test_lanes_that_are_not_the_root_s_are_a_lost_state(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = state_of(host(run))
    flip_a_lane(host(run))
    assert weightcast(["local", "verify", "--local", str(host(run)), "--json"]) == 3
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["file"] == ".weightcast/state.json" and "sync --rehash" in fault["meaning"]
    with following(run, host(run)) as updater:
        with pytest.raises(DamagedFile, match="lanes of version 2 do not give the version's root"):
            catch_up(updater)
        assert (phase_of(host(run)), state_of(host(run))["generation"]) == ("clean", before["generation"])
        assert adopt(updater) and not adopt(updater)
        assert state_of(host(run))["position"] == before["position"]
        catch_up(updater)
    assert read_checkpoint(host(run)) == bytes_of(run.latest)


def test_a_publisher_stops_at_lanes_that_are_not_the_root_s(run: Run) -> None:
    local = host(run)
    flip_a_lane(local)
    with pytest.raises(DamagedFile, match="local verify --repair"):
        Publisher.open(run.channel, local=local, base=run.base)
    where = ["--channel", str(run.channel), "--local", str(local), "--base", str(run.base)]
    assert weightcast(["local", "verify", "--repair", *where]) == 0
    with Publisher.open(run.channel, local=local, base=run.base) as publisher:
        assert publisher.local_version == 3


@pytest.mark.parametrize("verb", [["sync", "--rehash"], ["local", "verify", "--repair"]])
def test_as_verbs(run: Run, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    garble(run)
    flip(host(run), "long", 100)
    where = ["--channel", str(run.channel), "--local", str(host(run)), "--base", str(run.base), "--json"]
    if verb[0] == "sync":
        assert weightcast([verb[0], *where]) == 3
        assert "sync --rehash" in capsys.readouterr().out
    assert weightcast([*verb, *where]) == 0
    told = json.loads(capsys.readouterr().out)
    version = told["local_version"] if verb[0] == "sync" else told["version"]
    assert read_checkpoint(host(run)) == bytes_of(run.models[version])
    assert version == (3 if verb[0] == "sync" else 2)
