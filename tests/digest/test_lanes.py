"""Lanes of bytes: golden values, a second implementation in plain Python, and the laws they promise."""

from __future__ import annotations

import numpy as np
import numpy_kernels as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_kernels import finalise

from weightcast.shared.digest.checksums import ZERO, Lanes, hash_bytes, hash_pieces

M = (1 << 64) - 1


def reference_mix(word: int, number: int) -> tuple[int, int]:
    a = word ^ (number * 0x9E3779B97F4A7C15 & M)
    a = (a ^ a >> 32) * 0xFF51AFD7ED558CCD & M
    a = (a ^ a >> 29) * 0xC4CEB9FE1A85EC53 & M
    b = (word + number * 0xC2B2AE3D27D4EB4F) & M
    b = (b ^ b >> 31) * 0xD6E8FEB86659FD93 & M
    b = (b ^ b >> 33) * 0xA0761D6478BD642F & M
    return a ^ a >> 32, b ^ b >> 30


def reference_lanes(data: bytes, first: int = 0) -> Lanes:
    a = b = 0
    for start in range(0, len(data), 8):
        word = int.from_bytes(data[start : start + 8], "little")
        more_a, more_b = reference_mix(word, first + start // 8 + 1)
        a, b = a + more_a & M, b + more_b & M
    return Lanes(a, b)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


GOLDEN = {
    # data: (raw lanes, finalised)
    b"": ("00000000000000000000000000000000", "120e93a94e0324fde0a8e5257a4d6260"),
    b"\x00": ("fd24034ea9930e1260624d7a25e5a8e0", "7d590f70c2772d28c751c69e1539948d"),
    bytes(range(37)): ("ea8fa41d33ee0ea798d9063251be64e0", "175637a515c2a8894c09a4765d091b24"),
    b"weightcast" * 100: ("013343207a890f6a7fe8d35f33bf6469", "483ac95ac3e26152939227bec680448c"),
}


@pytest.mark.parametrize("data", GOLDEN)
def test_golden(data: bytes) -> None:
    raw, final = GOLDEN[data]
    assert hash_bytes(array(data)).hex() == raw
    assert finalise(hash_bytes(array(data)), len(data)).hex() == final


@settings(deadline=None)  # the first example compiles
@given(st.binary(max_size=100), st.integers(0, 1 << 50))
def test_both_kernels_agree_with_the_reference(data: bytes, first: int) -> None:
    expected = reference_lanes(data, first)
    assert hash_bytes(array(data), first) == expected
    assert oracle.hash_bytes(array(data), first) == expected


@pytest.mark.parametrize("offset", range(9))
def test_unaligned_and_read_only_bytes(offset: int) -> None:
    data = np.random.default_rng(5).integers(0, 256, 4099, dtype=np.uint8).tobytes()
    view = array(bytes(offset) + data)[offset:]
    writable = view.copy()
    assert hash_bytes(view) == hash_bytes(writable) == reference_lanes(data)
    assert writable.flags.writeable


def test_blocks_of_the_plain_kernel_add_up() -> None:
    data = np.random.default_rng(6).integers(0, 256, 2 * oracle.BLOCK + 11, dtype=np.uint8)
    assert oracle.hash_bytes(data, 7) == hash_bytes(data, 7)


CUT = st.tuples(st.integers(0, 700), st.integers(0, 700), st.integers(0, 1 << 50))


@settings(deadline=None)  # the first example compiles
@given(st.binary(min_size=700, max_size=700), st.lists(CUT, max_size=6))
def test_many_pieces_have_the_lanes_of_each(data: bytes, cuts: list[tuple[int, int, int]]) -> None:
    pieces = np.array([(min(a, b), max(a, b), first) for a, b, first in cuts], np.int64).reshape(-1, 3)
    expected = [reference_lanes(data[start:stop], first) for start, stop, first in pieces.tolist()]
    for found in (hash_pieces(array(data), pieces), oracle.hash_pieces(array(data), pieces)):
        assert [Lanes(*row) for row in found.tolist()] == expected


@pytest.mark.parametrize("piece", [(0, 9, 0), (-1, 3, 0), (9, 10, 0)])
def test_pieces_outside_the_bytes_are_not_read(piece: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pieces out of bounds"):
        hash_pieces(array(bytes(8)), np.array([(0, 8, 0), piece], np.int64))


@settings(deadline=None)  # the first example compiles
@given(st.binary(min_size=1, max_size=80), st.integers(0, 9))
def test_pieces_at_word_borders_add_up(data: bytes, cut: int) -> None:
    head, tail = data[: 8 * cut], data[8 * cut :]
    assert hash_bytes(array(head)).plus(hash_bytes(array(tail), cut)) == hash_bytes(array(data))


@settings(deadline=None)  # the first example compiles
@given(st.binary(min_size=1, max_size=80), st.data())
def test_any_damage_within_one_word_is_found(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    damaged = bytearray(data)
    damaged[place] ^= draw.draw(st.integers(1, 255))
    before, after = hash_bytes(array(data)), hash_bytes(array(bytes(damaged)))
    assert before.a != after.a and before.b != after.b


def test_zeros_of_different_lengths_differ_once_finalised() -> None:
    final = {finalise(hash_bytes(np.zeros(n, np.uint8)), n) for n in range(200)}
    assert len(final) == 200


@settings(deadline=None)
@given(st.integers(0, M), st.integers(0, M), st.integers(0, M), st.integers(0, M))
def test_minus_undoes_plus(a: int, b: int, c: int, d: int) -> None:
    one, other = Lanes(a, b), Lanes(c, d)
    assert one.plus(other).minus(other) == one
    assert one.minus(one) == ZERO
    assert Lanes.from_hex(one.hex()) == one
