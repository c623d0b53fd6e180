"""Released trainers on the CPU: after each step the channel has what the trainer's model holds."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="make test-trainers")

import torch
from datasets import Dataset
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from weightcast.publisher import init_channel
from weightcast.publisher.transformers_hook import PublishCallback
from weightcast.shared.base.errors import Refused, WrongRun
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

# the libraries' own deprecations are theirs
pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w1")


class Run:
    """A channel, its base, and what a host has of it. `published`: step by step, as `save_pretrained` writes
    the model, which knows nothing of weightcast."""

    def __init__(self, root: Path, kind: str = "tied") -> None:
        torch.manual_seed(0)
        self.root, self.base, self.channel = root, root / "base", root / "channel"
        if kind == "experts":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=kind == "tied"))
        model.to(torch.bfloat16).save_pretrained(self.base)
        tokenizer().save_pretrained(self.base)
        init_channel(self.channel, self.base)
        self.saved: dict[int, dict[str, bytes]] = {}

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base, dtype=dtype)

    def callback(self, **options: Any) -> PublishCallback:
        return PublishCallback(self.channel, local=self.root / "publisher", base=self.base, **options)

    def arguments(self, steps: int, **options: Any) -> dict[str, Any]:
        """A run that is broken off after `steps` of six."""
        return {
            "output_dir": str(self.root / "out"),
            "max_steps": steps,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **options,
        }

    def trainer(
        self, callbacks: Sequence[Any], dtype: torch.dtype = torch.float32, **options: Any
    ) -> Trainer:
        rng = np.random.default_rng(3)
        rows = [{"input_ids": rng.integers(2, 64, 12).tolist()} for _ in range(32)]
        return Trainer(
            self.model(dtype),
            TrainingArguments(**self.arguments(options.pop("steps", 3), **options)),
            data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
            train_dataset=Dataset.from_list(rows),
            callbacks=[*callbacks, Saves(self)],
        )

    @property
    def version(self) -> int:
        return Channel.open(open_store(self.channel)).pointed()

    def on_host(self, name: str = "host") -> dict[str, bytes]:
        updater = LocalUpdater(open_store(self.channel), self.root / name, self.base, UpdaterOptions())
        try:
            updater.update_to(Channel.open(open_store(self.channel)))
        finally:
            updater.close()
        return contents(self.root / name)


class Saves(TrainerCallback):
    """Comes after the publishing callback: what the model is, and what a host makes of the channel."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        directory = self.run.root / f"step-{state.global_step}"
        # rounded by torch itself
        copy.deepcopy(kwargs["model"]).to(torch.bfloat16).save_pretrained(directory)
        self.run.saved[state.global_step] = contents(directory)


def contents(directory: Path) -> dict[str, bytes]:
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = tensors.get_tensor(name).view(torch.uint8).numpy().tobytes()
    return found


class Follows(TrainerCallback):
    """A host that looks after each step's publication is out."""

    def __init__(self, run: Run, callback: PublishCallback) -> None:
        self.run, self.callback, self.seen = run, callback, {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(state.global_step)

    def _look(self, step: int) -> None:
        if self.callback.publisher is not None:
            self.callback.publisher.state_dict()  # waits
        if step and step not in self.seen:
            self.seen[step] = self.run.on_host()


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_is_in_the_channel(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    run = Run(tmp_path, kind)
    callback = run.callback()
    follows = Follows(run, callback)
    run.trainer([callback, follows], dtype).train()
    assert run.version == 3 and set(follows.seen) == {1, 2, 3}
    assert follows.seen == run.saved
    assert run.saved[1] != run.saved[2]


@pytest.mark.parametrize("when_busy", ["block", "newest"])
def test_every_second_step_and_the_last(tmp_path: Path, when_busy: Any) -> None:
    run = Run(tmp_path)
    callback = run.callback(every=2, when_busy=when_busy)
    run.trainer([callback], steps=5).train()
    assert run.version == 3 if when_busy == "block" else 1 <= run.version <= 3
    assert run.on_host() == run.saved[5]
    assert callback.publisher is None


def test_a_resumed_training_continues_the_chain(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saving = {"save_strategy": "steps", "save_steps": 2}
    run.trainer([run.callback()], steps=3, **saving).train()
    assert run.version == 3 and run.on_host() == run.saved[3]
    callback = run.callback()
    trainer = run.trainer([callback], steps=4, **saving)
    trainer.train(resume_from_checkpoint=str(run.root / "out" / "checkpoint-2"))
    assert callback.resumed is not None
    assert (callback.resumed.then, callback.resumed.now, callback.resumed.behind) == (2, 3, 1)
    assert run.version == 5 and run.on_host() == run.saved[4]


def test_a_checkpoint_of_another_channel_is_refused(tmp_path: Path) -> None:
    run, other = Run(tmp_path / "a"), Run(tmp_path / "b")
    run.trainer([run.callback()], steps=2, save_strategy="steps", save_steps=2).train()
    trainer = other.trainer([other.callback()], steps=4)
    with pytest.raises(WrongRun):
        trainer.train(resume_from_checkpoint=str(run.root / "out" / "checkpoint-2"))
    assert other.version == 0


def test_what_the_fleet_does_not_load_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    callback = run.callback(export=lambda model: {**model.state_dict(), "v_head.weight": torch.ones(3)})
    with pytest.raises(Refused, match=r"v_head\.weight"):
        run.trainer([callback]).train()
    callback.close()
    assert run.version == 0


def test_grpo_of_trl(tmp_path: Path) -> None:
    run = Run(tmp_path)
    callback = run.callback()
    follows = Follows(run, callback)
    config = GRPOConfig(
        **run.arguments(3), num_generations=2, max_completion_length=6, temperature=1.0, beta=0.0
    )
    trainer = GRPOTrainer(
        run.model(),
        reward_funcs=lambda completions, **_: [float(hash(text) % 7) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"w{n} w{n + 1} w{n + 2}"} for n in range(2, 20)]),
        processing_class=tokenizer(),
        callbacks=[callback, follows, Saves(run)],
    )
    trainer.train()
    assert run.version == 3
    assert follows.seen == run.saved and len(follows.seen) == 3


def sharded(run: Run, how: str, world: int = 2) -> list[str]:
    """What each rank's training said; empty where it went well."""
    command = [sys.executable, str(Path(__file__).with_name("sharded_child.py")), str(run.root)]
    done = subprocess.run(
        [*command, str(world), how], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((run.root / f"rank-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("kind", "how"), [("tied", "copy"), ("untied", "tensors")])
def test_every_rank_of_fsdp2_publishes_its_shards(tmp_path: Path, kind: str, how: str) -> None:
    run = Run(tmp_path, kind)
    assert sharded(run, how) == ["", ""]
    assert run.version == 3
    found = run.on_host()
    assert found != contents(run.base)
    with safe_open(run.root / "full.safetensors", "pt") as full:
        whole = {
            name: full.get_tensor(name).view(torch.uint8).numpy().tobytes()
            for name in full.keys()  # noqa: SIM118
        }
    assert found == {name: data for name, data in whole.items() if name in found}
    assert set(whole) - set(found) <= {"lm_head.weight"}, "tied"


def test_sharded_ranks_publish_the_same_steps(tmp_path: Path) -> None:
    run = Run(tmp_path)
    said = sharded(run, "newest")
    assert all("each rank would leave out other steps" in text for text in said)
    assert run.version == 0


class FullyShardedDataParallel(torch.nn.Linear):
    """Known by its name: torch's own wants a process group."""


def zero_3() -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_tensor = torch.zeros(1)  # as DeepSpeed marks them
    return model


def test_what_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    state = TrainerState(is_world_process_zero=True)
    for model, text in ((FullyShardedDataParallel(2, 2), "fsdp_version"), (zero_3(), "ZeRO-3")):
        with pytest.raises(Refused, match=text):
            run.callback().on_train_begin(None, state, None, model=model)
    assert run.version == 0
