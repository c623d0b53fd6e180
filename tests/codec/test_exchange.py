"""Words are exchanged only where they are what they should be."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.codec import plain
from weightcast.shared.codec.kernels import kernels

KERNELS = [plain, kernels()]
WIDTHS = ["<u1", "<u2", "<u4"]


class Case:
    """Words at any alignment, 5000 changes of them: some neighbours, some far apart."""

    def __init__(self, width: str, shift: int = 0) -> None:
        draw = np.random.default_rng(7)
        size = 80_000
        data = bytearray(draw.bytes(4 * size + shift))
        self.words = np.frombuffer(data, width, offset=shift, count=size)
        distances = draw.choice(
            [1, 2, 5, 254, 255, 256, 700], 5_000, p=[0.4, 0.3, 0.26, 0.01, 0.01, 0.01, 0.01]
        )
        self.index = (np.cumsum(distances) + 3).astype(np.int64)
        self.before = self.words[self.index].copy()
        self.after = self.before ^ np.array(1, width)
        self.first = int(self.index[0])
        self.gaps = np.empty(len(self.index), np.uint8)
        bounds = np.array([0, len(self.index)])
        self.escapes, _ = plain.pack_gaps(self.index.astype(np.uint32), bounds, self.gaps)

    def exchange(self, room: ModuleType, *, again: bool = False, back: bool = False) -> int | None:
        pair = (self.after, self.before) if back else (self.before, self.after)
        failed: int | None = room.exchange_packed(
            self.words, self.first, self.gaps, self.escapes, *pair, again=again
        )
        return failed


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_writes_there_and_back(room: ModuleType, width: str, shift: int) -> None:
    case = Case(width, shift)
    original, expected = case.words.copy(), case.words.copy()
    expected[case.index] = case.after
    assert case.exchange(room) is None
    assert np.array_equal(case.words, expected)
    assert case.exchange(room, back=True) is None
    assert np.array_equal(case.words, original)


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("place", [0, 511, 512, 1023, 4_999])
def test_an_unexpected_word_is_named(room: ModuleType, width: str, place: int) -> None:
    case = Case(width)
    word = case.index[place]
    case.words[word] ^= 2
    odd = case.words[word]
    assert case.exchange(room) == word
    assert case.exchange(room, again=True) == word
    assert case.words[word] == odd


@pytest.mark.parametrize("room", KERNELS)
def test_again_takes_what_is_written_already(room: ModuleType) -> None:
    case = Case("<u2")
    case.words[case.index[:3_000]] = case.after[:3_000]
    assert case.exchange(room) == case.first
    assert case.exchange(room, again=True) is None
    assert np.array_equal(case.words[case.index], case.after)


def _last_word_gone(case: Case) -> None:
    case.words = case.words[: case.index[-1]]


def _starts_past_the_end(case: Case) -> None:
    case.first = len(case.words) + (1 << 40)


def _stands_still(case: Case) -> None:
    case.gaps[7] = 0


def _does_not_start_at_its_first(case: Case) -> None:
    case.gaps[0] = 1


def _escape_missing(case: Case) -> None:
    case.escapes = case.escapes[:-1]


def _escape_too_many(case: Case) -> None:
    case.escapes = np.append(case.escapes, np.uint32(300))


def _escape_without_need(case: Case) -> None:
    case.escapes[0] = 254


@pytest.mark.parametrize("room", KERNELS)
@pytest.mark.parametrize(
    "damage",
    [
        _last_word_gone,
        _starts_past_the_end,
        _stands_still,
        _does_not_start_at_its_first,
        _escape_missing,
        _escape_too_many,
        _escape_without_need,
    ],
)
def test_damaged_places_are_refused_before_a_word_is_written(
    room: ModuleType, damage: Callable[[Case], None]
) -> None:
    case = Case("<u2")
    damage(case)
    original = case.words.copy()
    with pytest.raises(ValueError, match="out of order"):
        case.exchange(room)
    assert np.array_equal(case.words, original)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=40), min_size=1, max_size=5))
def test_kernels_pack_the_same(records: list[list[int]]) -> None:
    index = np.cumsum([gap for record in records for gap in record]).astype(np.uint32)
    bounds = np.cumsum([0, *map(len, records)])
    packed = []
    for room in KERNELS:
        gaps = np.empty(len(index), np.uint8)
        escapes, counts = room.pack_gaps(index, bounds, gaps)
        packed.append((gaps.tolist(), escapes.tolist(), counts.tolist()))
    assert packed[0] == packed[1]
    used = 0
    for start, stop, count in zip(bounds, bounds[1:], packed[0][2], strict=False):
        gaps = np.array(packed[0][0][start:stop], np.uint8)
        escapes = np.array(packed[0][1][used : used + count], np.uint32)
        found = plain.unpack_gaps(int(index[start]), gaps, escapes)
        assert found is not None and found.tolist() == index[start:stop].tolist()
        used += count
