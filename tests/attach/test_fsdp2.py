"""FSDP2 ranks publish from their shards; what arrives is torch's own full state dict, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from core_cases import read_checkpoint
from safetensors.torch import load_file

from examples import checkpoint
from examples.checkpoint import Config
from examples.model import CausalLM
from weightcast.publisher import init_channel
from weightcast.shared.channel.chain import verify
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

TINY = Config(
    hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
CHILD = Path(__file__).with_name("fsdp2_child.py")
REPOSITORY = Path(__file__).resolve().parents[2]


def run_worlds(place: Path) -> list[list[Any]]:
    """What each rank of each world left."""
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, CHILD, place],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(json.loads(file.read_text()) for file in place.glob("rank-*.json"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    checkpoint.save(tmp_path / "base", TINY, CausalLM(TINY).state_dict())
    init_channel(tmp_path / "channel", tmp_path / "base")
    return tmp_path


def bytes_in(file: Path) -> dict[str, bytes]:
    return {name: one.view(torch.uint8).numpy().tobytes() for name, one in load_file(file).items()}


def arrived(place: Path, version: int) -> dict[str, bytes]:
    """On a host that follows to this version."""
    updater = LocalUpdater(open_store(place / "channel"), place / "host", place / "base", UpdaterOptions())
    try:
        updater.update_to(Channel.open(open_store(place / "channel")), version)
    finally:
        updater.close()
    return read_checkpoint(place / "host")


def test_worlds_of_2_4_and_2_ranks(place: Path) -> None:
    """The second one is hybrid: two copies of two shards. Each resumes from the one before."""
    lines = run_worlds(place)
    assert [(number, rank) for number, rank, _, _ in lines] == [
        (number, rank) for number, world in ((1, 2), (2, 4), (3, 2)) for rank in range(world)
    ]
    assert {(number, *versions) for number, _, versions, _ in lines} == {(1, 1, 2), (2, 3), (3, 4)}
    failed = {rank: text for number, rank, _, text in lines if number == 1}
    assert failed[1] == "ValueError: the device is gone"
    assert "rank 1 failed: ValueError: the device is gone" in failed[0]
    for number, version in ((1, 2), (2, 3), (3, 4)):
        assert arrived(place, version) == bytes_in(place / f"full-{number}.safetensors")
    assert verify(Channel.open(open_store(place / "channel"))) == []
