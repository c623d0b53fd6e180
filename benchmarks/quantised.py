"""What versions of a quantised model cost: python -m benchmarks.quantised [--steps 60] [--json]

Trains a small Llama on the bytes of this repository's documents (fp32, AdamW, CPU), goes on at learning rates
of RL, and publishes every step in each format, with scales that follow the weights and with held ones. Needs
transformers (`make test-trainers` installs it).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weightcast.publisher import Publisher, Quantiser, cast_like, init_channel, quantise_checkpoint
from weightcast.publisher.weights.quantise import SCHEMES

HIDDEN, LAYERS, LENGTH = 512, 4, 128
WARM_RATE, RATES = 1e-3, (1e-6, 1e-5)
VERSIONS = 4
HOLDS = (0.0, 1 / 32, 1 / 8)
Weights = Mapping[str, torch.Tensor]


def train(room: Path, steps: int) -> dict[float, list[Weights]]:
    """Weights after each of `VERSIONS` steps at each rate, the first those of the base in `room`/base."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    files = sorted(Path(__file__).resolve().parents[1].glob("docs/**/*.md"))
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
    ).long()
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE)

    def step() -> float:
        starts = torch.randint(0, len(text) - LENGTH, (8,)).tolist()
        tokens = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    def taken() -> Weights:
        return {name: one.detach().clone() for name, one in model.state_dict().items()}

    for number in range(steps):
        loss = step()
        if number % 10 == 0:
            print(f"step {number}: loss {loss:.3f}", flush=True)
    base, state = taken(), {"model": taken(), "optimizer": optimizer.state_dict()}
    torch.save(state, room / "trained")
    model.to(torch.bfloat16).save_pretrained(room / "base")
    model.float()
    found = {}
    for rate in RATES:
        saved = torch.load(room / "trained")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        found[rate] = [base]
        for _ in range(VERSIONS):
            step()
            found[rate].append(taken())
    return found


def bf16(weights: Weights) -> Weights:
    return {name: one.bfloat16() for name, one in weights.items()}


def error(scheme: str, made: Weights, name: str, weight: torch.Tensor) -> float:
    """Root mean square of what quantisation adds, as a share of the weights'."""
    known = SCHEMES[scheme]
    module = name.removesuffix("weight")
    codes = made[module + known.names[0]]
    if scheme == "nvfp4":
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(weight.shape).int()
        numbers = values[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    else:
        numbers = codes.float()
    scale = known.load(made[module + known.names[1]])
    if known.names[2:]:
        scale = scale / made[module + known.names[2]]
    high, wide = known.block[0], known.block[1] or weight.shape[1]
    wide_scale = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    back = numbers * wide_scale[: weight.shape[0], : weight.shape[1]]
    return float(((back - weight).square().mean() / weight.square().mean()).sqrt())


def measure(room: Path, versions: list[Weights], scheme: str, hold: float, source: str) -> dict[str, Any]:
    """`scheme` bf16: nothing is quantised."""
    place = Path(tempfile.mkdtemp(dir=room))
    quantiser = None if scheme == "bf16" else Quantiser(scheme, hold=hold)
    base = room / "base"
    if quantiser is not None:
        base = place / "base"
        quantise_checkpoint(room / "base", base, quantiser)
    init_channel(place / "channel", base)
    reports, errors, seconds = [], [], []
    name = "model.layers.1.mlp.up_proj.weight"
    with Publisher.open(place / "channel", local=place / "local", base=base) as publisher:
        for weights in versions:
            given = bf16(weights) if source == "bf16" or quantiser is None else weights
            began = time.perf_counter()
            if quantiser is not None:
                given = dict(quantiser(given))
                errors.append(error(scheme, given, name, weights[name]))
            seconds.append(time.perf_counter() - began)
            reports.append(publisher.publish(cast_like(publisher, given)))
    shutil.rmtree(place)
    later = reports[1:]
    return {
        "format": scheme,
        "source": source,
        "hold": hold,
        "full": later[0].full_bytes,
        "changed": sum(one.density_elements for one in later) / len(later),
        "delta": round(sum(one.delta_bytes for one in later) / len(later)),
        "error": sum(errors) / len(errors) if errors else 0.0,
        "seconds": sorted(seconds)[len(seconds) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        for rate, versions in train(room, options.steps).items():
            cases = [("bf16", 0.0, "bf16")]
            cases += [(scheme, hold, "bf16") for scheme in SCHEMES for hold in HOLDS]
            cases += [
                (scheme, hold, "fp32") for scheme in ("fp8-block", "int8-channel") for hold in HOLDS[:2]
            ]
            for case in cases:
                rows.append({"rate": rate, **measure(room, versions, *case)})
                print(rows[-1], flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("| rate | format | quantised from | hold | model | delta | changed | error |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        what = f"{row['rate']:g} | `{row['format']}` | {row['source']} | {row['hold']:.3g} | {row['full']:,}"
        found = f"{row['delta']:,} ({row['delta'] / row['full']:.2%}) | {row['changed']:.2%}"
        print(f"| {what} | {found} | {row['error']:.3%} |")


if __name__ == "__main__":
    main()
