"""Versions of adapters as engines load them: `LOCAL/adapters/NAME-v000017/`, a PEFT directory and a record of
its files. It gets its name once every byte is durable and proven, and is never changed after that."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, MaxLen

from weightcast.shared.base.errors import DamagedFile, NeedsReseed, Refused, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.index import file_record
from weightcast.shared.channel.run_files import FORMAT, check_format, side_records, write_file_records
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint, Readers, grant_read_within
from weightcast.shared.checkpoint.verify.hashing import hash_tensors
from weightcast.shared.checkpoint.verify.inspect import Fault, inspect
from weightcast.shared.checkpoint.verify.seed import ReadCheckpoint
from weightcast.shared.digest.checksums import root
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.shared.files.paths import is_directory, matching
from weightcast.shared.files.strict_json import Hex, Members, parse_object, write_object

CONFIG = "adapter_config.json"
_RECORD, _RECORD_LIMIT = ".weightcast.json", 1 << 20
_STATE_LIMIT = 4 << 20
_DRAFT = ".tmp"
_LOADED = "engines that load it from here get wrong weights; its host exports it again"
_OURS = re.compile(r".+-v\d{6,15}(\.tmp)?", re.ASCII | re.DOTALL).fullmatch


def _directory(name: str, version: int) -> str:
    return f"{name}-v{version:06d}"


@dataclass(frozen=True)
class Exported:
    """A version of an adapter. `digest`: of its index; `main_version`, `main_root`: of the main weights that
    it was trained on."""

    name: Annotated[str, MaxLen(64)]
    version: Annotated[int, Ge(0)]
    digest: Annotated[str, Hex(64)]
    main_version: Annotated[int, Ge(0)]
    main_root: Annotated[str, Hex(64)]

    @property
    def label(self) -> str:
        """By which engines know it: no other bytes ever have this name."""
        return f"{self.name}@{self.version}"

    @property
    def directory(self) -> str:
        return _directory(self.name, self.version)


class ExportedAdapters:
    """Those of one host, in its directory `adapters`. For the owner of the local checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "state.json"

    def read_state(self) -> dict[str, object]:
        """What engines have loaded; empty where it cannot be read: nothing is trusted then."""
        try:
            return parse_object(durable.read_file(self.state, _STATE_LIMIT), str(self.state))
        except (FileNotFoundError, DamagedFile):
            return {}

    def followed(self, name: str) -> Path:
        """The local checkpoint from which its versions are exported."""
        return self.directory / ".follow" / name

    def left(self) -> list[str]:
        """Names of adapters that were ever followed here, and not removed."""
        room = self.directory / ".follow"
        return sorted(path.name for path in room.iterdir()) if is_directory(room) else []

    def scan(self) -> Iterator[Exported]:
        """Reads every byte. What a kill left half done is deleted, and what has other bytes than were
        exported."""
        for path in sorted(self.directory.iterdir()) if is_directory(self.directory) else ():
            if _OURS(path.name) is None:
                continue
            try:
                yield _read(path)
            except (WeightcastError, FileNotFoundError):
                self._remove(path)

    def lost(self, exported: Iterable[Exported]) -> list[Exported]:
        """Those whose directory is gone."""
        return [each for each in exported if not is_directory(self.directory / each.directory)]

    def verify(self, exported: Exported) -> int:
        """Reads every byte; returns how many. Raises DamagedFile, and OSError."""
        path = self.directory / exported.directory
        if _read(path) != exported:
            raise DamagedFile(f"{path} is not {exported.label}")
        return sum(file.stat().st_size for file in path.iterdir())

    def faults(self, threads: int, advance: Advance | None = None) -> Iterator[Fault]:
        """What is wrong with those of a host, for people. Nothing is changed."""
        for name in self.left():
            place = f"{self.directory.name}/.follow/{name}"
            for fault in inspect(self.followed(name), threads=threads, advance=advance).faults:
                yield Fault(f"{place}/{fault.file}", fault.problem, "its host repairs it")
        for path in matching(self.directory, "*-v*[0-9]"):
            try:
                _read(path)
            except (WeightcastError, OSError) as error:
                yield Fault(f"{self.directory.name}/{path.name}", error_text(error), _LOADED)
        for label in sorted({label for row in self._loaded(self.read_state()) for label in self._gone(row)}):
            yield Fault(f"{self.directory.name}/{label}", "is missing", "its host exports it again")

    def forget_missing(self) -> None:
        """Of what engines have loaded: their host loads it anew."""
        state = self.read_state()
        for row in self._loaded(state):
            for label in self._gone(row):
                del row[label]
        if state:
            durable.replace(self.state, write_object(state))

    def _loaded(self, state: Mapping[str, object]) -> list[dict[str, str]]:
        """By engine, digests by name."""
        what = str(self.state)
        rows = Members(state, what).object("engines").values() if state else ()
        return [Members(row, what).text_map("loaded") for row in rows]

    def _gone(self, loaded: Iterable[str]) -> list[str]:
        """Labels whose directory is gone; an adapter's own name has none."""
        gone = []
        for label in loaded:
            name, _, version = label.partition("@")
            if version.isdecimal() and not is_directory(self.directory / _directory(name, int(version))):
                gone.append(label)
        return gone

    def export(
        self, made: Exported, local: LocalCheckpoint, carried: Collection[str], readers: Readers | None
    ) -> None:
        """A copy of the local version of an adapter, with the files that it carries. Raises Refused where its
        config is not among them, and NeedsReseed where the copied bytes are not the version's."""
        there = self.directory / made.directory
        draft = there.with_name(there.name + _DRAFT)
        self._remove(draft)
        self._remove(there)
        if CONFIG not in carried:
            raise Refused(f"{made.label} has no {CONFIG}", remedy="publish the directory that PEFT saved")
        draft.mkdir(parents=True)
        names = [*(path.name for path in local.checkpoint.weight_files), *carried]
        for file in names:
            durable.replace(durable.make_within(draft, file), durable.pieces_of(local.directory / file))
        failpoint("adapter.copied", draft)
        with ReadCheckpoint(open_checkpoint(draft, follow_links=False, adapter=True)) as read:
            found = root(local.table, hash_tensors(local.table, read, threads=local.threads))
        expected = local.state.position.root
        if found != expected:
            raise NeedsReseed(
                f"{made.label}: its copy has root {found[:16]}, expected {expected[:16]}",
                remedy="check the disk and the memory of this host if this stays",
            )
        files = write_file_records(file_record(draft / file, file) for file in names)
        facts = {key: getattr(made, key) for key in Exported.__dataclass_fields__}
        durable.replace(draft / _RECORD, write_object({"format": FORMAT, **facts, "side_files": files}))
        if readers is not None:
            grant_read_within(draft, readers)
            self.directory.chmod(local.directory.stat().st_mode & 0o7777)
        draft.rename(there)
        failpoint("adapter.exported", there)
        durable.sync_directory(self.directory)

    def config(self, exported: Exported) -> Mapping[str, object]:
        path = self.directory / exported.directory / CONFIG
        return parse_object(durable.read_file(path, _RECORD_LIMIT), str(path))

    def delete(self, exported: Exported) -> None:
        self._remove(self.directory / exported.directory)

    def forget(self, name: str) -> None:
        """The local checkpoint of an adapter that is not followed any more."""
        if is_directory(self.followed(name)):
            shutil.rmtree(self.followed(name))

    @staticmethod
    def _remove(path: Path) -> None:
        """A kill in between leaves a draft."""
        if is_directory(path):
            draft = path if path.name.endswith(_DRAFT) else path.with_name(path.name + _DRAFT)
            if draft != path:
                path.rename(draft)
            failpoint("adapter.deleting", draft)
            shutil.rmtree(draft)


def _read(path: Path) -> Exported:
    """Raises DamagedFile where it is not what its record says."""
    what = str(path / _RECORD)
    members = Members(parse_object(durable.read_file(path / _RECORD, _RECORD_LIMIT), what), what)
    check_format(members, what)
    found = members.record(Exported)
    records = side_records(members, what)
    if found.directory != path.name or any(
        file_record(path / each.name, each.name) != each for each in records
    ):
        raise DamagedFile(f"{path} is not what was exported")
    return found
