"""A local checkpoint: an HF checkpoint directory that weightcast patches in place.

`<directory>/.weightcast/` holds state.json, base.json, journal/, spool/, carried/, spares, locks (`owner`,
`patch`).
The weight files are mapped read-write for the object's life; they are only ever written through these
mappings or by seeding, never replaced by rename.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weightcast.shared.base.choices import Readers as Readers
from weightcast.shared.base.elements import BLOCK_WORDS, ByteArray, Chunk, TensorTable, Words
from weightcast.shared.base.errors import Linked, NeedsReseed, Refused, RetryLater
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.run_files import BASE_LIMIT, Base, parse_base
from weightcast.shared.checkpoint.state.locks import FileLock, Wait, holder, owner_text
from weightcast.shared.checkpoint.state.state import (
    LANES_BYTES,
    Boot,
    LocalState,
    Proofs,
    check_roots,
    read_state,
    write_state,
)
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import (
    Checkpoint,
    FileIdentity,
    Place,
    Places,
    file_identity,
    open_checkpoint,
    run_of,
)
from weightcast.shared.files.mapping import populate, ready_to_write, unshare_blocks
from weightcast.shared.files.paths import exists, is_directory, is_file, is_link, matching
from weightcast.shared.files.probes import LOCAL_NEEDS, require
from weightcast.shared.files.system import file_system, taken_bytes
from weightcast.shared.kernels.parallel import scratch

WordsIn = Callable[[int, int, int], Words]
"""tensor number, start, stop to these words"""

_SEEDED_AGAIN = "run `weightcast sync`: it seeds again from base or anchor"
_LEAVE_ALONE = "stop whatever else writes here; the next sync verifies all bytes, or seeds again"
PATCH_LOCK_SECONDS = 60.0
_PAGE = 4096
_SHARING_SYSTEMS = ("xfs",)
"""file systems whose files may share blocks"""
_PLAIN_SYSTEMS = ("ext4", "xfs", "tmpfs")
"""file systems that compress nothing"""


class LocalPaths:
    """Paths of a local checkpoint; no IO. docs/FORMAT.md, Local state."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.room = room = directory / ".weightcast"
        self.state, self.base = room / "state.json", room / "base.json"
        self.channel = room / "channel.json"
        """the channel's, kept by its publisher for a repair"""
        self.owner, self.patch = room / "owner", room / "patch"
        self.journals, self.spool = room / "journal", room / "spool"
        self.carried = room / "carried"
        """config files by their BLAKE3"""
        self.engine = room / "engine"
        """patches of engines' memory"""
        self.spare, self.unready_spare = room / "spare", room / "spare.unready"
        """of a journal; under construction"""

    def spare_shard(self, number: int) -> Path:
        return self.room / f"spare.{number}"

    def journal(self, journal: str) -> Path:
        return self.journals / f"{journal}.journal"


@dataclass(frozen=True)
class _Mapped:
    path: Path
    map: mmap.mmap
    found: os.stat_result
    """when it was mapped"""
    header: bytes
    """BLAKE3 of the safetensors header, which no patch touches"""

    @property
    def is_in_place(self) -> bool:
        try:
            now = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(now, self.found) and now.st_size == self.found.st_size


def refuse_foreign(paths: LocalPaths) -> None:
    if is_foreign(paths):
        raise Refused(
            f"{paths.directory} is not empty and is not a weightcast local checkpoint",
            remedy="choose an empty or new directory for --local",
        )


def is_foreign(paths: LocalPaths) -> bool:
    """Whether the directory holds somebody else's files. A new disk has one directory of its own."""
    if not is_directory(paths.directory) or is_directory(paths.room):
        return False
    names = os.listdir(paths.directory)
    return any(not durable.is_temporary(name) and name != "lost+found" for name in names)


def ensure_room(paths: LocalPaths) -> None:
    """Makes the directories. Refused when the directory holds somebody else's files, or where nothing is
    seeded yet and its file system does not do."""
    refuse_foreign(paths)
    if not exists(paths.state):
        require("--local", paths.room if is_directory(paths.room) else paths.directory, LOCAL_NEEDS)
    paths.directory.mkdir(parents=True, exist_ok=True)
    for directory in (paths.room, paths.journals, paths.spool):
        if is_link(directory):
            raise Refused(f"{directory} is a symbolic link", remedy="remove it; links are refused here")
        directory.mkdir(exist_ok=True)


def empty_spool(paths: LocalPaths) -> None:
    """Fetched shards are of no use once they are staged, or when their fetcher was killed."""
    for path in sorted(paths.spool.rglob("*"), reverse=True):
        path.rmdir() if is_directory(path) else path.unlink()
        failpoint("spool.removed", path)


def read_base(paths: LocalPaths) -> Base:
    """Raises FileNotFoundError and DamagedFile."""
    return parse_base(durable.read_file(paths.base, BASE_LIMIT))


class HasWriter(RetryLater):
    """Another process has the local checkpoint."""


def own(paths: LocalPaths) -> FileLock:
    """The owner lock, taken; HasWriter when another writer lives."""
    ensure_room(paths)
    lock = FileLock(paths.owner)
    try:
        lock.acquire(text=owner_text())
    except RetryLater as error:
        found = holder(paths.owner)
        if found == owner_text():
            which, remedy = "this process", "call close() of the earlier Publisher, or give another local"
        else:
            which = found or "it does not say which"
            remedy = "stop the other publisher or subscriber, or give each its own --local"
        raise HasWriter(f"{paths.directory} already has a writer ({which})", remedy=remedy) from error
    return lock


class TensorFiles:
    """Files with the tensors of `table`, whose bytes a subclass reads. `places` in table order."""

    def __init__(self, table: TensorTable, places: Places | Sequence[Place]) -> None:
        self.table, self.places = table, places

    def bytes_at(self, place: Place) -> ByteArray:
        raise NotImplementedError

    def words_in(self, tensor: int, start: int, stop: int) -> Words:
        """As `bytes_at`; maybe not aligned."""
        kind, place = self.table[tensor].kind, self.places[tensor]
        nbytes = (stop - start) * kind.width
        return self.bytes_at(Place(place.file, place.offset + start * kind.width, nbytes)).view(kind.numpy)


class LocalCheckpoint(TensorFiles):
    """Open, mapped and described by a state. Only the holder of the owner lock may call what writes."""

    def __init__(
        self, paths: LocalPaths, base: Base, state: LocalState, checkpoint: Checkpoint, *, threads: int = 1
    ) -> None:
        super().__init__(base.table, checkpoint.places)
        self.paths = paths
        self.base = base
        self.state = state
        self.checkpoint = checkpoint
        self.threads = threads
        """that read and write its words"""
        self.host = Boot.here()
        self.proofs = Proofs(len(base.table))
        self._maps = {path: _map(path) for path in checkpoint.weight_files}
        self._in_memory = any(file_system(mapped.found.st_dev) == "tmpfs" for mapped in self._maps.values())
        """pages are small and never written back"""
        self.homes, self.files = self._laid_out()
        """int64[tensors, 3], not to be written: which of `files`, number of its first word there, words; and
        each file's words, once for each dtype and alignment of its tensors, writable"""
        self._index = _digest_of(checkpoint.index_file)

    @classmethod
    def open(cls, directory: Path, *, threads: int = 1) -> LocalCheckpoint | None:
        """None when nothing was ever seeded here. NeedsReseed when the files no longer fit the state,
        DamagedFile when the state contradicts itself."""
        paths = LocalPaths(directory)
        state = read_state(paths.state)
        if state is None:
            return None
        try:
            base = read_base(paths)
            checkpoint = open_checkpoint(directory, follow_links=False, adapter=base.is_adapter)
        except FileNotFoundError as error:
            raise NeedsReseed(f"{error.filename} is gone", remedy=_SEEDED_AGAIN) from error
        except Refused as error:
            # a kill while seeding may leave no weights at all
            raise NeedsReseed(error.message, remedy=_SEEDED_AGAIN) from error
        if checkpoint.table.specs != base.table.specs or len(state.position.lanes) != LANES_BYTES * len(
            base.table
        ):
            raise NeedsReseed(f"{directory}: its tensors differ from the run's base", remedy=_SEEDED_AGAIN)
        check_roots(paths.state, state, base.table)
        return cls(paths, base, state, checkpoint, threads=threads)

    @property
    def directory(self) -> Path:
        return self.paths.directory

    @property
    def side_files(self) -> dict[str, Path]:
        """Existing side files of the run, by name."""
        paths = {record.name: self.directory / record.name for record in self.base.all_files}
        return {name: path for name, path in paths.items() if is_file(path)}

    def close(self) -> None:
        self.files.clear()
        for mapped in self._maps.values():
            # views handed out keep a map alive; it is dropped with them
            with contextlib.suppress(BufferError):
                mapped.map.close()
        self._maps.clear()

    def __enter__(self) -> LocalCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(self, state: LocalState) -> None:
        """Makes `state` durable, then current."""
        state = state.but(host=self.host)
        write_state(self.paths.state, state)
        self.state = state

    def check_files(self) -> None:
        """Raises NeedsReseed when a path no longer leads to the file that is mapped, or what says where its
        tensors lie is another than when it was opened."""
        for mapped in self._maps.values():
            if not mapped.is_in_place:
                raise NeedsReseed(f"{mapped.path} was replaced while it was in use", remedy=_LEAVE_ALONE)
            if _header_digest(mapped.map) != mapped.header:
                raise NeedsReseed(
                    f"{mapped.path}: its header changed while it was in use", remedy=_LEAVE_ALONE
                )
        if self._index != _digest_of(self.checkpoint.index_file):
            raise NeedsReseed(f"{self.checkpoint.index_file} was changed", remedy=_LEAVE_ALONE)

    def check_alone(self) -> None:
        """Raises RetryLater when weights lie here that are none of the checkpoint's: engines read every
        safetensors file that they find."""
        known = {path.name for path in self.checkpoint.weight_files}
        known |= {record.name for record in self.base.all_files}
        for path in matching(self.directory, "[!.]*.safetensors"):
            if path.name not in known:
                raise RetryLater(
                    f"{path} is not part of the checkpoint, but engines would load it", remedy="remove it"
                )

    def file_identities(self) -> tuple[FileIdentity, ...]:
        """Of the weight files."""
        return tuple(file_identity(path) for path in self.checkpoint.weight_files)

    def _laid_out(self) -> tuple[NDArray[np.int64], list[Words]]:
        forms, rows = self.table.forms, self.checkpoint.places.rows
        widths, offsets = forms[:, 0], rows[:, 1]
        kinds, owners = np.unique(
            np.stack([rows[:, 0], widths, offsets % widths], 1), axis=0, return_inverse=True
        )
        files: list[Words] = []
        for file, width, rest in kinds.tolist():
            mapped = self._maps[self.checkpoint.weight_files[file]].map
            files.append(np.frombuffer(mapped, f"<u{width}", (len(mapped) - rest) // width, rest))
        return np.stack([owners.reshape(-1), offsets // widths, forms[:, 1]], 1), files

    def words(self, tensor: int) -> Words:
        """A writable view of a tensor's words in its mapped file; may be unaligned."""
        owner, start, words = self.homes[tensor].tolist()
        found: Words = self.files[owner][start : start + words]
        return found

    def bytes_at(self, place: Place) -> ByteArray:
        found = np.frombuffer(self._maps[place.file].map, np.uint8, place.nbytes, place.offset)
        if self._in_memory:
            populate(found)
        return found

    def begin_writing(self, words: Words, changes: int) -> None:
        """`words`: a stretch of a tensor in which so many words will be written. Where few pages stay as they
        are, all of them are made ready at once; memory of tmpfs is never written back, and is ready."""
        if changes * _PAGE >= words.nbytes and not self._in_memory:
            ready_to_write(words)

    def chunk_words(self, chunk: Chunk) -> Words:
        """The chunk's words with zero padding; not to be written. A view where the chunk is one run."""
        place = run_of(chunk, self.checkpoint.places, chunk.tensors)
        if place is None or place.offset % chunk.kind.width:
            return gather(chunk, self.words_in)
        return self.bytes_at(place).view(chunk.kind.numpy)

    @contextlib.contextmanager
    def patching(self, seconds: float = PATCH_LOCK_SECONDS, wait: Wait = time.sleep) -> Iterator[None]:
        """The exclusive patch lock, and the field's own lock where such a directory exists. `wait` is called
        between attempts and may raise."""
        with FileLock(self.paths.patch).holding(seconds=seconds, wait=wait), self._field_lock(seconds):
            yield

    @contextlib.contextmanager
    def reading(self, seconds: float = PATCH_LOCK_SECONDS) -> Iterator[None]:
        """The shared patch lock: bytes and state do not change while it is held."""
        with FileLock(self.paths.patch).holding(shared=True, seconds=seconds):
            yield

    @contextlib.contextmanager
    def _field_lock(self, seconds: float) -> Iterator[None]:
        room = self.directory / ".weight_sync"
        if not is_directory(room):
            yield
            return
        with FileLock(room / "lock").holding(seconds=seconds):
            # its state would let a patched engine replay on bytes that are ours now
            (room / "state.json").unlink(missing_ok=True)
            yield


def gather(chunk: Chunk, words_in: WordsIn) -> Words:
    """Assembles a chunk from its tensors: uint[chunk.words], zero where padded. In memory of this thread's
    scratch, which is lent again when nobody holds it."""
    first = chunk.spans[0]
    if len(chunk.spans) == 1 and first.words == chunk.words:
        view = words_in(first.tensor, first.start, first.stop)
        if view.flags.aligned:
            return view
    words = scratch().lend("gathered", chunk.kind.numpy, chunk.words)
    padding = np.zeros(BLOCK_WORDS, words.dtype)
    pieces: list[Words] = []
    filled = 0
    for span in chunk.spans:
        if filled < span.offset:
            pieces.append(padding[: span.offset - filled])
        pieces.append(words_in(span.tensor, span.start, span.stop))
        filled = span.offset + span.words
    pieces.append(padding[: chunk.words - filled])
    np.concatenate(pieces, out=words)
    return words


def _fill_holes(fd: int, path: Path, found: os.stat_result) -> None:
    """A store to a hole, or to a block shared with a copy, is SIGBUS on a full disk, not an error. Elsewhere
    fewer blocks need not be holes."""
    system = file_system(found.st_dev)
    try:
        if system in _PLAIN_SYSTEMS and taken_bytes(found) < found.st_size:
            os.posix_fallocate(fd, 0, found.st_size)
        if system in _SHARING_SYSTEMS:
            unshare_blocks(fd, found.st_size)
    except OSError as error:
        raise RetryLater(
            f"{path}: cannot allocate its holes or shared blocks: {error.strerror}",
            remedy="free space on the local disk",
        ) from error


def _map(path: Path) -> _Mapped:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if found.st_nlink > 1:
            raise Linked(
                f"{path} has {found.st_nlink} links: patching it would change another directory's file",
                remedy="copy the file: a local checkpoint needs files with a single link",
            )
        _fill_holes(fd, path, found)
        with durable.named(path, "mmap"):
            mapped = mmap.mmap(fd, found.st_size)
    finally:
        os.close(fd)
    return _Mapped(path, mapped, found, _header_digest(mapped))


def _header_digest(mapped: mmap.mmap) -> bytes:
    length = int.from_bytes(mapped[:8], "little")
    return blake3(mapped[: 8 + min(length, len(mapped))]).digest()


def _digest_of(path: Path | None) -> bytes:
    """Empty when the file is missing."""
    try:
        return b"" if path is None else blake3(path.read_bytes()).digest()
    except FileNotFoundError:
        return b""


_FILE_MODES: dict[Readers, int] = {"owner": 0o600, "group": 0o640, "all": 0o644}
_DIRECTORY_MODES: dict[Readers, int] = {"owner": 0o700, "group": 0o750, "all": 0o755}
_SET_GROUP = 0o2000


def grant_read(local: LocalCheckpoint, readers: Readers) -> None:
    """Sets the modes of the files that engines, which may run as other users, load. Raises OSError."""
    checkpoint = local.checkpoint
    index = () if checkpoint.index_file is None else (checkpoint.index_file,)
    side_files = (*checkpoint.other_files, *local.side_files.values())
    within = {each for path in side_files for each in path.parents if each.is_relative_to(local.directory)}
    _set_modes({local.directory, local.paths.room, *within}, _DIRECTORY_MODES[readers], _SET_GROUP)
    files = {*checkpoint.weight_files, *side_files, *index, local.paths.base}
    _set_modes(files, _FILE_MODES[readers])


def grant_read_within(directory: Path, readers: Readers) -> None:
    """As `grant_read`, for all files of a directory. Raises OSError."""
    _set_modes([directory], _DIRECTORY_MODES[readers], _SET_GROUP)
    _set_modes(directory.iterdir(), _FILE_MODES[readers])


def _set_modes(paths: Iterable[Path], mode: int, kept: int = 0) -> None:
    """`kept`: bits that stay as they are."""
    for path in paths:
        now = path.stat().st_mode & 0o7777
        if now != mode | now & kept:
            path.chmod(mode | now & kept)
