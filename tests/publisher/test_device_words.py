"""Words on torch's CPU device, which stands for a GPU: the host's kernels are the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.elements import Chunk, Part, Segment, TensorSpec, TensorTable, Words, grid
from weightcast.shared.codec.changes import compare
from weightcast.shared.digest.checksums import Lanes, hash_bytes

torch = pytest.importorskip("torch")

from weightcast.publisher.weights.device_side import differing, fetch, has_whole_eights, on_host, span_lanes  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GOLDEN = {
    # docs/FORMAT.md, Lanes
    b"\x00": "fd24034ea9930e1260624d7a25e5a8e0",
    bytes(range(37)): "ea8fa41d33ee0ea798d9063251be64e0",
    b"weightcast" * 100: "013343207a890f6a7fe8d35f33bf6469",
}
WIDTHS = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}


def chunks_of(dtype: str, segments: list[tuple[int, int]], chunk_words: int = 1 << 22) -> list[Chunk]:
    """`segments`: blocks that come before, words, of a tensor each."""
    width = WIDTHS[dtype]
    specs, parts = [], []
    for number, (blocks, words) in enumerate(segments):
        stop = 64 * blocks + words * (8 if width == 8 else 1)
        elements = stop // 8 if width == 8 else stop
        specs.append(TensorSpec(f"t{number:03}", dtype, (elements,), elements * width))
        parts.append(Segment(number, 64 * blocks, stop))
    return list(grid(TensorTable.of(specs), Part(0, tuple(parts)), chunk_words))


def words_for(chunk: Chunk, rng: np.random.Generator) -> Words:
    words = np.zeros(chunk.words, chunk.kind.numpy)
    for span in chunk.spans:
        data = rng.integers(0, 256, span.words * chunk.kind.width, np.uint8)
        words[span.offset : span.offset + span.words] = data.view(chunk.kind.numpy)
    return words


def expected_lanes(chunk: Chunk, words: Words) -> tuple[Lanes, ...]:
    width = chunk.kind.width
    return tuple(
        hash_bytes(words[span.offset : span.offset + span.words].view(np.uint8), span.start * width // 8)
        for span in chunk.spans
    )


def lanes_on_device(chunk: Chunk, words: Words) -> tuple[Lanes, ...]:
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    there = on_host(words).to(DEVICE)
    return fetch(none, there[:0], span_lanes(chunk, there), chunk.kind).lanes


@pytest.mark.parametrize("data", GOLDEN)
def test_golden(data: bytes) -> None:
    (chunk,) = chunks_of("U8", [(0, len(data))])
    words = np.zeros(chunk.words, np.uint8)
    words[: len(data)] = np.frombuffer(data, np.uint8)
    assert [lanes.hex() for lanes in lanes_on_device(chunk, words)] == [GOLDEN[data]]


@settings(deadline=None, max_examples=60)  # the first example compiles
@given(
    st.sampled_from(sorted(WIDTHS)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=5),
    st.sampled_from([256, 1 << 22]),
    st.sampled_from([0.0, 0.02, 1.0]),
    st.integers(0, 1 << 32),
)
def test_lanes_and_changes_are_those_of_the_host(
    dtype: str, segments: list[tuple[int, int]], chunk_words: int, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for chunk in chunks_of(dtype, segments, chunk_words):
        old = words_for(chunk, rng)
        new = np.where(rng.random(chunk.words) < density, words_for(chunk, rng), old)
        before, after = (on_host(words).to(DEVICE) for words in (old, new))
        place = differing(before, after)
        found = fetch(place.to(torch.int32), after[place], span_lanes(chunk, after), chunk.kind)
        changes = compare(old, new)
        assert np.array_equal(found.index, changes.index) and np.array_equal(found.new, changes.new)
        assert (found.index.dtype, found.new.dtype) == (changes.index.dtype, changes.new.dtype)
        assert found.lanes == expected_lanes(chunk, new)


def test_long_tensors_are_numbered_as_wholes() -> None:
    rng = np.random.default_rng(4)
    chunks = chunks_of("BF16", [(0, 3 * 1024 + 77), (1, 40)], 1024)
    assert [len(chunk.spans) for chunk in chunks] == [1, 1, 1, 1, 1] and chunks[2].spans[0].start > 0
    for chunk in chunks:
        words = words_for(chunk, rng)
        assert lanes_on_device(chunk, words) == expected_lanes(chunk, words)


def test_words_are_hashed_where_they_lie_only_at_whole_8_byte_words() -> None:
    flat = torch.zeros(64, dtype=torch.int16)
    assert [has_whole_eights(flat[start:]) for start in range(5)] == [True, False, False, False, True]


def test_read_only_words_are_given_without_a_warning() -> None:
    words = np.arange(9, dtype=np.uint16)
    words.flags.writeable = False
    assert on_host(words).tolist() == list(range(9))
