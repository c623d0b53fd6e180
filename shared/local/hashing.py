"""Reading every byte of a local checkpoint: full hashes, and what they say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weightcast.shared.codec.parallel import SMALL_RESULTS, ordered
from weightcast.shared.digest.hash import hash_bytes
from weightcast.shared.digest.lanes import Lanes
from weightcast.shared.digest.root import root
from weightcast.shared.errors import NeedsReseed
from weightcast.shared.local.local_checkpoint import LocalCheckpoint, WordsIn
from weightcast.shared.local.state import Position, lanes_list, pack_list
from weightcast.shared.progress import Advance
from weightcast.shared.words import TensorSpec, TensorTable

_PIECE = 8 << 20
"""words hashed at a time; a multiple of 8"""
_BATCH = 1 << 20
"""words from which a thread is given pieces together: thousands of tensors may have a few words each"""


class _Piece(NamedTuple):
    tensor: int
    start: int
    stop: int


def hash_tensors(
    table: TensorTable, words_in: WordsIn, *, threads: int = 1, advance: Advance | None = None
) -> list[Lanes]:
    """Raw lanes of every tensor, in table order, from all of its bytes."""
    lanes = [Lanes()] * len(table)

    def work(batch: Sequence[_Piece]) -> list[tuple[int, Lanes, int]]:
        return [_hashed(piece, words_in) for piece in batch]

    for batch in ordered(work, _batches(table), threads, each=SMALL_RESULTS):
        for tensor, part, _ in batch:
            lanes[tensor] = lanes[tensor].plus(part)
        if advance is not None:
            advance(sum(nbytes for _, _, nbytes in batch))
    return lanes


def hash_tensor(spec: TensorSpec, tensor: int, words_in: WordsIn) -> Lanes:
    """Raw lanes of one tensor, whose number is `tensor`."""
    lanes = Lanes()
    for piece in _pieces(tensor, spec.words):
        lanes = lanes.plus(_hashed(piece, words_in)[1])
    return lanes


def _hashed(piece: _Piece, words_in: WordsIn) -> tuple[int, Lanes, int]:
    """Tensor, lanes and bytes."""
    words = words_in(*piece)
    return piece.tensor, hash_bytes(words.view(np.uint8), piece.start * words.itemsize // 8), words.nbytes


def _pieces(tensor: int, words: int) -> Iterator[_Piece]:
    for start in range(0, words, _PIECE):
        yield _Piece(tensor, start, min(start + _PIECE, words))


def _batches(table: TensorTable) -> Iterator[Sequence[_Piece]]:
    batch: list[_Piece] = []
    filled = 0
    for number, (_, words) in enumerate(table.forms):
        for piece in _pieces(number, words):
            batch.append(piece)
            filled += piece.stop - piece.start
            if filled >= _BATCH:
                yield batch
                batch, filled = [], 0
    if batch:
        yield batch


@dataclass(frozen=True)
class HashReport:
    """What a full hash found. `differing`: names of tensors whose bytes are not the recorded version's."""

    version: int
    root: str
    expected_root: str
    differing: tuple[str, ...]
    lanes: bytes = field(default=b"", repr=False)
    """found, packed as a position's"""

    @property
    def intact(self) -> bool:
        return not self.differing and self.root == self.expected_root


def full_hash(
    local: LocalCheckpoint, *, threads: int = 1, advance: Advance | None = None, expected: bytes | None = None
) -> HashReport:
    """Hashes all bytes and compares them with the recorded position (or with packed lanes `expected`)."""
    position = local.state.position
    found = hash_tensors(local.table, local.words_in, threads=threads, advance=advance)
    names = differing(local.table, found, position.lanes if expected is None else expected)
    return HashReport(
        position.version, root(local.table, found), position.root, tuple(names), pack_list(found)
    )


def differing(table: TensorTable, found: Sequence[Lanes], expected: bytes) -> list[str]:
    """Names of the tensors whose lanes are not those `expected` (packed)."""
    return [
        spec.name
        for spec, got, wanted in zip(table, found, lanes_list(expected), strict=True)
        if got != wanted
    ]


def nearest(table: TensorTable, found: bytes, positions: Sequence[Position]) -> Position:
    """The position from which the fewest bytes of tensors differ; the first of equals. `found`: packed
    lanes."""
    lanes = lanes_list(found)

    def distance(position: Position) -> int:
        return sum(table[table.numbers[name]].nbytes for name in differing(table, lanes, position.lanes))

    return min(positions, key=distance)


class Differs(NeedsReseed):
    """What lies in the local checkpoint is no version: `tensors` are not those of `position`. `whole`: all
    others were read and are right."""

    def __init__(
        self, message: str, position: Position, tensors: Sequence[str], *, whole: bool = True
    ) -> None:
        super().__init__(message, remedy="the next sync repairs it from base and channel, or seeds it again")
        self.position = position
        self.tensors = tuple(tensors)
        self.whole = whole
