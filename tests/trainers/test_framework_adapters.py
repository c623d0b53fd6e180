"""Adapters of frameworks: SkyRL's released worker and publisher of deltas; prime-rl, NeMo RL by stand-ins."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("skyrl", reason="make test-trainers")

import stand_ins
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from weightcast.shared.base.errors import RetryLater
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


class Host:
    def __init__(self, root: Path, channel: Path) -> None:
        self.root, self.channel = root, channel

    def at(self, version: int) -> dict[str, torch.Tensor]:
        """What its local checkpoint holds there."""
        updater = LocalUpdater(
            open_store(self.channel), self.root / "host", self.root / "base", UpdaterOptions()
        )
        try:
            updater.update_to(Channel.open(open_store(self.channel)), version)
        finally:
            updater.close()
        return load_file(self.root / "host" / "model.safetensors")


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("kind", ["skyrl", "prime_rl"])
def test_ranks_publish_each_step(base: Path, kind: str) -> None:
    root = base.parent
    command = [sys.executable, str(Path(__file__).with_name("adapter_child.py")), str(root), kind]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    host = Host(root, root / "channel")
    for step in (1, 2, 3):
        assert same(host.at(step), load_file(root / f"step-{step}.safetensors"))


def test_a_host_follows_skyrl_s_own_delta_files(base: Path) -> None:
    stand_ins.skyrl()
    from skyrl.backends.skyrl_train.weight_sync.delta.checkpoint import DeltaCheckpointPublisher

    root = base.parent
    publisher = DeltaCheckpointPublisher(str(base), str(root / "sync"), str(root / "staging"), 1e-6)
    weights, host = load_file(base / "model.safetensors"), Host(root, root / "sync")
    for version in (1, 2, 3):
        names = list(weights)[version::3]
        weights |= {name: weights[name] * (1 + version / 64) for name in names}
        said = publisher.publish(publisher.create_delta_files(iter(weights.items())))
        assert said["version"] == version
        assert same(host.at(version), weights)
    assert len(list((root / "sync" / "delta-00000001").glob("*.safetensors"))) > 1
    publisher.publish(publisher.create_delta_files(iter(weights.items())))  # nothing changed
    assert same(host.at(4), weights)


def test_generation_workers_of_nemo_rl_load_what_policy_rank_0_published(base: Path) -> None:
    """Two policy ranks; two generation workers of a host."""
    stand_ins.nemo_rl()
    from weightcast.integrations.nemo_rl import WeightcastEngine

    places = {name: str(base.parent / name) for name in ("channel", "base", "local")}
    policy, generation = ([WeightcastEngine(2000, **places) for _ in range(2)] for _ in range(2))
    weights, taken = load_file(base / "model.safetensors"), list[str]()

    def gathered(rank: int):  # type: ignore[no-untyped-def]
        for name, tensor in weights.items():
            taken.append(f"{rank} {name}")
            yield name, tensor

    async def received(worker: WeightcastEngine) -> dict[str, torch.Tensor]:
        batches = [batch async for batch in worker.receive_weight_batches()]
        assert len(batches) > 1
        return {name: tensor.clone() for batch in batches for name, tensor in batch}

    async def refit() -> list[dict[str, torch.Tensor]]:
        metadata = [worker.prepare() for worker in (*policy, *generation)]
        sizes = {"train_world_size": 2, "rollout_world_size": 2, "metadata": metadata}
        for rank, worker in enumerate(policy):
            worker.init_policy_process_group(worker_rank=rank, **sizes)
        for rank, worker in enumerate(generation):
            worker.init_rollout_process_group(rollout_rank=rank, **sizes)
        sends = [worker.send_weights(gathered(rank)) for rank, worker in enumerate(policy)]
        done = await asyncio.gather(*sends, *map(received, generation))
        return done[2:]

    for step in (1, 2):
        weights = {name: tensor * (1 + step / 64) for name, tensor in weights.items()}
        assert all(same(found, weights) for found in asyncio.run(refit()))
        assert len(taken) == 2 * step * len(weights)


def test_a_version_that_does_not_come_is_an_error(base: Path) -> None:
    from weightcast.integrations.transfer import Receiver

    root = base.parent
    with pytest.raises(RetryLater, match="did not get past version 0"):
        Receiver(str(root / "channel"), base, root / "local", 0.5).follow(0)
