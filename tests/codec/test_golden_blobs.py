"""Blobs that every later release must read. The encoder makes the same bytes; a second decoder reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import codec_cases as cases
import numpy as np
import pytest
import reference_decoder

from weightcast.shared.base.elements import Chunk, Words, kind_of
from weightcast.shared.codec.changes import compare
from weightcast.shared.codec.container import HEADER, Mode, StepEncoding, decode_step, encode_chunk

FOLDER = Path(__file__).parent.parent / "golden" / "codec"
SIZES = [1, 70, 1300, 3]
FRAMED_SIZES = [1, 70, 5000, 3]
SHAPES: dict[str, tuple[int, StepEncoding, float, float]] = {
    "sparse": (Mode.FAST, "fast", 0.02, 0.6),
    "dense": (Mode.FAST, "fast", 0.9, 0.1),
    "small": (Mode.SMALL, "small", 0.25, 0.1),
    "inverted": (Mode.SMALL, "small", 0.8, 0.3),
    "raw": (Mode.RAW, "fast", 1.0, 1.0),
    "classes": (Mode.SMALL, "small", 0.9, 0.1),
}
"""of each: mode, encoding, share of changed words, share of them with a step longer than one"""
FLOATS = tuple(dtype for dtype in cases.KINDS if kind_of(dtype).exponent_mask)
FRAMED = {
    "steps": (Mode.STEPS, 0.7, 0.01),
    "planes": (Mode.PLANES, 1.0, 1.0),
    "escapes": (Mode.STEPS, 0.7, 0.01),
}
FRAMED_DTYPES = {
    "steps": ("BF16", "F8_E4M3", "I16", "F32"),
    "planes": ("BF16", "F32"),
    "escapes": ("BF16", "I16", "F32"),
}
"""Frames come from zstandard, whose later releases may write others: these blobs are read only."""


def pairs() -> Iterator[tuple[str, str]]:
    for shape, (mode, *_) in SHAPES.items():
        yield from ((dtype, shape) for dtype in (FLOATS if mode == Mode.SMALL else cases.KINDS))


def framed_pairs() -> Iterator[tuple[str, str]]:
    for shape, dtypes in FRAMED_DTYPES.items():
        yield from ((dtype, shape) for dtype in dtypes)


def read(name: str, chunk: Chunk) -> Words:
    return np.frombuffer((FOLDER / name).read_bytes(), chunk.kind.numpy)


def reference_words(blob: bytes, chunk: Chunk, old: Words) -> Words:
    inside = np.flatnonzero(cases.inside(chunk))
    new = old.copy()
    for position, word in reference_decoder.decode(blob, chunk.dtype, old[inside].tolist()).items():
        new[inside[position]] = word
    return new


def assert_reads(blob: bytes, chunk: Chunk, old: Words, new: Words) -> None:
    words = old.copy()
    decode_step(blob, chunk, old)[0].apply(words)
    assert words.tobytes() == new.tobytes()
    assert reference_words(blob, chunk, old).tobytes() == new.tobytes()


@pytest.mark.parametrize(("dtype", "shape"), list(pairs()))
def test_golden(dtype: str, shape: str) -> None:
    chunk = cases.chunk_of(dtype, SIZES)
    old, new = read(f"{dtype}.old", chunk), read(f"{dtype}-{shape}.new", chunk)
    blob = (FOLDER / f"{dtype}-{shape}.blob").read_bytes()
    mode, encoding, *_ = SHAPES[shape]
    assert blob[0] == mode
    assert shape != "classes" or blob[HEADER] > 1
    assert_reads(blob, chunk, old, new)
    assert encode_chunk(chunk, old, new, compare(old, new), encoding) == blob


@pytest.mark.parametrize(("dtype", "shape"), list(framed_pairs()))
def test_golden_frames(dtype: str, shape: str) -> None:
    chunk = cases.chunk_of(dtype, FRAMED_SIZES)
    old, new = read(f"{dtype}-{shape}.old", chunk), read(f"{dtype}-{shape}.new", chunk)
    blob = (FOLDER / f"{dtype}-{shape}.blob").read_bytes()
    assert blob[0] == FRAMED[shape][0]
    assert shape != "escapes" or words_behind_the_frame(blob, chunk) > 4
    assert_reads(blob, chunk, old, new)
    fresh = encode_chunk(chunk, old, new, compare(old, new))
    assert fresh[0] == blob[0]
    assert_reads(fresh, chunk, old, new)


def words_behind_the_frame(blob: bytes, chunk: Chunk) -> int:
    frame = int.from_bytes(blob[HEADER : HEADER + 4], "little")
    return (len(blob) - HEADER - 4 - frame) // chunk.kind.width


def of_low_exponents(chunk: Chunk, old: Words, new: Words) -> Words:
    """`new` where the old exponent is below the middle one, and in every 40th word; `old` elsewhere."""
    exponents = old >> chunk.kind.exponent_shift & chunk.kind.exponent_mask
    kept = exponents >= np.median(exponents[cases.inside(chunk)])
    kept[::40] = False
    return np.where(kept, old, new)


def with_long_steps(chunk: Chunk, old: Words, new: Words) -> Words:
    """Around the longest step that a byte can say: 127."""
    far = new.copy()
    at = np.flatnonzero(cases.inside(chunk))[::200]
    lengths = np.resize([127, -127, 128, -128, 300, -5000], len(at)).astype(old.dtype)
    far[at] = old[at] + lengths
    return far


def write(shapes: Sequence[str]) -> None:
    """Makes golden files anew: only for a new format, or a new shape."""
    rng, later = np.random.default_rng(20), np.random.default_rng(21)
    for dtype, shape in pairs():
        chunk = cases.chunk_of(dtype, SIZES)
        if not (FOLDER / f"{dtype}.old").exists():
            (FOLDER / f"{dtype}.old").write_bytes(cases.weights(chunk, rng).tobytes())
        mode, encoding, density, longer = SHAPES[shape]
        old = read(f"{dtype}.old", chunk)
        if shape == "classes":
            new = of_low_exponents(chunk, old, cases.stepped(chunk, old, density, longer, later))
        else:
            new = cases.stepped(chunk, old, density, longer, rng) if mode else cases.random_words(chunk, rng)
        if shape in shapes:
            keep(f"{dtype}-{shape}", new, encode_chunk(chunk, old, new, compare(old, new), encoding), mode)
    for dtype, shape in framed_pairs():
        mode, density, longer = FRAMED[shape]
        chunk = cases.chunk_of(dtype, FRAMED_SIZES)
        old = cases.weights(chunk, rng)
        new = (
            cases.stepped(chunk, old, density, longer, rng)
            if mode == Mode.STEPS
            else cases.weights(chunk, rng)
        )
        if shape == "escapes":
            new = with_long_steps(chunk, old, new)
        if shape in shapes:
            (FOLDER / f"{dtype}-{shape}.old").write_bytes(old.tobytes())
            keep(f"{dtype}-{shape}", new, encode_chunk(chunk, old, new, compare(old, new)), mode)


def keep(name: str, new: Words, blob: bytes, mode: int) -> None:
    if blob[0] != mode:
        raise SystemExit(f"{name} came out in mode {blob[0]}")
    (FOLDER / f"{name}.new").write_bytes(new.tobytes())
    (FOLDER / f"{name}.blob").write_bytes(blob)


if __name__ == "__main__":
    write(sys.argv[1:])
