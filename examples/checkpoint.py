"""Checkpoint directories as Hugging Face lays them out: config.json, tokenizer.json, safetensors, index."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""as peft names them"""
VOCABULARY = "0123456789>."
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {
        "type": "WordLevel",
        "vocab": {character: number for number, character in enumerate(VOCABULARY)},
        "unk_token": ".",
    },
}
"""A token per character, as Hugging Face's libraries read it."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the names are those of a Llama config.json."""

    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    vocab_size: int = len(VOCABULARY)
    max_position_embeddings: int = 24
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def save(directory: Path, config: Config, tensors: Mapping[str, torch.Tensor], shards: int = 2) -> None:
    """Writes a complete bf16 checkpoint; `directory` appears by one rename, so nobody sees half of it."""
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    _write_json(
        unfinished / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            **asdict(config),
        },
    )
    _write_json(unfinished / "tokenizer.json", TOKENIZER)
    _write_json(unfinished / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_shards(unfinished, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, shards)
    unfinished.rename(directory)


def load(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors as copies in memory: nothing keeps pointing into the files."""
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        found.update({name: tensor.clone() for name, tensor in load_file(file).items()})
    return found


def load_config(directory: Path) -> Config:
    members = json.loads((directory / "config.json").read_text())
    return Config(**{name: members[name] for name in Config.__dataclass_fields__})


def weight_files(directory: Path) -> list[Path]:
    if (directory / ADAPTER).exists():
        return [directory / ADAPTER]
    if not (directory / INDEX).exists():
        return [directory / SINGLE]
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    return [directory / name for name in sorted(set(weight_map.values()))]


def is_complete(directory: Path) -> bool:
    """All files that config and index name are there, each as long as its header says."""
    try:
        return (directory / "config.json").exists() and all(map(_is_whole, weight_files(directory)))
    except (OSError, ValueError, KeyError):
        return False


def file_checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of every tensor's bytes as they lie in the files."""
    return {
        name: hashlib.sha256(payload).hexdigest()
        for file in weight_files(directory)
        for name, payload in _payloads(file)
    }


def same_files(wanted: Path, found: Path) -> dict[str, str]:
    """Of an adapter: checksums of `found`, none where one of its files has other bytes than in `wanted`."""
    names = (ADAPTER, ADAPTER_CONFIG)
    same = all((wanted / name).read_bytes() == (found / name).read_bytes() for name in names)
    return file_checksums(found) if same else {}


def memory_checksums(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = torch.bfloat16
) -> dict[str, str]:
    """SHA-256 of every tensor's bytes as `dtype`, or as they are, comparable with `file_checksums`."""
    return {
        name: hashlib.sha256(_bytes(tensor.to(dtype or tensor.dtype))).hexdigest()
        for name, tensor in tensors.items()
    }


def changed_share(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> float:
    """Share of elements whose bits differ between two bf16 states with the same names."""
    changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in old)
    return float(changed / sum(tensor.numel() for tensor in old.values()))


def _write_shards(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, directory / SINGLE)
        return
    weight_map = {
        name: f"model-{at % shards + 1:05}-of-{shards:05}.safetensors" for at, name in enumerate(names)
    }
    for file in sorted(set(weight_map.values())):
        save_file(
            {name: tensors[name].contiguous() for name in names if weight_map[name] == file}, directory / file
        )
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, members: Mapping[str, object]) -> None:
    path.write_text(json.dumps(members, indent=1) + "\n")


def _header(file: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= min(file.stat().st_size, 100 << 20):
            raise ValueError(f"{file}: not a safetensors file")
        members = json.loads(stream.read(length))
    members.pop("__metadata__", None)
    return 8 + length, members


def _is_whole(file: Path) -> bool:
    start, members = _header(file)
    return file.stat().st_size == start + max(entry["data_offsets"][1] for entry in members.values())


def _payloads(file: Path) -> Iterator[tuple[str, bytes]]:
    start, members = _header(file)
    content = file.read_bytes()
    for name, entry in members.items():
        begin, end = entry["data_offsets"]
        yield name, content[start + begin : start + end]


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())
