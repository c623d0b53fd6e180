"""Repair: tensors of a local checkpoint that differ from the recorded version are rebuilt and put in place.

They are built in a scratch file, from full weights (base or anchor) and the deltas since, restricted to
the chunks that they lie in, and proven by their lanes before the first word is written. The state says
`dirty` meanwhile: killed in between, the next start reads every byte again.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weightcast.shared.base.elements import Chunk, Part, Segment, Span, TensorTable, Words, grid
from weightcast.shared.base.errors import DamagedFile, Stopped, WeightcastError, counted
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.delta_reader import open_delta
from weightcast.shared.channel.index import STEP_ENCODINGS, ForeignIndex, Index
from weightcast.shared.channel.run_files import BASE_LIMIT, Base, parse_base, write_base
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths, gather
from weightcast.shared.checkpoint.state.state import (
    EngineState,
    Mark,
    Phase,
    Position,
    Step,
    lanes_list,
    read_state,
)
from weightcast.shared.checkpoint.update.buffer_reuse import make_room
from weightcast.shared.checkpoint.update.fetch import Delta
from weightcast.shared.checkpoint.update.patch import repairable, require_files
from weightcast.shared.checkpoint.verify.hashing import Differs, differing, full_hash, hash_tensor, nearest
from weightcast.shared.checkpoint.verify.seed import ReadCheckpoint, check_table
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_error, error_text
from weightcast.shared.files.hf_checkpoint import open_checkpoint

_PIECE = 4 << 20
"""words compared and written at a time; a multiple of 8"""
AnyDelta = Index | ForeignIndex


@dataclass(frozen=True)
class RepairSource:
    """Full weights of some version in `directory`, and the deltas from it to the version to be repaired."""

    directory: Path
    of_base: bool
    deltas: tuple[Delta, ...] = ()


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
        runs = self._runs.get(span.tensor)
        if runs is None:
            return False
        at = bisect_right(runs, (span.stop - 1, span.stop)) - 1
        return any(start < span.stop and span.start < stop for start, stop in runs[max(at, 0) : at + 2])

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
    nbytes, grids = 0, _Grids(table)
    for delta in reversed(way.deltas):
        if isinstance(delta.index, Index) and delta.index.encoding in STEP_ENCODINGS:
            chunks, size = _step_chunks(grids, delta.index, cover)
        else:
            chunks, size = _payload_chunks(table, delta.index, cover)
        for chunk in chunks:
            for span in chunk.spans:
                cover.add(span.tensor, span.start, span.stop)
        walks.append(chunks)
        nbytes += size
    words = tuple(cover.segments())
    nbytes += sum((run.stop - run.start) * table[run.tensor].kind.width for run in words)
    return RepairPlan(way, words, tuple(reversed(walks)), nbytes)


class _Grids:
    """The grid of the split last asked for: neighbouring versions mostly share theirs."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._parts: tuple[Part, ...] = ()
        self._chunks: tuple[Chunk, ...] = ()

    def of(self, parts: tuple[Part, ...]) -> tuple[Chunk, ...]:
        if parts != self._parts:
            self._chunks = tuple(chunk for part in parts for chunk in grid(self._table, part))
            self._parts = parts
        return self._chunks


_Share = tuple[tuple[Chunk, ...], int]
"""chunks, and the bytes of their changes"""


def _step_chunks(grids: _Grids, index: Index, cover: _Cover) -> _Share:
    lengths = {record.key: record.length for record in index.chunks}
    found = tuple(
        chunk
        for chunk in grids.of(index.parts)
        if chunk.key in lengths and any(cover.meets(span) for span in chunk.spans)
    )
    return found, sum(lengths[chunk.key] for chunk in found)


def _payload_chunks(table: TensorTable, index: AnyDelta, cover: _Cover) -> _Share:
    """Payloads are one per tensor and depend on nothing else: a grid of these tensors alone reads them."""
    named = [tensor for tensor in cover.tensors if table[tensor].name in index.weight_map]
    part = Part(0, tuple(Segment(tensor, 0, table[tensor].words) for tensor in named))
    size = sum(file.size for file in index.files) if isinstance(index, Index) else 0
    return tuple(grid(table, part)), size


def cheapest(walks: Iterable[RepairPlan]) -> list[RepairPlan]:
    """Fewest bytes first."""
    return sorted(walks, key=lambda walk: walk.nbytes)


class _Scratch:
    """Words of some tensors in a sparse file, each tensor at a place of its own. Not mapped: a store into it
    on a full disk must be an error, not a signal."""

    def __init__(self, path: Path, table: TensorTable) -> None:
        self._table = table
        sizes = [-(-spec.nbytes // 8) * 8 for spec in table]
        self._places = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._path = path
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        # it lives as long as it is open
        path.unlink()

    def close(self) -> None:
        os.close(self._fd)

    def words_in(self, tensor: int, start: int, stop: int) -> Words:
        kind = self._table[tensor].kind
        words = np.empty(stop - start, kind.numpy)
        view = memoryview(words.view(np.uint8))  # type: ignore[arg-type]
        at = self._places[tensor] + start * kind.width
        while view:
            with durable.named(self._path):
                got = os.preadv(self._fd, [view], at)
            if not got:
                raise DamagedFile(f"{self._table[tensor].name} was not built to its end")
            view, at = view[got:], at + got
        return words

    def put(self, tensor: int, start: int, words: Words) -> None:
        view = memoryview(np.ascontiguousarray(words).view(np.uint8))  # type: ignore[arg-type]
        at = self._places[tensor] + start * self._table[tensor].kind.width
        while view:
            with durable.named(self._path):
                done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done


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
    damage = _damage(local, advance) if found is None else found
    if damage is None:
        return Repaired(local.state.position, (), 0, "")
    _note(local, damage)
    failpoint("repair.noted", local.directory)
    tensors = [local.table.numbers[name] for name in damage.tensors]
    try:
        scratch = _Scratch(local.paths.spool / "repair", local.table)
    except OSError as error:
        raise disk_error(error, local.paths.spool) from error
    try:
        walk = _build(local, scratch, damage, ways(damage.position), tensors, advance)
        failpoint("repair.built", local.directory)
        words = sum(_put(local, scratch, tensor) for tensor in tensors)
    finally:
        scratch.close()
    failpoint("repair.written", local.directory)
    _settle(local, damage, tensors, began)
    return Repaired(damage.position, damage.tensors, words, str(walk.way.directory), walk.nbytes)


def _damage(local: LocalCheckpoint, advance: Advance | None) -> Differs | None:
    """None, and state `clean`, when the bytes are a version that the state knows."""
    report = full_hash(local, advance=advance)
    position = nearest(local.table, report.lanes, repairable(local.state))
    names = differing(local.table, report.lanes, position.lanes)
    if names or report.root != position.root:
        return Differs(f"{local.directory}: other bytes in {counted(len(names), 'tensor')}", position, names)
    _arrive(local, position, hashed=report.began)
    return None


def _note(local: LocalCheckpoint, damage: Differs) -> None:
    """Before a word is written: the position meant is durable, and no engine counts as serving it."""
    reason = f"the local checkpoint was damaged in {counted(len(damage.tensors), 'tensor')} when it was read"
    engines = {name: _doubted(engine, reason) for name, engine in local.state.engines.items()}
    local.save(local.state.but(phase=Phase.DIRTY, engines=engines, undo=_way_back(local)))


def _way_back(local: LocalCheckpoint) -> tuple[Step, ...]:
    """No journal counts in another boot than that of the state that names it."""
    return local.state.undo if local.state.host.same_boot(local.host) else ()


def _doubted(engine: EngineState, reason: str) -> EngineState:
    return replace(engine, mark=Mark.SUSPECT, reason=reason) if engine.mark is Mark.SERVED else engine


def _arrive(local: LocalCheckpoint, position: Position, *, hashed: float | None) -> None:
    """`hashed`: unix time at which every byte was last read, if all were."""
    state = local.state
    moved = position != state.position
    local.save(
        state.but(
            phase=Phase.CLEAN,
            active=None,
            position=position,
            undo=() if moved or state.active is not None else _way_back(local),
            epoch=state.followed(position),
            files=local.file_identities(),
            generation=state.generation + 1,
            last_full_hash=state.last_full_hash if hashed is None else hashed,
        )
    )


def _build(
    local: LocalCheckpoint,
    scratch: _Scratch,
    damage: Differs,
    ways: Sequence[RepairSource],
    tensors: Sequence[int],
    advance: Advance | None,
) -> RepairPlan:
    """What led there. What a way brought is proven before it counts."""
    lanes = lanes_list(damage.position.lanes)
    reasons = []
    for walk in cheapest([plan_repair(local.table, way, tensors) for way in ways]):
        try:
            _check_room(local, walk)
            _follow(local.table, scratch, walk, advance)
            wrong = [t for t in tensors if hash_tensor(local.table[t], t, scratch.words_in) != lanes[t]]
        except Stopped:
            raise
        except (WeightcastError, OSError) as error:
            reasons.append(f"{walk.way.directory}: {error_text(error)}")
            continue
        if not wrong:
            return walk
        reasons.append(f"{walk.way.directory} gives other bytes of {local.table[wrong[0]].name}")
    raise Differs(
        f"{local.directory}: {counted(len(tensors), 'tensor')} cannot be repaired: "
        f"{'; '.join(reasons) or 'no base or anchor leads to this version'}",
        damage.position,
        damage.tensors,
    )


def _check_room(local: LocalCheckpoint, walk: RepairPlan) -> None:
    wanted = sum((run.stop - run.start) * local.table[run.tensor].kind.width for run in walk.words)
    make_room(local.paths, wanted, "repairing")


def _follow(table: TensorTable, scratch: _Scratch, walk: RepairPlan, advance: Advance | None) -> None:
    """Full weights, then each delta, into the scratch. Raises what reading raises, and OSError."""
    checkpoint = open_checkpoint(
        walk.way.directory, follow_links=walk.way.of_base, need_index=not walk.way.of_base
    )
    check_table(walk.way.directory, checkpoint.table, table)
    with ReadCheckpoint(checkpoint) as full:
        for run in walk.words:
            for start, stop in _pieces(run.start, run.stop):
                scratch.put(run.tensor, start, full.words_in(run.tensor, start, stop))
                if advance is not None:
                    advance((stop - start) * table[run.tensor].kind.width)
    for delta, chunks in zip(walk.way.deltas, walk.chunks, strict=True):
        _step(table, scratch, delta, chunks)


def _step(table: TensorTable, scratch: _Scratch, delta: Delta, chunks: Sequence[Chunk]) -> None:
    """Shards are read where they lie: every chunk has a checksum and sums of its own, and the outcome is
    proven by the tensors' lanes."""
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


def _put(local: LocalCheckpoint, scratch: _Scratch, tensor: int) -> int:
    """Writes the words of a tensor that differ; returns how many."""
    written = 0
    for start, stop in _pieces(0, local.table[tensor].words):
        right, here = scratch.words_in(tensor, start, stop), local.words_in(tensor, start, stop)
        wrong = np.flatnonzero(right != here)
        here[wrong] = right[wrong]
        written += len(wrong)
    return written


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, _PIECE):
        yield at, min(at + _PIECE, stop)


def _settle(local: LocalCheckpoint, damage: Differs, tensors: Sequence[int], began: float) -> None:
    """The repaired bytes are read once more before the state records them."""
    lanes = lanes_list(damage.position.lanes)
    wrong = [t for t in tensors if hash_tensor(local.table[t], t, local.words_in) != lanes[t]]
    if wrong:
        names = [local.table[tensor].name for tensor in wrong]
        raise Differs(f"{local.directory}: {', '.join(names[:3])} cannot be written", damage.position, names)
    require_files(local)
    _arrive(local, damage.position, hashed=began if damage.whole else None)


def restore_base(paths: LocalPaths, base: Base) -> None:
    """Writes base.json of a local checkpoint of this run that lost its own. The caller owns it."""
    state = read_state(paths.state)
    if state is None or state.foreign or state.run_id != base.run_id:
        return
    try:
        parse_base(durable.read_file(paths.base, BASE_LIMIT))
    except (DamagedFile, FileNotFoundError):
        durable.replace(paths.base, write_base(base))
