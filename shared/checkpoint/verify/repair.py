"""Repair: tensors of a local checkpoint that differ from the recorded version are rebuilt and put in place.

They are built in a scratch file, from full weights (base or anchor) and the deltas since, restricted to
the chunks that contain them: a store is asked for these ranges alone. They are proven by their lanes before
the first word is written. The state says
`dirty` meanwhile: killed in between, the next start reads every byte again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from weightcast.shared.base.elements import ByteArray, Chunk, Part, Segment, Span, TensorTable, Words, grid
from weightcast.shared.base.errors import Stopped, WeightcastError, counted
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.delta import open_delta, read_exactly, read_shard_header
from weightcast.shared.channel.index import STEP_ENCODINGS, ForeignIndex, Index
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, TensorFiles, gather
from weightcast.shared.checkpoint.state.state import Mark, Phase, Position, Step
from weightcast.shared.checkpoint.update.buffer_reuse import make_room
from weightcast.shared.checkpoint.update.fetch import Delta
from weightcast.shared.checkpoint.update.patch import arrived, repairable, require_files
from weightcast.shared.checkpoint.verify.hashing import Differs, differing, full_hash, hash_tensors
from weightcast.shared.checkpoint.verify.seed import ReadCheckpoint, check_table
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_errors, error_text
from weightcast.shared.files.hf_checkpoint import Place, Places, laid_out, open_checkpoint

_PIECE = 4 << 20
"""words compared and written at a time; a multiple of 8"""
AnyDelta = Index | ForeignIndex


@dataclass(frozen=True)
class RepairSource:
    """Full weights of some version, and the deltas from it to the version to be repaired. `weights`: a
    checkpoint directory, or an anchor in a channel with its `shards`."""

    weights: Path | Store
    shards: tuple[str, ...] = ()
    of_base: bool = False
    deltas: tuple[Delta, ...] = ()

    @property
    def place(self) -> str:
        return str(self.weights) if isinstance(self.weights, Path) else self.weights.place()

    def opened(self) -> contextlib.AbstractContextManager[TensorFiles]:
        """Reads headers. Raises what reading raises."""
        if not isinstance(self.weights, Path):
            return contextlib.nullcontext(StoredTensors(self.weights, self.shards))
        return ReadCheckpoint(
            open_checkpoint(self.weights, follow_links=self.of_base, need_index=not self.of_base)
        )


@dataclass(frozen=True)
class RepairPlan:
    """What of a way is needed: words of the full weights, chunks of each of its deltas, bytes to be read."""

    way: RepairSource
    words: tuple[Segment, ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    nbytes: int


@dataclass(frozen=True)
class Repaired:
    """`words`: how many were wrong, in `tensors`; `source`: the full weights they were made from; `nbytes`:
    read of these and of deltas."""

    position: Position
    tensors: tuple[str, ...]
    words: int
    source: str
    nbytes: int = 0


class _Cover:
    """Disjoint runs of words per tensor."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}

    def add(self, tensor: int, start: int, stop: int) -> None:
        joined: list[tuple[int, int]] = []
        for run in sorted([*self._runs.get(tensor, []), (start, stop)]):
            if joined and run[0] <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], run[1])
            else:
                joined.append(run)
        self._runs[tensor] = joined

    def meets(self, span: Span) -> bool:
        runs = self._runs.get(span.tensor, ())
        return any(start < span.stop and span.start < stop for start, stop in runs)

    @property
    def tensors(self) -> list[int]:
        return sorted(self._runs)

    def segments(self) -> Iterator[Segment]:
        for tensor in self.tensors:
            yield from (Segment(tensor, start, stop) for start, stop in self._runs[tensor])


def plan_repair(table: TensorTable, way: RepairSource, tensors: Iterable[int]) -> RepairPlan:
    """What must be read so that `tensors` come out whole. A chunk is decoded as a whole, so that each delta
    may need words of other tensors from before it."""
    cover = _Cover()
    for tensor in tensors:
        cover.add(tensor, 0, table[tensor].words)
    walks: list[tuple[Chunk, ...]] = []
    nbytes = 0
    # neighbouring versions mostly share their split
    chunks_of = lru_cache(1)(lambda parts: tuple(chunk for part in parts for chunk in grid(table, part)))
    for delta in reversed(way.deltas):
        if isinstance(delta.index, Index) and delta.index.encoding in STEP_ENCODINGS:
            chunks, size = _step_chunks(chunks_of(delta.index.parts), delta.index, cover)
        else:
            chunks, size = _payload_chunks(table, delta.index, cover)
        for chunk in chunks:
            for span in chunk.spans:
                cover.add(span.tensor, span.start, span.stop)
        walks.append(chunks)
        nbytes += size
    words = tuple(cover.segments())
    return RepairPlan(way, words, tuple(reversed(walks)), nbytes + _words_bytes(table, words))


def _step_chunks(chunks: tuple[Chunk, ...], index: Index, cover: _Cover) -> tuple[tuple[Chunk, ...], int]:
    """And the bytes of their changes. `chunks`: the version's grid."""
    lengths = {record.key: record.length for record in index.chunks}
    found = tuple(
        chunk for chunk in chunks if chunk.key in lengths and any(cover.meets(span) for span in chunk.spans)
    )
    return found, sum(lengths[chunk.key] for chunk in found)


def _payload_chunks(table: TensorTable, index: AnyDelta, cover: _Cover) -> tuple[tuple[Chunk, ...], int]:
    """Payloads are one per tensor and depend on nothing else: a grid of these tensors alone reads them."""
    named = [tensor for tensor in cover.tensors if table[tensor].name in index.weight_map]
    part = Part(0, tuple(Segment(tensor, 0, table[tensor].words) for tensor in named))
    size = sum(file.size for file in index.files) if isinstance(index, Index) else 0
    return tuple(grid(table, part)), size


class StoredTensors(TensorFiles):
    """Full weights in a channel, read by ranges. Raises NotFound and DamagedFile."""

    def __init__(self, files: Store, shards: Sequence[str]) -> None:
        table, rows = laid_out(tuple(read_shard_header(files, shard) for shard in shards))
        super().__init__(table, Places(tuple(map(Path, shards)), rows))
        self._files = files

    def bytes_at(self, place: Place) -> ByteArray:
        name = place.file.name
        data = read_exactly(self._files, name, place.offset, place.nbytes, self._files.place(name))
        return np.frombuffer(data, np.uint8)


class _Scratch(TensorFiles):
    """Words of some tensors in a sparse file without a name, each tensor at a place of its own. Not mapped: a
    store into it on a full disk must be an error, not a signal."""

    def __init__(self, directory: Path, table: TensorTable) -> None:
        offsets = accumulate((-(-spec.nbytes // 8) * 8 for spec in table), initial=0)
        places = [
            Place(directory / "repair", at, spec.nbytes) for at, spec in zip(offsets, table, strict=False)
        ]
        super().__init__(table, places)
        self.file = TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115

    def bytes_at(self, place: Place) -> ByteArray:
        """Zeros where nothing was put."""
        data = np.zeros(place.nbytes, np.uint8)
        with durable.named(place.file):
            durable.read_at(self.file.fileno(), data.data, place.offset)
        return data

    def put(self, tensor: int, start: int, words: Words) -> None:
        place = self.places[tensor]
        with durable.named(place.file):
            self.file.seek(place.offset + start * words.itemsize)
            durable.write_all(self.file.fileno(), np.ascontiguousarray(words).view(np.uint8).data)


def repair(
    local: LocalCheckpoint,
    ways: Callable[[Position], Sequence[RepairSource]],
    found: Differs | None = None,
    *,
    advance: Advance | None = None,
) -> Repaired:
    """Makes the checkpoint the version that it is nearest to. The caller holds the patch lock.

    `found`: what reading said a moment ago; None: everything is read first. `ways(position)`: how full
    weights of a version can be had. Only words that differ are written. Engines that read the checkpoint are
    in doubt afterwards, and noted so before anything else. Raises NeedsReseed, with state `dirty`, when no
    way leads there."""
    require_files(local)
    began = time.time()
    damage = found
    if damage is None:
        report = full_hash(local, advance=advance).nearest(repairable(local.state))
        if report.intact:
            _arrive(local, report.position, hashed=report.began)
            return Repaired(report.position, (), 0, "")
        message = f"{local.directory}: other bytes in {counted(len(report.differing), 'tensor')}"
        damage = Differs(message, report.position, report.differing)
    # before a word is written: the position meant is durable, and no engine counts as serving it
    reason = f"the local checkpoint was damaged in {counted(len(damage.tensors), 'tensor')} when it was read"
    engines = {
        name: replace(engine, mark=Mark.SUSPECT, reason=reason) if engine.mark is Mark.SERVED else engine
        for name, engine in local.state.engines.items()
    }
    local.save(local.state.but(phase=Phase.DIRTY, engines=engines, undo=_way_back(local)))
    failpoint("repair.noted", local.directory)
    tensors = [local.table.numbers[name] for name in damage.tensors]
    with disk_errors(local.paths.spool):
        scratch = _Scratch(local.paths.spool, local.table)
    with scratch.file:
        walk = _build(local, scratch, damage, ways(damage.position), tensors, advance)
        failpoint("repair.built", local.directory)
        words = 0
        for tensor in tensors:
            for start, stop in _pieces(0, local.table[tensor].words):
                right = scratch.words_in(tensor, start, stop)
                here = local.words_in(tensor, start, stop)
                wrong = np.flatnonzero(right != here)
                here[wrong] = right[wrong]
                words += len(wrong)
    failpoint("repair.written", local.directory)
    names = _wrong(local, tensors, damage.position)
    if names:
        raise Differs(f"{local.directory}: {', '.join(names[:3])} cannot be written", damage.position, names)
    require_files(local)
    _arrive(local, damage.position, hashed=began if damage.whole else None)
    return Repaired(damage.position, damage.tensors, words, walk.way.place, walk.nbytes)


def _way_back(local: LocalCheckpoint) -> tuple[Step, ...]:
    """No journal counts in another boot than that of the state that names it."""
    return local.state.undo if local.state.host.same_boot(local.host) else ()


def _arrive(local: LocalCheckpoint, position: Position, *, hashed: float | None) -> None:
    """`hashed`: unix time at which every byte was last read, if all were."""
    state = local.state
    stays = position == state.position and state.active is None
    after = arrived(local, position, _way_back(local) if stays else ())
    local.save(after if hashed is None else after.but(last_full_hash=hashed))


def _build(
    local: LocalCheckpoint,
    scratch: _Scratch,
    damage: Differs,
    ways: Sequence[RepairSource],
    tensors: Sequence[int],
    advance: Advance | None,
) -> RepairPlan:
    """What led there. What a way brought is proven before it counts."""
    reasons = []
    walks = [plan_repair(local.table, way, tensors) for way in ways]
    for walk in sorted(walks, key=lambda walk: walk.nbytes):
        try:
            make_room(local.paths, _words_bytes(local.table, walk.words), "repairing")
            _follow(local.table, scratch, walk, advance)
            wrong = _wrong(scratch, tensors, damage.position)
        except Stopped:
            raise
        except (WeightcastError, OSError) as error:
            reasons.append(f"{walk.way.place}: {error_text(error)}")
            continue
        if not wrong:
            return walk
        reasons.append(f"{walk.way.place} gives other bytes of {wrong[0]}")
    raise Differs(
        f"{local.directory}: {counted(len(tensors), 'tensor')} cannot be repaired: "
        f"{'; '.join(reasons) or 'no base or anchor leads to this version'}",
        damage.position,
        damage.tensors,
    )


def _wrong(read: LocalCheckpoint | _Scratch, tensors: Sequence[int], position: Position) -> list[str]:
    """Names of those tensors that are not the position's."""
    return differing(read.table, hash_tensors(read.table, read, only=tensors), position.lanes, only=tensors)


def _words_bytes(table: TensorTable, runs: Iterable[Segment]) -> int:
    return sum((run.stop - run.start) * table[run.tensor].kind.width for run in runs)


def _follow(table: TensorTable, scratch: _Scratch, walk: RepairPlan, advance: Advance | None) -> None:
    """Full weights, then each delta, into the scratch. Raises what reading raises, and OSError."""
    with walk.way.opened() as full:
        check_table(walk.way.place, full.table, table)
        for run in walk.words:
            for start, stop in _pieces(run.start, run.stop):
                scratch.put(run.tensor, start, full.words_in(run.tensor, start, stop))
                if advance is not None:
                    advance((stop - start) * table[run.tensor].kind.width)
    # shards are read where they are: every chunk has a checksum and sums, and lanes prove the outcome
    for delta, chunks in zip(walk.way.deltas, walk.chunks, strict=True):
        reader = open_delta(_as_payloads(delta.index), table, delta.files)
        for chunk in chunks:
            words = gather(chunk, scratch.words_in)
            reader.step(chunk, words).changes.apply(words)
            for span in chunk.spans:
                scratch.put(span.tensor, span.start, words[span.offset : span.offset + span.words])


def _as_payloads(index: AnyDelta) -> AnyDelta:
    """Sums per chunk are those of the version's own grid; payloads are proven by their checksums."""
    if not isinstance(index, Index) or index.encoding not in ("xor", "overwrite"):
        return index
    return ForeignIndex(
        index.version, index.base_version, index.encoding, "xxh3-128", index.weight_map, index.digest
    )


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, _PIECE):
        yield at, min(at + _PIECE, stop)
