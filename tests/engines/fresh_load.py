"""What a fresh load of a checkpoint says of token sequences: the judge of the engines' answers.

Runs in the engines' environment as a process that reads one JSON object per line and answers with one:
`{"directory": path, "sequences": [[prompt, answer], ...]}`, both lists of token ids, gives per sequence
`{"logprobs": [...], "best": [...], "greedy": [...]}`: for every token of the answer its log probability after
all tokens before it, that of the likeliest token, and which one that is. float32 throughout. With `"adapter":
path`, of a directory that peft saved, its products are added to the weights.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

KEPT = 4
"""models; a version's directory never changes"""


def load(directory: str, adapter: str | None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    if adapter is not None:
        merge(model, Path(adapter))
    return model


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, up in tensors.items():
        if ".lora_B." in name:
            down = tensors[name.replace(".lora_B.", ".lora_A.")]
            target = name.removeprefix("base_model.model.").replace(".lora_B", "")
            model.get_parameter(target).add_(config["lora_alpha"] / config["r"] * up @ down)


@torch.inference_mode()
def judge(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.max(-1)
    said = logprobs.gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)
    return {"logprobs": said.tolist(), "best": best.values.tolist(), "greedy": best.indices.tolist()}


def main() -> None:
    torch.set_num_threads(1)
    models: OrderedDict[tuple[str, str | None], PreTrainedModel] = OrderedDict()
    for line in sys.stdin:
        asked = json.loads(line)
        wanted = asked["directory"], asked.get("adapter")
        if wanted not in models:
            models[wanted] = load(*wanted)
            while len(models) > KEPT:
                models.popitem(last=False)
        answers = [judge(models[wanted], prompt, answer) for prompt, answer in asked["sequences"]]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
