"""What one rank holds of a chunk that another one writes, closed up so that the codec can be asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.weights.boxes import Run
from weightcast.shared.words import Chunk, Span, Words, padded

Runs = Mapping[int, tuple[Run, ...]]
"""of what a rank holds: tensor number to runs, ascending"""


@dataclass(frozen=True)
class PackedRun:
    """`run` of a tensor in the chunk: its words there count from `origin`; in the packed words they stand
    from `place`."""

    tensor: int
    run: Run
    origin: int
    place: int

    def within(self, words: Words) -> NDArray[np.unsignedinteger]:
        """A view [count, length] of it in the chunk's words."""
        return self.run.within(words, self.origin)


@dataclass(frozen=True)
class PackedChunk:
    """`chunk` is what the codec sees: one span for each span of the chunk of which something is held."""

    chunk: Chunk
    pieces: tuple[PackedRun, ...]

    def gather(self, words: Words) -> Words:
        """Packed words of the chunk's, zero where padded."""
        packed: Words = np.zeros(self.chunk.words, self.chunk.kind.numpy)
        for piece in self.pieces:
            run = piece.run
            packed[piece.place : piece.place + run.words].reshape(run.count, run.length)[:] = piece.within(
                words
            )
        return packed

    def scatter(self, packed: Words, words: Words) -> None:
        """Writes packed words to where they stand in the chunk's."""
        for piece in self.pieces:
            run = piece.run
            piece.within(words)[:] = packed[piece.place : piece.place + run.words].reshape(
                run.count, run.length
            )


def pack(chunk: Chunk, held: Runs) -> PackedChunk | None:
    """None where nothing of the chunk is held."""
    spans: list[Span] = []
    pieces: list[PackedRun] = []
    filled = 0
    for span in chunk.spans:
        place = filled
        for run in _clipped(held.get(span.tensor, ()), span):
            pieces.append(PackedRun(span.tensor, run, span.start - span.offset, place))
            place += run.words
        if place > filled:
            # numbered from 0: the sums of packed words prove only that both sides have the same ones
            spans.append(Span(span.tensor, 0, place - filled, filled))
            filled += padded(place - filled)
    if not spans:
        return None
    return PackedChunk(Chunk(chunk.part, chunk.dtype, chunk.number, tuple(spans), filled), tuple(pieces))


def _clipped(runs: Sequence[Run], span: Span) -> Iterator[Run]:
    for run in runs:
        yield from run.clip(span.start, span.stop)
