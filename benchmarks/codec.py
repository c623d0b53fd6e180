"""Sizes and speeds of the encodings on chunks in memory, digests included, beside the field's path.

Contenders take turns within each round, so that all meet the same machine, and another one begins each, so
that what one leaves to the next counts for all alike. The first round is not counted.
Publishing a chunk compares, hashes all new bytes, sums the touched words, encodes; the field's way is xor,
zstd and hash. Applying decodes with the sums over touched words, and writes; the field's way is zstd, xor and
hash. Both read and write the same words, forth and back in turns. Chunks without changes are not stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal, get_args

import numpy as np

from weightcast.shared.base.elements import CHUNK_WORDS, Chunk, Span
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.codec.changes import compare, scan
from weightcast.shared.codec.container import StepEncoding, decode_step, encode_chunk
from weightcast.shared.digest.checksums import hash_bytes
from weightcast.shared.kernels.parallel import ordered

from .bounds import bounds
from .field_path import FieldChunks
from .results import ChunkRow, FloorRow, Spread
from .steps import Case, Words, simulated

DENSITIES = (0.0, 0.003, 0.014, 0.04, 0.08, 0.18, 0.28, 0.35, 0.5, 1.0)
RATES = (2e-7, 5e-7, 1e-6, 3e-6, 1e-5)
"""learning rates of the trained traces"""

CHUNKS = 8
"""per thread: more than caches hold"""
_PASSES = 4
"""over them in a row, so that the begin and the end, where one thread waits, count little"""

Job = Callable[[], object]
Trace = Literal["simulated", "trained", "unrelated"]
_FIELD = FieldChunks()


Blobs = tuple[bytes, bytes]
"""of a chunk: forth, back"""


@dataclass
class _Piece:
    """One chunk of a case, and words to write to: the old ones until `arrived`."""

    chunk: Chunk
    old: Words
    new: Words
    target: Words
    arrived: bool = False

    def back(self) -> _Piece:
        return replace(self, old=self.new, new=self.old)


def _pieces(case: Case, most: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    for start in range(0, min(len(case.old), most * CHUNK_WORDS), CHUNK_WORDS):
        old, new = case.old[start : start + CHUNK_WORDS], case.new[start : start + CHUNK_WORDS]
        count = len(old) & ~63
        chunk = Chunk(0, "BF16", len(pieces), (Span(0, 0, count, 0),), count)
        pieces.append(_Piece(chunk, old[:count], new[:count], old[:count].copy()))
    return pieces


def _publish(piece: _Piece, encoding: StepEncoding) -> bytes:
    changes = scan(piece.chunk, piece.old, piece.new).changes
    if not len(changes):
        return b""
    return encode_chunk(piece.chunk, piece.old, piece.new, changes, encoding)


def _apply(piece: _Piece, blob: bytes) -> None:
    changes, _ = decode_step(blob, piece.chunk, piece.target)
    changes.apply(piece.target)


def _publish_field(piece: _Piece) -> bytes:
    return _FIELD.encode(piece.old.view(np.uint8), piece.new.view(np.uint8))[0]


def _apply_field(piece: _Piece, blob: bytes) -> None:
    _FIELD.decode(blob, piece.target.view(np.uint8))


@dataclass(frozen=True)
class _Contender:
    publish: Callable[[_Piece], bytes]
    apply: Callable[[_Piece, bytes], None]
    own: StepEncoding | None

    def move(self, piece: _Piece, blobs: Blobs) -> None:
        """Forth, or back where it has arrived. Nothing where nothing changes."""
        blob = blobs[piece.arrived]
        if blob:
            self.apply(piece, blob)
            piece.arrived = not piece.arrived


_CONTENDERS: dict[str, _Contender] = {
    **{name: _Contender(partial(_publish, encoding=name), _apply, name) for name in get_args(StepEncoding)},
    "field": _Contender(_publish_field, _apply_field, None),
}


def _times(jobs: Mapping[str, list[Job]], threads: int, rounds: int) -> dict[str, Spread]:
    """Seconds of each for all of its jobs, which run in threads as the daemons' do."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    order = deque(jobs.items())
    for _ in range(rounds + 1):
        order.rotate(-1)
        for name, mine in order:
            # a job comes again only when it is over
            passes = _PASSES if len(mine) > 2 * threads else 1
            began = perf_counter()
            deque(ordered(lambda job: job(), passes * mine, threads), maxlen=0)
            taken[name].append((perf_counter() - began) / passes)
    return {name: Spread.of(seconds[1:]) for name, seconds in taken.items()}


def measure_case(case: Case, trace: Trace, threads: int, rounds: int) -> Iterator[ChunkRow]:
    """A row for each contender. Raises WeightcastError when one does not bring the new words back."""
    pieces = _pieces(case, CHUNKS * threads)
    blobs = {
        name: [(one.publish(piece), one.publish(piece.back())) for piece in pieces]
        for name, one in _CONTENDERS.items()
    }
    _check(pieces, blobs)
    published = _times(
        {name: [partial(one.publish, p) for p in pieces] for name, one in _CONTENDERS.items()},
        threads,
        rounds,
    )
    applied = _times(
        {
            name: [partial(one.move, *pair) for pair in zip(pieces, blobs[name], strict=True)]
            for name, one in _CONTENDERS.items()
        },
        threads,
        rounds,
    )
    changed = sum(int(np.count_nonzero(piece.old != piece.new)) for piece in pieces)
    ideal: dict[str, float] = asdict(bounds(case)) if changed else {}
    for name, made in blobs.items():
        yield ChunkRow(
            trace=trace,
            case=case.name,
            threads=threads,
            encoding=name,
            modes="".join(sorted({str(forth[0]) for forth, _ in made if forth}))
            if _CONTENDERS[name].own
            else "",
            raw_bytes=sum(piece.old.nbytes for piece in pieces),
            chunks=len(pieces),
            words=sum(len(piece.old) for piece in pieces),
            changed=changed,
            payload_bytes=sum(len(forth) for forth, _ in made),
            bound_bits=ideal.get(name),
            publish=published[name],
            apply=applied[name],
        )


def _check(pieces: Sequence[_Piece], blobs: Mapping[str, Sequence[Blobs]]) -> None:
    for name, one in _CONTENDERS.items():
        for piece, both in zip(pieces, blobs[name], strict=True):
            for words in (piece.new, piece.old):
                one.move(piece, both)
                if not np.array_equal(piece.target, words):
                    raise WeightcastError(f"{name} did not bring the right words")


def measure_floor(threads: int, rounds: int) -> FloorRow:
    """memcpy, reading alone, and the passes that publishing is made of, at 1.4%; `scan` compares, hashes and
    sums."""
    pieces = _pieces(simulated(CHUNKS * threads * CHUNK_WORDS, 0.014, 1), CHUNKS * threads)
    jobs: dict[str, list[Job]] = {
        "memcpy": [partial(np.copyto, piece.target, piece.old) for piece in pieces],
        "read": [partial(np.bitwise_xor.reduce, piece.old.view(np.uint64)) for piece in pieces],
        "compare": [partial(compare, piece.old, piece.new) for piece in pieces],
        "hash": [partial(hash_bytes, piece.old.view(np.uint8)) for piece in pieces],
        "scan": [partial(scan, piece.chunk, piece.old, piece.new) for piece in pieces],
    }
    return FloorRow(
        threads=threads,
        nbytes=sum(piece.old.nbytes for piece in pieces),
        seconds=_times(jobs, threads, rounds),
    )
