"""The versions of a channel as one chain: what each says of itself, whether the files bear it out, and what
anything wrong means for hosts.

Reads only. Everything found wrong is listed; nothing stops at the first problem.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import RetryLater, Untrusted, WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel import pins
from weightcast.shared.channel.channel import Channel, FullVersion, look
from weightcast.shared.channel.claims import CLAIM_LIMIT, current_epoch, parse_claim
from weightcast.shared.channel.index import INDEX_NAME, FileRecord, ForeignIndex, Index, object_record
from weightcast.shared.channel.layout import (
    HOSTS,
    LATEST,
    PUBLISHERS,
    Pointer,
    from_name,
    index_key,
    version_of,
)
from weightcast.shared.channel.reports import REPORT_LIMIT, parse_report
from weightcast.shared.channel.run_files import Base
from weightcast.shared.channel.signing import Trust
from weightcast.shared.channel.store import NotFound, Store
from weightcast.shared.files.disk_errors import disk_text

AnyIndex = Index | ForeignIndex | FullVersion
Part = Literal["pointer", "version", "link", "anchor", "skip", "claim", "report", "stray", "channel"]


@dataclass(frozen=True)
class Flaw:
    """`unread`: it could not be read now, by this user, over this mount. It may be intact. `remedy`:
    where the reader, not the file, is to be changed."""

    message: str
    unread: bool = False
    remedy: str = ""


def flaw(error: WeightcastError | OSError) -> Flaw:
    if isinstance(error, Untrusted) and error.unknown_key:
        return Flaw(error.message, remedy=error.remedy)
    if isinstance(error, WeightcastError):
        return Flaw(error.message, isinstance(error, RetryLater) and not isinstance(error, NotFound))
    return Flaw(disk_text(error, "a file"), unread=True)


@dataclass(frozen=True)
class ChainEntry:
    """One version directory. `index` is None where it cannot be read: `problem` says why; `unread` and
    `remedy` as of a Flaw: it is not known to be wrong."""

    version: int
    files: Store
    index: AnyIndex | None
    problem: str = ""
    unread: bool = False
    remedy: str = ""


@dataclass(frozen=True)
class Problem:
    """`part`: what of the channel it concerns; `directory`: of the anchor or the delta from an older version
    that it concerns, else empty; `meaning`: for hosts; `unread` and `remedy`: as of a Flaw."""

    version: int | None
    message: str
    part: Part = "version"
    directory: str = ""
    meaning: str = ""
    unread: bool = False
    remedy: str = ""

    @property
    def where(self) -> str:
        return "" if self.version is None else f"version {self.version}: "


def entries(channel: Channel, pointer: Pointer | None) -> Iterator[ChainEntry]:
    """The versions up to the pointer that are there, in order. Beyond it nothing was announced."""
    if pointer is None:
        return
    if channel.store.is_static:
        there = [v for v in channel.numbers(pointer) if channel.version(pointer, v).stat(INDEX_NAME)]
    else:
        there = versions_in(channel.store, pointer)
    found = {version for version in there if version <= pointer.version}
    if channel.version(pointer, pointer.version).stat(pointer.index_name) is not None:
        # a listing may lack it
        found.add(pointer.version)
    for version in sorted(found):
        entry = read_entry(channel, pointer, version)
        if entry.index is not None or not is_half_pruned(channel, version):
            yield entry


def is_half_pruned(channel: Channel, version: int) -> bool:
    """Whether a pruning that was killed left files of a version: in an object store its index goes first. The
    owner deletes them."""
    store, horizon = channel.store, 0 if channel.file is None else channel.file.horizon
    if store.renames or version >= horizon or store.stat(index_key(version)) is not None:
        return False
    try:
        return version not in {*pins.kept(store), *pins.tags(store).values()}
    except (WeightcastError, OSError):
        return False  # who cannot tell deletes nothing


def committed(store: Store, above: int = 0) -> list[int]:
    """Versions with an index, in order; those beyond the pointer are the owner's alone to look at."""
    there = (version for version in versions_in(store) if version > above)
    return sorted(version for version in there if store.stat(index_key(version)) is not None)


def versions_in(store: Store, pointer: Pointer = Pointer(0)) -> list[int]:
    """Versions whose directories are there, in no order."""
    directories = (entry.name for entry in store.list(pointer.prefix) if entry.kind == "directory")
    found = map(pointer.version_of, directories)
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
        return ChainEntry(version, files, None, found.message, unread, found.remedy)
    if index is None:
        cut = files.stat(pointer.index_name) is not None
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
        Problem(entry.version, entry.problem, unread=entry.unread, remedy=entry.remedy)
        for entry in found
        if entry.problem
    ]
    problems += _links(channel, pointer, found)
    known = {entry.version: entry.index for entry in found if isinstance(entry.index, Index)}
    for entry in found:
        problems += [Problem(entry.version, one.message, unread=one.unread) for one in _files(entry, advance)]
        anchor = channel.anchor_files(entry.version).place()
        problems += [
            Problem(entry.version, one.message, "anchor", anchor, unread=one.unread, remedy=one.remedy)
            for one in _anchor(channel, entry, advance)
        ]
        problems += list(_skips(channel, entry, known, advance))
    return sorted(problems, key=lambda problem: (problem.version or 0, problem.message))


def _links(channel: Channel, pointer: Pointer | None, found: Sequence[ChainEntry]) -> Iterator[Problem]:
    known = {entry.version: entry.index for entry in found}
    if pointer is not None and pointer.version > 0 and pointer.version not in known:
        yield Problem(pointer.version, "the pointer names it, and it is not there")
    horizon = 0 if channel.file is None else channel.file.horizon
    unread = {entry.version for entry in found if entry.unread or entry.remedy}
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
            if pointer is not None and pointer.run is not None and entry is found[0]:
                continue  # a run may have been resumed there
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
    if files.is_static:
        return []
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
        if channel.store.is_static:
            shown = channel.probe(Pointer(entry.version), entry.version, 0)
        else:
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
            yield Problem(entry.version, one.message, "skip", place, unread=one.unread, remedy=one.remedy)


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


_FILES = ("channel.json", "base.json", "latest")
_OURS = (*_FILES, *(f"{name}.sig" for name in _FILES))
_LIKE_OURS = re.compile(r"(weight_v(?!.*\.parts$)|latest|channel|base)", re.ASCII)
_POINTER = "hosts keep what they have until it names a version again; `channel repair` writes it"
_CHANNEL = "no host can follow or join; engines keep what they have"
UNKNOWN_KEY = "hosts that trust only the given keys keep what they have; others follow"
_ANCHOR = "hosts that join or are far behind take another way, where there is one; `channel repair` drops it"
_SKIP = "hosts that are behind take single steps; `channel repair` drops it"
_CLAIM = "it still counts as a claim: a new publisher waits for it, or takes over"
_REPORT = "this host is not shown; nothing is decided from it"
_STRAY = "nothing: no host reads it; `channel repair` moves it to .trash"
_VISIBLE_SECONDS, _POLL_SECONDS = 10.0, 0.2
_UNREAD = (
    "unknown: it cannot be read from here now; fix access, mount or disk and verify again; "
    "`channel repair` does not touch it"
)


def faults(store: Store, advance: Advance | None = None, trust: Trust | None = None) -> list[Problem]:
    """Everything that is wrong, in order of versions; with `trust`, also what is not signed. Raises
    RetryLater when the channel does not exist."""
    try:
        opened = Channel.open(store, trust)
    except WeightcastError as error:
        if not store.present():
            raise
        found = flaw(error)
        meaning = UNKNOWN_KEY if found.remedy else _CHANNEL
        return [Problem(None, found.message, "channel", "", meaning, found.unread, found.remedy)]
    return of_channel(opened, advance)


def of_channel(channel: Channel, advance: Advance | None = None) -> list[Problem]:
    found = verify(channel, advance)
    # what nobody names cannot be found where nothing is listed
    whole = not (channel.foreign or channel.store.is_static)
    if whole and channel.store.stat(LATEST) is None and _committed_by_key(channel):
        found.append(Problem(None, "latest is missing, and there are versions", "pointer"))
    anchors = sound_anchors(channel, found)
    found = [replace(problem, meaning=_meaning(problem, anchors)) for problem in found]
    if not whole:
        return found
    return [*found, *_unreadable(channel.store), *strays(channel)]


def sound_anchors(channel: Channel, problems: Sequence[Problem]) -> list[int]:
    """Versions whose full weights can be read."""
    pointer = _pointer(channel)
    if pointer is None or channel.foreign:
        return []
    bad = {problem.version for problem in problems if problem.part == "anchor"}
    broken = {problem.version for problem in problems if problem.part == "version"}
    try:
        beside = channel.anchored(pointer)
    except OSError:
        return []
    return [
        entry.version
        for entry in entries(channel, pointer)
        if isinstance(entry.index, Index)
        and (entry.version in beside - bad or (entry.index.kind == "anchor" and entry.version not in broken))
    ]


def _meaning(problem: Problem, anchors: Sequence[int]) -> str:
    if problem.unread or problem.remedy:
        return _UNREAD if problem.unread else UNKNOWN_KEY
    if problem.part in ("version", "link") and problem.version is not None:
        return _lost(problem.version, anchors)
    return {"pointer": _POINTER, "anchor": _ANCHOR, "skip": _SKIP}.get(problem.part, "")


NO_WAY_ROUND = "cannot take this step until it is repaired"
"""in the meaning of what no anchor leads over"""


def _lost(version: int, anchors: Sequence[int]) -> str:
    over = [anchor for anchor in anchors if anchor >= version]
    if over:
        return f"hosts below version {version} cannot take this step; the anchor of {over[0]} leads past it"
    return (
        f"hosts below version {version} {NO_WAY_ROUND}: run `weightcast channel "
        f"repair` (with the publisher's --local if it is stopped)"
    )


def unannounced(channel: Channel) -> list[int]:
    """Committed versions above the pointer: their publisher will announce them."""
    pointer = _pointer(channel)
    at = 0 if pointer is None else pointer.version
    return committed(channel.store, at)


def highest_sound(channel: Channel, known: int, advance: Advance | None = None) -> int | None:
    """The highest version that is committed and whole, and contradicts no version that is there. None where
    it may be a version that cannot be read now: a pointer is never put too low. `known`: the newest version
    that anybody says was published; it is waited for."""
    versions = _committed_by_key(channel, known)[::-1]
    if not versions:
        return None
    problems = verify_to(channel, Pointer(versions[0]), advance)
    concerned = [problem for problem in problems if problem.part == "version"]
    broken = {problem.version for problem in concerned if not problem.unread}
    highest = next((version for version in versions if version not in broken), None)
    return None if any(problem.version == highest for problem in concerned) else highest


def _committed_by_key(channel: Channel, known: int = 0) -> list[int]:
    """As `committed`, although a listing may lack the newest versions, and a mount show them late."""
    store, horizon = channel.store, 0 if channel.file is None else channel.file.horizon
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while known and store.stat(index_key(known)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    found = set(committed(store))
    if known and store.stat(index_key(known)) is not None:
        found.add(known)
    newest = max(found, default=max(horizon - 1, 0))
    while store.stat(index_key(newest + 1)) is not None:
        newest += 1
        found.add(newest)
    return sorted(found)


def _unreadable(store: Store) -> Iterator[Problem]:
    """Claims and reports that cannot be parsed. A linked directory is not the channel's."""
    there = {entry.name for entry in store.list() if entry.kind == "directory"}
    newest = f"{PUBLISHERS}/{current_epoch(store)}.json"
    kinds: tuple[tuple[Part, str, int, Callable[[bytes, str], object]], ...] = (
        ("claim", PUBLISHERS, CLAIM_LIMIT, parse_claim),
        ("report", HOSTS, REPORT_LIMIT, parse_report),
    )
    for part, prefix, limit, parse in kinds:
        for name in sorted(store.names(prefix)) if prefix in there else ():
            key = f"{prefix}/{name}"
            try:
                if name.endswith(".json"):
                    parse(store.read(key, limit), name)
            except NotFound:
                continue
            except (WeightcastError, OSError) as error:
                found = flaw(error)
                lost = _REPORT if part == "report" else _CLAIM if key == newest else _STRAY
                meaning = _UNREAD if found.unread else lost
                yield Problem(None, f"{key}: {found.message}", part, store.place(key), meaning, found.unread)


def strays(channel: Channel) -> Iterator[Problem]:
    """Copies of parts of a channel under other names. Names that resemble nothing of weightcast are not
    listed; parts, and directories without an index beyond the pointer, belong to a publisher at work."""
    for name in sorted(channel.store.names()):
        if _LIKE_OURS.match(name) and name not in _OURS and version_of(name) is None:
            place = channel.store.place(name)
            yield Problem(None, f"{name} is not part of a channel", "stray", place, _STRAY)
    pointer = _pointer(channel)
    for entry in entries(channel, pointer):
        if isinstance(entry.index, Index):
            for name in unlisted(entry.files, entry.index):
                text, place = f"{name} is not named by its index", entry.files.place(name)
                yield Problem(entry.version, text, "stray", place, _STRAY)


def _pointer(channel: Channel) -> Pointer | None:
    try:
        return channel.pointer()
    except WeightcastError:
        return None
