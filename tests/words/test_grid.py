"""The chunk grid: every word once, short segments together, long ones by themselves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.elements import (
    BLOCK_WORDS,
    Part,
    Segment,
    TensorSpec,
    TensorTable,
    grid,
)

CHUNK = 256


def table_of(*sizes: int, dtype: str = "BF16") -> TensorTable:
    width = 4 if dtype == "F32" else 2
    return TensorTable.of(
        [TensorSpec(f"t{number:03d}", dtype, (size,), size * width) for number, size in enumerate(sizes)]
    )


def layout(table: TensorTable) -> list[list[tuple[int, int, int, int]]]:
    chunks = list(grid(table, table.whole, CHUNK))
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    return [[(span.tensor, span.start, span.stop, span.offset) for span in chunk.spans] for chunk in chunks]


def test_short_segments_share_chunks_and_long_ones_have_their_own() -> None:
    assert layout(table_of(10, 300, 70, 256)) == [
        [(0, 0, 10, 0), (2, 0, 70, 64)],
        [(1, 0, 256, 0)],
        [(1, 256, 300, 0)],
        [(3, 0, 256, 0)],
    ]


def test_short_segments_are_cut_where_a_chunk_is_full() -> None:
    assert layout(table_of(200, 100)) == [[(0, 0, 200, 0)], [(1, 0, 100, 0)]]
    assert layout(table_of(100, 200)) == [[(0, 0, 100, 0), (1, 0, 128, 128)], [(1, 128, 200, 0)]]


def test_parts_have_grids_of_their_own() -> None:
    table = table_of(600, 5)
    part = Part(1, (Segment(0, 128, 448), Segment(1, 0, 5)))
    chunks = list(grid(table, part, CHUNK))
    assert [(chunk.key.part, chunk.words) for chunk in chunks] == [(1, 64), (1, 256), (1, 64)]
    assert [span.tensor for chunk in chunks for span in chunk.spans] == [1, 0, 0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 700), max_size=12), st.lists(st.integers(0, 700), max_size=6))
def test_every_word_lies_in_one_span(shorts: list[int], floats: list[int]) -> None:
    table = TensorTable.of([*table_of(*shorts), *(_renamed(spec) for spec in table_of(*floats, dtype="F32"))])
    seen = dict.fromkeys(range(len(table)), 0)
    for chunk in grid(table, table.whole, CHUNK):
        end = 0
        for span in chunk.spans:
            assert span.start == seen[span.tensor] and span.words > 0
            assert span.offset == end and span.offset % BLOCK_WORDS == span.start % BLOCK_WORDS == 0
            assert table[span.tensor].dtype == chunk.dtype
            seen[span.tensor] = span.stop
            end = -(-(span.offset + span.words) // BLOCK_WORDS) * BLOCK_WORDS
        assert end == chunk.words <= CHUNK
    assert seen == {number: spec.words for number, spec in enumerate(table)}


def _renamed(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(f"f{spec.name}", spec.dtype, spec.shape, spec.nbytes)
