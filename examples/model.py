"""A small causal transformer with the tensor names of a Llama checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from examples.checkpoint import Config

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""keys and values of one layer, each (batch, key heads, positions, head size)"""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        key_size = self.head_size * config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, rotary: torch.Tensor, past: KeyValue | None
    ) -> tuple[torch.Tensor, KeyValue]:
        query = _rotate(self._heads(self.q_proj(x)), rotary)
        key = _rotate(self._heads(self.k_proj(x)), rotary)
        value = self._heads(self.v_proj(x))
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), (key, value)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, rotary: torch.Tensor, past: KeyValue | None
    ) -> tuple[torch.Tensor, KeyValue]:
        attended, present = self.self_attn(self.input_layernorm(x), rotary, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    """(batch, positions, vocabulary)"""
    cache: list[KeyValue]


class CausalLM(nn.Module):
    """`model(tokens)`, tokens int64 (batch, positions); with `cache` they are the one position after it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("rotary", _rotary_table(config), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.hidden_size**-0.5)

    def forward(self, tokens: torch.Tensor, cache: list[KeyValue] | None = None) -> Output:
        start = 0 if cache is None else cache[0][0].shape[2]
        rotary = self.rotary[:, start : start + tokens.shape[1]]
        x = self.model.embed_tokens(tokens)
        present = []
        for number, layer in enumerate(self.model.layers):
            x, keys_and_values = layer(x, rotary, None if cache is None else cache[number])
            present.append(keys_and_values)
        return Output(self.lm_head(self.model.norm(x)), present)


def _rotary_table(config: Config) -> torch.Tensor:
    half = config.hidden_size // config.num_attention_heads // 2
    speeds = config.rope_theta ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(config.max_position_embeddings), speeds).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-right, left], dim=-1) * rotary[1]
