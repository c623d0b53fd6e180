"""Chunks of several tensors, put together in memory that is used again."""

from __future__ import annotations

import numpy as np

from weightcast.shared.base.elements import Chunk, Span, Words
from weightcast.shared.checkpoint.local_checkpoint import WordsIn, gather

CHUNK = Chunk(0, "BF16", 0, (Span(0, 0, 65, 0), Span(1, 10, 75, 128), Span(2, 0, 3, 256)), 320)
PLACES = ((0, 65), (128, 193), (256, 259))


def test_padding_is_zero_whatever_lay_there_before() -> None:
    first = gather(CHUNK, filled_with(7))
    place = first.ctypes.data
    first[:] = 9
    del first
    words = gather(CHUNK, filled_with(5))
    assert words.ctypes.data == place
    expected = np.zeros(320, np.uint16)
    for start, stop in PLACES:
        expected[start:stop] = 5
    assert np.array_equal(words, expected)


def test_a_chunk_outlives_the_next_ones() -> None:
    kept = [gather(CHUNK, filled_with(number)) for number in range(1, 7)]
    assert [words[258] for words in kept] == [1, 2, 3, 4, 5, 6]
    assert len({words.ctypes.data for words in kept}) == 6


def filled_with(number: int) -> WordsIn:
    def words_in(tensor: int, start: int, stop: int) -> Words:
        return np.full(stop - start, number, np.uint16)

    return words_in
