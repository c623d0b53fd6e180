"""A rank's new weights without its tensors: the local checkpoint, and the words that differ from it.

Ranks meet in the channel and wait there for it and for each other. A trainer's step waits for neither when
each rank first compares what it holds; all that ranks then send each other is read from here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.ranks.shards import PackedChunk, PackedRun, RankWeights, pack, runs_in
from weightcast.publisher.weights.shard_spec import Box, Run
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import Chunk, Words, grid
from weightcast.shared.base.errors import NeedsReseed, RetryLater
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.codec.changes import Changes, scan
from weightcast.shared.digest.checksums import Lanes, hash_bytes
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import ordered, scratch

_INDEX_BYTES = 4


@dataclass(frozen=True)
class _Stretch:
    """A stretch of a piece, from its word `run.at` on. `index`: uint32[k], ascending, where words differ,
    counted from there; None where `new` is all of its words."""

    run: Run
    index: NDArray[np.uint32] | None
    new: Words

    def read(self, local: LocalCheckpoint, tensor: int, start: int, stop: int, words: Words) -> None:
        """Words [start, stop) of the stretch into `words`."""
        if self.index is None:
            words[:] = self.new[start:stop]
            return
        words[:] = _old_words(local, tensor, self.run, start, stop)
        low, high = np.searchsorted(self.index, (start, stop))
        if low < high:
            kernels().scatter(words, self.index[low:high] - np.uint32(start), self.new[low:high])


def _old_words(local: LocalCheckpoint, tensor: int, run: Run, start: int, stop: int) -> Words:
    """Words [start, stop) of a run's, in the order of the piece."""
    if run.count == 1:
        return local.words_in(tensor, run.first + start, run.first + stop)
    low, high = start // run.length, -(-stop // run.length)
    rows = replace(run, first=run.first + low * run.stride, count=high - low)
    end = rows.first + (rows.count - 1) * rows.stride + rows.length
    found = rows.within(local.words_in(tensor, rows.first, end), rows.first)
    words: Words = found.reshape(-1)[start - low * run.length : stop - low * run.length]
    return words


class ComparedWeights(NewWeights):
    """New weights that are no longer read from their owner. In memory: what differs from `local`, at most as
    many bytes as the rank holds. `local` must stay at `position`, whichever object shows it."""

    def __init__(self, own: RankWeights) -> None:
        self.local = own.local
        self.position: Position = own.local.state.position
        self.table = own.weights.table
        self._rank, self._names = own.rank, own.names
        self._boxes = {spec.name: own.weights.box(spec.name) for spec in own.weights.table}
        self._numbers = {name: number for number, name in own.names.items()}
        self._stretches: dict[int, list[_Stretch]] = {number: [] for number in own.names}
        self._starts: Mapping[int, Sequence[int]] = {}
        self._proofs: list[tuple[PackedChunk, list[Lanes]]] = []

    @classmethod
    def compared(cls, own: RankWeights, threads: int) -> ComparedWeights:
        """Reads `own.weights` once, and never again."""
        made = cls(own)
        mine = runs_in(own.local.table, own.holds)
        with own.local.reading():
            chunks = ((chunk, pack(chunk, mine)) for chunk in grid(own.local.table, own.local.table.whole))
            held = ((chunk, packed) for chunk, packed in chunks if packed is not None)
            for packed, stretches, full in ordered(lambda one: _compare(own, *one), held, threads):
                made._proofs.append((packed, full))
                for tensor, stretch in stretches:
                    made._stretches[tensor].append(stretch)
        made._starts = {number: [s.run.at for s in held] for number, held in made._stretches.items()}
        return made

    def prove(self, threads: int) -> None:
        """Raises NeedsReseed unless what is read here are the bytes that were read from their owner."""
        with self.local.reading():
            for same in ordered(self._is_same, self._proofs, threads):
                if not same:
                    raise NeedsReseed(
                        f"{self.local.directory} changed while it was compared; nothing was published",
                        remedy="publish again: it is first read in full",
                    )
        self._proofs.clear()

    def _is_same(self, proof: tuple[PackedChunk, list[Lanes]]) -> bool:
        packed, full = proof
        words = RankWeights(self._rank, self.local, self, self._names).pack_new(packed)
        return full == [
            hash_bytes(words[span.offset : span.offset + span.words].view(np.uint8))
            for span in packed.chunk.spans
        ]

    def moved_to(self, local: LocalCheckpoint | None) -> None:
        """Reads old words from `local`. Raises RetryLater when that is lost, or at another version."""
        if local is None or local.state.position != self.position:
            raise RetryLater(
                f"the channel left version {self.position.version} while it was compared",
                remedy="nothing was published; submit again on all ranks",
            )
        self.local = local

    def box(self, name: str) -> Box:
        return self._boxes[name]

    def pieces(self) -> Sequence[str]:
        return [spec.name for spec in self.table if self._boxes[spec.name] != Box.whole(spec.shape)]

    def words_in(self, name: str, start: int, stop: int) -> Words:
        tensor = self._numbers[name]
        words = scratch().lend("compared", self.local.table[tensor].kind.numpy, stop - start)
        for stretch in self._between(tensor, start, stop) if start < stop else ():
            at, end = stretch.run.at, stretch.run.at + stretch.run.words
            low, high = max(start, at), min(stop, end)
            stretch.read(self.local, tensor, low - at, high - at, words[low - start : high - start])
        return words

    def _between(self, tensor: int, start: int, stop: int) -> Iterator[_Stretch]:
        stretches = self._stretches[tensor]
        first = bisect_right(self._starts[tensor], start) - 1
        for number in range(max(0, first), len(stretches)):
            if stretches[number].run.at >= stop:
                return
            yield stretches[number]

    def equal(self, name: str, other: str) -> bool:
        end = self.table.named(name).words
        return self.box(name) == self.box(other) and np.array_equal(
            self.words_in(name, 0, end), self.words_in(other, 0, end)
        )


_Compared = tuple[PackedChunk, list[tuple[int, _Stretch]], list[Lanes]]


def _compare(own: RankWeights, chunk: Chunk, packed: PackedChunk) -> _Compared:
    old = _closed(packed, packed.pieces[0].within(words := own.local.chunk_words(chunk)))
    old = packed.gather(words) if old is None else old
    new = _closed(packed, own.words(packed.pieces[0]))
    new = own.pack_new(packed) if new is None else new
    found = scan(packed.chunk, old, new)
    full = list(map(Lanes._make, found.full.tolist()))
    return packed, list(_stretches(packed, found.changes, new)), full


def _closed(packed: PackedChunk, piece: NDArray[np.unsignedinteger]) -> Words | None:
    """The first piece's words, where they are all of the packed ones and lie as these do: no copy."""
    whole = len(packed.pieces) == 1 and piece.size == packed.chunk.words
    fits = whole and piece.flags.c_contiguous and piece.flags.aligned
    return piece.reshape(-1) if fits else None


def _stretches(packed: PackedChunk, changes: Changes, new: Words) -> Iterator[tuple[int, _Stretch]]:
    edges = [edge for one in packed.pieces for edge in (one.place, one.place + one.run.words)]
    places = np.searchsorted(changes.index, edges).reshape(-1, 2).tolist()
    for piece, (low, high) in zip(packed.pieces, places, strict=True):
        yield piece.tensor, _stretch(piece, changes.index[low:high], changes.new[low:high], new)


def _stretch(piece: PackedRun, index: NDArray[np.uint32], changed: Words, new: Words) -> _Stretch:
    """Copies: what it is given is lent, or somebody else's."""
    end = piece.place + piece.run.words
    if len(index) * (_INDEX_BYTES + new.itemsize) > piece.run.words * new.itemsize:
        return _Stretch(piece.run, None, new[piece.place : end].copy())
    return _Stretch(piece.run, index - np.uint32(piece.place), changed.copy())
