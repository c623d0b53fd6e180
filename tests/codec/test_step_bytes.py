"""A byte for the step of every word: all steps where words are bytes, at the ends of numbers elsewhere."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy_kernels as oracle
import pytest
from codec_cases import KINDS

from weightcast.shared.base.elements import WordKind, Words, kind_of
from weightcast.shared.kernels.load import kernels

ROOMS = [oracle, kernels()]
LONG = 255


def ends(kind: WordKind) -> Words:
    """Zeros of both signs, denormals, the largest numbers, infinities, NaNs, and what lies beside them."""
    half, infinity = 1 << (8 * kind.width - 1), kind.exponent_mask << kind.exponent_shift
    near = [
        base + more for base in (0, half, infinity, infinity | half) for more in (-128, -127, -1, 0, 1, 127)
    ]
    return np.array([word % (2 * half) for word in near], np.uint64).astype(kind.numpy)


def pairs(kind: WordKind) -> tuple[Words, Words]:
    words = np.arange(256, dtype=np.uint8) if kind.width == 1 else ends(kind)
    old, new = np.meshgrid(words, words)
    return old.reshape(-1), new.reshape(-1)


def ordinals(words: Words, kind: WordKind) -> np.ndarray:
    wide = words.astype(np.int64)
    return np.where(wide & kind.sign_bit, -1 - (wide ^ kind.sign_bit), wide) if kind.sign_bit else wide


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rest", [0, 1, 63])
def test_from_every_word_to_every_other(room: ModuleType, dtype: str, rest: int) -> None:
    """`rest`: of words that are fewer than 64."""
    kind = kind_of(dtype)
    old, new = (words[: (len(words) - 63) // 64 * 64 + rest] for words in pairs(kind))
    steps, bits = np.empty(len(old), np.uint8), 8 * kind.width
    longer = room.step_bytes(old, new, kind, steps)
    step = ordinals(new, kind) - ordinals(old, kind)
    if not kind.sign_bit:
        step = (step + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    assert np.array_equal(steps, np.minimum(np.where(step < 0, -2 * step - 1, 2 * step), LONG))
    assert longer == np.count_nonzero(steps == LONG)
    places = room.escapes(steps, longer)
    assert np.array_equal(places, np.flatnonzero(steps == LONG))
    kept = new[places]
    assert np.array_equal(room.add_steps(old, steps, kept, kind), new)
    assert room.add_steps(old, steps, kept[1:], kind) is None


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("place", [0, 63, 64, 100])
def test_a_step_off_the_end_is_no_word_of_floats(room: ModuleType, dtype: str, place: int) -> None:
    """Integers go on at their other end."""
    kind = kind_of(dtype)
    half = 1 << (8 * kind.width - 1)
    last = (half - 1, 2 * half - 1) if kind.sign_bit else (2 * half - 1, 0)
    for word, byte, reached in ((last[0], 2, 0), (last[1], 1, 2 * half - 1)):
        old, steps = np.zeros(101, kind.numpy), np.zeros(101, np.uint8)
        old[place], steps[place] = word, byte
        found = room.add_steps(old, steps, old[:0], kind)
        if kind.sign_bit:
            assert found is None
        else:
            assert found is not None and found[place] == reached and np.count_nonzero(found) <= 1
        steps[place] = 3 - byte  # the other way
        found = room.add_steps(old, steps, old[:0], kind)
        assert found is not None and abs(int(found[place]) - word) == 1
