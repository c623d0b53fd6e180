"""A channel as a reader sees it: opened once, read again at every step, nothing cached but the base."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import (
    MEND_CHANNEL,
    DamagedFile,
    Refused,
    RetryLater,
    UnknownFormat,
    Untrusted,
)
from weightcast.shared.channel.index import (
    INDEX_LIMIT,
    INDEX_NAME,
    ForeignIndex,
    Index,
    describe,
    parse_foreign,
    parse_index,
    read_top,
    remembered,
)
from weightcast.shared.channel.layout import Layout, Pointer, read_pointer, version_name, version_of
from weightcast.shared.channel.render import Shown, look
from weightcast.shared.channel.run_files import (
    BASE_LIMIT,
    Base,
    ChannelFile,
    parse_base,
    parse_channel_file,
)
from weightcast.shared.channel.signing import (
    SIGNATURE_LIMIT,
    Statement,
    Trust,
    require_same,
    signature_path,
    stated_by,
    stated_by_base,
)
from weightcast.shared.files.durable import read_file
from weightcast.shared.files.paths import exists, is_directory, is_file, require_directory
from weightcast.shared.files.safetensors import read_header
from weightcast.shared.files.strict_json import Members

_CHANNEL_FILE_LIMIT = 16 << 20


@dataclass(frozen=True)
class FullVersion:
    """A version in a foreign channel that is an ordinary checkpoint directory. `digest`: of its index file,
    or of its name where it has none."""

    version: int
    digest: str
    directory: Path


_BEFORE = ("hosts", "publishers", "lost+found")
"""what may lie in a channel's directory before the channel is made"""


class NoChannel(RetryLater):
    """Nobody has made a channel there yet, or it is not mounted."""

    @classmethod
    def within(cls, directory: Path) -> NoChannel:
        return cls(
            f"{directory} has neither channel.json nor a pointer",
            remedy="has the publisher started? is the channel mounted?",
        )


@dataclass(frozen=True)
class Channel:
    """`file` and `base` are None for a foreign channel (the field's plain format: no channel.json). With
    `trust`, base.json and indexes are given out only if a trusted key signed them; None checks nothing."""

    directory: Path
    file: ChannelFile | None
    base: Base | None
    trust: Trust | None = None

    @classmethod
    def open(cls, directory: Path, trust: Trust | None = None) -> Channel:
        """Raises NoChannel when the directory is not there (yet), Refused when it is no channel, Untrusted
        when `trust` is given and its base is not signed."""
        layout = Layout(directory)
        if not is_directory(directory):
            require_directory("the channel", directory)
            raise NoChannel(
                f"{directory} is not a directory",
                remedy="mount it, or make the channel with `weightcast channel init`",
            )
        file = _read(layout.channel_json)
        if file is None:
            foreign = cls(directory, None, None)
            if trust is not None:
                _refuse_unsigned(foreign)
            return foreign
        with _read_from(layout.channel_json):
            parsed = parse_channel_file(file)
        data = _read(layout.base_json)
        if data is None:
            raise DamagedFile(
                f"{layout.base_json} is missing", remedy="restore it; nothing can be checked without"
            )
        stated = _stated(trust, layout.base_json, data)
        with _read_from(layout.base_json):
            base = parse_base(data)
        if stated is not None:
            require_same(stated, stated_by_base(base, stated.time), str(layout.base_json))
        if base.run_id != parsed.run_id:
            raise DamagedFile(
                f"{layout.base_json} is of run {base.run_id}, channel.json of {parsed.run_id}",
                remedy="restore both from one backup",
            )
        return cls(directory, parsed, base, trust)

    @property
    def foreign(self) -> bool:
        return self.file is None

    @property
    def layout(self) -> Layout:
        return Layout(self.directory)

    def require_ours(self) -> tuple[ChannelFile, Base]:
        if self.file is None or self.base is None:
            raise Refused(
                f"{self.directory} has no channel.json",
                remedy="make a channel with `weightcast channel init`",
            )
        return self.file, self.base

    def pointer(self) -> Pointer | None:
        """Raises NoChannel for a channel that was made since it was opened: its pointer is none of another
        tool's."""
        pointer = read_pointer(self.directory)
        if pointer is not None and self.foreign and exists(self.layout.channel_json):
            raise NoChannel(f"{self.directory} is being made", remedy="the next look finds it")
        if pointer is not None and pointer.run is not None and not self.foreign:
            raise DamagedFile(
                f"{self.layout.latest} names run {pointer.run!r}, as only foreign channels' pointers do",
                remedy="run `weightcast channel repair`, or write the six digits of a version into it",
            )
        return pointer

    def pointed(self) -> int:
        """The version that the pointer names; 0 before the first."""
        pointer = self.pointer()
        return 0 if pointer is None else pointer.version

    def index(
        self, pointer: Pointer, version: int, table: TensorTable
    ) -> Index | ForeignIndex | FullVersion | None:
        """The main index of a version at or below the pointer. None when it is not there, or not wholly: a
        network mount may show the size of a moment ago. Raises Refused for one that is damaged."""
        if version > pointer.version:
            raise RetryLater(
                f"version {version} is not published yet: the newest is {pointer.version}",
                remedy="sync again once it is out, or give one that `weightcast channel log` lists",
            )
        directory = pointer.prefix / version_name(version)
        data = _read(directory / INDEX_NAME, INDEX_LIMIT)
        if data is None:
            return _single_file(directory, version) if self.foreign else None
        if _is_cut(data):
            return None
        return self._parse(data, directory, version, table)

    def _parse(
        self, data: bytes, directory: Path, version: int, table: TensorTable
    ) -> Index | ForeignIndex | FullVersion:
        # what nobody vouches for is not parsed, nor what was parsed before
        plain = self.trust is not None or remembered(data, table) is not None
        path = directory / INDEX_NAME
        with _read_from(path):
            top = None if plain else read_top(data)
            kind = "ours" if top is None else describe(data, top)
        if kind == "ours" and not self.foreign:
            index = self._ours(data, directory, version, table, "", top)
            _require(not index.main, f"{directory}: its index belongs beside another")
            return index
        if kind == "ours":
            raise UnknownFormat(
                f"{directory} is weightcast's, but the channel has no channel.json",
                remedy="restore channel.json",
            )
        if not self.foreign:
            raise DamagedFile(f"{path} was not written by weightcast", remedy=MEND_CHANNEL)
        if kind == "full":
            return FullVersion(version, digest_of(data), directory)
        with _read_from(path):
            foreign = parse_foreign(data)
        _require(foreign.version == version, f"{directory}: its index is of version {foreign.version}")
        return _told_apart(foreign, directory, data)

    def anchor(self, version: int, table: TensorTable) -> Index | None:
        """The index of the anchor beside a version."""
        index = self._beside(self.layout.anchor_dir(version), version, table)
        wrong = f"{self.layout.anchor_dir(version)}: its index is not that of an anchor"
        _require(index is None or index.kind == "anchor", wrong)
        return index

    def _ours(
        self,
        data: bytes,
        directory: Path,
        version: int,
        table: TensorTable,
        main: str,
        top: Members | None = None,
    ) -> Index:
        """`main`: digest of the version's main index for one that lies beside it; `top`: of `data`, where it
        was read already."""
        file, _ = self.require_ours()
        path = directory / INDEX_NAME
        stated = _stated(self.trust, path, data)
        with _read_from(path):
            index = parse_index(data, table, top=top, run=file.run_id)
        if stated is not None:
            require_same(stated, stated_by(index, index.digest, main), str(path))
        _require(index.version == version, f"{directory}: its index is of version {index.version}")
        return index

    def _beside(self, directory: Path, version: int, table: TensorTable) -> Index | None:
        """An index that lies beside the version's main one, and was signed for exactly that one."""
        data = _read(directory / INDEX_NAME, INDEX_LIMIT)
        if data is None or _is_cut(data):
            return None
        main = b"" if self.trust is None else _read(self.layout.index(version), INDEX_LIMIT)
        if main is None:
            return None
        return self._ours(data, directory, version, table, digest_of(main))

    def skip(self, version: int, base_version: int, table: TensorTable) -> Index | None:
        """The index of the delta to a version from one older than the version before it."""
        directory = self.layout.from_dir(version, base_version)
        index = self._beside(directory, version, table)
        fits = index is None or (index.main != "" and index.base_version == base_version)
        _require(fits, f"{directory}: not the index of a delta from version {base_version}")
        return index

    def shown(self, pointer: Pointer, *, above: int = 0, up_to: int | None = None) -> dict[int, Shown]:
        """What the directories of the versions in (above, up_to] show, as far as the pointer leads."""
        last = pointer.version if up_to is None else min(up_to, pointer.version)
        found: dict[int, Shown] = {}
        for name in _names(pointer.prefix):
            version = version_of(name)
            if version is not None and above < version <= last:
                seen = look(pointer.prefix / name)
                if seen is not None:
                    found[version] = seen
        return found

    def anchored(self, pointer: Pointer) -> frozenset[int]:
        """Versions up to the pointer that have an anchor beside them."""
        found = self.shown(pointer)
        return frozenset(version for version, seen in found.items() if seen.anchor is not None)


def _names(directory: Path) -> list[str]:
    with os.scandir(directory) as scan:
        return [entry.name for entry in scan]


def _stated(trust: Trust | None, path: Path, data: bytes) -> Statement | None:
    """None when nothing is to be checked. Raises Untrusted."""
    if trust is None:
        return None
    signature = _read(signature_path(path), SIGNATURE_LIMIT)
    return trust.check(signature, str(path), digest_of(data))


def may_lie_before(name: str) -> bool:
    """Whether an entry may lie in a channel's directory before the channel is made."""
    return name.startswith(".") or name in _BEFORE


def require_named(directory: Path) -> None:
    """Raises Refused for a directory with other things than a channel's in it, and NoChannel where it may be
    made yet, or mounted. A channel of another tool has no more than the pointer."""
    named = (directory / name for name in ("channel.json", "base.json", "latest"))
    if not is_directory(directory) or any(exists(path) for path in named):
        return
    for name in os.listdir(directory):
        if not may_lie_before(name) and version_of(name) is None:
            raise Refused(
                f"{directory} is no channel: it has neither channel.json nor latest", remedy="check --channel"
            )
    raise NoChannel.within(directory)


def _refuse_unsigned(foreign: Channel) -> None:
    if foreign.pointer() is None:
        raise NoChannel.within(foreign.directory)
    raise Untrusted(
        f"{foreign.directory} has no channel.json: nothing in it can be signed",
        remedy="restore channel.json, or follow a foreign channel without --trusted-key",
    )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise DamagedFile(problem, remedy=MEND_CHANNEL)


def _is_cut(data: bytes) -> bool:
    """Whether it may be the beginning of an index."""
    return data.lstrip()[:1] in (b"", b"{") and not data.rstrip().endswith(b"}")


@contextlib.contextmanager
def _read_from(path: Path) -> Iterator[None]:
    """Parsers know what is wrong; which file it is, and what to do about it, is known here."""
    try:
        yield
    except Refused as error:
        problem = error.message.removeprefix(f"{path.name}: ")
        raise type(error)(f"{path}: {problem}", remedy=error.remedy or MEND_CHANNEL) from error


def _read(path: Path, limit: int = _CHANNEL_FILE_LIMIT) -> bytes | None:
    try:
        return read_file(path, max(limit, BASE_LIMIT) if path.name == "base.json" else limit)
    except FileNotFoundError:
        return None


def _single_file(directory: Path, version: int) -> FullVersion | None:
    """A full version of one file needs no index."""
    file = directory / "model.safetensors"
    if not is_file(file):
        return None
    found = file.stat()
    return FullVersion(
        version, digest_of(f"{version} {found.st_size} {found.st_mtime_ns}".encode()), directory
    )


def _told_apart(foreign: ForeignIndex, directory: Path, data: bytes) -> ForeignIndex:
    """With a digest over the checksums in the shards too: two runs that changed the same tensors write the
    same index. Raises RetryLater while a shard is not there."""
    told = [data]
    for shard in sorted(set(foreign.weight_map.values())):
        try:
            header = read_header(directory / shard)
        except FileNotFoundError:
            raise RetryLater(
                f"{directory / shard} is not there, which its index names",
                remedy="is the mount stale? is a trainer emptying the channel?",
            ) from None
        told.append(json.dumps([shard, sorted(header.metadata.items())]).encode())
    return replace(foreign, digest=digest_of(b"\n".join(told)))


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()
