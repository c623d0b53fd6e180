"""How near the encodings come to the entropy of what they carry, on simulated optimizer steps."""

from __future__ import annotations

import codec_cases as cases
import numpy as np
import numpy_kernels as oracle
import pytest

from benchmarks.chunks import bounds, simulated
from weightcast.shared.base.elements import ByteArray, Words, kind_of
from weightcast.shared.codec.changes import compare
from weightcast.shared.codec.container import Mode, decode_step, encode_chunk

WORDS = 1 << 20


@pytest.mark.parametrize("density", [0.003, 0.014, 0.04])
def test_bits_per_change(density: float) -> None:
    case = simulated(WORDS, density, seed=3)
    chunk = cases.chunk_of("BF16", [WORDS])
    changes = compare(case.old, case.new)
    fast = encode_chunk(chunk, case.old, case.new, changes)
    small = encode_chunk(chunk, case.old, case.new, changes, "small")
    ideal = bounds(case)
    assert (fast[0], small[0]) == (Mode.FAST, Mode.SMALL)
    header_bits = 8 * 200 / len(changes)
    assert 8 * len(fast) / len(changes) < 1.04 * ideal.fast + header_bits
    assert 8 * len(small) / len(changes) < 1.06 * ideal.small + 2 * header_bits


def test_the_bounds_are_below_what_any_blob_takes() -> None:
    case = simulated(WORDS // 4, 0.25, seed=4)
    changes = compare(case.old, case.new)
    chunk = cases.chunk_of("BF16", [WORDS // 4])
    ideal = bounds(case)
    for encoding, bound in (("fast", ideal.fast), ("small", ideal.small)):
        blob = encode_chunk(chunk, case.old, case.new, changes, encoding)  # type: ignore[arg-type]
        assert bound < 8 * len(blob) / len(changes) < 1.1 * bound


@pytest.mark.parametrize(
    ("density", "mode"), [(0.3, Mode.FAST), (0.4, Mode.STEPS), (0.95, Mode.STEPS), (1.0, Mode.PLANES)]
)
def test_fast_takes_the_mode_that_is_quick_at_a_density(density: float, mode: int) -> None:
    case = simulated(WORDS // 4, density, seed=5)
    chunk = cases.chunk_of("BF16", [WORDS // 4])
    blob = encode_chunk(chunk, case.old, case.new, compare(case.old, case.new))
    assert blob[0] == mode


def test_noise_goes_raw() -> None:
    rng = np.random.default_rng(6)
    old, new = rng.integers(0, 1 << 16, (2, WORDS // 4), dtype=np.uint16)
    chunk = cases.chunk_of("BF16", [WORDS // 4])
    assert encode_chunk(chunk, old, new, compare(old, new))[0] == Mode.RAW


def test_step_bytes_are_little_but_their_huffman_codes() -> None:
    case = simulated(WORDS, 0.5, seed=7)
    steps = step_bytes_of(case.old, case.new)
    share = np.bincount(steps, minlength=256) / len(steps)
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum() / 8
    blob = encode_chunk(cases.chunk_of("BF16", [WORDS]), case.old, case.new, compare(case.old, case.new))
    assert blob[0] == Mode.STEPS
    assert len(blob) < 1.08 * entropy * WORDS


def test_runs_of_words_that_stay_take_next_to_nothing() -> None:
    case = simulated(WORDS, 0.95, seed=8)
    chunk = cases.chunk_of("BF16", [2 * WORDS])
    old, new = np.concatenate([case.old, case.old]), np.concatenate([case.new, case.old])
    half, both = (
        encode_chunk(cases.chunk_of("BF16", [len(one)]), one, other, compare(one, other))
        for one, other in ((case.old, case.new), (old, new))
    )
    assert half[0] == both[0] == Mode.STEPS
    assert len(both) < 1.02 * len(half)
    whole = decode_step(both, chunk, old)[0].whole
    assert whole is not None and np.array_equal(whole, new)


def step_bytes_of(old: Words, new: Words) -> ByteArray:
    steps = np.empty(len(old), np.uint8)
    oracle.step_bytes(old, new, kind_of("BF16"), steps)
    return steps
