"""Words are exchanged only where they are what they should be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weightcast.shared.codec import plain
from weightcast.shared.codec.kernels import kernels

EXCHANGES = [plain.exchange, kernels().exchange]
WIDTHS = ["<u1", "<u2", "<u4"]


def _case(width: str, shift: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Words at any alignment, 5000 positions, old and new words there."""
    draw = np.random.default_rng(7)
    words = np.frombuffer(bytearray(draw.bytes(40_000 + shift)), width, offset=shift, count=9_000)
    index = np.sort(draw.choice(9_000, 5_000, replace=False)).astype(np.uint64)
    before = words[index].copy()
    return words, index, before, before ^ np.array(1, width)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_writes_there_and_back(exchange: Callable[..., int | None], width: str, shift: int) -> None:
    words, index, before, after = _case(width, shift)
    original = words.copy()
    expected = words.copy()
    expected[index] = after
    assert exchange(words, index, before, after, again=False) is None
    assert np.array_equal(words, expected)
    assert exchange(words, index, after, before, again=False) is None
    assert np.array_equal(words, original)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("place", [0, 1023, 1024, 4_999])
def test_an_unexpected_word_is_named(exchange: Callable[..., int | None], width: str, place: int) -> None:
    words, index, before, after = _case(width, 0)
    words[index[place]] ^= 2
    odd = words[index[place]]
    assert exchange(words, index, before, after, again=False) == place
    assert exchange(words, index, before, after, again=True) == place
    assert words[index[place]] == odd


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_again_takes_what_is_written_already(exchange: Callable[..., int | None]) -> None:
    words, index, before, after = _case("<u2", 0)
    words[index[:3_000]] = after[:3_000]
    assert exchange(words, index, before, after, again=False) == 0
    assert exchange(words, index, before, after, again=True) is None
    assert np.array_equal(words[index], after)


def test_never_past_the_end() -> None:
    words, index, before, after = _case("<u2", 0)
    with pytest.raises(IndexError):
        kernels().exchange(words[:100], index, before, after, again=False)
