"""Elements that change, where words are pieces of them."""

from __future__ import annotations

import numpy as np
import pytest

from weightcast.publisher.publish.diff import changed_elements
from weightcast.shared.base.elements import TensorSpec, TensorTable, grid
from weightcast.shared.codec.changes import scan


@pytest.mark.parametrize(
    ("dtype", "bytes_of_one"), [("F64", 8), ("I64", 8), ("X24", 3), ("U8", 1), ("BF16", 2), ("F32", 4)]
)
def test_an_element_counts_once(dtype: str, bytes_of_one: int) -> None:
    rng = np.random.default_rng(1)
    sizes = [70, 1, 500, 33]
    specs = [TensorSpec(f"t{n}", dtype, (size,), size * bytes_of_one) for n, size in enumerate(sizes)]
    table = TensorTable.of(specs)
    (chunk,) = grid(table, table.whole)
    old = np.zeros(chunk.words, chunk.kind.numpy)
    new, expected = old.copy(), {}
    for span, size in zip(chunk.spans, sizes, strict=True):
        hit = np.flatnonzero(rng.random(size) < 0.3)
        elements = np.zeros((size, bytes_of_one), np.uint8)
        elements[hit] = rng.integers(1, 256, (len(hit), bytes_of_one))
        new[span.offset : span.offset + span.words] = elements.reshape(-1).view(chunk.kind.numpy)
        if len(hit):
            expected[span.tensor] = len(hit)
    found = scan(chunk, old, new)
    counts = changed_elements(table, chunk, found.changes, found.sums)
    assert dict(zip(found.sums.tensors.tolist(), counts.tolist(), strict=True)) == expected


def test_an_element_that_a_chunk_cuts_counts_from_its_first_byte() -> None:
    table = TensorTable.of([TensorSpec("t", "X24", (100,), 300)])
    counts = []
    for chunk in grid(table, table.whole, chunk_words=64):
        old = np.zeros(chunk.words, np.uint8)
        new = old.copy()
        new[1:3] = 1
        found = scan(chunk, old, new)
        counts += changed_elements(table, chunk, found.changes, found.sums).tolist()
    # of an element's three bytes the first one of the chunks is number 0, 1, 2, 0 and 1
    assert counts == [1, 2, 1, 1, 2]
