"""Sums that come with a decoded chunk are those that a comparison of its words finds."""

from __future__ import annotations

import codec_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.elements import DTYPES, Chunk, Words
from weightcast.shared.codec.changes import changes_of, compare
from weightcast.shared.codec.container import StepEncoding, decode_step, encode_chunk

SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=6)
DENSITIES = st.sampled_from([0.0, 0.003, 0.05, 0.5, 1.0])
ENCODINGS: tuple[StepEncoding, ...] = ("fast", "small")


def assert_same_sums(chunk: Chunk, old: Words, new: Words, encoding: StepEncoding) -> None:
    changes = compare(old, new)
    decoded, sums = decode_step(encode_chunk(chunk, old, new, changes, encoding), chunk, old)
    found = cases.those_that_change(decoded)
    assert found.index.tobytes() == changes.index.tobytes() and found.new.tobytes() == changes.new.tobytes()
    assert cases.rows(sums) == cases.rows(changes_of(chunk, old, new)[1])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(DTYPES)), SIZES, DENSITIES, st.sampled_from(ENCODINGS), st.integers(0, 1 << 30))
def test_small_chunks(
    dtype: str, sizes: list[int], density: float, encoding: StepEncoding, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    chunk = cases.chunk_of(dtype, sizes)
    old = cases.weights(chunk, rng)
    assert_same_sums(chunk, old, cases.stepped(chunk, old, density, 0.2, rng), encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", cases.KINDS)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_chunks_of_many_blocks(dtype: str, density: float, encoding: StepEncoding) -> None:
    rng = np.random.default_rng(5)
    chunk = cases.chunk_of(dtype, [9001, 1, 64, 3, 4099, 63, 5000])
    old = cases.weights(chunk, rng)
    for longer in (0.0, 0.3):
        assert_same_sums(chunk, old, cases.stepped(chunk, old, density, longer, rng), encoding)


def test_many_short_spans() -> None:
    rng = np.random.default_rng(6)
    chunk = cases.chunk_of("BF16", [1, 2, 64, 65] * 200)
    old = cases.weights(chunk, rng)
    assert_same_sums(chunk, old, cases.stepped(chunk, old, 0.4, 0.2, rng), "fast")


def test_words_of_any_alignment() -> None:
    rng = np.random.default_rng(7)
    chunk = cases.chunk_of("F32", [5000])
    old = cases.weights(chunk, rng)
    new = cases.stepped(chunk, old, 0.1, 0.2, rng)
    odd = np.frombuffer(b"\0" + old.tobytes(), old.dtype, offset=1)
    blob = encode_chunk(chunk, old, new, compare(old, new))
    assert cases.rows(decode_step(blob, chunk, odd)[1]) == cases.rows(changes_of(chunk, old, new)[1])
