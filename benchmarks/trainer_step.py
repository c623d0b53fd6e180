"""What PublishCallback costs a step of released trainers on this machine: python -m benchmarks.trainer_step

Needs transformers and trl, which `make test-trainers` installs:
`.venv-trainers/bin/python -m benchmarks.trainer_step`. A Qwen2-like model of some 20 million parameters,
masters in fp32, base in bf16, is trained on random tokens; every step is published. `step`: the trainer's own
time, from the step's begin until the callback is called; `in the step`: the callback's. Medians without the
first step. On a CPU the step is long: read the share with that in mind, and the time beside a copy in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from weightcast.publisher import init_channel
from weightcast.publisher.transformers_hook import PublishCallback

_VOCABULARY = 2048


@dataclass(frozen=True)
class Row:
    """Seconds; `copy`: of the model's bf16 bytes, in memory."""

    framework: str
    step: float
    in_step: float
    copy: float
    nbytes: int

    @property
    def share(self) -> float:
        return self.in_step / (self.step + self.in_step)


@dataclass(eq=False)
class Begins(TrainerCallback):  # type: ignore[misc]
    """Comes before the publishing callback."""

    at: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.at)


class Timed(PublishCallback):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        super().on_step_end(args, state, control, **kwargs)
        self.seconds.append(time.perf_counter() - began)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(_VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w1")


def write_base(directory: Path, hidden: int, layers: int) -> None:
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def arguments(room: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(room / "out"),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def plain_trainer(model: Any, room: Path, steps: int, callbacks: list[Any]) -> Trainer:
    rng = np.random.default_rng(0)
    rows = [{"input_ids": row, "labels": row} for row in rng.integers(2, _VOCABULARY, (16, 128)).tolist()]
    return Trainer(
        model,
        TrainingArguments(**arguments(room, steps)),
        train_dataset=Dataset.from_list(rows),
        callbacks=callbacks,
    )


def grpo_trainer(model: Any, room: Path, steps: int, callbacks: list[Any]) -> Trainer:
    config = GRPOConfig(**arguments(room, steps), num_generations=2, max_completion_length=32, beta=0.0)
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(hash(text) % 7) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"w{n} w{n + 1}"} for n in range(2, 40)]),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


FRAMEWORKS: dict[str, Callable[[Any, Path, int, list[Any]], Trainer]] = {
    "transformers Trainer": plain_trainer,
    "TRL GRPOTrainer": grpo_trainer,
}


def measure(name: str, room: Path, steps: int) -> Row:
    base = room / "base"
    init_channel(room / "channel", base)
    begins, publish = Begins(), Timed(room / "channel", local=room / "publisher", base=base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    FRAMEWORKS[name](model, room, steps, [begins, publish]).train()
    parameters = sum(one.numel() for one in model.parameters())
    step, in_step = (statistics.median(found[1:]) for found in (begins.seconds, publish.seconds))
    return Row(name, step, in_step, copied(2 * parameters), 2 * parameters)


def copied(nbytes: int) -> float:
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def show(rows: list[Row], console: Console) -> None:
    table = Table("", "step, s", "in the step, s", "share", "copies in memory", "MB of bf16")
    for row in rows:
        seconds = (f"{row.step:.3f}", f"{row.in_step:.3f}")
        copies = row.in_step / row.copy
        table.add_row(row.framework, *seconds, f"{row.share:.1%}", f"{copies:.1f}", f"{row.nbytes / 1e6:.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="What PublishCallback costs a step of released trainers.")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in FRAMEWORKS:
        with tempfile.TemporaryDirectory() as room:
            write_base(Path(room) / "base", options.hidden, options.layers)
            rows.append(measure(name, Path(room), options.steps))
    if options.json:
        print(json.dumps([{**asdict(row), "share": row.share} for row in rows]))
    else:
        show(rows, Console())


if __name__ == "__main__":
    main()
