"""Seeding: full weights from a base or an anchor become a local checkpoint.

Nothing is written before the source's tensors, files and every byte have been compared with what the channel
says of it. Phase `seeding` is durable before the first byte and replaced by `clean` only after a full hash of
what was written; killed in between, seeding starts over into the same files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from weightcast.shared.base.elements import ByteArray, TensorTable
from weightcast.shared.base.errors import MEND_CHANNEL, DamagedFile, NeedsReseed, Refused, WrongRun, counted
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.index import INDEX_NAME, FileRecord, Index, file_record
from weightcast.shared.channel.run_files import Base, parse_base, write_base
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths, TensorFiles
from weightcast.shared.checkpoint.state.state import (
    Boot,
    LocalState,
    Phase,
    Position,
    pack_lanes,
    write_state,
)
from weightcast.shared.checkpoint.update.buffer_reuse import make_room
from weightcast.shared.checkpoint.verify.hashing import differing, full_hash, hash_tensors, proven
from weightcast.shared.digest.checksums import root
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_errors
from weightcast.shared.files.hf_checkpoint import WEIGHT_INDEX, Checkpoint, Place, index_for_copy, side_files
from weightcast.shared.files.mapping import LeasedFile, is_open_elsewhere
from weightcast.shared.files.paths import exists, is_file, is_link
from weightcast.shared.files.system import taken_bytes

_BLOCK = 8 << 20
_RESERVE = 1 << 20
"""bytes of free space needed on top of the weights: state, config, tokenizer"""


@dataclass(frozen=True)
class SeedSource:
    """Full weights at `position`. `base` describes the run: tensor table and side files.
    `anchor`: the index that lists the files, for weights that come out of the channel."""

    checkpoint: Checkpoint
    position: Position
    base: Base
    foreign: bool = False
    anchor: Index | None = None

    @cached_property
    def listed(self) -> Mapping[str, FileRecord] | None:
        """Files that may be taken, by name; None: all, as they are."""
        if self.anchor is None:
            return None
        index = FileRecord(INDEX_NAME, -1, self.anchor.digest)
        return {file.name: file for file in (*self.anchor.files, *self.anchor.side_files, index)}

    @cached_property
    def beside(self) -> Mapping[str, Path]:
        """Side files that are copied, by name: config, tokenizer, code; not the index."""
        known = self.listed or {record.name for record in self.base.all_files}
        return {name: path for name, path in side_files(self.checkpoint).files.items() if name in known}

    @property
    def small_files(self) -> Mapping[str, Path]:
        """Side files by name, the weights' index included."""
        index = self.checkpoint.index_file
        return self.beside if index is None else {**self.beside, index.name: index}

    def pieces(self, name: str, path: Path) -> Iterator[durable.Piece]:
        """Of a file, proven by its record: lanes, compared before, do not protect against forgery."""
        record = None if self.listed is None else self.listed[name]
        return proven(record, durable.pieces_of(path, block_bytes=_BLOCK), path, MEND_CHANNEL)


def seed(
    paths: LocalPaths,
    source: SeedSource,
    *,
    threads: int = 1,
    advance: Advance | None = None,
    keep: LocalState | None = None,
) -> LocalCheckpoint:
    """Seeds into `paths` (owner and patch lock held). `keep`: epoch, engines and blocked versions of an
    earlier state survive.

    Raises WrongRun when the source is not what the channel describes (nothing is written then), RetryLater
    when the disk is full.
    """
    _check_source(source, threads, advance)
    _check_room(paths, source)
    state = _seeding_state(source, keep)
    failpoint("seed.checked", paths.directory)
    with disk_errors(paths.directory):
        durable.replace(paths.base, write_base(source.base))
        write_state(paths.state, state)
        _copy_files(paths, source, advance)
    opened = LocalCheckpoint.open(paths.directory, threads=threads)
    if opened is None:
        raise NeedsReseed(f"{paths.state} vanished while seeding")
    report = full_hash(opened, advance=advance)
    if not report.intact:
        opened.close()
        raise NeedsReseed(
            f"{paths.directory}: the written weights differ from their source",
            remedy="check the disk and the memory of this host",
        )
    failpoint("seed.hashed", paths.directory)
    opened.save(state.but(phase=Phase.CLEAN, last_full_hash=report.began, files=opened.file_identities()))
    return opened


def _seeding_state(source: SeedSource, keep: LocalState | None) -> LocalState:
    old = LocalState("", source.position, generation=-1) if keep is None else keep
    return LocalState(
        run_id=source.base.run_id,
        position=source.position,
        phase=Phase.SEEDING,
        generation=old.generation + 1,
        epoch=old.followed(source.position),
        host=Boot.here(),
        foreign=source.foreign,
        engines=old.engines,
        blocked=old.blocked,
    )


def _check_source(source: SeedSource, threads: int, advance: Advance | None) -> None:
    """Tensors, then config and tokenizer files, then all bytes against `source.position`. Raises WrongRun,
    and DamagedFile where an anchor is the source: nobody gave it."""
    try:
        where = source.checkpoint.directory
        check_table(where, source.checkpoint.table, source.base.table)
        _check_listed(source)
        check_other_files(where, source.beside, source.base.all_files)
        with ReadCheckpoint(source.checkpoint) as read:
            found = hash_tensors(source.base.table, read, threads=threads, advance=advance)
        if root(source.base.table, found) != source.position.root:
            names = differing(source.base.table, found, source.position.lanes)
            raise WrongRun(
                f"{where}: {counted(len(names), 'tensor')} with other bytes than version "
                f"{source.position.version}: {', '.join(names[:3])}",
                remedy="give the checkpoint that the channel was made from",
            )
    except WrongRun as error:
        if source.anchor is None:
            raise
        raise DamagedFile(error.message, remedy=MEND_CHANNEL) from error


def _check_listed(source: SeedSource) -> None:
    if source.anchor is None:
        return
    listed = {file.name: file.size for file in source.anchor.files}
    for path in source.checkpoint.weight_files:
        size = path.stat().st_size
        if path.name not in listed:
            raise DamagedFile(f"{path} is not listed in the anchor's index", remedy=MEND_CHANNEL)
        if size != listed[path.name]:
            raise DamagedFile(
                f"{path} has {size} bytes, its index lists {listed[path.name]}", remedy=MEND_CHANNEL
            )


def check_table(where: Path | str, found: TensorTable, expected: TensorTable) -> None:
    """WrongRun that names tensors missing, extra, re-typed or re-shaped: the first, and how many more."""
    problems = table_problems(found, expected)
    if problems:
        raise WrongRun(
            f"{where} does not fit the run: {listing(problems)}",
            remedy="give the checkpoint that the channel was made from",
        )


def listing(problems: Sequence[str], most: int = 10) -> str:
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def table_problems(found: TensorTable, expected: TensorTable) -> list[str]:
    problems = []
    for spec in expected:
        number = found.numbers.get(spec.name)
        if number is None:
            problems.append(f"{spec.name} is missing")
        elif (found[number].dtype, found[number].shape) != (spec.dtype, spec.shape):
            other = found[number]
            problems.append(
                f"{spec.name} is {other.dtype} {list(other.shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
    problems.extend(
        f"{spec.name} is not part of the run" for spec in found if spec.name not in expected.numbers
    )
    return problems


def check_other_files(where: Path, found: Mapping[str, Path], expected: Sequence[FileRecord]) -> None:
    for record in expected:
        path = found.get(record.name)
        if path is None or file_record(path).blake3 != record.blake3:
            state = "missing" if path is None else "different"
            raise WrongRun(
                f"{where / record.name} is {state} from the run's",
                remedy="give the channel's base with all of its files, config and tokenizer included",
            )


class ReadCheckpoint(TensorFiles):
    """A checkpoint's files open for one pass. A concurrent writer is an error then, not a SIGBUS. What is
    read is not to be kept for longer than a few seconds. RetryLater when a file has become shorter than its
    header says."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.table, checkpoint.places)
        self._files: dict[Path, LeasedFile] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            for path in checkpoint.weight_files:
                self._files[path] = LeasedFile(path, follow_links=checkpoint.links)
            undo.pop_all()

    def __enter__(self) -> ReadCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def bytes_at(self, place: Place) -> ByteArray:
        return self._files[place.file].view(place.offset, place.nbytes)


def _check_room(paths: LocalPaths, source: SeedSource) -> None:
    """Raises Refused for a target that is not a file of this directory alone, RetryLater when what is to be
    written does not fit. Nothing is changed."""
    wanted = _RESERVE
    for path in source.checkpoint.weight_files:
        target = paths.directory / path.name
        wanted += path.stat().st_size
        if is_link(target) or (exists(target) and target.stat().st_nlink > 1):
            raise Refused(
                f"{target} is a link: writing it would change another directory's file",
                remedy="remove it, or choose an empty directory for --local",
            )
        if exists(target):
            wanted -= taken_bytes(target.stat())
    missing = [path for name, path in source.beside.items() if not exists(paths.directory / name)]
    wanted += sum(path.stat().st_size for path in missing)
    device = paths.directory.stat().st_dev
    make_room(paths, wanted - sum(_given_back(stray, device) for stray in _strays(paths, source)), "seeding")


def _given_back(stray: Path, device: int) -> int:
    """Bytes that the file system `device` has again when the file is removed: none while another name or an
    open file, such as an engine's mapping, keeps them."""
    found = stray.lstat()
    alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not is_open_elsewhere(stray)
    return taken_bytes(found) if alone and found.st_dev == device else 0


def _strays(paths: LocalPaths, source: SeedSource) -> list[Path]:
    """Of an earlier run, or of full weights in other files: engines would read them."""
    wanted = {path.name for path in source.checkpoint.weight_files} | source.small_files.keys()
    return [
        path
        for path in paths.directory.iterdir()
        if path.name not in wanted and path.suffix in (".safetensors", ".json") and is_file(path)
    ]


def _copy_files(paths: LocalPaths, source: SeedSource, advance: Advance | None) -> None:
    checkpoint = source.checkpoint
    for stray in _strays(paths, source):
        stray.unlink()
        failpoint("seed.stray", stray)
    for name, path in source.small_files.items():
        durable.replace(durable.make_within(paths.directory, name), source.pieces(name, path))
    index = index_for_copy(checkpoint)
    if index is not None:
        durable.replace(paths.directory / WEIGHT_INDEX, index)
    for path in checkpoint.weight_files:
        # the room that one file gives back may be what another one needs
        target = paths.directory / path.name
        if exists(target) and target.stat().st_size > path.stat().st_size:
            os.truncate(target, path.stat().st_size)
    for path in checkpoint.weight_files:
        _copy_into(paths.directory / path.name, path.stat().st_size, source.pieces(path.name, path), advance)
    durable.sync_directory(paths.directory)


def _copy_into(target: Path, size: int, pieces: Iterator[durable.Piece], advance: Advance | None) -> None:
    """Into the same inode if there is one, every byte written, so that a later store through a mapping never
    needs a new block."""
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with durable.named(target):
            os.ftruncate(fd, size)
            if size:
                os.posix_fallocate(fd, 0, size)
            failpoint("seed.allocated", target)
            for piece in pieces:
                durable.write_all(fd, piece)
                if advance is not None:
                    advance(len(piece))
            failpoint("seed.copied", target)
            os.fsync(fd)
        failpoint("seed.synced", target)
    finally:
        os.close(fd)


def describe(
    checkpoint: Checkpoint, run_id: str, *, threads: int = 1, advance: Advance | None = None
) -> Base:
    """What a run starts from: the tensors of a checkpoint with lanes and root, digests of its other files.
    Reads every byte."""
    with ReadCheckpoint(checkpoint) as read:
        lanes = hash_tensors(checkpoint.table, read, threads=threads, advance=advance)
    listed = {path.name for path in checkpoint.other_files}
    records = [file_record(path, name) for name, path in side_files(checkpoint).files.items()]
    base = Base(
        run_id,
        checkpoint.table,
        lanes,
        root(checkpoint.table, lanes),
        tuple(record for record in records if record.name in listed),
        side_files=tuple(record for record in records if record.name not in listed),
    )
    return parse_base(write_base(base))


def start_of(base: Base) -> Position:
    """Version 0."""
    return Position(0, base.digest, base.root, 0, pack_lanes(base.lanes))
