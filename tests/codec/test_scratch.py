"""Memory that threads use again must never show in results, whoever encodes or decodes next."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import codec_cases as cases
import numpy as np
import pytest

from weightcast.shared.codec.changes import Changes, compare, scan
from weightcast.shared.codec.container import StepEncoding, decode_step, encode_chunk
from weightcast.shared.kernels.parallel import Scratch


def test_results_outlive_the_next_chunk() -> None:
    rng = np.random.default_rng(16)
    kept: list[tuple[Changes, bytes]] = []
    for size, dtype in ((5000, "BF16"), (9000, "F32"), (70, "BF16"), (5000, "F8_E4M3")):
        chunk = cases.chunk_of(dtype, [size])
        old = cases.weights(chunk, rng)
        for density in (0.9, 0.1):
            changes = compare(old, cases.stepped(chunk, old, density, 0.3, rng))
            words = old.copy()
            changes.apply(words)
            for encoding in ("fast", "small"):
                blob = encode_chunk(chunk, old, words, changes, encoding)  # type: ignore[arg-type]
                decoded = decode_step(blob, chunk, old)[0]
                kept += [(one, as_bytes(one)) for one in (changes, decoded)]
    for changes, before in kept:
        assert as_bytes(changes) == before


def as_bytes(changes: Changes) -> bytes:
    return b"".join(array.tobytes() for array in (changes.index, changes.old, changes.new))


@pytest.mark.parametrize("encoding", ["fast", "small"])
def test_threads_do_not_share_scratch(encoding: StepEncoding) -> None:
    chunk = cases.chunk_of("BF16", [200_000])

    def round_trip(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        old = cases.weights(chunk, rng)
        new = cases.stepped(chunk, old, 0.1 * (1 + seed % 9), 0.2, rng)
        blob = encode_chunk(chunk, old, new, compare(old, new), encoding)
        words = old.copy()
        decode_step(blob, chunk, old)[0].apply(words)
        return words.tobytes() == new.tobytes()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, range(24)))


def test_scratch_keeps_the_largest_of_each_name() -> None:
    scratch = Scratch()
    large = scratch.take("index", np.uint32, 100)
    assert np.shares_memory(large, scratch.take("index", np.uint16, 20))
    assert not np.shares_memory(large, scratch.take("other", np.uint32, 100))
    assert len(scratch.take("index", np.uint32, 200)) == 200


def test_a_change_outside_the_words_is_an_error() -> None:
    changes = Changes(np.array([2, 64], np.uint32), np.zeros(2, np.uint16), np.ones(2, np.uint16))
    words = np.zeros(64, np.uint16)
    with pytest.raises(IndexError):
        changes.apply(words)
    assert not words.any()


def test_lent_memory_is_lent_again_only_when_nobody_holds_it() -> None:
    room = Scratch()
    held = room.lend("words", np.uint16, 64)[:10]
    held[:] = 7
    other = room.lend("words", np.uint16, 64)
    other[:] = 8
    assert (held == 7).all()
    place = other.ctypes.data
    del other
    assert room.lend("words", np.uint16, 64).ctypes.data == place


def test_several_pieces_lent_at_once_are_all_lent_again() -> None:
    room = Scratch()
    held = [room.lend("words", np.uint16, 64) for _ in range(3)]
    places = {one.ctypes.data for one in held}
    assert len(places) == 3
    held.clear()
    held = [room.lend("words", np.uint32, 32) for _ in range(3)]
    assert {one.ctypes.data for one in held} == places


def test_lent_memory_grows() -> None:
    room = Scratch()
    assert len(room.lend("words", np.uint16, 64)) == 64
    assert len(room.lend("words", np.uint16, 1 << 16)) == 1 << 16


@pytest.mark.parametrize("density", [0.02, 0.5, 1.0])
def test_scans_outlive_the_next_scan(density: float) -> None:
    rng = np.random.default_rng(18)
    chunk = cases.chunk_of("BF16", [5000])
    old = cases.weights(chunk, rng)
    new = cases.stepped(chunk, old, density, 0.3, rng)
    first = scan(chunk, old, new).changes
    before = as_bytes(first)
    scan(chunk, new, old)
    assert as_bytes(first) == before


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32"])
@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_writing_changes_makes_the_new_words(dtype: str, density: float) -> None:
    rng = np.random.default_rng(19)
    chunk = cases.chunk_of(dtype, [700, 3000])
    old = cases.weights(chunk, rng)
    new = cases.stepped(chunk, old, density, 0.3, rng)
    changes = scan(chunk, old, new).changes
    changes.apply(old)
    assert np.array_equal(old, new)
