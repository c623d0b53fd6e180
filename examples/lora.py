"""The trainer with peft: two adapters over a frozen base, each for a task of its own.

Every step ends with a directory in the watched one, as peft's `save_pretrained` writes it, with both
adapters. The first of them has the adapters as they begin, which answer like the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from examples import checkpoint
from examples.model import CausalLM
from examples.trainer import ADAPTERS, RANK, Fleet, Plan, Rollouts, Trainer, note, random_questions

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATE = 1e-3


def adapted(model: CausalLM, names: list[str], seed: int) -> PeftModel:
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
    found = get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        found.add_adapter(name, config)
    return found


def save(model: PeftModel, directory: Path) -> None:
    """peft's layout, DIRECTORY/NAME/adapter_model.safetensors, by one rename."""
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    model.save_pretrained(unfinished, save_embedding_layers=False)
    unfinished.rename(directory)


class Adapter:
    """One of the model's, with its task and its engines."""

    def __init__(self, model: PeftModel, name: str, plan: Plan, fleet: Fleet) -> None:
        self.name, self._model, self._plan = name, model, plan
        self._fleet = replace(fleet, adapter=name)
        self._random = torch.Generator().manual_seed(plan.seed + 1)
        model.set_adapter(name)
        self._trainer = Trainer(model, RATE)

    def rollouts(self, step: int, oldest: int) -> Rollouts:
        questions = random_questions(self._plan.questions, self._random)
        found = self._fleet.rollouts(questions, self._plan.group, step, oldest)
        return replace(found, descending=ADAPTERS[self.name])

    def step(self, rollouts: Rollouts) -> None:
        self._model.set_adapter(self.name)
        self._trainer.step(rollouts)


def run(plan: Plan, fleet: Fleet, outbox: Path, directory: Path, freeze: bool) -> None:
    """Step N trains version N of each adapter, and exports version N + 1; with `freeze` none."""
    base = CausalLM(checkpoint.load_config(directory / "base"))
    base.load_state_dict(checkpoint.load(directory / "base"))
    model = adapted(base, list(ADAPTERS), plan.seed)
    adapters = {name: Adapter(model, name, plan, fleet) for name in ADAPTERS}
    save(model, outbox / "step_000000")

    def newest(step: int) -> int:
        return 1 if freeze else step

    def ask(step: int) -> Mapping[str, Future[Rollouts]]:
        oldest = max(1, newest(step) - plan.max_lag)
        return {name: ahead.submit(each.rollouts, step, oldest) for name, each in adapters.items()}

    with ThreadPoolExecutor(len(adapters)) as ahead:
        coming = ask(1)
        for step in range(1, plan.steps + 1):
            rollouts = {name: each.result() for name, each in coming.items()}
            if step < plan.steps:
                coming = ask(step + 1)
            for name, adapter in adapters.items():
                adapter.step(rollouts[name])
            if not freeze:
                save(model, outbox / f"step_{step:06}")
            for name in adapters:
                note(directory / f"metrics-{name}.jsonl", step, rollouts[name], newest(step))
    save(model, directory / "last")
