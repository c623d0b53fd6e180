"""A trainer in fp32 or bf16 with a fleet in fp8 or int8: quantise, then publish.

    python -m examples.attach.quantised --dir /tmp/quantised [--how int8] [--steps 5]

A channel has one set of tensors, that of the fleet's checkpoint, so what is published is quantised by the
trainer: fp8 (e4m3) with one scale for each block of 128 x 128, as DeepSeek-V3 names and stores them, or int8
with one scale for each row. A fleet in two precisions needs two channels.

Scales are powers of two. They move only when a block's largest value passes one, so that a small step changes
few bytes; a scale that follows the largest value would change with every step, and all of its block with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weightcast.publisher import Publisher, PublisherOptions, init_channel

BLOCK = 128
FP8_MAX, INT8_MAX = 448.0, 127.0

Named = Mapping[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def power_of_two(largest: torch.Tensor, most: float) -> torch.Tensor:
    """The smallest power of two that brings `largest` within `most`; 1 for a block of zeros."""
    exponent = torch.ceil(torch.log2(largest / most))
    return torch.where(largest > 0, torch.exp2(exponent), torch.ones_like(largest))


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    """float32 (block rows, BLOCK, block columns, BLOCK), padded with zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn (rows, columns) and float32 scales (block rows, block columns); value = word * scale."""
    blocks = blocks_of(weight)
    scale = power_of_two(blocks.abs().amax(dim=(1, 3)), FP8_MAX)
    words = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    rows, columns = weight.shape
    flat = words.view(torch.uint8).reshape(blocks.shape[0] * BLOCK, -1)[:rows, :columns].contiguous()
    return flat.view(torch.float8_e4m3fn), scale


def from_fp8(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return words.float() * wide[: words.shape[0], : words.shape[1]]


def to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 (rows, columns) and float32 scales (rows, 1)."""
    scale = power_of_two(weight.float().abs().amax(dim=1, keepdim=True), INT8_MAX)
    return torch.round(weight.float() / scale).clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def from_int8(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return words.float() * scale


HOW: Mapping[str, tuple[Quantise, str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "fp8": (to_fp8, "_scale_inv", from_fp8),
    "int8": (to_int8, "_scale", from_int8),
}
"""quantise, what the scale's name ends in, and back"""


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """Linear layers; embeddings, norms and the head stay in bf16."""
    return tensor.dim() == 2 and "embed" not in name and not name.startswith("lm_head")


def quantised(named_tensors: Named, how: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What the fleet's checkpoint holds: pairs for `publish`, and for the base of the channel."""
    quantise, ending, _ = HOW[how]
    for name, tensor in named_tensors.items():
        if is_quantised(name, tensor):
            words, scale = quantise(tensor.detach())
            yield name, words
            yield name + ending, scale
        else:
            yield name, tensor.detach().to(torch.bfloat16)


class Policy(torch.nn.Module):
    """Stands for the trainer's model."""

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64, width)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.norm = torch.nn.LayerNorm(width, bias=False)
        self.lm_head = torch.nn.Linear(width, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embed_tokens(tokens)
        return self.lm_head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def run(directory: Path, how: str, steps: int) -> Policy:
    """Trains and publishes `steps` versions to `directory`/channel-HOW."""
    torch.manual_seed(0)
    policy = Policy()
    base, channel = directory / f"base-{how}", directory / f"channel-{how}"
    base.mkdir(parents=True, exist_ok=True)
    save_file(dict(quantised(policy.state_dict(), how)), base / "model.safetensors")
    (base / "config.json").write_text("{}")
    init_channel(channel, base)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    local = directory / f"publisher-{how}"
    with Publisher.open(
        channel, local=local, base=base, options=PublisherOptions(non_finite="refuse")
    ) as publisher:
        for step in range(1, steps + 1):
            tokens = torch.randint(64, (8, 32))
            torch.nn.functional.cross_entropy(policy(tokens).transpose(1, 2), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = publisher.submit(quantised(policy.state_dict(), how), step=step)
            report = handle.result()
            print(f"version {report.version}: {report.density_elements:.2%} of the elements changed")
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description="Publishes a quantised policy.")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--how", choices=sorted(HOW), default="fp8")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    run(options.dir, options.how, options.steps)


if __name__ == "__main__":
    main()
