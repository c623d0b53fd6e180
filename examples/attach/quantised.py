"""A trainer in fp32 with a fleet that serves quantised weights: quantise, then publish.

    python -m examples.attach.quantised --dir /tmp/quantised [--scheme int8-channel] [--steps 5]

A channel has one set of tensors, that of the fleet's checkpoint, so what is published is quantised by the
trainer. A fleet in two precisions needs two channels. docs/quantised.md has the formats.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weightcast.publisher import (
    Publisher,
    PublisherOptions,
    Quantiser,
    cast_like,
    init_channel,
    quantise_checkpoint,
)
from weightcast.publisher.weights.quantise import SCHEMES


class Policy(torch.nn.Module):
    """Stands for the trainer's model."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64, width)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.norm = torch.nn.LayerNorm(width, bias=False)
        self.lm_head = torch.nn.Linear(width, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embed_tokens(tokens)
        return self.lm_head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def run(directory: Path, scheme: str, steps: int) -> Policy:
    """Trains and publishes `steps` versions to `directory`/channel-SCHEME."""
    torch.manual_seed(0)
    policy = Policy()
    start, base, channel = (directory / f"{name}-{scheme}" for name in ("policy", "base", "channel"))
    start.mkdir(parents=True)
    weights = {name: tensor.bfloat16() for name, tensor in policy.state_dict().items()}
    save_file(weights, start / "model.safetensors")
    (start / "config.json").write_text("{}")

    quantiser = Quantiser(scheme)
    quantise_checkpoint(start, base, quantiser)
    init_channel(channel, base)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    with Publisher.open(
        channel,
        local=directory / f"publisher-{scheme}",
        base=base,
        options=PublisherOptions(non_finite="refuse"),
    ) as publisher:
        for step in range(1, steps + 1):
            tokens = torch.randint(64, (8, 32))
            torch.nn.functional.cross_entropy(policy(tokens).transpose(1, 2), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            # embeddings and norms, which are not quantised, are rounded to the base's bf16
            handle = publisher.submit(cast_like(publisher, quantiser(policy.state_dict())), step=step)
            report = handle.result()
            print(f"version {report.version}: {report.density_elements:.2%} of the elements changed")
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description="Publishes a quantised policy.")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--scheme", choices=sorted(SCHEMES), default="fp8-block")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    run(options.dir, options.scheme, options.steps)


if __name__ == "__main__":
    main()
