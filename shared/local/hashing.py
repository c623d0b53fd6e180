"""Reading every byte of a local checkpoint: full hashes, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weightcast.shared.codec.parallel import ordered
from weightcast.shared.digest.hash import hash_bytes
from weightcast.shared.digest.lanes import Lanes
from weightcast.shared.digest.root import root
from weightcast.shared.local.local_checkpoint import LocalCheckpoint, WordsIn
from weightcast.shared.local.state import lanes_list
from weightcast.shared.progress import Advance
from weightcast.shared.words import TensorTable

_PIECE = 8 << 20
"""words hashed at a time; a multiple of 8"""


@dataclass(frozen=True)
class _Piece:
    tensor: int
    start: int
    stop: int


def hash_tensors(
    table: TensorTable, words_in: WordsIn, *, threads: int = 1, advance: Advance | None = None
) -> list[Lanes]:
    """Raw lanes of every tensor, in table order, from all of its bytes."""
    lanes = [Lanes()] * len(table)

    def work(piece: _Piece) -> tuple[_Piece, Lanes]:
        words = words_in(piece.tensor, piece.start, piece.stop)
        return piece, hash_bytes(words.view(np.uint8), piece.start * words.itemsize // 8)

    for piece, part in ordered(work, _pieces(table), threads):
        lanes[piece.tensor] = lanes[piece.tensor].plus(part)
        if advance is not None:
            advance((piece.stop - piece.start) * table[piece.tensor].kind.width)
    return lanes


def _pieces(table: TensorTable) -> Iterator[_Piece]:
    for number, spec in enumerate(table):
        for start in range(0, spec.words, _PIECE):
            yield _Piece(number, start, min(start + _PIECE, spec.words))


@dataclass(frozen=True)
class HashReport:
    """What a full hash found. `differing`: names of tensors whose bytes are not the recorded version's."""

    version: int
    root: str
    expected_root: str
    differing: tuple[str, ...]

    @property
    def intact(self) -> bool:
        return not self.differing and self.root == self.expected_root


def full_hash(
    local: LocalCheckpoint, *, threads: int = 1, advance: Advance | None = None, expected: bytes | None = None
) -> HashReport:
    """Hashes all bytes and compares them with the recorded position (or with packed lanes `expected`)."""
    position = local.state.position
    found = hash_tensors(local.table, local.words_in, threads=threads, advance=advance)
    packed = position.lanes if expected is None else expected
    names = tuple(
        spec.name
        for spec, got, wanted in zip(local.table, found, lanes_list(packed), strict=True)
        if got != wanted
    )
    return HashReport(position.version, root(local.table, found), position.root, names)
