"""What versions of a LoRA adapter cost: python -m benchmarks.adapters [--ranks 8 32 128] [--json]

Trains an adapter of each rank with peft on a small random model (CPU), publishes after every step in which it
was saved, and compares the bytes of the deltas with the adapter's file and with its changes as xor, then
zstd level 1. Needs peft and transformers (`pip install -c constraints-trainers.txt transformers peft`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors import safe_open
from safetensors.torch import save_file

from weightcast.publisher import Publisher, init_channel
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import open_component
from weightcast.shared.channel.directory_store import open_store

HIDDEN, LAYERS, VOCABULARY = 512, 4, 1024
VERSIONS, STEPS_PER_VERSION = 5, 4
LEARNING_RATES = {"rl": 1e-5, "sft": 2e-4}


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config)


def saves(rank: int, rate: float, dtype: str, room: Path) -> Iterator[Path]:
    """Directories of the adapter after every few optimizer steps, in dtype `dtype`."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trained = get_peft_model(model(), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    if dtype == "bfloat16":
        trained = trained.to(torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=rate)
    for version in range(VERSIONS):
        for _ in range(STEPS_PER_VERSION):
            tokens = torch.randint(0, VOCABULARY, (2, 64))
            trained(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        directory = room / f"save-{rank}-{version}"
        trained.save_pretrained(directory)
        yield directory


def tensors_of(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    import torch

    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        return {n: file.get_tensor(n).contiguous().view(torch.uint8).numpy() for n in file.keys()}  # noqa: SIM118


def xor_zstd(old: dict[str, np.ndarray[Any, Any]], new: dict[str, np.ndarray[Any, Any]]) -> int:
    packer = zstandard.ZstdCompressor(level=1)
    return sum(len(packer.compress((old[name] ^ new[name]).tobytes())) for name in new)


def measure(rank: int, rate: float, dtype: str, encoding: str, base: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        init_channel(room / "channel", base)
        deltas, xors, seconds, shares = [], [], [], []
        before: dict[str, np.ndarray[Any, Any]] | None = None
        name = "adapter/bench"
        with Publisher.open(
            room / "channel",
            local=room / "local",
            base=base,
            encoding=encoding,  # type: ignore[arg-type]
        ) as publisher:
            for given in saves(rank, rate, dtype, room):
                began = time.perf_counter()
                report = publisher.publish(given, component=name)
                seconds.append(time.perf_counter() - began)
                now = tensors_of(given)
                before = {n: np.zeros_like(one) for n, one in now.items()} if before is None else before
                xors.append(xor_zstd(before, now))
                deltas.append(report.delta_bytes)
                shares.append(report.density_elements)
                before = now
        file = (given / "adapter_model.safetensors").stat().st_size
        nested = open_component(Channel.open(open_store(room / "channel")), name)
        assert nested.pointed() == VERSIONS
    return {
        "rank": rank,
        "learning_rate": rate,
        "dtype": dtype,
        "encoding": encoding,
        "file": file,
        "first": deltas[0],
        "delta": round(sum(deltas[1:]) / len(deltas[1:])),
        "xor_zstd": round(sum(xors[1:]) / len(xors[1:])),
        "changed": sum(shares[1:]) / len(shares[1:]),
        "seconds": round(sorted(seconds)[len(seconds) // 2], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--encodings", nargs="+", default=["fast", "small"])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        base.mkdir()
        save_file({"frozen": torch.zeros(8)}, base / "model.safetensors")
        for dtype in given.dtypes:
            for rate in LEARNING_RATES.values():
                for rank in given.ranks:
                    for encoding in given.encodings:
                        rows.append(measure(rank, rate, dtype, encoding, base))
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print("| dtype | rate | rank | encoding | file | version 1 | later versions | xor + zstd-1 | changed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        what = f"{row['dtype']} | {row['learning_rate']:g} | {row['rank']} | `{row['encoding']}`"
        sizes = [f"{row[name]:,} ({row[name] / row['file']:.0%})" for name in ("first", "delta", "xor_zstd")]
        print(f"| {what} | {row['file']:,} | {' | '.join(sizes)} | {row['changed']:.1%} |")


if __name__ == "__main__":
    main()
