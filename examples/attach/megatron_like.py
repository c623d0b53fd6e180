"""A Megatron-like trainer: fused, tensor- and pipeline-parallel parameters exported per rank under HF names.

    python -m examples.attach.megatron_like

`exported` is the part to take along: an iterator of (HF name, tensor or `Shard`) of one rank, for
`Publisher.publish`. It slices; only fused query, key and value are copied. Parameters follow Megatron's
layout:

- `linear_qkv`: cut by rows; per key head its query heads, then the key, then the value
- `linear_fc1`: cut by rows; this rank's rows of the gate, then those of the up projection
- `linear_proj`, `linear_fc2`: cut by columns; layer norms are on every tensor-parallel rank
- embedding and head: cut by rows of a vocabulary that is padded; tied, on the first and the last stage
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from weightcast.publisher import Publisher, Shard, init_channel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sizes:
    hidden: int = 24
    feed_forward: int = 40
    heads: int = 4
    key_heads: int = 2
    layers: int = 4
    vocabulary: int = 51
    padded_vocabulary: int = 64

    @property
    def head(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Place:
    """Of a rank: in the tensor-parallel group, and in the pipeline."""

    tensor: int
    tensors: int
    stage: int
    stages: int

    def layers(self, sizes: Sizes) -> range:
        count = sizes.layers // self.stages
        return range(self.stage * count, (self.stage + 1) * count)


def exported(parameters: Mapping[str, Any], sizes: Sizes, place: Place) -> Iterator[tuple[str, Any]]:
    """`parameters`: of this rank, layers numbered from 0 in each stage. Works for torch tensors and
    arrays."""
    for local, layer in enumerate(place.layers(sizes)):
        mine, theirs = f"decoder.layers.{local}", f"model.layers.{layer}"
        yield from _attention(parameters[f"{mine}.self_attention.linear_qkv.weight"], sizes, place, theirs)
        gate_and_up = parameters[f"{mine}.mlp.linear_fc1.weight"]
        rows = gate_and_up.shape[0] // 2
        yield f"{theirs}.mlp.gate_proj.weight", _by_rows(gate_and_up[:rows], place)
        yield f"{theirs}.mlp.up_proj.weight", _by_rows(gate_and_up[rows:], place)
        down = parameters[f"{mine}.mlp.linear_fc2.weight"]
        out = parameters[f"{mine}.self_attention.linear_proj.weight"]
        yield f"{theirs}.mlp.down_proj.weight", _by_columns(down, place)
        yield f"{theirs}.self_attn.o_proj.weight", _by_columns(out, place)
        yield f"{theirs}.input_layernorm.weight", parameters[f"{mine}.input_layernorm.weight"]
        yield f"{theirs}.post_attention_layernorm.weight", parameters[f"{mine}.pre_mlp_layernorm.weight"]
    if place.stage == 0:
        embedding = parameters["embedding.word_embeddings.weight"]
        yield "model.embed_tokens.weight", _vocabulary(embedding, sizes, place)
    if place.stage == place.stages - 1:
        yield "lm_head.weight", _vocabulary(parameters["output_layer.weight"], sizes, place)
        yield "model.norm.weight", parameters["decoder.final_layernorm.weight"]


def _by_rows(piece: Any, place: Place) -> Shard:
    rows, *rest = piece.shape
    return Shard(piece, (place.tensor * rows, *(0 for _ in rest)), (place.tensors * rows, *rest))


def _by_columns(piece: Any, place: Place) -> Shard:
    rows, columns = piece.shape
    return Shard(piece, (0, place.tensor * columns), (rows, place.tensors * columns))


def _attention(fused: Any, sizes: Sizes, place: Place, layer: str) -> Iterator[tuple[str, Shard]]:
    """Rows of one key head after another; a rank has whole groups."""
    each = sizes.heads // sizes.key_heads
    groups = fused.reshape(-1, each + 2, sizes.head, fused.shape[1])
    for name, piece in (("q", groups[:, :each]), ("k", groups[:, each]), ("v", groups[:, each + 1])):
        rows = piece.reshape(-1, fused.shape[1])
        yield f"{layer}.self_attn.{name}_proj.weight", _by_rows(rows, place)


def _vocabulary(piece: Any, sizes: Sizes, place: Place) -> Shard:
    """Without the rows that only fill up; the last rank may be left with few or none."""
    rows = piece.shape[0]
    first = min(place.tensor * rows, sizes.vocabulary)
    kept = piece[: min(rows, sizes.vocabulary - first)]
    return Shard(kept, (first, 0), (sizes.vocabulary, piece.shape[1]))


# From here on only what stands in for a trainer.


def random_model(sizes: Sizes, random: np.random.Generator) -> dict[str, Array]:
    """By HF names; the head is tied to the embedding and not among them."""
    wide, deep, keys = sizes.hidden, sizes.feed_forward, sizes.key_heads * sizes.head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, wide)}
    for layer in range(sizes.layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{one}_proj.weight": (wide, wide) for one in "qo"}
        shapes |= {f"{name}.self_attn.{one}_proj.weight": (keys, wide) for one in "kv"}
        shapes |= {f"{name}.mlp.{one}_proj.weight": (deep, wide) for one in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (wide, deep)
        shapes |= {f"{name}.{one}_layernorm.weight": (wide,) for one in ("input", "post_attention")}
    shapes["model.norm.weight"] = (wide,)
    return {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def held(model: Mapping[str, Array], sizes: Sizes, place: Place) -> dict[str, Array]:
    """What Megatron's rank at this place holds of a model given by HF names."""
    found: dict[str, Array] = {}
    for local, layer in enumerate(place.layers(sizes)):
        mine, theirs = f"decoder.layers.{local}", f"model.layers.{layer}"
        heads = [
            model[f"{theirs}.self_attn.{one}_proj.weight"].reshape(
                sizes.key_heads, -1, sizes.head, sizes.hidden
            )
            for one in "qkv"
        ]
        fused = np.concatenate(heads, axis=1)
        found[f"{mine}.self_attention.linear_qkv.weight"] = _cut(fused, place).reshape(-1, sizes.hidden)
        halves = [_cut(model[f"{theirs}.mlp.{one}_proj.weight"], place) for one in ("gate", "up")]
        found[f"{mine}.mlp.linear_fc1.weight"] = np.concatenate(halves)
        found[f"{mine}.mlp.linear_fc2.weight"] = _cut(model[f"{theirs}.mlp.down_proj.weight"], place, 1)
        found[f"{mine}.self_attention.linear_proj.weight"] = _cut(
            model[f"{theirs}.self_attn.o_proj.weight"], place, 1
        )
        found[f"{mine}.input_layernorm.weight"] = model[f"{theirs}.input_layernorm.weight"]
        found[f"{mine}.pre_mlp_layernorm.weight"] = model[f"{theirs}.post_attention_layernorm.weight"]
    embedding = np.zeros((sizes.padded_vocabulary, sizes.hidden), np.float16)
    embedding[: sizes.vocabulary] = model["model.embed_tokens.weight"]
    found["embedding.word_embeddings.weight"] = found["output_layer.weight"] = _cut(embedding, place)
    found["decoder.final_layernorm.weight"] = model["model.norm.weight"]
    return found


def _cut(whole: Array, place: Place, axis: int = 0) -> Array:
    return np.split(whole, place.tensors, axis)[place.tensor]


def places(tensors: int, stages: int) -> list[Place]:
    """By rank."""
    return [Place(tensor, tensors, stage, stages) for stage in range(stages) for tensor in range(tensors)]


def run(directory: Path, steps: int, tensors: int = 2, stages: int = 2) -> dict[str, Array]:
    """Ranks are threads here, processes elsewhere. Returns the last model by HF names."""
    sizes, random = Sizes(), np.random.default_rng(0)
    model = random_model(sizes, random)
    (directory / "base").mkdir()
    save_file(model, directory / "base" / "model.safetensors")
    (directory / "base" / "config.json").write_text('{"tie_word_embeddings": true}')
    init_channel(
        directory / "channel", directory / "base", aliases={"lm_head.weight": "model.embed_tokens.weight"}
    )
    ranks = places(tensors, stages)

    def train(rank: int) -> int:
        with Publisher.open(
            directory / "channel",
            local=directory / "publisher",
            base=directory / "base",
            rank=rank,
            world_size=len(ranks),
        ) as publisher:
            for step in range(1, steps + 1):
                parameters = held(model_at(model, step), sizes, ranks[rank])
                report = publisher.publish(exported(parameters, sizes, ranks[rank]), step=step)
                if rank == 0:
                    print(f"step {step}: version {report.version}, {report.changed_elements} elements")
        return report.version

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(train, range(len(ranks))))
    return model_at(model, steps)


def model_at(model: Mapping[str, Array], step: int) -> dict[str, Array]:
    """Every seventh element moved a little more with every step."""
    moved = {name: one.copy() for name, one in model.items()}
    for one in moved.values():
        one.reshape(-1)[::7] += np.float16(step)
    return moved


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run(Path(directory), steps=3)


if __name__ == "__main__":
    main()
