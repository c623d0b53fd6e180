"""The law of the incremental digest: hash(new) = hash(old) - S_old + S_new, for every tensor of a chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.elements import (
    Chunk,
    Part,
    Segment,
    Span,
    TensorSpec,
    TensorTable,
    Words,
    grid,
)
from weightcast.shared.codec.changes import changes_of
from weightcast.shared.digest.checksums import (
    ZERO,
    ChunkSums,
    Lanes,
    SpanSums,
    StepSums,
    hash_bytes,
)

WIDTHS = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}


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


def sums_of(table: TensorTable, part: Part, old: list[np.ndarray], new: list[np.ndarray]) -> StepSums:
    step = StepSums(len(table))
    for chunk in grid(table, part, chunk_words=128):
        before, after = chunk_words_of(chunk, old), chunk_words_of(chunk, new)
        _, sums = changes_of(chunk, before, after)
        assert (sums.changed > 0).all() and len(sums) == len(sums.lanes) == len(sums.changed)
        step.add(sums)
    return step


def assert_law(table: TensorTable, part: Part, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = random_tensors(table, rng)
    new = [mutated(tensor, density, rng) for tensor in old]
    lanes = np.array([hash_bytes(t.view(np.uint8)) for t in old], np.uint64).reshape(-1, 2)
    step = sums_of(table, part, old, new)
    after = step.after(lanes)
    for n, tensor in enumerate(new):
        assert Lanes(*after[n].tolist()) == hash_bytes(tensor.view(np.uint8)), (seed, table[n])
        assert step.words[n] == np.count_nonzero(old[n] != tensor)
    assert step.changed.tolist() == [n for n, tensor in enumerate(new) if (old[n] != tensor).any()]


SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 127, 200, 513]), min_size=1, max_size=6)
DENSITIES = st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0])


@settings(deadline=None)  # the first example compiles
@given(st.sampled_from(sorted(WIDTHS)), SIZES, DENSITIES, st.integers(0, 1 << 30))
def test_law_holds_for_any_table(dtype: str, sizes: list[int], density: float, seed: int) -> None:
    table = table_of(dtype, sizes)
    assert_law(table, table.whole, seed, density)


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_law_holds_for_a_mixed_table(dtype: str, density: float) -> None:
    table = table_of(dtype, [1, 700, 64, 3, 129, 0, 65])
    assert_law(table, table.whole, 3, density)


def test_spans_in_the_middle_of_a_tensor_count_its_own_words() -> None:
    table = table_of("BF16", [1000])
    rng = np.random.default_rng(8)
    old = random_tensors(table, rng)
    new = [old[0].copy()]
    new[0][640:705] ^= np.uint16(9)
    part = Part(1, (Segment(0, 640, 1000),))
    lanes = np.array([hash_bytes(old[0].view(np.uint8))], np.uint64)
    after = sums_of(table, part, old, new).after(lanes)
    assert Lanes(*after[0].tolist()) == hash_bytes(new[0].view(np.uint8))


def test_a_tensor_with_two_pieces_in_a_chunk_counts_both() -> None:
    table = table_of("BF16", [1000])
    old = random_tensors(table, np.random.default_rng(10))
    new = [old[0].copy()]
    new[0][:50] ^= np.uint16(1)
    new[0][640:680] ^= np.uint16(1)
    step = sums_of(table, Part(0, (Segment(0, 0, 64), Segment(0, 640, 704))), old, new)
    assert step.words.tolist() == [90]
    after = step.after(np.array([hash_bytes(old[0].view(np.uint8))], np.uint64))
    assert Lanes(*after[0].tolist()) == hash_bytes(new[0].view(np.uint8))


def test_only_touched_words_are_counted() -> None:
    chunk = Chunk(0, "U16", 0, (Span(4, 64, 128, 0),), 64)
    old = np.arange(64, dtype=np.uint16)
    new = old.copy()
    new[5:7] = 0
    _, sums = changes_of(chunk, old, new)
    assert sums.tensors.tolist() == [4]
    before = hash_bytes(old[4:8].view(np.uint8), first_word=17)
    after = hash_bytes(np.array([4, 0, 0, 7], np.uint16).view(np.uint8), first_word=17)
    assert sums.total() == ChunkSums(before, after, 2)


def test_nothing_changed() -> None:
    chunk = Chunk(0, "U8", 0, (Span(0, 0, 64, 0),), 64)
    _, sums = changes_of(chunk, np.zeros(64, np.uint8), np.zeros(64, np.uint8))
    assert len(sums) == 0 and sums.total() == ChunkSums(ZERO, ZERO, 0)


def test_total_adds_all_spans() -> None:
    lanes = np.array([[1, 2, 3, 4], [(1 << 64) - 1, 1, 1, 1]], np.uint64)
    sums = SpanSums(np.array([0, 9]), lanes, np.array([5, 2]))
    assert sums.total() == ChunkSums(Lanes(0, 3), Lanes(4, 5), 7)
