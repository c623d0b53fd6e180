"""Each kind of file of a local checkpoint, damaged in each way: `local verify` names it and says what it
means, `--repair` brings it right or leaves it as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from core_cases import bytes_of, read_checkpoint, snapshot
from in_process import Command
from local_cases import Run, catch_up, following, make_run, patch_keeping_undo, step_to

from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.layout import Pointer
from weightcast.shared.checkpoint.update.plan import Patch

ROOM = ".weightcast"
KINDS = ["state", "base", "weights", "index", "config", "tokenizer", "journal"]
DAMAGES = ["removed", "truncated", "flipped", "swapped", "duplicated", "emptied", "link"]
GONE = ("removed", "truncated", "emptied", "link")
NOT_REPAIRED = {(kind, damage) for kind in ("weights", "index") for damage in GONE}
NOT_REPAIRED |= {("index", "flipped"), ("weights", "duplicated"), ("state", "removed")}
NOT_REPAIRED |= {("config", "link"), ("tokenizer", "link")}
"""left to the next sync, which reads full weights anew, or to a person"""
NOT_REPAIRED |= {("journal", damage) for damage in DAMAGES if damage != "duplicated"}
HARMLESS = {("state", "duplicated"), ("base", "duplicated"), ("base", "swapped"), ("config", "swapped")}
HARMLESS |= {("config", "duplicated"), ("tokenizer", "duplicated"), ("tokenizer", "swapped")}
HARMLESS |= {("index", "swapped"), ("index", "duplicated")}


@dataclass(frozen=True)
class Hosts:
    run: Run
    here: Path
    """at version 3, with the journal of its last step"""
    older: Path
    """another host, at version 1"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    root = tmp_path_factory.mktemp("faults")
    run = make_run(root, 3, files=2, anchor_every=2)
    for name, version in (("here", 2), ("older", 0)):
        with following(run, root / name) as updater:
            step_to(updater, 1)
            if version == 2:
                step_to(updater, 2)
                patch_keeping_undo(updater, 3)
    return Hosts(run, root / "here", root / "older")


def file_of(local: Path, kind: str) -> Path:
    names = {
        "state": f"{ROOM}/state.json",
        "base": f"{ROOM}/base.json",
        "weights": "model-00001-of-00002.safetensors",
        "index": "model.safetensors.index.json",
        "config": "config.json",
        "tokenizer": "tokenizer.json",
    }
    return next((local / ROOM / "journal").iterdir()) if kind == "journal" else local / names[kind]


def plant(hosts: Hosts, local: Path, kind: str, damage: str) -> Path:
    path = file_of(local, kind)
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "flipped":
        at = len(data) - 3 if kind == "weights" else len(data) // 2 if kind == "journal" else 0
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif damage == "swapped":
        other = path if kind == "journal" else file_of(hosts.older, kind)
        data = other.read_bytes()
        path.write_bytes(data.replace(b'"run_id"', b'"Run_id"') if kind == "journal" else data)
    elif damage == "link":
        path.rename(local.parent / "moved")
        path.symlink_to(local.parent / "moved")
    else:
        copy = path.with_name(f"{path.stem}2{path.suffix}")
        copy.write_bytes(data)
    return path


@pytest.fixture
def verify(
    weightcast: Command,
) -> Callable[..., tuple[int, dict[str, Any]]]:
    def call(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        code, out, _ = weightcast("local", "verify", "--json", *arguments)
        return code, json.loads(out) if out else {}

    return call


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault(
    hosts: Hosts,
    tmp_path: Path,
    kind: str,
    damage: str,
    verify: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    local = Path(shutil.copytree(hosts.here, tmp_path / "local"))
    planted = plant(hosts, local, kind, damage)
    before = snapshot(local)
    code, found = verify("--local", local)
    assert snapshot(local) == before, "looking changes nothing"
    if (kind, damage) in HARMLESS:
        assert (code, found["faults"]) == (0, [])
        return
    assert code == 3
    assert all(fault["meaning"] and fault["problem"] for fault in found["faults"])
    said = " ".join(f"{fault['file']} {fault['problem']}" for fault in found["faults"])
    assert planted.stem in said or planted.name in said or kind == "state", said
    sources = "--channel", hosts.run.channel, "--base", hosts.run.base
    code, found = verify("--local", local, "--repair", *sources)
    if kind not in ("weights", "index"):
        version = 1 if (kind, damage) == ("state", "swapped") else 3
        assert read_checkpoint(local) == bytes_of(hosts.run.models[version])
    assert (code == 3) is ((kind, damage) in NOT_REPAIRED), found
    if damage == "link":
        return
    with following(hosts.run, local) as updater:
        catch_up(updater)
        updater.forget_undo()
    assert read_checkpoint(local) == bytes_of(hosts.run.models[3])


def test_what_a_running_daemon_has_staged_is_not_a_fault(
    hosts: Hosts, tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    local = Path(shutil.copytree(hosts.older, tmp_path / "local"))
    with following(hosts.run, local) as updater:
        channel = Channel.open(updater.store)
        updater.load(channel)
        route = updater.route(channel, Pointer(2), 2, exact=True)
        assert isinstance(route.plan, Patch)
        staged = updater.prepare(route, route.plan.legs[0])
        assert verify("--local", local)[0] == 0
    code, found = verify("--local", local)
    assert code == 3 and staged.step.journal in found["faults"][0]["file"]
    assert found["faults"][0]["problem"] == "left by an interrupted update"


def test_an_intact_one_has_no_fault(
    hosts: Hosts, tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    local = Path(shutil.copytree(hosts.here, tmp_path / "local"))
    before = snapshot(local)
    code, found = verify("--local", local, "--repair", "--channel", hosts.run.channel)
    assert (code, found["intact"], found["repaired"]) == (0, True, None)
    assert snapshot(local) == before


def test_a_repair_needs_a_channel(hosts: Hosts, verify: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    assert verify("--local", hosts.here, "--repair")[0] == 2


def test_a_checkpoint_that_a_daemon_owns_is_left_to_it(
    hosts: Hosts, tmp_path: Path, verify: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    local = Path(shutil.copytree(hosts.here, tmp_path / "local"))
    plant(hosts, local, "weights", "flipped")
    before = snapshot(local)
    with following(hosts.run, local) as updater:
        updater.own()
        assert verify("--local", local, "--repair", "--channel", hosts.run.channel)[0] == 75
    assert snapshot(local) == before
