"""What is wrong in a channel, file by file, and what it means for its hosts. Reads only."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import (
    Flaw,
    Part,
    Problem,
    committed,
    entries,
    flaw,
    unlisted,
    verify,
    verify_to,
)
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import CLAIM_LIMIT, current_epoch, parse_claim
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import HOSTS, LATEST, PUBLISHERS, Pointer, index_key, version_of
from weightcast.shared.channel.reports import REPORT_LIMIT, parse_report
from weightcast.shared.channel.signing import Trust
from weightcast.shared.channel.store import NotFound, Store

_FILES = ("channel.json", "base.json", "latest")
_OURS = (*_FILES, *(f"{name}.sig" for name in _FILES))
_LIKE_OURS = re.compile(r"(weight_v(?!.*\.parts$)|latest|channel|base)", re.ASCII)
_POINTER = "hosts keep what they have until it names a version again; `channel repair` writes it"
_CHANNEL = "no host can follow or join; engines keep what they have"
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
        return [Problem(None, error.message, "channel", meaning=_CHANNEL, unread=flaw(error).unread)]
    return of_channel(opened, advance)


def of_channel(channel: Channel, advance: Advance | None = None) -> list[Problem]:
    found = verify(channel, advance)
    if not channel.foreign:
        found += _lost_pointer(channel)
    anchors = sound_anchors(channel, found)
    found = [replace(problem, meaning=_meaning(problem, anchors)) for problem in found]
    if channel.foreign:
        return found
    return [*found, *_claims(channel.store), *_reports(channel.store), *strays(channel)]


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
    if problem.unread:
        return _UNREAD
    if problem.part in ("version", "link") and problem.version is not None:
        return _lost(problem.version, anchors)
    return {"pointer": _POINTER, "anchor": _ANCHOR, "skip": _SKIP}.get(problem.part, "")


def _lost(version: int, anchors: Sequence[int]) -> str:
    over = [anchor for anchor in anchors if anchor >= version]
    if over:
        return f"hosts below version {version} cannot take this step; the anchor of {over[0]} leads over it"
    return (
        f"hosts below version {version} cannot take this step until an anchor is written: run `weightcast "
        f"channel repair` (with the publisher's --local if it is stopped)"
    )


def _lost_pointer(channel: Channel) -> Iterator[Problem]:
    if channel.store.stat(LATEST) is None and _committed_by_key(channel):
        yield Problem(None, "latest is missing, and there are versions", "pointer")


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


def _claims(store: Store) -> Iterator[Problem]:
    newest = f"{current_epoch(store)}.json"
    for name, found in _unreadable(store, PUBLISHERS, CLAIM_LIMIT, parse_claim):
        meaning = _CLAIM if name == newest else _STRAY
        yield _small("claim", store, f"{PUBLISHERS}/{name}", found, meaning)


def _reports(store: Store) -> Iterator[Problem]:
    for name, found in _unreadable(store, HOSTS, REPORT_LIMIT, parse_report):
        yield _small("report", store, f"{HOSTS}/{name}", found, _REPORT)


def _small(part: Part, store: Store, key: str, found: Flaw, meaning: str) -> Problem:
    meaning = _UNREAD if found.unread else meaning
    return Problem(None, f"{key}: {found.message}", part, store.place(key), meaning, found.unread)


def _unreadable(
    store: Store, prefix: str, limit: int, parse: Callable[[bytes, str], object]
) -> Iterator[tuple[str, Flaw]]:
    """Names of JSON files below `prefix` that cannot be parsed. A linked prefix is not the channel's."""
    if not any(entry.name == prefix and entry.kind == "directory" for entry in store.list()):
        return
    for name in sorted(name for name in store.names(prefix) if name.endswith(".json")):
        try:
            parse(store.read(f"{prefix}/{name}", limit), name)
        except NotFound:
            continue
        except (WeightcastError, OSError) as error:
            yield name, flaw(error)


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
