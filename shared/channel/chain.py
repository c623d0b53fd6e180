"""The versions of a channel as one chain: what each says of itself, and whether the files bear it out.

Reads only. Everything found wrong is listed; nothing stops at the first problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import RetryLater, WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.channel import Channel, FullVersion, look
from weightcast.shared.channel.index import INDEX_NAME, FileRecord, ForeignIndex, Index, object_record
from weightcast.shared.channel.layout import Pointer, from_name, index_key, version_of
from weightcast.shared.channel.run_files import Base
from weightcast.shared.channel.store import NotFound, Store
from weightcast.shared.files.disk_errors import disk_text

AnyIndex = Index | ForeignIndex | FullVersion
Part = Literal["pointer", "version", "link", "anchor", "skip", "claim", "report", "stray", "channel"]


@dataclass(frozen=True)
class Flaw:
    """`unread`: it could not be read now, by this user, over this mount. It may be intact."""

    message: str
    unread: bool = False


def flaw(error: WeightcastError | OSError) -> Flaw:
    if isinstance(error, WeightcastError):
        return Flaw(error.message, isinstance(error, RetryLater) and not isinstance(error, NotFound))
    return Flaw(disk_text(error, "a file"), unread=True)


@dataclass(frozen=True)
class ChainEntry:
    """One version directory. `index` is None where it cannot be read: `problem` says why, `unread` that it is
    not known to be wrong."""

    version: int
    files: Store
    index: AnyIndex | None
    problem: str = ""
    unread: bool = False


@dataclass(frozen=True)
class Problem:
    """`part`: what of the channel it concerns; `directory`: of the anchor or the delta from an older version
    that it concerns, else empty; `meaning`: for hosts; `unread`: as of a Flaw."""

    version: int | None
    message: str
    part: Part = "version"
    directory: str = ""
    meaning: str = ""
    unread: bool = False


def entries(channel: Channel, pointer: Pointer | None) -> Iterator[ChainEntry]:
    """The versions up to the pointer that are there, in order. Beyond it nothing was announced."""
    if pointer is None:
        return
    found = {version for version in versions_in(channel.store, pointer.prefix) if version <= pointer.version}
    if channel.version(pointer, pointer.version).stat(INDEX_NAME) is not None:
        # a listing may lack it
        found.add(pointer.version)
    for version in sorted(found):
        yield read_entry(channel, pointer, version)


def committed(store: Store, above: int = 0) -> list[int]:
    """Versions with an index, in order; those beyond the pointer are the owner's alone to look at."""
    there = (version for version in versions_in(store) if version > above)
    return sorted(version for version in there if store.stat(index_key(version)) is not None)


def versions_in(store: Store, prefix: str = "") -> list[int]:
    """Versions whose directories are there, in no order."""
    found = [version_of(entry.name) for entry in store.list(prefix) if entry.kind == "directory"]
    return [version for version in found if version is not None]


def read_entry(channel: Channel, pointer: Pointer, version: int) -> ChainEntry:
    files = channel.version(pointer, version)
    table = TensorTable(()) if channel.base is None else channel.base.table
    try:
        index = channel.index(pointer, version, table)
    except (WeightcastError, OSError) as error:
        found = flaw(error)
        # the shards that a foreign index names are read with it: an absent one is missing
        unread = found.unread and not (channel.foreign and isinstance(error, RetryLater))
        return ChainEntry(version, files, None, found.message, unread)
    if index is None:
        cut = files.stat(INDEX_NAME) is not None
        return ChainEntry(version, files, None, f"its index is {'cut short' if cut else 'missing'}")
    return ChainEntry(version, files, index, "")


def verify(channel: Channel, advance: Advance | None = None) -> list[Problem]:
    """Every file of every version and anchor against its size and BLAKE3, and every version against the one
    that it continues. A foreign channel states neither: there only the presence of files is checked."""
    try:
        pointer = channel.pointer()
    except WeightcastError as error:
        return [Problem(None, error.message, "pointer")]
    return verify_to(channel, pointer, advance)


def verify_to(channel: Channel, pointer: Pointer | None, advance: Advance | None = None) -> list[Problem]:
    """As `verify`, were this the pointer."""
    found = list(entries(channel, pointer))
    problems = [
        Problem(entry.version, entry.problem, unread=entry.unread) for entry in found if entry.problem
    ]
    problems += _links(channel, pointer, found)
    known = {entry.version: entry.index for entry in found if isinstance(entry.index, Index)}
    for entry in found:
        problems += [Problem(entry.version, one.message, unread=one.unread) for one in _files(entry, advance)]
        anchor = channel.anchor_files(entry.version).place()
        problems += [
            Problem(entry.version, one.message, "anchor", anchor, unread=one.unread)
            for one in _anchor(channel, entry, advance)
        ]
        problems += list(_skips(channel, entry, known, advance))
    return sorted(problems, key=lambda problem: (problem.version or 0, problem.message))


def _links(channel: Channel, pointer: Pointer | None, found: Sequence[ChainEntry]) -> Iterator[Problem]:
    known = {entry.version: entry.index for entry in found}
    if pointer is not None and pointer.version > 0 and pointer.version not in known:
        yield Problem(pointer.version, "the pointer names it, and it is not there")
    horizon = 0 if channel.file is None else channel.file.horizon
    unread = {entry.version for entry in found if entry.unread}
    epoch = 0
    for entry in found:
        if isinstance(entry.index, Index):
            for text in _link(channel, entry.index, known, epoch):
                yield Problem(entry.version, text)
            base_version = entry.index.base_version
            there = isinstance(known.get(base_version), Index) or base_version in unread
            if base_version >= max(horizon, 1) and not there:
                text = f"it starts from version {base_version}, which is not there"
                yield Problem(entry.version, text, "link")
            epoch = max(epoch, entry.index.epoch)
        elif isinstance(entry.index, ForeignIndex) and entry.index.base_version not in (0, *known):
            yield Problem(entry.version, f"it starts from {entry.index.base_version}, which is not there")


def _link(channel: Channel, index: Index, known: Mapping[int, AnyIndex | None], epoch: int) -> Iterator[str]:
    if index.epoch < epoch:
        yield f"its epoch {index.epoch} is lower than an earlier version's {epoch}"
    if index.kind == "anchor":
        return
    base, start = known.get(index.base_version), channel.base
    if index.base_version == 0 and start is not None:
        if (index.parent, index.base_root) != (start.digest, start.root):
            yield "it does not start from base.json"
    elif isinstance(base, Index):
        if index.parent != base.digest:
            yield f"it continues another version {base.version} than the present one"
        if index.base_root != base.root:
            yield f"it starts from another root than that of version {base.version}"


def _files(entry: ChainEntry, advance: Advance | None) -> Iterator[Flaw]:
    if isinstance(entry.index, Index):
        yield from check_files(entry.files, entry.index.all_files, advance)
    elif isinstance(entry.index, ForeignIndex):
        for name in sorted(set(entry.index.weight_map.values())):
            if entry.files.stat(name) is None:
                yield Flaw(f"{name} is missing")


def _anchor(channel: Channel, entry: ChainEntry, advance: Advance | None) -> Iterator[Flaw]:
    """The anchor of a version must have the weights those of the same version."""
    if channel.base is None or not isinstance(entry.index, Index):
        return
    try:
        anchor = channel.anchor(entry.version, channel.base.table)
    except (WeightcastError, OSError) as error:
        yield flaw(error)
        return
    files = channel.anchor_files(entry.version)
    if anchor is None:
        if files.stat(INDEX_NAME) is not None:
            yield Flaw("the index of its anchor is cut short")
        return
    if anchor.root != entry.index.root:
        yield Flaw("its anchor has another root")
    yield from _of("anchor", check_files(files, anchor.all_files, advance))
    try:
        # a host that opens the anchor as a checkpoint refuses it
        extra = unlisted(files, anchor)
    except OSError as error:
        yield flaw(error)
        return
    yield from (Flaw(f"anchor: {name} is not named by its index") for name in extra)


def _of(name: str, found: Iterable[Flaw]) -> Iterator[Flaw]:
    return (Flaw(f"{name}: {one.message}", one.unread) for one in found)


def unlisted(files: Store, index: Index) -> list[str]:
    """Names of weights in a version's directory that its index does not name."""
    named = {record.name for record in index.all_files}
    return sorted(name for name in files.names() if name.endswith(".safetensors") and name not in named)


def _skips(
    channel: Channel, entry: ChainEntry, known: Mapping[int, Index], advance: Advance | None
) -> Iterator[Problem]:
    """Deltas from older versions lead to the same bytes, and start from versions of this chain."""
    main = known.get(entry.version)
    if channel.base is None or main is None:
        return
    try:
        shown = look(entry.files)
    except OSError as error:
        yield Problem(entry.version, flaw(error).message, unread=True)
        return
    if shown is None:
        return
    for base_version in sorted(shown.skips):
        place = channel.multi_step_files(entry.version, base_version).place()
        start = channel.base if base_version == 0 else known.get(base_version)
        for one in _skip(channel, main, base_version, start, advance):
            yield Problem(entry.version, one.message, "skip", place, unread=one.unread)


def _skip(
    channel: Channel,
    main: Index,
    base_version: int,
    start: Base | Index | None,
    advance: Advance | None,
) -> Iterator[Flaw]:
    table = TensorTable(()) if channel.base is None else channel.base.table
    try:
        skip = channel.skip(main.version, base_version, table)
    except (WeightcastError, OSError) as error:
        yield flaw(error)
        return
    if skip is None:
        return
    if (skip.main, skip.root) != (main.digest, main.root):
        yield Flaw(f"its delta from version {base_version} leads to another version {main.version}")
    if start is not None and (skip.parent, skip.base_root) != (start.digest, start.root):
        yield Flaw(f"its delta from version {base_version} does not start from the present one")
    files = channel.multi_step_files(main.version, base_version)
    yield from _of(from_name(base_version), check_files(files, skip.files, advance))


def check_files(
    files: Store, records: Sequence[FileRecord], advance: Advance | None = None
) -> Iterator[Flaw]:
    """What is wrong with the files that an index lists."""
    for record in records:
        try:
            found = object_record(files, record.name, advance)
        except NotFound:
            yield Flaw(f"{record.name} is missing")
        except (WeightcastError, OSError) as error:
            yield flaw(error)
        else:
            if found != record:
                yield Flaw(
                    f"{record.name}: {found.size} bytes with BLAKE3 {found.blake3[:16]}, "
                    f"its index says {record.size} bytes and {record.blake3[:16]}"
                )
