"""Two FSDP2 ranks publish an adapter and a draft model from their shards; what arrives is what torch gathers,
bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from core_cases import Tensor, read_checkpoint, write_checkpoint
from safetensors.torch import load_file, save_file

from weightcast.publisher import init_channel
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import all_faults, open_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

CHILD = Path(__file__).with_name("adapter_ranks_child.py")
REPOSITORY = Path(__file__).resolve().parents[2]


def test_an_adapter_from_the_shards_of_two_ranks(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", {"w": Tensor("F32", (3,), np.zeros(12, np.uint8))})
    init_channel(tmp_path / "channel", base)
    done = subprocess.run(
        [sys.executable, CHILD, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = {name: one + 1 for name, one in load_file(tmp_path / "full-3.safetensors").items()}
    save_file(last, tmp_path / "full-4.safetensors")
    check(tmp_path, "adapter/math", "full", 4, "adapter_config.json")
    check(tmp_path, "draft", "draft", 3, "config.json")
    assert all_faults(open_store(tmp_path / "channel")) == []
    failed = {rank: (tmp_path / f"failed-{rank}").read_text() for rank in (0, 1)}
    assert failed[1] == "ValueError: the device is gone"
    # rank 1 was killed in the fifth step
    assert (
        "rank 1 of 2 has ended" in (tmp_path / "alone").read_text()
        and (tmp_path / "after").read_text() == "3"
    )


def check(room: Path, component: str, saved: str, versions: int, config: str) -> None:
    """Every version of a component arrives as torch gathered it, from parts, with its configuration."""
    nested = open_component(Channel.open(open_store(room / "channel")), component)
    for version in range(1, versions + 1):
        updater = LocalUpdater(nested.store, room / f"host-{saved}", None, UpdaterOptions())
        try:
            updater.update_to(nested, version)
        finally:
            updater.close()
        full = load_file(room / f"{saved}-{version}.safetensors")
        expected = {name: one.view(torch.uint8).numpy().tobytes() for name, one in full.items()}
        assert read_checkpoint(room / f"host-{saved}") == expected
        index = nested.own_index(version)
        assert index is not None and index.parts != (nested.require_ours()[1].table.whole,)
        assert [file.name for file in index.carried] == [config]
