"""A channel as a reader sees it: opened once, read again at every step, nothing cached but the base."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from weightcast.shared.base.elements import MAIN, TensorTable
from weightcast.shared.base.errors import (
    MEND_CHANNEL,
    DamagedFile,
    Refused,
    RetryLater,
    UnknownFormat,
    Untrusted,
)
from weightcast.shared.channel.delta import read_shard_header
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
from weightcast.shared.channel.layout import (
    ANCHOR,
    BASE_JSON,
    CHANNEL_JSON,
    LATEST,
    MANIFEST,
    Pointer,
    anchor_key,
    base_of,
    delta_version,
    index_key,
    multi_step_bases,
    multi_step_key,
    read_pointer,
    version_of,
)
from weightcast.shared.channel.run_files import (
    BASE_LIMIT,
    CHANNEL_FILE_LIMIT,
    Base,
    ChannelFile,
    check_component,
    parse_base,
    parse_channel_file,
)
from weightcast.shared.channel.signing import (
    SIGNATURE_LIMIT,
    Statement,
    Trust,
    require_same,
    signature_key,
    stated_by,
    stated_by_base,
)
from weightcast.shared.channel.skyrl import foreign_pointer, newest, parse_manifest
from weightcast.shared.channel.store import NotFound, Stat, Store, read_if_there
from weightcast.shared.files.paths import exists
from weightcast.shared.files.strict_json import Members


@dataclass(frozen=True)
class FullVersion:
    """A version in a foreign channel that is an ordinary checkpoint directory. `digest`: of its index file,
    or of its name where it has none."""

    version: int
    digest: str
    files: Store


@dataclass(frozen=True)
class Shown:
    """Bytes, indexes included: of the version's own files; of its deltas from older versions, by base
    version; of the anchor. Only directories with an index count. `created`: unix time of the index by the
    store's clock; `whole`: the version is known to be full weights itself."""

    nbytes: int
    skips: Mapping[int, int] = field(default_factory=dict)
    anchor: int | None = None
    created: float = 0.0
    whole: bool = False

    @property
    def stored(self) -> int:
        """Bytes of all that."""
        return self.nbytes + sum(self.skips.values()) + (self.anchor or 0)

    @property
    def full(self) -> int | None:
        """Bytes of full weights of this version."""
        return self.nbytes if self.whole else self.anchor


def look(files: Store) -> Shown | None:
    """Of a version's directory; None where it has no index. Raises StoreError."""
    stats, directories = _listed(files)
    if INDEX_NAME not in stats:
        return None
    skips: dict[int, int] = {}
    for name in directories:
        base_version = base_of(name)
        found = None if base_version is None else _bytes_in(files.within(name))
        if base_version is not None and found is not None:
            skips[base_version] = found
    nbytes, anchor = sum(stat.size for stat in stats.values()), None
    if ANCHOR in directories:
        anchor = _bytes_in(files.within(ANCHOR))
    return Shown(nbytes, skips, anchor, stats[INDEX_NAME].written)


def _bytes_in(files: Store) -> int | None:
    """None without an index."""
    stats, _ = _listed(files)
    return sum(stat.size for stat in stats.values()) if INDEX_NAME in stats else None


def _listed(files: Store) -> tuple[dict[str, Stat], list[str]]:
    """The files, and the names of the directories."""
    entries = list(files.list())
    stats = {entry.name: entry.stat for entry in entries if entry.stat is not None}
    return stats, [entry.name for entry in entries if entry.kind == "directory"]


_BEFORE = ("hosts", "publishers", "lost+found")
"""what a channel's directory may hold before the channel is made"""


_MEND_CHANNEL_FILE = (
    "on the publisher's machine run `weightcast channel repair --channel CHANNEL --local PUBLISHER_LOCAL`, "
    "or restore the file from a backup"
)


class NoChannel(RetryLater):
    """The channel does not exist yet, or is not mounted."""

    @classmethod
    def at(cls, store: Store) -> NoChannel:
        make = "only for a new run start a publisher, or run `weightcast channel init`"
        return cls(
            f"{_absolute(store.place())} is not a directory{_missing(store.place())}",
            remedy="mount it again; do not make a new channel" if store.was_opened else f"mount it; {make}",
        )

    @classmethod
    def within(cls, place: str | Path) -> NoChannel:
        return cls(
            f"{_absolute(place)} has neither channel.json nor a pointer",
            remedy="has the publisher started? is the channel mounted?",
        )


@dataclass(frozen=True)
class Channel:
    """`file` and `base` are None for a foreign channel (the field's plain format: no channel.json). With
    `trust`, base.json and indexes are given out only if a trusted key signed them; None checks nothing."""

    store: Store
    file: ChannelFile | None
    base: Base | None
    trust: Trust | None = None

    @classmethod
    def open(cls, store: Store, trust: Trust | None = None, known: Channel | None = None) -> Channel:
        """Raises NoChannel for a directory that does not exist (yet), Refused when it is not a channel,
        Untrusted when `trust` is given and its base is not signed. `known`: as it was opened before with this
        `trust`; the base of a run never changes, and is not read again."""
        if not store.present():
            raise NoChannel.at(store)
        file = read_if_there(store, CHANNEL_JSON, CHANNEL_FILE_LIMIT)
        if file is None:
            foreign = cls(store, None, None)
            if trust is not None:
                _refuse_unsigned(foreign)
            return foreign
        with _read_from(store, CHANNEL_JSON, _MEND_CHANNEL_FILE):
            parsed = parse_channel_file(file)
        if known is not None and known.base is not None and known.base.run_id == parsed.run_id:
            return replace(known, file=parsed)
        data, place = read_if_there(store, BASE_JSON, BASE_LIMIT), store.place(BASE_JSON)
        if data is None:
            raise DamagedFile(f"{place} is missing", remedy="restore it; nothing can be checked without")
        stated = _stated(trust, store, BASE_JSON, data)
        with _read_from(store, BASE_JSON):
            base = parse_base(data)
        if stated is not None:
            require_same(stated, stated_by_base(base, stated.time), place)
        check_component(base.component, store.component, place)
        if base.run_id != parsed.run_id:
            raise DamagedFile(
                f"{place} is of run {base.run_id}, channel.json of {parsed.run_id}",
                remedy="restore both from one backup",
            )
        store.was_opened = True
        return cls(store, parsed, base, trust)

    @property
    def place(self) -> str:
        """Where the channel is, for messages."""
        return self.store.place()

    @property
    def foreign(self) -> bool:
        return self.file is None

    def require_ours(self) -> tuple[ChannelFile, Base]:
        if self.file is None or self.base is None:
            raise Refused(
                f"{self.place} has no channel.json",
                remedy="make a channel with `weightcast channel init`",
            )
        return self.file, self.base

    def pointer(self) -> Pointer | None:
        """Raises NoChannel for a channel that was made since it was opened: its pointer is not another
        tool's."""
        pointer = foreign_pointer(self.store) if self.foreign else read_pointer(self.store)
        if pointer is not None and self.foreign and self.store.stat(CHANNEL_JSON) is not None:
            raise NoChannel(f"{self.place} is being made", remedy="the next attempt finds it")
        if pointer is not None and pointer.run is not None and not self.foreign:
            raise DamagedFile(
                f"{self.store.place(LATEST)} names run {pointer.run!r}; only foreign channels have runs",
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
        network mount may show the size of a moment ago. Raises DamagedFile and UnknownFormat."""
        if version > pointer.version:
            raise RetryLater(
                f"version {version} is not published yet: the newest is {pointer.version}",
                remedy="sync again once it is out, or give a version that `weightcast channel log` lists",
            )
        files = self.version(pointer, version)
        data = read_if_there(files, pointer.index_name, INDEX_LIMIT)
        if data is None:
            return _single_file(files, version) if self.foreign else None
        if _is_cut(data):
            return None
        if pointer.is_skyrl:
            with _read_from(files, MANIFEST):
                manifest = parse_manifest(data)
            _require(manifest.version == version, f"{files.place(MANIFEST)} is of version {manifest.version}")
            return manifest
        return self._parse(data, files, version, table)

    def own_index(self, version: int) -> Index | None:
        """As `index`, of a run's channel; the version may be above the pointer."""
        index = self.index(Pointer(version), version, self.require_ours()[1].table)
        return index if isinstance(index, Index) else None

    def version(self, pointer: Pointer, version: int) -> Store:
        """The files of a version."""
        return self.store.within(pointer.version_key(version))

    def anchor_files(self, version: int) -> Store:
        return self.store.within(anchor_key(version))

    def multi_step_files(self, version: int, base_version: int) -> Store:
        return self.store.within(multi_step_key(version, base_version))

    def _parse(
        self, data: bytes, files: Store, version: int, table: TensorTable
    ) -> Index | ForeignIndex | FullVersion:
        # unsigned bytes are not parsed, nor bytes that were parsed before
        plain = self.trust is not None or remembered(data, table) is not None
        with _read_from(files, INDEX_NAME):
            top = None if plain else read_top(data)
            kind = "ours" if top is None else describe(data, top)
        place = files.place()
        if kind == "ours" and not self.foreign:
            index = self._ours(data, files, version, table, "", top)
            _require(not index.main, f"{place}: its index belongs to an anchor or a multi-step delta")
            names_main = table.component == MAIN or index.main_root != ""
            _require(names_main, f"{place}: its index names no version of main")
            return index
        if kind == "ours":
            raise UnknownFormat(
                f"{place} is weightcast's, but the channel has no channel.json",
                remedy="give ROOT/updates as --channel if its layout is stitch; else restore channel.json",
            )
        if not self.foreign:
            raise DamagedFile(f"{files.place(INDEX_NAME)} was not written by weightcast", remedy=MEND_CHANNEL)
        if kind == "full":
            return FullVersion(version, digest_of(data), files)
        with _read_from(files, INDEX_NAME):
            foreign = parse_foreign(data)
        _require(foreign.version == version, f"{place}: its index is of version {foreign.version}")
        return _with_checksums(foreign, files, data)

    def anchor(self, version: int, table: TensorTable) -> Index | None:
        """The index of the anchor of a version that is a delta."""
        files = self.anchor_files(version)
        index = self._of_version(files, version, table)
        fits = index is None or index.kind == "anchor"
        _require(fits, f"{files.place()}: its index is not that of an anchor")
        return index

    def _ours(
        self,
        data: bytes,
        files: Store,
        version: int,
        table: TensorTable,
        main: str,
        top: Members | None = None,
    ) -> Index:
        """`main`: digest of the version's main index, for the index of an anchor or a multi-step delta;
        `top`: of `data`, where it was read already."""
        file, _ = self.require_ours()
        stated = _stated(self.trust, files, INDEX_NAME, data)
        with _read_from(files, INDEX_NAME):
            index = parse_index(data, table, top=top, run=file.run_id)
        if stated is not None:
            require_same(stated, stated_by(index, index.digest, main), files.place(INDEX_NAME))
        _require(index.version == version, f"{files.place()}: its index is of version {index.version}")
        return index

    def _of_version(self, files: Store, version: int, table: TensorTable) -> Index | None:
        """The index of an anchor or a multi-step delta, which was signed for exactly this main index."""
        data = read_if_there(files, INDEX_NAME, INDEX_LIMIT)
        if data is None or _is_cut(data):
            return None
        unchecked = self.trust is None
        main = b"" if unchecked else read_if_there(self.store, index_key(version), INDEX_LIMIT)
        if main is None:
            return None
        return self._ours(data, files, version, table, digest_of(main))

    def skip(self, version: int, base_version: int, table: TensorTable) -> Index | None:
        """The index of the delta to a version from one older than the version before it."""
        files = self.multi_step_files(version, base_version)
        index = self._of_version(files, version, table)
        fits = index is None or (index.main != "" and index.base_version == base_version)
        _require(fits, f"{files.place()}: not the index of a delta from version {base_version}")
        return index

    def shown(self, pointer: Pointer, *, above: int = 0, up_to: int | None = None) -> dict[int, Shown]:
        """What the directories of the versions in (above, up_to] show, up to the pointer."""
        last = pointer.version if up_to is None else min(up_to, pointer.version)
        found: dict[int, Shown] = {}
        if self.store.is_static:
            return self._probed(pointer, above, last)
        for entry in self.store.list(pointer.prefix):
            version = version_of(entry.name) if entry.kind == "directory" else None
            if version is not None and above < version <= last:
                seen = look(self.version(pointer, version))
                if seen is not None:
                    found[version] = seen
        return found

    def _probed(self, pointer: Pointer, above: int, last: int) -> dict[int, Shown]:
        """As `shown`, by asking for every index that may be there, from the newest version back to the first
        anchor: no way begins before it that is not planned for by reading more indexes."""
        found: dict[int, Shown] = {}
        for version in range(last, above, -1):
            seen = self.probe(pointer, version, above)
            if seen is not None:
                found[version] = seen
                if seen.anchor is not None:
                    break
        return found

    def probe(self, pointer: Pointer, version: int, oldest: int) -> Shown | None:
        """What there is of a version in a store that lists nothing, by its indexes; without their own bytes,
        and deltas from before `oldest`. A damaged index counts as missing: there are other sources."""
        table = TensorTable(()) if self.base is None else self.base.table
        main: Index | ForeignIndex | FullVersion | None = None
        with contextlib.suppress(Refused):
            main = self.index(pointer, version, table)
        if not isinstance(main, Index):
            return None
        skips: dict[int, int] = {}
        for base_version in multi_step_bases(version, oldest):
            with contextlib.suppress(Refused):
                skip = self.skip(version, base_version, table)
                if skip is not None:
                    skips[base_version] = _nbytes(skip)
        anchor = main if main.kind == "anchor" else None
        with contextlib.suppress(Refused):
            anchor = anchor or self.anchor(version, table)
        return Shown(_nbytes(main), skips, None if anchor is None else _nbytes(anchor))

    def numbers(self, pointer: Pointer) -> range:
        """Of the versions that may be there, up to the pointer."""
        return range(1 if self.file is None else max(1, self.file.horizon), pointer.version + 1)

    def anchored(self, pointer: Pointer) -> frozenset[int]:
        """Versions up to the pointer that are deltas and have an anchor."""
        if self.store.is_static:
            return frozenset(v for v in self.numbers(pointer) if self.anchor_files(v).stat(INDEX_NAME))
        found = self.shown(pointer)
        return frozenset(version for version, seen in found.items() if seen.anchor is not None)


def _nbytes(index: Index) -> int:
    return sum(file.size for file in index.all_files)


def _stated(trust: Trust | None, files: Store, key: str, data: bytes) -> Statement | None:
    """None when nothing is to be checked. Raises Untrusted."""
    if trust is None:
        return None
    signature = read_if_there(files, signature_key(key), SIGNATURE_LIMIT)
    return trust.check(signature, files.place(key), digest_of(data))


def may_lie_before(name: str) -> bool:
    """Whether a channel's directory may hold an entry before the channel is made."""
    return name.startswith(".") or name in _BEFORE


def _absolute(place: str | Path) -> str:
    """A relative path is more often mistyped."""
    return str(place) if "://" in str(place) else str(Path(place).absolute())


def _missing(place: str) -> str:
    """Which part of a path is not there."""
    path = Path(place).absolute()
    if "://" in place or exists(path):
        return ""
    there = next(each for each in path.parents if exists(each))
    return f": {path.relative_to(there).parts[0]} is missing in {there}"


def require_named(store: Store) -> None:
    """Raises Refused for a directory with files of anything else, and NoChannel where a channel may still be
    made or mounted. A channel of another tool has only the pointer."""
    files = (CHANNEL_JSON, BASE_JSON, LATEST)
    if not store.present() or any(store.stat(key) for key in files) or newest(store) is not None:
        return
    names = [] if store.is_static else store.names()
    if any(name in files for name in names):
        return  # made meanwhile
    for name in names:
        if not may_lie_before(name) and version_of(name) is None and delta_version(name) is None:
            raise Refused(
                f"{store.place()} is not a channel: it has neither channel.json nor latest",
                remedy="check --channel",
            )
    raise NoChannel.within(store.place())


def _refuse_unsigned(foreign: Channel) -> None:
    if foreign.pointer() is None:
        raise NoChannel.within(foreign.place)
    raise Untrusted(
        f"{foreign.place} has no channel.json: nothing in it can be signed",
        remedy="restore channel.json, or follow a foreign channel without --trusted-key",
    )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise DamagedFile(problem, remedy=MEND_CHANNEL)


def _is_cut(data: bytes) -> bool:
    """Whether it may be the beginning of an index."""
    return data.lstrip()[:1] in (b"", b"{") and not data.rstrip().endswith(b"}")


@contextlib.contextmanager
def _read_from(files: Store, key: str, remedy: str = MEND_CHANNEL) -> Iterator[None]:
    """Parsers know what is wrong; the object's place and the remedy are known here."""
    try:
        yield
    except Refused as error:
        problem = error.message.removeprefix(f"{key}: ")
        raise type(error)(f"{files.place(key)}: {problem}", remedy=error.remedy or remedy) from error


def _single_file(files: Store, version: int) -> FullVersion | None:
    """A full version of one file needs no index."""
    found = files.stat("model.safetensors")
    if found is None:
        return None
    return FullVersion(version, digest_of(f"{version} {found.size} {found.written_ns}".encode()), files)


def _with_checksums(foreign: ForeignIndex, files: Store, data: bytes) -> ForeignIndex:
    """With a digest over the checksums in the shards too: two runs that changed the same tensors write the
    same index. Raises RetryLater while a shard is not there."""
    parts = [data]
    for shard in sorted(set(foreign.weight_map.values())):
        try:
            header = read_shard_header(files, shard)
        except NotFound:
            raise RetryLater(
                f"{files.place(shard)} is missing although its index names it",
                remedy="is the mount stale? is a trainer emptying the channel?",
            ) from None
        parts.append(json.dumps([shard, sorted(header.metadata.items())]).encode())
    return replace(foreign, digest=digest_of(b"\n".join(parts)))


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()
