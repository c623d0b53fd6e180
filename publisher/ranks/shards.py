"""One rank's side of a version that several ranks hold: what it sends to those that write, and the new words
of what it writes itself. Tensors are never gathered: what passes between ranks are changes.

Ranks meet in the channel and wait there for it and for each other. A trainer's step waits for neither when
each rank first compares what it holds (`ComparedWeights`); all that ranks then send each other is read from
there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weightcast.publisher.ranks.rendezvous import Sent, Share, blobs_name, read_blob
from weightcast.publisher.ranks.shard_assignment import Holds, ShardAssignment
from weightcast.publisher.weights.match import Matched
from weightcast.publisher.weights.shard_spec import Box, Run, runs_of
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import (
    Chunk,
    ChunkKey,
    Part,
    Span,
    TensorTable,
    Words,
    grid,
    padded,
)
from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Refused, RetryLater, on_error
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.codec.changes import Changes, changes_of, scan
from weightcast.shared.codec.container import decode_step, encode_chunk
from weightcast.shared.codec.slime import digest_stream
from weightcast.shared.digest.checksums import Lanes, hash_bytes
from weightcast.shared.kernels.load import kernels
from weightcast.shared.kernels.parallel import ordered, scratch

_DIGESTED = 4 << 20
"""words at a time"""


def runs_in(table: TensorTable, boxes: Mapping[int, Box]) -> Runs:
    return {tensor: runs_of(box, table[tensor]) for tensor, box in boxes.items()}


@dataclass(frozen=True)
class RankWeights:
    """What this rank holds. `names`: tensor number to the name under which it is given."""

    rank: int
    local: LocalCheckpoint
    weights: NewWeights
    names: Mapping[int, str]

    @classmethod
    def of(cls, rank: int, local: LocalCheckpoint, weights: NewWeights, matched: Matched) -> RankWeights:
        """A tied tensor may have the name of the tensor to which it is tied. Raises Refused when the rank
        gives different pieces of tied tensors."""
        names = {number: name for name, number in matched.ties} | dict(matched.sources)
        for name, number in matched.ties:
            if weights.box(name) != weights.box(names[number]):
                raise Refused(
                    f"{name} is tied to {local.table[number].name}, but this rank holds other pieces of it",
                    remedy="shard tied tensors alike, or give only one of them",
                )
        return cls(rank, local, weights, names)

    @property
    def holds(self) -> Holds:
        return {number: self.weights.box(name) for number, name in self.names.items()}

    def words(self, piece: PackedRun) -> Words:
        run = piece.run
        return self.weights.words_in(self.names[piece.tensor], run.at, run.at + run.words)

    def pack_new(self, packed: PackedChunk) -> Words:
        words: Words = np.zeros(packed.chunk.words, packed.chunk.kind.numpy)
        for piece in packed.pieces:
            words[piece.place : piece.place + piece.run.words] = self.words(piece)
        return words

    def digest(self, tensor: int, box: Box) -> str:
        """xxh3-128 of the piece's new bytes, row-major."""
        stream = digest_stream("xxh3-128")
        end = sum(run.words for run in runs_of(box, self.local.table[tensor]))
        for start in range(0, end, _DIGESTED):
            words = self.weights.words_in(self.names[tensor], start, min(start + _DIGESTED, end))
            stream.update(np.ascontiguousarray(words).tobytes())
        return stream.hexdigest()


def senders(assignment: ShardAssignment, table: TensorTable, rank: int) -> list[int]:
    """The other ranks that hold something of what this one writes."""
    segments = assignment.parts[rank].segments
    found = []
    for other, boxes in enumerate(assignment.answers):
        concerned = [segment for segment in segments if segment.tensor in boxes]
        meets = (
            True
            for segment in concerned
            for run in runs_of(boxes[segment.tensor], table[segment.tensor])
            for _ in run.clip(segment.start, segment.stop)
        )
        if other != rank and any(meets):
            found.append(other)
    return found


def send(
    own: RankWeights, assignment: ShardAssignment, files: Store, threads: int
) -> Mapping[ChunkKey, Share]:
    """Writes the blobs for all other ranks, one after another; nothing is left behind when it raises."""
    mine = runs_in(own.local.table, assignment.answers[own.rank])
    shares: dict[ChunkKey, Share] = {}
    end, name = 0, blobs_name(own.rank)
    # what a killed process of this rank left is not read: its record was never there
    files.delete(name)
    writer = files.write(name)
    with on_error(writer.discard):
        with own.local.reading():
            chunks = _concerned(own, assignment.parts, mine)
            for key, blob, old, new in ordered(lambda one: _encoded(own, *one), chunks, threads):
                writer.write(blob)
                shares[key] = Share(end, len(blob), old, new)
                end += len(blob)
        if end:
            writer.finish()
        else:
            writer.discard()
    return shares


def _concerned(own: RankWeights, parts: Sequence[Part], mine: Runs) -> Iterator[tuple[Chunk, PackedChunk]]:
    for part in parts:
        if part.number == own.rank or not any(segment.tensor in mine for segment in part.segments):
            continue
        for chunk in grid(own.local.table, part):
            packed = pack(chunk, mine)
            if packed is not None:
                yield chunk, packed


def _encoded(own: RankWeights, chunk: Chunk, packed: PackedChunk) -> tuple[ChunkKey, bytes, Lanes, Lanes]:
    old = packed.gather(own.local.chunk_words(chunk))
    new = own.pack_new(packed)
    changes, _ = changes_of(packed.chunk, old, new)
    blob = encode_chunk(packed.chunk, old, new, changes) if len(changes) else b""
    return chunk.key, blob, _lanes(old), _lanes(new)


def _lanes(packed: Words) -> Lanes:
    return hash_bytes(packed.view(np.uint8))


@dataclass(frozen=True)
class FromRank:
    """What another rank sent into the attempt's `files`. `runs`: of what it answers for."""

    rank: int
    runs: Runs
    sent: Sent
    files: Store

    def merge(self, chunk: Chunk, old: Words, new: Words) -> None:
        """Its words of the chunk into `new`. Raises NeedsReseed where it compared with other old words,
        DamagedFile where it does not become what it holds."""
        packed = pack(chunk, self.runs)
        if packed is None:
            return
        share = self.sent.shares.get(chunk.key)
        if share is None:
            raise DamagedFile(f"{self._place}: rank {self.rank} sent nothing for {chunk.key}")
        words = packed.gather(old)
        if _lanes(words) != share.old:
            raise NeedsReseed(
                f"the local checkpoints of this rank and of rank {self.rank} differ; nothing was published",
                remedy="publish again: both are first read in full",
            )
        if share.length:
            changes, _ = decode_step(read_blob(self.files, self.rank, share), packed.chunk, words)
            changes.apply(words)
        if _lanes(words) != share.new:
            raise DamagedFile(
                f"{self._place}: {chunk.key} decodes to other words than rank {self.rank} holds"
            )
        packed.scatter(words, new)

    @property
    def _place(self) -> str:
        return self.files.place(blobs_name(self.rank))


@dataclass(frozen=True)
class Merged:
    """New words of this rank's part: its own and what was sent."""

    own: RankWeights
    mine: Runs
    received: Sequence[FromRank]

    def __call__(self, chunk: Chunk) -> Words:
        """`chunk` is one of the rank's own part, numbered 0 there."""
        chunk = Chunk(self.own.rank, chunk.dtype, chunk.number, chunk.spans, chunk.words)
        old = self.own.local.chunk_words(chunk)
        new = old.copy()
        packed = pack(chunk, self.mine)
        for piece in () if packed is None else packed.pieces:
            run = piece.run
            piece.within(new)[:] = self.own.words(piece).reshape(run.count, run.length)
        for one in self.received:
            one.merge(chunk, old, new)
        return new


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

    def packed(self, words: Words) -> NDArray[np.unsignedinteger]:
        """As `within`, in packed words."""
        return words[self.place : self.place + self.run.words].reshape(self.run.count, self.run.length)


@dataclass(frozen=True)
class PackedChunk:
    """`chunk` is what the codec sees: one span for each span of the chunk of which something is held."""

    chunk: Chunk
    pieces: tuple[PackedRun, ...]

    def gather(self, words: Words) -> Words:
        """Packed words of the chunk's, zero where padded."""
        packed: Words = np.zeros(self.chunk.words, self.chunk.kind.numpy)
        for piece in self.pieces:
            piece.packed(packed)[:] = piece.within(words)
        return packed

    def scatter(self, packed: Words, words: Words) -> None:
        """Writes packed words to where they stand in the chunk's."""
        for piece in self.pieces:
            piece.within(words)[:] = piece.packed(packed)


def pack(chunk: Chunk, held: Runs) -> PackedChunk | None:
    """None where nothing of the chunk is held."""
    spans: list[Span] = []
    pieces: list[PackedRun] = []
    filled = 0
    for span in chunk.spans:
        place = filled
        for whole in held.get(span.tensor, ()):
            for run in whole.clip(span.start, span.stop):
                pieces.append(PackedRun(span.tensor, run, span.start - span.offset, place))
                place += run.words
        if place > filled:
            # numbered from 0: the sums of packed words prove only that both sides have the same ones
            spans.append(Span(span.tensor, 0, place - filled, filled))
            filled += padded(place - filled)
    if not spans:
        return None
    return PackedChunk(Chunk(chunk.part, chunk.dtype, chunk.number, tuple(spans), filled), tuple(pieces))


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
        # copies: what is given here is lent, or somebody else's
        if (high - low) * (_INDEX_BYTES + new.itemsize) > piece.run.words * new.itemsize:
            words = new[piece.place : piece.place + piece.run.words].copy()
            yield piece.tensor, _Stretch(piece.run, None, words)
        else:
            index = changes.index[low:high] - np.uint32(piece.place)
            yield piece.tensor, _Stretch(piece.run, index, changes.new[low:high].copy())
