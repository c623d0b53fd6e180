"""verl's released checkpoint manager and worker, with weightcast as their checkpoint engine."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="make test-trainers")

# what verl's modules warn of while they are imported is theirs
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineWorker
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig
    from verl_workers import Adapter, Rank, digests, weights_of

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": here})
    yield
    ray.shutdown()


class Replica:
    """An engine of verl as its manager sees it; `calls` in their order."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers, self.calls = workers, list[str]()

    def __getattr__(self, name: str) -> Any:
        async def call(**kwargs: Any) -> None:
            self.calls.append(name)

        return call


def group(count: int, cls: type, *arguments: Any) -> RayWorkerGroup:
    made = RayClassWithInitArgs(ray.remote(cls), *arguments)
    return RayWorkerGroup(
        RayResourcePool([count], use_gpu=False, max_colocate_count=1), made, device_name="cpu"
    )


def test_rollouts_load_what_the_trainer_published(cluster: None, tmp_path: Path) -> None:
    """Two ranks, two rollout workers that share a host's local checkpoint, three updates."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)).save_pretrained(tmp_path / "base")
    settings = {name: str(tmp_path / name) for name in ("channel", "base", "local")}
    config = CheckpointEngineConfig(
        backend="weightcast",
        engine_kwargs={"weightcast": settings},
        custom_backend_module="weightcast.integrations.verl",
    )
    rollout = RolloutConfig(name="vllm", checkpoint_engine=config)
    seen = tmp_path / "seen"
    seen.mkdir()
    ranks = group(2, Rank, settings)
    workers = group(2, CheckpointEngineWorker, rollout, None, Adapter(str(seen)))
    replica = Replica(workers.workers)
    manager = CheckpointEngineManager(config, ranks, [replica])
    for step in (1, 2, 3):
        metrics = asyncio.run(_update(manager, step))
        tensors = weights_of(tmp_path / "base", step)
        assert metrics["weightcast/version"] == step and metrics["weightcast/delta_bytes"] > 0
        assert metrics["taken/0"] == metrics["taken/1"] == step * len(tensors)
        for rank in (0, 1):
            assert json.loads((seen / f"step-{step}-rank-{rank}.json").read_text()) == digests(tensors)
    assert replica.calls[:2] == ["abort_all_requests", "release_kv_cache"]


async def _update(manager: CheckpointEngineManager, step: int) -> dict[str, float]:
    found: dict[str, float] = await manager.update_weights(global_steps=step)
    return found


def test_a_version_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    from weightcast.integrations.verl import WeightcastEngine
    from weightcast.shared.base.errors import RetryLater

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)).save_pretrained(tmp_path / "base")
    places = {name: str(tmp_path / name) for name in ("channel", "base", "local")}
    master = WeightcastEngine(1 << 20, is_master=True, **places)
    worker = WeightcastEngine(1 << 20, deadline_seconds=0.5, **places)
    told, _ = WeightcastEngine.build_topology(1, 1, [master.prepare(), worker.prepare()])
    worker.init_process_group(before=told["before"][0])

    async def receive() -> list[str]:
        return [name async for name, _ in worker.receive_weights(global_steps=1)]

    with pytest.raises(RetryLater, match="did not get past version 0"):
        asyncio.run(receive())
