"""bf16 weights before and after an optimizer step: simulated, or those of a small transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]

_STD = 0.02
"""of the weights"""
_UPDATE = 0.3
"""standard deviation of Adam's update in units of the learning rate"""
_PROBE = 1 << 18


@dataclass(frozen=True)
class Case:
    """Words of one tensor before and after a step."""

    name: str
    old: Words
    new: Words

    @property
    def density(self) -> float:
        return float(np.count_nonzero(self.old != self.new)) / len(self.old)


def rounded(values: NDArray[np.float32]) -> Words:
    """The nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def simulated(words: int, density: float, seed: int) -> Case:
    """fp32 masters from N(0, 0.02) move by N(0, 0.3 lr); lr such that about `density` of the words change;
    for 1 nearly all, for 0 none."""
    rng = np.random.default_rng(seed)
    masters = (rng.standard_normal(words) * _STD).astype(np.float32)
    update = (rng.standard_normal(words) * _UPDATE).astype(np.float32)
    rate = _rate(masters[:_PROBE], update[:_PROBE], density) if density else 0.0
    return Case(f"{density:.1%}", rounded(masters), rounded(masters + update * np.float32(rate)))


class Masters:
    """fp32 weights of one tensor that take steps as in `simulated`; `words` are their bf16."""

    def __init__(self, words: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._values = self._rng.standard_normal(words, dtype=np.float32) * np.float32(_STD)
        self._probe = self._rng.standard_normal(min(words, _PROBE), dtype=np.float32) * np.float32(_UPDATE)
        self.words = rounded(self._values)

    def step(self, density: float) -> None:
        """One that changes about this share of the words."""
        rate = _rate(self._values[: len(self._probe)], self._probe, density)
        update = self._rng.standard_normal(len(self._values), dtype=np.float32)
        update *= np.float32(_UPDATE * rate)
        self._values += update
        self.words[:] = rounded(self._values)


def _rate(masters: NDArray[np.float32], update: NDArray[np.float32], density: float) -> float:
    low, high = 1e-9, 1.0
    old = rounded(masters)
    for _ in range(40):
        middle = (low * high) ** 0.5
        changed = np.count_nonzero(old != rounded(masters + update * np.float32(middle))) / len(old)
        low, high = (middle, high) if changed < density else (low, middle)
    return low


def unrelated(words: int, seed: int) -> Case:
    """Random bits before, other random bits after: what no encoding can help with."""
    rng = np.random.default_rng(seed)
    old, new = (rng.integers(0, 1 << 16, words, np.uint16) for _ in range(2))
    return Case("unrelated", old, new)


def trained(rates: tuple[float, ...], warm_steps: int = 100) -> Iterator[Case]:
    """Steps of a transformer that learns a Markov chain, fp32 masters under AdamW: after `warm_steps` at a
    high rate, one case for each of `rates`, when its moments have settled. Needs torch."""
    import torch

    torch.manual_seed(0)
    vocabulary, width, length, batch = 512, 256, 32, 8
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    parts = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(vocabulary, width),
            "body": torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
            "head": torch.nn.Linear(width, vocabulary),
        }
    )
    likely = torch.randint(vocabulary, (vocabulary, 4))
    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-4)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length)

    def step() -> None:
        tokens = torch.randint(vocabulary, (batch, 1))
        for _ in range(length):
            following = likely[tokens[:, -1:], torch.randint(4, (batch, 1))]
            tokens = torch.cat([tokens, following], 1)
        hidden = parts["body"](parts["embed"](tokens[:, :-1]), mask=mask, is_causal=True)
        scores = parts["head"](hidden).flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def words() -> Words:
        return np.concatenate([rounded(p.detach().numpy().reshape(-1)) for p in parts.parameters()])

    for _ in range(warm_steps):
        step()
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(5):
            step()
        old = words()
        step()
        yield Case(f"trained, lr {rate:g}", old, words())
