"""`scan` finds what `compare` and `hash_bytes` find, in one pass."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import KINDS, chunk_of, counted, random_words, rows, spread, stepped
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.elements import (
    Chunk,
    Part,
    Segment,
    TensorSpec,
    TensorTable,
    Words,
    grid,
    kind_of,
)
from weightcast.shared.codec.changes import compare, masked_changes, scan
from weightcast.shared.digest.checksums import Lanes, hash_bytes
from weightcast.shared.kernels.load import kernels

DENSITIES = (0.0, 0.002, 0.03, 0.4, 1.0)


def assert_found(chunk: Chunk, old: Words, new: Words) -> None:
    found, changes = scan(chunk, old, new), compare(old, new)
    masked, masked_sums = masked_changes(chunk, old, new)
    for each in (found.changes, masked):
        for ours, expected in (
            (each.index, changes.index),
            (each.old, changes.old),
            (each.new, changes.new),
        ):
            assert ours.dtype == expected.dtype
            assert np.array_equal(ours, expected)
    masks = kernels().masks_of(changes.index, chunk.words) if len(changes) else np.zeros(chunk.words >> 6)
    assert masked.masks is not None and np.array_equal(masked.masks, masks)
    assert rows(found.sums) == rows(masked_sums)
    width = chunk.kind.width
    for span, lanes in zip(chunk.spans, found.full.tolist(), strict=True):
        piece = new[span.offset : span.offset + span.words]
        assert Lanes(*lanes) == hash_bytes(piece.view(np.uint8), span.start * width // 8)


def altered(chunk: Chunk, old: Words, density: float, rng: np.random.Generator) -> Words:
    new = old.copy()
    hit = rng.random(counted(chunk)) < density
    flips = np.where(hit, rng.integers(1, 1 << (8 * chunk.kind.width), len(hit)), 0)
    new ^= spread(chunk, flips.astype(new.dtype))
    return new


@settings(deadline=None, max_examples=120)
@given(
    dtype=st.sampled_from(KINDS),
    sizes=st.lists(st.one_of(st.integers(1, 9), st.integers(1, 700)), min_size=1, max_size=8),
    density=st.sampled_from(DENSITIES),
    seed=st.integers(0, 1 << 32),
)
def test_small_spans_with_padding(dtype: str, sizes: list[int], density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunk = chunk_of(dtype, sizes)
    old = random_words(chunk, rng)
    assert_found(chunk, old, altered(chunk, old, density, rng))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32"])
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", [16384, 16385, 40001, 65536])
def test_several_blocks(dtype: str, density: float, size: int) -> None:
    rng = np.random.default_rng(size)
    chunk = chunk_of(dtype, [size, 77, 20000])
    old = random_words(chunk, rng)
    assert_found(chunk, old, altered(chunk, old, density, rng))


@pytest.mark.parametrize("dtype", KINDS)
def test_pieces_are_numbered_as_in_their_tensor(dtype: str) -> None:
    """A tensor cut by chunk borders, and a part that begins inside it."""
    rng = np.random.default_rng(5)
    size = 1000
    table = TensorTable.of([TensorSpec("t", dtype, (size,), size * kind_of(dtype).width)])
    for chunk in grid(table, Part(0, (Segment(0, 128, size),)), chunk_words=256):
        old = random_words(chunk, rng)
        assert_found(chunk, old, stepped(chunk, old, 0.1, 0.1, rng))


@pytest.mark.parametrize("at", [0, 63, 64, 16383, 16384, 20000 - 1])
def test_a_single_change(at: int) -> None:
    chunk = chunk_of("BF16", [20000])
    old = random_words(chunk, np.random.default_rng(0))
    new = old.copy()
    new[at] ^= 1
    assert_found(chunk, old, new)
    assert scan(chunk, old, new).changes.index.tolist() == [at]


def test_words_that_may_not_be_written_or_lie_askew() -> None:
    chunk = chunk_of("BF16", [5000])
    rng = np.random.default_rng(3)
    words = rng.integers(0, 256, 2 * chunk.words + 1, dtype=np.uint8)
    words[1 + 2 * 5000 :] = 0
    old = words[1:].view(np.uint16)
    old.flags.writeable = False
    assert_found(chunk, old, stepped(chunk, old, 0.05, 0.1, rng))


def test_what_was_found_stays_when_the_next_chunk_is_scanned() -> None:
    chunk = chunk_of("BF16", [5000])
    rng = np.random.default_rng(4)
    old = random_words(chunk, rng)
    new = stepped(chunk, old, 0.05, 0.1, rng)
    found, masked = scan(chunk, old, new), masked_changes(chunk, old, new)[0]
    other = stepped(chunk, new, 0.5, 0.1, rng)
    scan(chunk, new, other)
    masked_changes(chunk, new, other)
    expected = compare(old, new)
    assert np.array_equal(found.changes.index, expected.index)
    assert np.array_equal(masked.index, expected.index) and np.array_equal(masked.new, expected.new)


@pytest.mark.parametrize("given_words", [np.zeros(64, np.uint16), np.zeros(128, np.uint8)])
def test_words_of_another_chunk_are_refused(given_words: Words) -> None:
    chunk = chunk_of("BF16", [128])
    right = np.zeros(128, np.uint16)
    with pytest.raises(ValueError, match="128 BF16"):
        scan(chunk, right, given_words)
    with pytest.raises(ValueError, match="128 BF16"):
        scan(chunk, given_words, right)
