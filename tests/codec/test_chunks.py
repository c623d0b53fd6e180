"""Round trips of chunks, what a blob may weigh, and what becomes of damaged ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import codec_cases as cases
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.elements import DTYPES, Chunk, Words, kind_of
from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.codec.changes import Changes, compare
from weightcast.shared.codec.container import HEADER, Mode, StepEncoding, decode_step, encode_chunk

compiles = settings(deadline=None)  # the first example compiles

SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=5)
DENSITIES = st.sampled_from([0.0, 0.003, 0.02, 0.1, 0.5, 1.0])
SPECIALS = {
    # ±0, subnormals, the greatest, infinities, NaNs with payloads of both signs
    "BF16": "0 8000 1 8001 7f 807f 80 8080 7f7f ff7f 7f80 ff80 7fc1 7fff ffc0 ffff",
    "F32": "0 80000000 1 80000001 7f7fffff ff7fffff 7f800000 ff800000 7fc00001 7fffffff ffc00000 ffffffff",
    "F8_E4M3": "0 80 1 81 7e fe 7f ff",
    "I32": "0 1 7fffffff 80000000 ffffffff",
    "I8": "0 1 7f 80 ff",
}


def assert_round_trip(chunk: Chunk, old: Words, new: Words) -> bytes:
    """In both encodings. Returns the blob of `fast`."""
    changes = compare(old, new)
    old.flags.writeable = False
    assert_decodes(encode_chunk(chunk, old, new, changes, "small"), chunk, old, changes)
    blob = encode_chunk(chunk, old, new, changes)
    assert_decodes(blob, chunk, old, changes)
    return blob


def assert_decodes(blob: bytes, chunk: Chunk, old: Words, changes: Changes) -> None:
    decoded = cases.those_that_change(decode_step(memoryview(blob), chunk, old)[0])
    for name in ("index", "old", "new"):
        assert getattr(decoded, name).tobytes() == getattr(changes, name).tobytes()
        assert getattr(decoded, name).dtype == getattr(changes, name).dtype
    assert len(blob) <= cases.counted(chunk) * chunk.kind.width + 64


@compiles
@given(st.sampled_from(sorted(DTYPES)), SIZES, DENSITIES, st.integers(0, 1 << 30))
def test_small_steps(dtype: str, sizes: list[int], density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunk = cases.chunk_of(dtype, sizes)
    old = cases.weights(chunk, rng)
    assert_round_trip(chunk, old, cases.stepped(chunk, old, density, 0.2, rng))


@compiles
@given(st.sampled_from(sorted(DTYPES)), SIZES, DENSITIES, st.integers(0, 1 << 30))
def test_any_words(dtype: str, sizes: list[int], density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunk = cases.chunk_of(dtype, sizes)
    old, new = cases.random_words(chunk, rng), cases.random_words(chunk, rng)
    keep = rng.random(chunk.words) >= density
    new[keep] = old[keep]
    assert_round_trip(chunk, old, new)


@pytest.mark.parametrize("dtype", cases.KINDS)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_chunks_with_contexts(dtype: str, density: float) -> None:
    rng = np.random.default_rng(11)
    chunk = cases.chunk_of(dtype, [9000, 1, 3001])
    old = cases.weights(chunk, rng)
    for longer in (0.0, 0.1, 1.0):
        assert_round_trip(chunk, old, cases.stepped(chunk, old, density, longer, rng))


@pytest.mark.parametrize("dtype", SPECIALS)
def test_special_words_step_to_each_other(dtype: str) -> None:
    words = [int(word, 16) for word in SPECIALS[dtype].split()]
    old, new = (pairs.ravel() for pairs in np.meshgrid(words, words))
    far = 20_000  # unchanged words, so that raw is the longer one
    chunk = cases.chunk_of(dtype, [len(old) + far])
    fill = np.zeros(far, chunk.kind.numpy)
    before = cases.spread(chunk, np.concatenate([old.astype(chunk.kind.numpy), fill]))
    after = cases.spread(chunk, np.concatenate([new.astype(chunk.kind.numpy), fill]))
    assert assert_round_trip(chunk, before, after)[0] == Mode.FAST


def test_the_longest_step_of_fp32_both_ways() -> None:
    chunk = cases.chunk_of("F32", [100])
    old, new = np.zeros(128, np.uint32), np.zeros(128, np.uint32)
    old[[3, 70]], new[[3, 70]] = [0xFFFFFFFF, 0x7FFFFFFF], [0x7FFFFFFF, 0xFFFFFFFF]
    assert assert_round_trip(chunk, old, new)[0] == Mode.FAST


def test_all_words_of_16_bits_step_anywhere() -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    for dtype in ("BF16", "F16", "I16"):
        chunk = cases.chunk_of(dtype, [1 << 16])
        for new in (old + np.uint16(1), old ^ np.uint16(0x8000), np.random.default_rng(2).permutation(old)):
            assert_round_trip(chunk, old, new)


@pytest.mark.parametrize("places", [[0], [299_999], [0, 299_999], [150_000]])
def test_long_gaps(places: list[int]) -> None:
    chunk = cases.chunk_of("BF16", [300_000])
    old = cases.weights(chunk, np.random.default_rng(4))
    new = old.copy()
    new[places] ^= np.uint16(1)
    assert len(assert_round_trip(chunk, old, new)) < 64


@pytest.mark.parametrize(
    "places",
    [
        [*range(0, 200, 2), *range(20_000, 20_200, 2), 290_000, *range(290_002, 290_200, 2)],
        [n * n * 900 for n in range(68)],
    ],
    ids=["some that are escaped among short ones", "four longer than a load"],
)
def test_many_long_gaps(places: Sequence[int]) -> None:
    chunk = cases.chunk_of("BF16", [places[-1] + 1000])
    old = cases.weights(chunk, np.random.default_rng(4))
    new = old.copy()
    new[places] ^= np.uint16(1)
    assert assert_round_trip(chunk, old, new)[0] == Mode.FAST


def test_classes_of_a_large_chunk_come_from_a_sample_that_may_mislead() -> None:
    """Every sixteenth block holds small words that all change, the others large ones that hardly do."""
    rng = np.random.default_rng(14)
    chunk = cases.chunk_of("BF16", [1 << 18])
    sampled = (np.arange(chunk.words) // 64) % 16 == 0
    old = cases.weights(chunk, rng)
    old[sampled] = 0x3000
    for density, rare in ((0.9, sampled), (0.02, ~sampled)):
        new = cases.stepped(chunk, old, density, 0.1, rng)
        new[rare] = old[rare]
        new[:40] = old[:40] ^ np.uint16(1)
        assert_round_trip(chunk, old, new)


@pytest.mark.parametrize("dtype", [dtype for dtype in cases.KINDS if kind_of(dtype).exponent_mask])
def test_small_is_smaller(dtype: str) -> None:
    rng = np.random.default_rng(15)
    chunk = cases.chunk_of(dtype, [30_000])
    old = cases.weights(chunk, rng)
    new = old.copy()
    smallest = np.argsort(old & np.array(chunk.kind.sign_bit - 1, old.dtype))[:6000]
    new[smallest[cases.inside(chunk)[smallest]][::2]] ^= 1
    changes = compare(old, new)
    small = encode_chunk(chunk, old, new, changes, "small")
    assert small[0] == Mode.SMALL
    assert len(small) < 0.9 * len(encode_chunk(chunk, old, new, changes))


def test_a_thousand_scalars() -> None:
    chunk = cases.chunk_of("F32", [1] * 1000)
    old = cases.weights(chunk, np.random.default_rng(5))
    blob = assert_round_trip(chunk, old, cases.stepped(chunk, old, 1.0, 0.1, np.random.default_rng(6)))
    assert len(blob) < 1000


def test_unrelated_words_go_raw_without_padding() -> None:
    chunk = cases.chunk_of("BF16", [1, 65])
    rng = np.random.default_rng(7)
    blob = assert_round_trip(chunk, cases.random_words(chunk, rng), cases.random_words(chunk, rng))
    assert blob[0] == Mode.RAW and len(blob) == 24 + 2 * 66


def test_nothing_changed() -> None:
    chunk = cases.chunk_of("BF16", [100])
    old = cases.weights(chunk, np.random.default_rng(8))
    assert len(decode_step(encode_chunk(chunk, old, old, compare(old, old)), chunk, old)[0]) == 0


def test_size_comes_near_the_entropy() -> None:
    """1.4% of bf16 weights, nine steps of ten by one unit: below 9.6 bits a change."""
    rng = np.random.default_rng(9)
    chunk = cases.chunk_of("BF16", [1 << 20])
    old = cases.weights(chunk, rng)
    new = cases.stepped(chunk, old, 0.014, 0.0, rng)
    assert 8 * len(assert_round_trip(chunk, old, new)) < 9.6 * np.count_nonzero(old != new)


def resealed(blob: bytes) -> bytes:
    """`blob` with the checksum that its damaged bytes need to be looked at."""
    facts = blob[:12] + struct.pack("<I", max(0, len(blob) - 24))
    return facts + struct.pack("<Q", xxhash.xxh3_64_intdigest(facts + blob[24:])) + blob[24:]


def sample(
    mode: int, dtype: str, density: float, encoding: StepEncoding = "fast", words: int = 1900
) -> tuple[Chunk, Words, bytes]:
    rng = np.random.default_rng(10)
    chunk = cases.chunk_of(dtype, [words, 1, 77])
    old = cases.weights(chunk, rng)
    new = cases.weights(chunk, rng) if mode == Mode.PLANES else cases.stepped(chunk, old, density, 0.1, rng)
    blob = encode_chunk(chunk, old, new, compare(old, new), encoding)
    assert blob[0] == mode
    return chunk, old, blob


SAMPLES = [
    sample(Mode.FAST, "BF16", 0.05),
    sample(Mode.FAST, "BF16", 0.9),
    sample(Mode.FAST, "F32", 0.9),
    sample(Mode.FAST, "I8", 0.3),
    sample(Mode.FAST, "F8_E4M3", 0.2),
    sample(Mode.SMALL, "BF16", 0.2, "small"),
    sample(Mode.SMALL, "F8_E4M3", 0.7, "small"),
    sample(Mode.SMALL, "F32", 0.9, "small"),
    sample(Mode.STEPS, "BF16", 0.7, words=4100),
    sample(Mode.STEPS, "I8", 0.9, words=4100),
    sample(Mode.PLANES, "BF16", 1.0, words=4100),
]


def assert_lawful(chunk: Chunk, old: Words, changes: Changes) -> None:
    inside, changes = cases.inside(chunk), cases.those_that_change(changes)
    assert (np.diff(changes.index.astype(np.int64)) > 0).all()
    assert inside[changes.index].all()
    assert (changes.old == old[changes.index]).all() and (changes.old != changes.new).all()
    assert changes.new.dtype == changes.old.dtype == chunk.kind.numpy


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(SAMPLES), st.data())
def test_damage_behind_a_right_checksum_is_refused_or_lawful(
    sample: tuple[Chunk, Words, bytes], draw: st.DataObject
) -> None:
    chunk, old, blob = sample
    damaged = bytearray(blob)
    for _ in range(draw.draw(st.integers(1, 3))):
        near_the_header = draw.draw(st.booleans())
        place = draw.draw(st.integers(0, 160 if near_the_header else len(blob) - 1))
        damaged[min(place, len(blob) - 1)] ^= draw.draw(st.integers(1, 255))
    cut = draw.draw(st.sampled_from([0, 0, 0, 1, 9, len(blob) - 30]))
    try:
        changes = decode_step(resealed(bytes(damaged[: len(blob) - cut])), chunk, old)[0]
    except (DamagedFile, UnknownFormat):
        return
    assert_lawful(chunk, old, changes)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_wrong_count_of_changes_behind_a_right_checksum_is_refused(more: int) -> None:
    for chunk, old, blob in SAMPLES:
        changed = int.from_bytes(blob[8:12], "little") + more
        with pytest.raises(DamagedFile):
            decode_step(resealed(blob[:8] + changed.to_bytes(4, "little") + blob[12:]), chunk, old)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([Mode.RAW, Mode.FAST, Mode.SMALL, Mode.STEPS, Mode.PLANES]),
    st.integers(0, 400),
    st.binary(max_size=300),
)
def test_random_payloads_are_refused_or_lawful(mode: int, changed: int, payload: bytes) -> None:
    chunk, old, _ = SAMPLES[0]
    facts = struct.pack("<BBHIII", mode, 2, 0, cases.counted(chunk), changed, len(payload))
    try:
        changes = decode_step(resealed(facts + bytes(8) + payload), chunk, old)[0]
    except DamagedFile:
        return
    assert_lawful(chunk, old, changes)


@pytest.mark.parametrize("encoding", ["fast", "small"])
@pytest.mark.parametrize("bit", [0x10, 0x80])
def test_signs_that_are_not_filled_with_zeros(encoding: StepEncoding, bit: int) -> None:
    chunk = cases.chunk_of("BF16", [1300])
    old = cases.weights(chunk, np.random.default_rng(12))
    new = old.copy()
    new[::100][:12] += 1
    blob = bytearray(encode_chunk(chunk, old, new, compare(old, new), encoding))
    assert blob[0] == Mode.FAST
    contexts, gaps = blob[HEADER + 1], int.from_bytes(blob[HEADER + 4 : HEADER + 8], "little")
    blob[HEADER + 8 + 8 * contexts + gaps + 1] |= bit
    with pytest.raises(DamagedFile, match="not padded with zeros"):
        decode_step(resealed(bytes(blob)), chunk, old)


@compiles
@given(st.sampled_from(SAMPLES), st.data())
def test_damage_under_the_checksum_is_always_refused(
    sample: tuple[Chunk, Words, bytes], draw: st.DataObject
) -> None:
    chunk, old, blob = sample
    damaged = bytearray(blob)
    damaged[draw.draw(st.integers(0, len(blob) - 1))] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(DamagedFile):
        decode_step(bytes(damaged), chunk, old)


@pytest.mark.parametrize("length", [0, 1, 23, 24, 31, 40])
def test_short_blobs(length: int) -> None:
    chunk, old, blob = SAMPLES[0]
    with pytest.raises(DamagedFile, match="chunk 0 of BF16 in part 0"):
        decode_step(blob[:length], chunk, old)
    with pytest.raises(DamagedFile, match="chunk 0 of BF16 in part 0"):
        decode_step(resealed(blob[:24].ljust(24, b"\0") + blob[24:length]), chunk, old)


@pytest.mark.parametrize("mode", [5, 17, 255])
def test_modes_of_later_releases(mode: int) -> None:
    chunk, old, blob = SAMPLES[0]
    with pytest.raises(UnknownFormat, match=f"mode {mode}"):
        decode_step(resealed(bytes([mode]) + blob[1:]), chunk, old)


def test_a_blob_of_another_chunk() -> None:
    _, _, blob = SAMPLES[0]
    for other in (cases.chunk_of("BF16", [1900, 1, 78]), cases.chunk_of("F32", [1900, 1, 77])):
        with pytest.raises(DamagedFile, match="another chunk"):
            decode_step(blob, other, np.zeros(other.words, other.kind.numpy))


def test_a_count_that_no_payload_can_hold() -> None:
    chunk = cases.chunk_of("BF16", [1 << 22])
    old = np.zeros(chunk.words, np.uint16)
    blob = bytearray(encode_chunk(chunk, old, old, compare(old, old)))
    blob[8:12] = struct.pack("<I", 1 << 22)
    with pytest.raises(DamagedFile, match="shorter"):
        decode_step(resealed(bytes(blob)), chunk, old)


def one_step(dtype: str, place: int, old: int, new: int) -> bytes:
    """A `fast` blob of 200 words, one of them changed."""
    chunk = cases.chunk_of(dtype, [200])
    before = np.zeros(chunk.words, chunk.kind.numpy)
    before[place] = old
    after = before.copy()
    after[place] = new
    return encode_chunk(chunk, before, after, compare(before, after))


def test_a_position_behind_the_last_word() -> None:
    chunk = cases.chunk_of("BF16", [128])
    old = np.zeros(128, np.uint16)
    for place in (128, 150):
        blob = one_step("BF16", place, 0, 1)
        smaller = blob[:4] + struct.pack("<I", 128) + blob[8:]
        with pytest.raises(DamagedFile, match="past the chunk's last word"):
            decode_step(resealed(smaller), chunk, old)


@pytest.mark.parametrize(("old", "new", "base"), [(0x7FFE, 0x7FFF, 0x7FFF), (0xFFFE, 0xFFFF, 0xFFFF)])
def test_a_step_out_of_the_floats(old: int, new: int, base: int) -> None:
    chunk = cases.chunk_of("BF16", [200])
    other = np.full(chunk.words, base, np.uint16)
    with pytest.raises(DamagedFile, match="out of its word"):
        decode_step(one_step("BF16", 7, old, new), chunk, other)


@pytest.mark.parametrize("step", [129, 256, 512])
def test_a_step_longer_than_an_integer(step: int) -> None:
    blob = resealed(b"\1\1" + one_step("I16", 7, 0, step)[2:])
    chunk = cases.chunk_of("I8", [200])
    with pytest.raises(DamagedFile):
        decode_step(blob, chunk, np.zeros(chunk.words, np.uint8))


def test_raw_words_that_change_another_number_than_the_header_says() -> None:
    chunk = cases.chunk_of("BF16", [40])
    rng = np.random.default_rng(13)
    old, new = cases.random_words(chunk, rng), cases.random_words(chunk, rng)
    blob = encode_chunk(chunk, old, new, compare(old, new))
    assert blob[0] == Mode.RAW
    with pytest.raises(DamagedFile, match="40 words change, expected 39"):
        decode_step(resealed(blob[:8] + struct.pack("<I", 39) + blob[12:]), chunk, old)


def unchanged(mode: int, payload: bytes) -> bytes:
    """A blob that says that nothing changes in 64 words of BF16."""
    facts = struct.pack("<BBHIII", mode, 2, 0, 64, 0, len(payload))
    return resealed(facts + bytes(8) + payload)


def test_streams_that_nothing_reads_are_refused() -> None:
    chunk = cases.chunk_of("BF16", [64])
    old = np.zeros(64, np.uint16)
    nothing, end = bytes(8), bytes(8)
    empty_run = struct.pack("<BBBBI", 2, 0, 0, 0, 1)
    gap_of_100 = bytes([1 | 100 << 1])
    beyond = struct.pack("<BBBBII", 0, 7, 0, 0, 1, 1)
    payloads = {
        Mode.FAST: struct.pack("<BBBBI", 0, 1, 0, 0, 0) + empty_run + b"\1" + end,
        Mode.SMALL: struct.pack("<BBBBI", 1, 1, 0, 0, 1) + nothing + beyond + gap_of_100 + end,
    }
    for mode, payload in payloads.items():
        with pytest.raises(DamagedFile):
            decode_step(unchanged(mode, payload), chunk, old)
    lawful = struct.pack("<BBBBI", 0, 1, 0, 0, 0) + nothing + end
    assert len(decode_step(unchanged(Mode.FAST, lawful), chunk, old)[0]) == 0


def test_old_words_of_another_chunk_are_a_callers_error() -> None:
    chunk, old, blob = SAMPLES[0]
    for wrong in (old[:-64], old.astype(np.uint32)):
        with pytest.raises(ValueError, match="old words"):
            decode_step(blob, chunk, wrong)
