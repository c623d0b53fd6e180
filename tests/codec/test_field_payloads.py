"""The field's payloads: golden bytes, round trips in pieces, and what a reader refuses."""

from __future__ import annotations

import contextlib
import gc
import itertools
import struct
import weakref
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.shared.base.errors import DamagedFile, Refused, UnknownFormat
from weightcast.shared.codec.slime import ONE_SHOT, PayloadWriter, digest_stream, open_payload

OLD_A = np.arange(16, dtype=np.uint16).view(np.uint8)
NEW_A = np.array([0, 0x1234, *range(2, 16)], np.uint16).view(np.uint8)
OLD_C = np.frombuffer(struct.pack("<f", 1.5), np.uint8)
NEW_C = np.frombuffer(struct.pack("<f", 2.5), np.uint8)


def one_shot(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw)


def written(encoding: str, old: np.ndarray, new: np.ndarray, cuts: Sequence[int] = ()) -> bytes:
    out = bytearray()
    borders = [0, *sorted(cuts), len(old)]
    with closing(PayloadWriter(encoding, len(old), out.extend)) as writer:
        for start, stop in itertools.pairwise(borders):
            writer.step(old[start:stop], new[start:stop])
        writer.finish()
    return bytes(out)


def read(encoding: str, payload: bytes, old: np.ndarray, cuts: Sequence[int] = ()) -> np.ndarray:
    reader = open_payload(encoding, lambda at, count: payload[at : at + count], len(payload), len(old))
    borders = [0, *sorted(cuts), len(old)]
    pieces = [reader.step(old[start:stop]) for start, stop in itertools.pairwise(borders)]
    reader.finish()
    return np.concatenate(pieces)


def sparse_raw(old: np.ndarray, new: np.ndarray, form: str, positions: Sequence[int] | None = None) -> bytes:
    places = np.flatnonzero(old != new) if positions is None else np.array(positions, np.int64)
    inside = np.minimum(places, max(0, len(old) - 1))
    values = new[inside] if form == "<u4" else new[inside] ^ old[inside]
    return np.array([len(places)], form).tobytes() + places.astype(form).tobytes() + values.tobytes()


def test_golden_xor() -> None:
    frame = bytes.fromhex("28b52ffd20205d0000280000351200010021d002")
    assert written("xor", OLD_A, NEW_A) == frame == one_shot(bytes.fromhex("00003512") + bytes(28))
    assert read("xor", frame, OLD_A).tobytes() == NEW_A.tobytes()
    scalar = bytes.fromhex("28b52ffd20042100000000e07f")
    assert written("xor", OLD_C, NEW_C) == scalar
    assert read("xor", scalar, OLD_C).tobytes() == NEW_C.tobytes()


def test_golden_overwrite() -> None:
    frame = one_shot(bytes.fromhex("0200000002000000030000003412"))
    assert written("overwrite", OLD_A, NEW_A) == frame
    assert read("overwrite", frame, OLD_A).tobytes() == NEW_A.tobytes()


def test_golden_digests() -> None:
    expected = {
        "xxh3-128": "56b698bbbb5f3d93ca12935fa509eb40",
        "blake3": "5e53db636660aaa0a9cb476be3e49ba74cbeb10ea9d8a4c831736e31e85fae02",
        "adler32": "0d7400be",
    }
    for checksum_format, value in expected.items():
        stream = digest_stream(checksum_format)
        for start in range(0, 32, 7):
            stream.update(NEW_A[start : start + 7].tobytes())
        assert stream.hexdigest() == value
    assert digest_stream("adler32").hexdigest() == "00000001"
    with pytest.raises(UnknownFormat, match="md5"):
        digest_stream("md5")


BYTES = st.integers(0, 3000)


@settings(deadline=None)
@given(st.sampled_from(["xor", "overwrite"]), BYTES, st.floats(0, 1), st.integers(0, 1 << 30), st.data())
def test_round_trip_in_any_pieces(
    encoding: str, size: int, density: float, seed: int, draw: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    new = np.where(rng.random(size) < density, rng.integers(0, 256, size, dtype=np.uint8), old)
    cuts = draw.draw(st.lists(st.integers(0, size), max_size=5))
    payload = written(encoding, old, new, cuts)
    raw = (old ^ new).tobytes() if encoding == "xor" else sparse_raw(old, new, "<u4")
    assert payload == one_shot(raw)
    assert (
        read(encoding, payload, old, draw.draw(st.lists(st.integers(0, size), max_size=5))).tobytes()
        == new.tobytes()
    )


@pytest.mark.parametrize("size", [ONE_SHOT - 1, ONE_SHOT, ONE_SHOT + 1, 3 * ONE_SHOT])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_long_tensors(encoding: str, size: int) -> None:
    rng = np.random.default_rng(12)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    new[rng.integers(0, size, size // 2)] ^= 1
    cuts = range(1 << 20, size, 1 << 20)
    payload = written(encoding, old, new, cuts)
    assert zstandard.get_frame_parameters(payload).content_size != zstandard.CONTENTSIZE_UNKNOWN
    assert (read(encoding, payload, old, cuts) == new).all()
    if encoding == "xor" and size <= ONE_SHOT:
        assert payload == one_shot((old ^ new).tobytes())


@settings(deadline=None)
@given(BYTES, st.integers(0, 1 << 30))
def test_xor_sparse_is_read(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = rng.integers(0, 4, (2, size), dtype=np.uint8)
    payload = one_shot(sparse_raw(old, new, "<u8"))
    assert read("xor_sparse", payload, old, [size // 3]).tobytes() == new.tobytes()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_reader_gives_its_memory_back(encoding: str) -> None:
    """A window and a source for each tensor of each version; what leads in a circle through zstandard's
    reader is never freed."""

    class Held:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self, at: int, count: int) -> bytes:
            return self.data[at : at + count]

    held = Held(written(encoding, OLD_A, NEW_A))
    reader = open_payload(encoding, held.read, len(held.data), len(OLD_A))
    assert reader.step(OLD_A).tobytes() == NEW_A.tobytes()
    reader.finish()
    seen = weakref.ref(held)
    del held, reader
    gc.collect()
    assert seen() is None


def test_nothing_changed_and_no_bytes() -> None:
    empty = np.zeros(0, np.uint8)
    for encoding in ("xor", "overwrite"):
        assert read(encoding, written(encoding, OLD_A, OLD_A), OLD_A).tobytes() == OLD_A.tobytes()
        assert read(encoding, written(encoding, empty, empty), empty).size == 0


BAD_POSITIONS = {
    "descending": [5, 3],
    "twice": [3, 3],
    "behind the end": [1, 32],
    "far behind": [1, (1 << 32) - 1],
}


@pytest.mark.parametrize("positions", BAD_POSITIONS.values(), ids=BAD_POSITIONS)
@pytest.mark.parametrize(("encoding", "form"), [("overwrite", "<u4"), ("xor_sparse", "<u8")])
def test_positions_out_of_order_or_range(encoding: str, form: str, positions: list[int]) -> None:
    with pytest.raises(DamagedFile, match="positions"):
        read(encoding, one_shot(sparse_raw(OLD_A, NEW_A, form, positions)), OLD_A)


def test_a_position_at_the_far_end_of_64_bits() -> None:
    with pytest.raises(DamagedFile, match="positions"):
        read("xor_sparse", one_shot(struct.pack("<QQB", 1, (1 << 64) - 1, 7)), OLD_A)


def test_order_is_kept_across_blocks() -> None:
    size = 300_000
    old, new = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    places = np.arange(size)
    places[200_000:] -= 1
    with pytest.raises(DamagedFile, match="positions"):
        read("overwrite", one_shot(sparse_raw(old, new, "<u4", places)), old)
    assert (read("overwrite", one_shot(sparse_raw(old, new, "<u4")), old, [70_001]) == new).all()


FRAMES = {
    "two frames": one_shot(bytes(32)) * 2,
    "an empty frame behind": one_shot(bytes(32)) + one_shot(b""),
    "a skippable frame before": b"\x50\x2a\x4d\x18\x00\x00\x00\x00" + one_shot(bytes(32)),
    "rubbish behind": one_shot(bytes(32)) + b"x",
    "cut": one_shot(bytes(range(32)))[:-1],
    "cut in the header": one_shot(bytes(32))[:5],
    "nothing": b"",
    "rubbish": b"rubbish, and enough of it",
    "no content size": zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(32)),
    "another size": one_shot(bytes(33)),
}


@pytest.mark.parametrize("payload", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("encoding", ["xor", "overwrite", "xor_sparse"])
def test_frames_that_are_refused(encoding: str, payload: bytes) -> None:
    with pytest.raises(DamagedFile, match="payload of a tensor"):
        read(encoding, payload, OLD_A)


def test_a_frame_that_expands_far_beyond_the_tensor_is_not_decompressed() -> None:
    with pytest.raises(DamagedFile, match="holds 1073741824 bytes"):
        payload = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
        bomb = b"".join(payload.compress(bytes(1 << 20)) for _ in range(1 << 10)) + payload.flush()
        read("overwrite", bomb, OLD_A)


def test_a_window_beyond_the_limit() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=20 << 20)
    payload = stream.compress(bytes(20 << 20)) + stream.flush()
    with pytest.raises(UnknownFormat, match="window"):
        open_payload("xor", lambda at, count: payload[at : at + count], len(payload), 20 << 20)


def test_a_dictionary() -> None:
    dictionary = zstandard.train_dictionary(1024, [bytes([n % 7, n % 11, 5] * 40) for n in range(2000)])
    payload = zstandard.ZstdCompressor(level=1, dict_data=dictionary).compress(bytes(32))
    with pytest.raises(DamagedFile, match="dictionary"):
        read("xor", payload, OLD_A)


def test_the_frames_own_checksum_counts() -> None:
    payload = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(bytes(32))
    assert read("xor", payload, OLD_A).tobytes() == OLD_A.tobytes()
    with pytest.raises(DamagedFile, match="damaged"):
        read("xor", payload[:-1] + bytes([payload[-1] ^ 1]), OLD_A)


def test_counts_that_do_not_fit() -> None:
    for raw in (
        b"",
        b"\0\0\0",
        struct.pack("<I", 1),
        struct.pack("<IIB", 2, 0, 0),
        struct.pack("<I", 0) + b"x",
    ):
        with pytest.raises(DamagedFile):
            read("overwrite", one_shot(raw), OLD_A)
    with pytest.raises(DamagedFile, match="no number of changes"):
        read("overwrite", one_shot(struct.pack("<I", 33) + bytes(5 * 33)), OLD_A)


def test_a_reader_that_gets_less_than_the_whole() -> None:
    payload = written("xor", OLD_A, NEW_A)
    reader = open_payload("xor", lambda at, count: payload[at : at + count], len(payload), 32)
    reader.step(OLD_A[:30])
    with pytest.raises(DamagedFile, match="longer than the tensor"):
        reader.finish()
    payload = one_shot(sparse_raw(OLD_A, NEW_A, "<u4"))
    sparse = open_payload("overwrite", lambda at, count: payload[at : at + count], len(payload), 32)
    sparse.step(OLD_A[:3])
    with pytest.raises(DamagedFile, match="1 changes past the tensor"):
        sparse.finish()


def test_a_file_that_became_shorter() -> None:
    payload = written("xor", OLD_A, NEW_A)
    with pytest.raises(DamagedFile, match="truncated"):
        open_payload("xor", lambda at, count: payload[:12][at : at + count], len(payload), 32)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["xor", "overwrite", "xor_sparse"]), st.data())
def test_damaged_payloads_are_refused_or_stay_in_bounds(encoding: str, draw: st.DataObject) -> None:
    raw = {
        "xor": (OLD_A ^ NEW_A).tobytes(),
        "overwrite": sparse_raw(OLD_A, NEW_A, "<u4"),
        "xor_sparse": sparse_raw(OLD_A, NEW_A, "<u8"),
    }[encoding]
    damaged = bytearray(one_shot(raw))
    for _ in range(draw.draw(st.integers(1, 3))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(DamagedFile, UnknownFormat):
        assert len(read(encoding, bytes(damaged), OLD_A, [5])) == 32


def test_overwrite_refuses_what_it_cannot_address() -> None:
    with pytest.raises(Refused, match=r"lm_head.*--encoding fast or xor"):
        PayloadWriter("overwrite", (1 << 32) + 1, bytearray().extend, name="lm_head")


def test_a_writer_that_was_given_too_little() -> None:
    with closing(PayloadWriter("overwrite", 32, bytearray().extend)) as writer:
        writer.step(OLD_A[:4], NEW_A[:4])
        with pytest.raises(ValueError, match="got 4 bytes, expected 32"):
            writer.finish()


def test_unknown_encoding() -> None:
    with pytest.raises(UnknownFormat, match="gzip"):
        read("gzip", one_shot(bytes(32)), OLD_A)
