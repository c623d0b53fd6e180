"""Side files of a local checkpoint (config, tokenizer, code): missing and damaged ones are replaced."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from weightcast.shared.base.errors import DamagedFile, WeightcastError
from weightcast.shared.channel.chain import check_files
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import DirectoryStore
from weightcast.shared.channel.index import CARRIED, ForeignIndex, Index, object_record
from weightcast.shared.channel.run_files import DRAFT, Base, FileRecord, carried_records, write_file_records
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.checkpoint.state.state import Position
from weightcast.shared.checkpoint.update.fetch import NotThere, Patience
from weightcast.shared.checkpoint.update.sources import open_base
from weightcast.shared.checkpoint.verify.hashing import proven
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import Checkpoint, side_files
from weightcast.shared.files.paths import exists, is_file, matching
from weightcast.shared.files.strict_json import Members, parse_object, write_object


def repair_files(local: LocalCheckpoint, sources: Sequence[Path | Store]) -> list[str]:
    """Replaces side files that differ from the run's by those of a source that has them. Returns
    the names of those that were written."""
    return [
        record.name
        for record in SideFiles(local.paths).expected(local.base, local.state.position)
        if any(check_files(DirectoryStore(local.directory), [record]))
        and any(_copied(source, local.directory, record) for source in sources)
    ]


def _copied(source: Path | Store, directory: Path, record: FileRecord) -> bool:
    with contextlib.suppress(WeightcastError, OSError):
        if isinstance(source, Path):
            pieces: Iterable[durable.Piece] = durable.pieces_of(source / record.name)
        else:
            pieces = source.pieces(record.name)
        durable.replace(durable.make_within(directory, record.name), proven(record, pieces))
        return True
    return False


Sets = dict[str, tuple[FileRecord, ...]]
"""by digest of the version, the last one noted last"""
_KEPT = 16
_LIMIT = 16 << 20


class SideFiles:
    """The side files of one local checkpoint, and what its versions carry. For the owner; `expected` and
    `unsettled` for any reader. `base`: where missing ones are copied from; `carries`: whether files that
    versions carry are put in place."""

    def __init__(
        self,
        paths: LocalPaths,
        base: Path | None = None,
        patience: Patience = Patience(),
        *,
        carries: bool = True,
    ) -> None:
        self._paths, self._memory = paths, paths.room / "carried.json"
        self._base_dir, self._patience, self._carries = base, patience, carries
        self._base: Checkpoint | None = None
        """as it was last opened"""
        self.missing: tuple[str, ...] = ()
        """files of the base that could not be copied"""
        self.left_behind: tuple[str, ...] = ()
        """files of the base that hosts do not get"""
        self.base_notes: tuple[str, ...] = ()
        """small faults in the base that are tolerated"""
        self.changed: list[str] = []
        """carried files that were put in place or removed since the reader cleared this"""

    def sets(self) -> Sets:
        """Empty where no version ever carried anything."""
        what = str(self._memory)
        try:
            versions = Members(parse_object(durable.read_file(self._memory, _LIMIT), what), what)
            return {
                # of any component: the index that listed them was judged by its own
                digest: carried_records(Members({CARRIED: rows}, what), what, DRAFT)
                for digest, rows in versions.object("versions").items()
            }
        except (FileNotFoundError, DamagedFile):
            return {}  # what the local version carries is learned from the channel again

    def keep(self, record: FileRecord, pieces: Iterable[durable.Piece]) -> None:
        """Raises DamagedFile where the pieces are not the record's bytes."""
        path = self._paths.carried / record.blake3
        path.parent.mkdir(exist_ok=True)
        durable.replace(path, proven(record, pieces))

    def path(self, record: FileRecord) -> Path | None:
        """Of the copy that is kept here."""
        path = self._paths.carried / record.blake3
        return path if is_file(path) else None

    def settle(self, local: LocalCheckpoint) -> None:
        """Puts the files of the local version in place. The caller holds the patch lock. Raises DamagedFile
        where one cannot be."""
        sets, position = self.sets(), local.state.position
        if not self._carries or not sets or (position.version and position.digest not in sets):
            return  # not known: left as they are
        base = _by_name(local.base.all_files)
        wanted = base | _by_name(sets.get(position.digest, ()))
        for name in sorted({record.name for records in sets.values() for record in records}):
            if self._put(local, name, wanted.get(name), base.get(name)):
                self.changed.append(name)
        self._sweep(sets, base)

    def _put(
        self, local: LocalCheckpoint, name: str, wanted: FileRecord | None, original: FileRecord | None
    ) -> bool:
        path = durable.within(local.directory, name)
        here = _digest(path)
        if here == (None if wanted is None else wanted.blake3):
            return False
        if wanted is None:
            path.unlink()
            durable.sync_directory(path.parent)
            return True
        if original is not None and here == original.blake3:
            self.keep(original, durable.pieces_of(path))
        source = self.path(wanted)
        if source is None:
            raise DamagedFile(
                f"{path} is not that of the local version, and no copy is kept",
                remedy="run `weightcast local verify --repair` with --channel and --base",
            )
        durable.replace(durable.make_within(local.directory, name), proven(wanted, durable.pieces_of(source)))
        # by whoever reads the weights
        path.chmod(stat.S_IMODE(local.checkpoint.weight_files[0].stat().st_mode))
        for parent in path.relative_to(local.directory).parents[:-1]:
            (local.directory / parent).chmod(stat.S_IMODE(local.directory.stat().st_mode))
        return True

    def _sweep(self, sets: Sets, base: Mapping[str, FileRecord]) -> None:
        """What no version that is remembered carries, nor replaces."""
        carried = [record for records in sets.values() for record in records]
        wanted = {record.blake3 for record in carried}
        wanted |= {base[record.name].blake3 for record in carried if record.name in base}
        for path in matching(self._paths.carried, "*"):
            if path.name not in wanted:
                path.unlink()

    def expected(self, base: Base, position: Position) -> tuple[FileRecord, ...]:
        """The side files at that version."""
        carried = self.sets().get(position.digest, ())
        return tuple((_by_name(base.all_files) | _by_name(carried)).values())

    def unsettled(self, directory: Path, base: Base, position: Position) -> str | None:
        """The first file that is not yet that of the version."""
        sets = self.sets()
        wanted = {record.name: record.blake3 for record in self.expected(base, position)}
        for name in {record.name for records in sets.values() for record in records}:
            if position.digest in sets and _digest(durable.within(directory, name)) != wanted.get(name):
                return name
        return None

    def names(self, position: Position) -> tuple[str, ...]:
        return tuple(record.name for record in self.sets().get(position.digest, ()))

    def complete(self, local: LocalCheckpoint, channel: Channel | None) -> None:
        """Copies what was removed since: from the base, which need not be the run's, as bytes decide. Raises
        OSError."""
        base = self._opened_base()
        wanted = [record for record in local.base.all_files if not is_file(local.directory / record.name)]
        self.missing = tuple(
            record.name
            for record in wanted
            if base is None or not _copied(base.directory, local.directory, record)
        )
        if channel is not None and self._carries:
            self._learn(local.state.position, channel)
        if self.sets():
            with local.patching():
                self.settle(local)

    def _learn(self, position: Position, channel: Channel) -> None:
        """What the local version carries, where it was not noted on the way to it."""
        if channel.base is None or position.version == 0 or position.digest in self.sets():
            return
        # pruned, damaged or unreadable: a newer version brings its own, and the local one is intact
        with contextlib.suppress(WeightcastError, OSError):
            pointer = channel.pointer()
            index = pointer and channel.index(pointer, position.version, channel.base.table)
            if pointer is not None and isinstance(index, Index) and index.version_digest == position.digest:
                self.note(position, index, channel.version(pointer, index.version), waits=False)

    def note(
        self, here: Position | None, index: Index | ForeignIndex, files: Store, *, waits: bool = True
    ) -> None:
        """Fetches and remembers what a version carries, before the local checkpoint moves there from `here`.
        Raises NotThere or DamagedFile for what is missing or damaged, and does not appear or heal in time."""
        sets = self.sets()
        if not isinstance(index, Index) or not self._carries:
            return
        digest, records = index.version_digest, index.carried
        if sets.get(digest) == records or not (sets or records):
            return
        patience = self._patience.begin() if waits else Patience()
        for record in records:
            if not exists(self._paths.carried / record.blake3):
                place = files.place(f"{CARRIED}/{record.name}")
                patience.retry(index.version, place, partial(self._fetch, index.version, files, record))
        if here is not None:
            sets.setdefault(here.digest, ())
        sets.pop(digest, None)
        sets[digest] = records
        kept = dict(list(sets.items())[-_KEPT:])
        rows = {version: write_file_records(files) for version, files in kept.items()}
        durable.replace(self._memory, write_object({"versions": rows}))

    def _fetch(self, version: int, files: Store, record: FileRecord) -> None:
        try:
            self.keep(record, files.pieces(f"{CARRIED}/{record.name}"))
        except FileNotFoundError as error:
            raise NotThere(f"{error.filename} is missing", version) from error

    def _opened_base(self) -> Checkpoint | None:
        """None where it is not given or unreadable: it is not needed once it was copied."""
        if self._base is None and self._base_dir is not None:
            with contextlib.suppress(WeightcastError, OSError):
                base = open_base(self._base_dir)
                self.left_behind, self.base_notes = side_files(base).left, base.notes
                self._base = base
        return self._base


def _by_name(records: Iterable[FileRecord]) -> dict[str, FileRecord]:
    return {record.name: record for record in records}


def _digest(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return object_record(DirectoryStore(path.parent), path.name).blake3
    return None
