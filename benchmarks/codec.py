"""Sizes and speeds of the chunk encodings: python -m benchmarks.codec [--quick] [--trained] [--json FILE]

GB/s are bytes of *model* per second of wall clock. Contenders take turns within each round, so that all meet
the same machine, and the best of all rounds counts. `xor` is what the field does, built with equal care:
chunk by chunk, zstd's working memory and the buffers kept per thread. Encoding includes the comparison,
decoding the writing of the new words.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import zstandard

from benchmarks.bounds import bounds
from benchmarks.steps import Case, Words, simulated, trained
from weightcast.shared.codec.changes import compare
from weightcast.shared.codec.choose import StepEncoding
from weightcast.shared.codec.container import decode_chunk, encode_chunk
from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.digest.hash import hash_bytes
from weightcast.shared.digest.touched import span_sums
from weightcast.shared.words import CHUNK_WORDS, Chunk, Span

DENSITIES = (0.003, 0.014, 0.04, 0.08, 0.18, 0.5)
QUICK_DENSITIES = (0.014, 0.18)
RATES = (1e-6, 3e-6)

Work = Callable[[], object]


class _Xor(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()
        self.buffer = np.empty(CHUNK_WORDS, np.uint16)

    def encode(self, old: Words, new: Words) -> bytes:
        different = np.bitwise_xor(old, new, out=self.buffer[: len(old)])
        return self.compressor.compress(different.data)

    def decode(self, blob: bytes, words: Words) -> None:
        np.bitwise_xor(words, np.frombuffer(self.decompressor.decompress(blob), words.dtype), out=words)


_XOR = _Xor()


@dataclass(frozen=True)
class _Piece:
    """One chunk of a case, and a copy of its old words to write to."""

    chunk: Chunk
    old: Words
    new: Words
    target: Words


def _pieces(case: Case, most: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    for start in range(0, min(len(case.old), most * CHUNK_WORDS), CHUNK_WORDS):
        old, new = case.old[start : start + CHUNK_WORDS], case.new[start : start + CHUNK_WORDS]
        count = len(old) & ~63
        chunk = Chunk(0, "BF16", len(pieces), (Span(0, 0, count, 0),), count)
        pieces.append(_Piece(chunk, old[:count], new[:count], old[:count].copy()))
    return pieces


def _encode(piece: _Piece, encoding: StepEncoding) -> bytes:
    return encode_chunk(piece.chunk, piece.old, piece.new, compare(piece.old, piece.new), encoding)


def _decode(piece: _Piece, blob: bytes) -> None:
    decode_chunk(blob, piece.chunk, piece.old).apply(piece.target)


def _sums(piece: _Piece) -> object:
    return span_sums(piece.chunk, piece.old, compare(piece.old, piece.new))


def _times(contenders: Mapping[str, Sequence[Work]], threads: int, rounds: int) -> dict[str, float]:
    """Seconds of each contender for all of its work, the best of all rounds."""
    best = dict.fromkeys(contenders, float("inf"))
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):
            for name, works in contenders.items():
                began = time.perf_counter()
                list(pool.map(lambda work: work(), works))
                best[name] = min(best[name], time.perf_counter() - began)
    return best


@dataclass(frozen=True)
class Row:
    case: str
    threads: int
    density: float
    encoding: str
    modes: str
    bits: float
    """per changed word, headers included"""
    bound: float | None
    encode: float
    decode: float
    """GB of model per second"""


def measure(case: Case, threads: int, rounds: int) -> list[Row]:
    pieces = _pieces(case, 2 * threads)
    blobs: dict[str, list[bytes]] = {
        "xor": [_XOR.encode(piece.old, piece.new) for piece in pieces],
        "fast": [_encode(piece, "fast") for piece in pieces],
        "small": [_encode(piece, "small") for piece in pieces],
    }
    _check(pieces, blobs)
    encoding: dict[str, list[Work]] = {
        "xor": [partial(_XOR.encode, piece.old, piece.new) for piece in pieces],
        "fast": [partial(_encode, piece, "fast") for piece in pieces],
        "small": [partial(_encode, piece, "small") for piece in pieces],
    }
    decoding: dict[str, list[Work]] = {
        "xor": [partial(_XOR.decode, *pair) for pair in zip(blobs["xor"], _targets(pieces), strict=True)],
        "fast": [partial(_decode, *pair) for pair in zip(pieces, blobs["fast"], strict=True)],
        "small": [partial(_decode, *pair) for pair in zip(pieces, blobs["small"], strict=True)],
    }
    encoded, decoded = _times(encoding, threads, rounds), _times(decoding, threads, rounds)
    size = sum(piece.old.nbytes for piece in pieces) / 1e9
    changed = sum(int(np.count_nonzero(piece.old != piece.new)) for piece in pieces)
    ideal: dict[str, float] = asdict(bounds(case))
    return [
        Row(
            case.name,
            threads,
            case.density,
            name,
            "" if name == "xor" else ",".join(sorted({str(blob[0]) for blob in made})),
            8 * sum(map(len, made)) / changed,
            ideal.get(name),
            size / encoded[name],
            size / decoded[name],
        )
        for name, made in blobs.items()
    ]


def _targets(pieces: Sequence[_Piece]) -> list[Words]:
    return [piece.target for piece in pieces]


def _check(pieces: Sequence[_Piece], blobs: Mapping[str, Sequence[bytes]]) -> None:
    for encoding in ("fast", "small"):
        for piece, blob in zip(pieces, blobs[encoding], strict=True):
            _decode(piece, blob)
            if not np.array_equal(piece.target, piece.new):
                raise SystemExit(f"{encoding} did not bring the new words back")
            piece.target[:] = piece.old


@dataclass(frozen=True)
class Floor:
    threads: int
    copy: float
    read: float
    compare: float
    hash: float
    sums: float
    """all in GB of model per second; `compare` and `sums` at 1.4%, `sums` with its comparison"""


def floors(threads: int, rounds: int) -> Floor:
    pieces = _pieces(simulated(2 * threads * CHUNK_WORDS, 0.014, 1), 2 * threads)
    times = _times(
        {
            "copy": [partial(np.copyto, piece.target, piece.old) for piece in pieces],
            "read": [partial(np.bitwise_xor.reduce, piece.old.view(np.uint64)) for piece in pieces],
            "compare": [partial(compare, piece.old, piece.new) for piece in pieces],
            "hash": [partial(hash_bytes, piece.old.view(np.uint8)) for piece in pieces],
            "sums": [partial(_sums, piece) for piece in pieces],
        },
        threads,
        rounds,
    )
    size = sum(piece.old.nbytes for piece in pieces) / 1e9
    return Floor(threads, **{name: size / seconds for name, seconds in times.items()})


def _show_floor(floor: Floor) -> None:
    facts = ", ".join(f"{name} {value:.1f}" for name, value in asdict(floor).items() if name != "threads")
    print(f"\n{floor.threads} threads, GB/s: {facts}")
    print(
        f"{'case':>20} {'changed':>8} {'encoding':>9} {'mode':>4} {'bits':>6} {'bound':>6} {'over':>6}",
        end="",
    )
    print(f" {'enc':>6} {'dec':>6}")


def _show(row: Row) -> None:
    bound = f"{row.bound:6.2f} {row.bits / row.bound - 1:6.1%}" if row.bound is not None else " " * 13
    print(
        f"{row.case:>20} {row.density:8.2%} {row.encoding:>9} {row.modes:>4} {row.bits:6.2f} {bound}", end=""
    )
    print(f" {row.encode:6.2f} {row.decode:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="sizes and speeds of the chunk encodings")
    parser.add_argument("--quick", action="store_true", help="two densities, few rounds, one thread")
    parser.add_argument("--trained", action="store_true", help="steps of a small transformer too (torch)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    asked = parser.parse_args()
    warm_up()
    rounds = 3 if asked.quick else 7
    cores = len(os.sched_getaffinity(0))
    every_threads = [1] if asked.quick else sorted({1, 2, cores} & set(range(1, cores + 1)))
    learned = list(trained(RATES)) if asked.trained else []
    done: list[Floor] = []
    rows: list[Row] = []
    for threads in every_threads:
        done.append(floors(threads, rounds))
        _show_floor(done[-1])
        for density in QUICK_DENSITIES if asked.quick else DENSITIES:
            rows += _measured(simulated(2 * threads * CHUNK_WORDS, density, 0), threads, rounds)
        for case in learned:
            rows += _measured(case, threads, rounds)
    if asked.json is not None:
        figures = {"floors": [asdict(one) for one in done], "rows": [asdict(row) for row in rows]}
        asked.json.write_text(json.dumps(figures, indent=1))


def _measured(case: Case, threads: int, rounds: int) -> list[Row]:
    rows = measure(case, threads, rounds)
    for row in rows:
        _show(row)
    return rows


if __name__ == "__main__":
    main()
