"""Blobs that every later release must read. The encoder makes the same bytes; a second decoder reads them."""

from __future__ import annotations

from pathlib import Path

import codec_cases as cases
import numpy as np
import pytest
import reference_decoder

from weightcast.shared.codec.changes import compare
from weightcast.shared.codec.container import decode_chunk, encode_chunk
from weightcast.shared.words import Chunk, Words

FOLDER = Path(__file__).parent.parent / "golden" / "codec"
SIZES = [1, 70, 1300, 3]
SHAPES = {"sparse": (1, 0.02, 0.6), "dense": (1, 0.9, 0.1), "raw": (0, 1.0, 1.0)}
"""of each: mode byte, share of changed words, share of them with a step longer than one"""


def read(name: str, chunk: Chunk) -> Words:
    return np.frombuffer((FOLDER / name).read_bytes(), chunk.kind.numpy)


def reference_words(blob: bytes, chunk: Chunk, old: Words) -> Words:
    inside = np.flatnonzero(cases.inside(chunk))
    new = old.copy()
    for position, word in reference_decoder.decode(blob, chunk.dtype, old[inside].tolist()).items():
        new[inside[position]] = word
    return new


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", cases.KINDS)
def test_golden(dtype: str, shape: str) -> None:
    chunk = cases.chunk_of(dtype, SIZES)
    old, new = read(f"{dtype}.old", chunk), read(f"{dtype}-{shape}.new", chunk)
    blob = (FOLDER / f"{dtype}-{shape}.blob").read_bytes()
    assert blob[0] == SHAPES[shape][0]
    words = old.copy()
    decode_chunk(blob, chunk, old).apply(words)
    assert words.tobytes() == new.tobytes()
    assert reference_words(blob, chunk, old).tobytes() == new.tobytes()
    assert encode_chunk(chunk, old, new, compare(old, new)) == blob


def write() -> None:
    """Makes the golden files anew: only for a new format."""
    rng = np.random.default_rng(20)
    for dtype in cases.KINDS:
        chunk = cases.chunk_of(dtype, SIZES)
        old = cases.weights(chunk, rng)
        (FOLDER / f"{dtype}.old").write_bytes(old.tobytes())
        for shape, (mode, density, longer) in SHAPES.items():
            new = cases.stepped(chunk, old, density, longer, rng) if mode else cases.random_words(chunk, rng)
            blob = encode_chunk(chunk, old, new, compare(old, new))
            if blob[0] != mode:
                raise SystemExit(f"{dtype} {shape} came out in mode {blob[0]}")
            (FOLDER / f"{dtype}-{shape}.new").write_bytes(new.tobytes())
            (FOLDER / f"{dtype}-{shape}.blob").write_bytes(blob)


if __name__ == "__main__":
    write()
