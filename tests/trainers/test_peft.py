"""Adapters that the released peft trains and saves: hosts have what computes the same as in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="make test-trainers")

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from weightcast.publisher import Publisher, init_channel
from weightcast.publisher.transformers_hook import PublishCallback
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import all_faults, open_component
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]

MATH, VERSIONS = "adapter/math", 5
TARGETS = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 16}},
    "dora": {"use_dora": True},
    "saved modules": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "lora_only"},
}


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def arrived(channel: Path, host: Path, version: int) -> Path:
    nested = open_component(Channel.open(open_store(channel)), MATH)
    updater = LocalUpdater(nested.store, host, None)
    try:
        updater.update_to(nested, version)
    finally:
        updater.close()
    return host


@pytest.mark.parametrize("given", ["directory", "tensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_computes_on_a_host_what_it_does_in_training(
    tmp_path: Path, kind: str, given: str
) -> None:
    model().save_pretrained(tmp_path / "base")
    init_channel(tmp_path / "channel", tmp_path / "base")
    trained = get_peft_model(model(), LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **KINDS[kind]))
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=0.01)
    tokens = torch.randint(0, 64, (2, 12))
    with Publisher.open(tmp_path / "channel", local=tmp_path / "local", base=tmp_path / "base") as publisher:
        for step in range(1, VERSIONS + 1):
            trained(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = tmp_path / f"checkpoint-{step}"
            trained.save_pretrained(saved)
            if given == "directory":
                report = publisher.publish(saved, step=step, component=MATH)
            else:
                report = publisher.publish(
                    get_peft_model_state_dict(trained),
                    step=step,
                    component=MATH,
                    config=trained.peft_config["default"].to_dict(),
                )
            assert report.version == step
            host = arrived(tmp_path / "channel", tmp_path / "host", step)
            with torch.no_grad():
                ours = trained.eval()(input_ids=tokens).logits
                fresh = PeftModel.from_pretrained(model(), host).eval()(input_ids=tokens).logits
            trained.train()
            assert torch.equal(ours, fresh)
    assert all_faults(open_store(tmp_path / "channel")) == []


def test_the_callback_publishes_the_adapter_of_every_step(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "base")
    init_channel(tmp_path / "channel", tmp_path / "base")
    trained = get_peft_model(model(), LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))
    tokens = torch.randint(0, 64, (12,))
    places = {"local": tmp_path / "local", "base": tmp_path / "base"}
    arguments = TrainingArguments(
        tmp_path / "out", max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[]
    )

    def trainer(of: Any, callback: PublishCallback) -> Trainer:
        rows = [{"input_ids": tokens, "labels": tokens}] * 4
        return Trainer(of, arguments, train_dataset=rows, callbacks=[callback])

    trainer(trained, PublishCallback(tmp_path / "channel", component=MATH, **places)).train()
    host = arrived(tmp_path / "channel", tmp_path / "host", 3)
    with torch.no_grad():
        ours = trained.eval()(input_ids=tokens[None]).logits
        fresh = PeftModel.from_pretrained(model(), host).eval()(input_ids=tokens[None]).logits
    assert torch.equal(ours, fresh)
    assert Channel.open(open_store(tmp_path / "channel")).pointed() == 0
    with pytest.raises(Refused, match="Qwen2ForCausalLM has no adapter"):
        trainer(model(), PublishCallback(tmp_path / "channel", component=MATH, **places)).train()
