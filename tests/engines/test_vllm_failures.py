"""What a real vLLM does not survive, or survives wrongly, when it is told to load it: it never comes to that.

A reload that fails leaves vLLM alive until its next token, one that lacks a tensor is answered with success.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_world import LONG, STEP_SECONDS, Tensors, World, copy_checkpoint, wait_until

from weightcast.shared.base.errors import WeightcastError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
SHARDED, SINGLE = "qwen2-untied-sharded-bf16", "llama-untied-single-fp32"
NORM = "model.norm.weight"


def without_norm(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != NORM}


def with_unknown(tensors: Tensors) -> Tensors:
    return {("model.nrom.weight" if name == NORM else name): tensor for name, tensor in tensors.items()}


def with_wrong_shape(tensors: Tensors) -> Tensors:
    return {name: tensor[:-1].clone() if name == NORM else tensor for name, tensor in tensors.items()}


def rewritten(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Each file where its tensors change: another file, as a copy from elsewhere would be."""
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if NORM in tensors:
            aside = path.with_suffix(".new")
            save_file(change({name: tensor.clone() for name, tensor in tensors.items()}), aside)
            aside.rename(path)


def lacks_tensor(directory: Path) -> None:
    rewritten(directory, without_norm)


def has_unknown_name(directory: Path) -> None:
    rewritten(directory, with_unknown)


def has_wrong_shape(directory: Path) -> None:
    rewritten(directory, with_wrong_shape)


def is_truncated(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def is_missing(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        path.unlink()


def header_in_place(directory: Path) -> None:
    """The same file, size and bytes but for one name in the header."""
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        at = data.find(NORM.encode())
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"model.nrom.weight")


DAMAGES = (is_missing, is_truncated, has_unknown_name, has_wrong_shape, lacks_tensor)


@pytest.mark.parametrize("variant", [SHARDED])
def test_bad_exports_become_no_version(world: World, variant: str) -> None:
    world.start_host()
    newest = world.run.newest
    for number, damage in enumerate(DAMAGES):
        export = copy_checkpoint(world.run.versions[-1], world.root / f"bad-export{number}", dict)
        damage(export)
        with pytest.raises((WeightcastError, OSError)):
            world.run.publisher.publish_checkpoint(export, step=99)
    world.host.wait_served(newest)
    world.require(newest)


@pytest.mark.parametrize("damage", [*DAMAGES, header_in_place])
@pytest.mark.parametrize("variant", [SHARDED])
def test_damaged_local_files_are_found_before_the_engine_reads_them(
    world: World, variant: str, damage: Callable[[Path], None]
) -> None:
    world.start_host()
    assert world.host.process is not None
    with world.host.process.suspended():
        version = world.run.publish()
        damage(world.host.local)
    world.require_honest_until(lambda: world.host.served == version, "the host healed")
    world.require(version)


@pytest.mark.parametrize("variant", [SINGLE])
def test_weights_lying_beside_the_checkpoint_stop_the_host(world: World, variant: str) -> None:
    """vLLM loads every safetensors file of a directory without an index."""
    world.start_host()
    stray = world.host.local / "extra.safetensors"
    old = world.run.newest
    save_file({"model.unknown.weight": torch.zeros(4)}, stray)
    version = world.run.publish()
    world.require_honest_until(
        lambda: "extra.safetensors" in json.dumps(world.host.status["last_error"]), "the stray file found"
    )
    assert world.host.served == old
    stray.unlink()
    world.host.wait_served(version)
    world.require(version)


@pytest.mark.parametrize("damage", ["directory", "shard", "index"])
@pytest.mark.parametrize("variant", [SHARDED])
def test_a_damaged_version_leaves_the_engine_where_it_is(world: World, variant: str, damage: str) -> None:
    world.start_host("--visible-deadline", "1")
    assert world.host.process is not None
    old = world.run.newest
    with world.host.process.suspended():
        version = world.run.publish()
        directory = world.run.channel / f"weight_v{version:06d}"
        whole = world.root / f"whole-{version}"
        shutil.copytree(directory, whole)
        damage_version(directory, damage)
    world.require_honest_until(lambda: world.host.status["last_error"] is not None, "the damage noticed")
    assert world.host.served == old
    shutil.rmtree(directory, ignore_errors=True)
    whole.rename(directory)
    world.host.wait_served(version)
    world.require(version)


def damage_version(directory: Path, damage: str) -> None:
    if damage == "directory":
        shutil.rmtree(directory)
    elif damage == "shard":
        is_truncated(directory)
    else:
        index = directory / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(NORM, "model.nrom.weight"))


@pytest.mark.parametrize("damage", [is_missing, is_truncated, has_unknown_name, has_wrong_shape])
@pytest.mark.parametrize("variant", [SINGLE])
def test_a_failed_reload_keeps_the_engine_paused_until_a_good_one(
    world: World, variant: str, damage: Callable[[Path], None]
) -> None:
    """The engine's own view of the files is wrong, which the host cannot see: another mount point. After a
    wrong shape vLLM must be restarted, as a supervisor of an engine that stays `failed` does."""
    view = world.root / f"view-{damage.__name__}"
    shutil.copytree(world.host.local, view)
    world.start_host(path=view)
    damage(view)
    version = world.run.publish()
    wait_until(lambda: world.host.mark == "suspect" and not world.host.ready, "the failure noticed")
    waiting = world.server.send(LONG, 8)
    assert world.server.paused and world.server.status("/health") == 200
    shutil.rmtree(view)
    shutil.copytree(world.host.local, view)
    if damage is has_wrong_shape:
        world.server.restart()
    world.require_honest_until(lambda: world.host.served == version, "the engine reloaded")
    answer = waiting.result(STEP_SECONDS)
    if damage is not has_wrong_shape:
        assert answer.status == 200 and world.judged(answer, version), answer.text
    world.require(version)
