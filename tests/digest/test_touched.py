"""The law of the incremental digest: hash(new) = hash(old) - S_old + S_new, for every tensor of a chunk."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.digest.hash import hash_bytes
from weightcast.shared.digest.lanes import ZERO, Lanes
from weightcast.shared.digest.touched import ChunkSums, SpanSums, span_sums, total
from weightcast.shared.words import (
    Chunk,
    Part,
    Segment,
    Span,
    TensorSpec,
    TensorTable,
    Words,
    grid,
    whole_part,
)

WIDTHS = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}


@dataclass(frozen=True)
class Change:
    index: np.ndarray
    new: Words


def table_of(dtype: str, sizes: list[int]) -> TensorTable:
    specs = [TensorSpec(f"t{n:03}", dtype, (size,), size * WIDTHS[dtype]) for n, size in enumerate(sizes)]
    return TensorTable.of(specs)


def chunk_words_of(chunk: Chunk, tensors: list[np.ndarray]) -> Words:
    words = np.zeros(chunk.words, chunk.kind.numpy)
    for span in chunk.spans:
        words[span.offset : span.offset + span.words] = tensors[span.tensor][span.start : span.stop]
    return words


def random_tensors(table: TensorTable, rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.integers(0, 256, spec.nbytes, dtype=np.uint8).view(spec.kind.numpy) for spec in table]


def mutated(tensor: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    new = tensor.copy()
    hit = rng.random(len(new)) < density
    new[hit] ^= rng.integers(1, 256, hit.sum()).astype(new.dtype)
    return new


def sums_of(table: TensorTable, part: Part, old: list[np.ndarray], new: list[np.ndarray]) -> list[SpanSums]:
    sums: list[SpanSums] = []
    for chunk in grid(table, part, chunk_words=128):
        before, after = chunk_words_of(chunk, old), chunk_words_of(chunk, new)
        index = np.flatnonzero(before != after).astype(np.uint32)
        before.flags.writeable = False
        sums += span_sums(chunk, before, Change(index, after[index]))
    return sums


def assert_law(table: TensorTable, part: Part, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = random_tensors(table, rng)
    new = [mutated(tensor, density, rng) for tensor in old]
    lanes: dict[int, Lanes] = {n: hash_bytes(t.view(np.uint8)) for n, t in enumerate(old)}
    changed: dict[int, int] = defaultdict(int)
    for one in sums_of(table, part, old, new):
        lanes[one.tensor] = lanes[one.tensor].minus(one.old).plus(one.new)
        changed[one.tensor] += one.changed
        assert one.changed > 0
    for n, tensor in enumerate(new):
        assert lanes[n] == hash_bytes(tensor.view(np.uint8)), (seed, table[n])
        assert changed[n] == np.count_nonzero(old[n] != tensor)


SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 127, 200, 513]), min_size=1, max_size=6)
DENSITIES = st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0])


@settings(deadline=None)  # the first example compiles
@given(st.sampled_from(sorted(WIDTHS)), SIZES, DENSITIES, st.integers(0, 1 << 30))
def test_law_holds_for_any_table(dtype: str, sizes: list[int], density: float, seed: int) -> None:
    table = table_of(dtype, sizes)
    assert_law(table, whole_part(table), seed, density)


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_law_holds_for_a_mixed_table(dtype: str, density: float) -> None:
    table = table_of(dtype, [1, 700, 64, 3, 129, 0, 65])
    assert_law(table, whole_part(table), 3, density)


def test_spans_in_the_middle_of_a_tensor_count_its_own_words() -> None:
    table = table_of("BF16", [1000])
    rng = np.random.default_rng(8)
    old = random_tensors(table, rng)
    new = [old[0].copy()]
    new[0][640:705] ^= np.uint16(9)
    part = Part(1, (Segment(0, 640, 1000),))
    lanes = hash_bytes(old[0].view(np.uint8))
    for one in sums_of(table, part, old, new):
        lanes = lanes.minus(one.old).plus(one.new)
    assert lanes == hash_bytes(new[0].view(np.uint8))


def test_unaligned_old_words() -> None:
    chunk = Chunk(0, "BF16", 0, (Span(0, 0, 60, 0),), 64)
    raw = np.random.default_rng(9).integers(0, 256, 129, dtype=np.uint8)
    raw[121:] = 0
    old = raw[1:].view(np.uint16)
    change = Change(np.array([0, 59], np.uint32), np.array([1, 2], np.uint16))
    assert span_sums(chunk, old, change) == span_sums(chunk, old.copy(), change)


def test_only_touched_words_are_counted() -> None:
    chunk = Chunk(0, "U16", 0, (Span(4, 64, 128, 0),), 64)
    old = np.arange(64, dtype=np.uint16)
    (one,) = span_sums(chunk, old, Change(np.array([5, 6], np.uint32), np.array([0, 0], np.uint16)))
    assert one.tensor == 4 and one.changed == 2
    assert one.old == hash_bytes(old[4:8].view(np.uint8), first_word=17)
    assert one.new == hash_bytes(np.array([4, 0, 0, 7], np.uint16).view(np.uint8), first_word=17)


def test_nothing_changed() -> None:
    chunk = Chunk(0, "U8", 0, (Span(0, 0, 64, 0),), 64)
    assert (
        span_sums(chunk, np.zeros(64, np.uint8), Change(np.zeros(0, np.uint32), np.zeros(0, np.uint8))) == []
    )
    assert total([]) == ChunkSums(ZERO, ZERO, 0)


def test_total_adds_all_spans() -> None:
    one, other = (
        SpanSums(0, Lanes(1, 2), Lanes(3, 4), 5),
        SpanSums(9, Lanes((1 << 64) - 1, 1), Lanes(1, 1), 2),
    )
    assert total([one, other]) == ChunkSums(Lanes(0, 3), Lanes(4, 5), 7)
