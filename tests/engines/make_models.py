"""Small real models, made locally with the engines' own libraries: `python make_models.py DIRECTORY`.

Runs in the engines' environment. Writes one Hugging Face checkpoint per variant, `llama-tied-single-bf16` and
so on, each with a tokenizer; the same names give the same bytes.
"""

from __future__ import annotations

import sys
import zlib
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = {"single": "1GB", "sharded": "150KB"}
WORDS = 256
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")


def model(family: str, tied: bool, seed: int) -> PreTrainedModel:
    """Weights far from zero: what the model says depends on every layer and position."""
    torch.manual_seed(seed)
    make_config, make_model = FAMILIES[family]
    made = make_model(make_config(**SIZES, tie_word_embeddings=tied))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 * (0.5 if "embed" in name else 1.5))
            elif "bias" in name:
                parameter.normal_(0.0, 0.3)
    return made


def main(directory: Path) -> None:
    for family, tie, files, dtype in product(FAMILIES, ("tied", "untied"), SHARD_BYTES, DTYPES):
        name = f"{family}-{tie}-{files}-{dtype}"
        made = model(family, tie == "tied", zlib.crc32(name.encode()))
        made.to(DTYPES[dtype]).save_pretrained(directory / name, max_shard_size=SHARD_BYTES[files])
        tokenizer().save_pretrained(directory / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
