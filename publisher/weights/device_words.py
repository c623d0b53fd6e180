"""Words on a torch device: compared, gathered and hashed there, with the results of the host's kernels.

docs/FORMAT.md, Lanes. torch's integers are signed: products and sums wrap as the format's do, and a logical
shift is an arithmetic one under a mask. torch is imported when a tensor is given, not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.shared.base.elements import Chunk, WordKind, Words
from weightcast.shared.digest.checksums import Lanes
from weightcast.shared.kernels.constants import MIX_A, MIX_B


def words_of(flat: Any, kind: WordKind) -> Any:
    """A one-dimensional contiguous tensor, viewed as integers as wide as its words."""
    import torch

    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.width])


def on_host(words: Words) -> Any:
    """The same memory as a torch tensor of `words_of`'s dtype."""
    import torch

    # torch warns about arrays that may not be written, although nothing writes here
    writable = words if words.flags.writeable else words.copy()
    return torch.from_numpy(writable if words.itemsize == 1 else writable.view(f"<i{words.itemsize}"))


def has_whole_eights(words: Any) -> bool:
    """True when 8-byte words can be seen in place."""
    return bool(words.storage_offset() * words.itemsize % 8 == 0 and words.data_ptr() % 8 == 0)


def differing(old: Any, new: Any) -> Any:
    """int64[k], ascending: where two tensors of words differ."""
    return (old != new).nonzero().reshape(-1)


def span_lanes(chunk: Chunk, words: Any) -> Any:
    """Raw lanes of each span, int64[spans, 2]. `words`: the chunk's with zero padding, as `words_of` views
    them; `has_whole_eights`."""
    import torch

    numbers = _numbers(chunk, words.device)
    eights = words.view(torch.int64)
    a = eights ^ (numbers * _signed(MIX_A[0]))
    lane_a = _sums(chunk, _mixed(a, (32, 29, 32), MIX_A))
    b = numbers.mul_(_signed(MIX_B[0])).add_(eights)
    lane_b = _sums(chunk, _mixed(b, (31, 33, 30), MIX_B))
    return torch.stack([lane_a, lane_b], dim=1)


def _signed(factor: int) -> int:
    return factor - (1 << 64) if factor >> 63 else factor


def _mixed(x: Any, shifts: tuple[int, int, int], factors: tuple[int, int, int]) -> Any:
    """In place."""
    x.bitwise_xor_(_shifted(x, shifts[0])).mul_(_signed(factors[1]))
    x.bitwise_xor_(_shifted(x, shifts[1])).mul_(_signed(factors[2]))
    return x.bitwise_xor_(_shifted(x, shifts[2]))


def _shifted(x: Any, bits: int) -> Any:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _numbers(chunk: Chunk, device: Any) -> Any:
    """The number, from 1, of each 8-byte word of the chunk in its tensor: int64."""
    import torch

    per_word = 8 // chunk.kind.width
    count = chunk.words // per_word
    firsts = [(span.start - span.offset) // per_word + 1 for span in chunk.spans]
    if len(firsts) == 1:
        return torch.arange(firsts[0], firsts[0] + count, device=device)
    edges = [span.offset // per_word for span in chunk.spans] + [count]
    lengths = torch.tensor(np.diff(edges), device=device)
    shifts = torch.tensor(firsts, device=device).repeat_interleave(lengths, output_size=count)
    return shifts.add_(torch.arange(count, device=device))


def _sums(chunk: Chunk, mixed: Any) -> Any:
    """Per span the sum over its 8-byte words, its tail included, padding not: int64[spans]."""
    import torch

    per_word = 8 // chunk.kind.width
    if len(chunk.spans) == 1:
        return mixed[: -(-chunk.spans[0].words // per_word)].sum().reshape(1)
    places = [(span.offset // per_word, -(-span.words // per_word)) for span in chunk.spans]
    starts = torch.tensor([start for start, _ in places], device=mixed.device)
    stops = torch.tensor([start + count for start, count in places], device=mixed.device)
    before = torch.cat([mixed.new_zeros(1), mixed.cumsum(0)])
    return before[stops] - before[starts]


@dataclass(frozen=True)
class Found:
    """What crosses to the host for a chunk. `index`: uint32[k]; `new`: word[k]; `lanes`: per span, over all
    of its new words."""

    index: NDArray[np.uint32]
    new: Words
    lanes: tuple[Lanes, ...]


def fetch(index: Any, new: Any, lanes: Any, kind: WordKind) -> Found:
    """In one copy. `index`: int32[k]; `new`: the k words; `lanes`: int64[spans, 2]."""
    import torch

    pieces = [piece.reshape(-1).view(torch.uint8) for piece in (lanes, index, new)]
    data = np.asarray(torch.cat(pieces).cpu().numpy())
    ends = np.cumsum([len(piece) for piece in pieces])
    packed = data[: ends[0]].view("<u8").reshape(-1, 2)
    return Found(
        data[ends[0] : ends[1]].view("<u4"),
        data[ends[1] : ends[2]].view(kind.numpy),
        tuple(Lanes(a, b) for a, b in packed.tolist()),
    )
