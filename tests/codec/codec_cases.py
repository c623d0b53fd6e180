"""Chunks and words for the codec's tests."""

from __future__ import annotations

import numpy as np

from weightcast.shared.base.elements import (
    Chunk,
    TensorSpec,
    TensorTable,
    Words,
    grid,
    kind_of,
)
from weightcast.shared.codec.changes import Changes
from weightcast.shared.digest.checksums import SpanSums

KINDS = ("U8", "I16", "I32", "F8_E4M3", "F8_E5M2", "F16", "BF16", "F32")


def chunk_of(dtype: str, sizes: list[int]) -> Chunk:
    """One chunk of tensors with these numbers of words."""
    width = kind_of(dtype).width
    specs = [TensorSpec(f"t{n:05}", dtype, (size,), size * width) for n, size in enumerate(sizes)]
    table = TensorTable.of(specs)
    (chunk,) = grid(table, table.whole)
    return chunk


def spread(chunk: Chunk, words: Words) -> Words:
    """Words without padding, laid out as the chunk has them."""
    laid, at = np.zeros(chunk.words, chunk.kind.numpy), 0
    for span in chunk.spans:
        laid[span.offset : span.offset + span.words] = words[at : at + span.words]
        at += span.words
    return laid


def those_that_change(found: Changes) -> Changes:
    """Without those that stay, which only changes with all words may hold."""
    stay = found.old == found.new
    if not stay.any():
        return found
    assert found.all_shown and found.whole is not None and stay.mean() < 0.2
    return Changes(found.index[~stay], found.old[~stay], found.new[~stay], found.whole)


def rows(sums: SpanSums) -> list[list[int]]:
    """Of each span: tensor, old lanes, new lanes, changed words."""
    columns = zip(sums.tensors.tolist(), sums.lanes.tolist(), sums.changed.tolist(), strict=True)
    return [[tensor, *lanes, changed] for tensor, lanes, changed in columns]


def counted(chunk: Chunk) -> int:
    return sum(span.words for span in chunk.spans)


def inside(chunk: Chunk) -> np.ndarray:
    """Mask of what is not padding."""
    return spread(chunk, np.ones(counted(chunk), chunk.kind.numpy)).astype(bool)


def random_words(chunk: Chunk, rng: np.random.Generator) -> Words:
    return spread(
        chunk, rng.integers(0, 1 << (8 * chunk.kind.width), counted(chunk)).astype(chunk.kind.numpy)
    )


def weights(chunk: Chunk, rng: np.random.Generator) -> Words:
    """Words whose exponents are spread as those of trained weights."""
    if not chunk.kind.sign_bit:
        return random_words(chunk, rng)
    values = (rng.standard_normal(counted(chunk)) * 0.02).astype(np.float32).view(np.uint32)
    if chunk.dtype == "F32":
        return spread(chunk, values)
    if chunk.dtype == "BF16":
        return spread(chunk, (values >> 16).astype(np.uint16))
    halves = (rng.standard_normal(counted(chunk)) * 0.02).astype(np.float16).view(np.uint16)
    return spread(chunk, halves if chunk.kind.width == 2 else (halves >> 8).astype(np.uint8))


def stepped(chunk: Chunk, old: Words, density: float, longer: float, rng: np.random.Generator) -> Words:
    """Steps at about `density` of the words, of one unit but for a share of `longer`."""
    new = old.copy()
    hit = inside(chunk) & (rng.random(chunk.words) < density)
    many = hit.sum()
    steps = np.where(rng.random(many) < longer, rng.choice([2, 3, 17, 80], many), 1) * rng.choice(
        [-1, 1], many
    )
    new[hit] += steps.astype(chunk.kind.numpy)
    return new
