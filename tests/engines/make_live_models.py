"""Small models of the kinds whose weights an engine does not keep as the checkpoint has them: a mixture of
experts, latent attention, 8-bit integers, 8-bit floats. `python make_live_models.py DIRECTORY`, where the
engines live."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from make_models import SIZES, tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
# with these two vLLM's kernel for the CPU knows one size of a head, 576
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 99,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}

# SGLang on a CPU knows no other rotation for latent attention
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "rope_theta": 10000.0,
}

BITS = {"num_bits": 8, "type": "float", "symmetric": True}
QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**BITS, "strategy": "token", "dynamic": True},
        }
    },
}
"""8 bits as vLLM computes them on a processor without AMX: a scale for each row and for each token"""
PROJECTIONS = ("_proj.weight",)


def save(
    directory: Path,
    config: PretrainedConfig,
    kind: type[PreTrainedModel],
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    torch.manual_seed(7)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 * 1.5)
    model.to(dtype).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def quantise(directory: Path) -> None:
    tensors, dtype = load_file(directory / "model.safetensors"), torch.float8_e4m3fn
    for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / torch.finfo(dtype).max
        tensors[name] = (tensors[name].float() / scale).to(dtype)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED}))


def main(directory: Path) -> None:
    moe = Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64)
    save(directory / "moe", moe, Qwen2MoeForCausalLM)
    save(
        directory / "mla",
        DeepseekV2Config(**{**SIZES, "num_key_value_heads": 2}, **LATENT),
        DeepseekV2ForCausalLM,
    )
    # a released SGLang computes these in float32 on a CPU, shared experts with Triton only
    experts = Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32)
    save(directory / "experts-fp32", experts, Qwen3MoeForCausalLM, torch.float32)
    save(
        directory / "latent-fp32",
        DeepseekV2Config(**{**SIZES, "num_key_value_heads": 2}, **LATENT, rope_scaling=YARN),
        DeepseekV2ForCausalLM,
        torch.float32,
    )
    quantise(save(directory / "fp8", LlamaConfig(**SIZES), LlamaForCausalLM))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
