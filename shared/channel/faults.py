"""What is wrong in a channel, file by file, and what it means for its hosts. Reads only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.base.progress import Advance
from weightcast.shared.channel.chain import (
    Flaw,
    Part,
    Problem,
    entries,
    flaw,
    unlisted,
    verify,
    verify_to,
)
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import CLAIM_LIMIT, current_epoch, parse_claim
from weightcast.shared.channel.index import INDEX_NAME, Index
from weightcast.shared.channel.layout import Layout, Pointer, version_of
from weightcast.shared.channel.reports import REPORT_LIMIT, parse_report
from weightcast.shared.channel.signing import Trust
from weightcast.shared.files import durable
from weightcast.shared.files.paths import exists, is_directory, is_file, is_own_directory

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
_UNREAD = (
    "it cannot be read from here now, which says nothing of it: mend rights, mount or disk and ask again; "
    "`channel repair` leaves it where it is"
)


def faults(directory: Path, advance: Advance | None = None, trust: Trust | None = None) -> list[Problem]:
    """Everything that is wrong, in order of versions; with `trust`, also what is not signed. Raises
    RetryLater when the directory is not there."""
    try:
        channel = Channel.open(directory, trust)
    except WeightcastError as error:
        if not is_directory(directory):
            raise
        return [Problem(None, error.message, "channel", meaning=_CHANNEL, unread=flaw(error).unread)]
    return of_channel(channel, advance)


def of_channel(channel: Channel, advance: Advance | None = None) -> list[Problem]:
    found = verify(channel, advance)
    if not channel.foreign:
        found += _lost_pointer(channel)
    anchors = sound_anchors(channel, found)
    found = [replace(problem, meaning=_meaning(problem, anchors)) for problem in found]
    if channel.foreign:
        return found
    return [*found, *_claims(channel.directory), *_reports(channel.directory), *strays(channel)]


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
    if exists(channel.directory / "latest") or not any(_versions(channel.directory)):
        return
    yield Problem(None, "latest is missing, and there are versions", "pointer")


def _versions(directory: Path) -> Iterator[int]:
    for entry in directory.iterdir():
        version = version_of(entry.name)
        if version is not None and is_file(entry / INDEX_NAME):
            yield version


def unannounced(channel: Channel) -> list[int]:
    """Versions that are committed and that the pointer does not name yet: their publisher's matter."""
    pointer = _pointer(channel)
    at = 0 if pointer is None else pointer.version
    return sorted(version for version in _versions(channel.directory) if version > at)


def highest_sound(channel: Channel, advance: Advance | None = None) -> int | None:
    """The highest version that is committed and whole, and contradicts no version that is there. None where
    one that cannot be read now may be it: a pointer is never put too low."""
    versions = sorted(_versions(channel.directory), reverse=True)
    if not versions:
        return None
    problems = verify_to(channel, Pointer(versions[0], None, channel.directory), advance)
    concerned = [problem for problem in problems if problem.part == "version"]
    broken = {problem.version for problem in concerned if not problem.unread}
    highest = next((version for version in versions if version not in broken), None)
    return None if any(problem.version == highest for problem in concerned) else highest


def _claims(directory: Path) -> Iterator[Problem]:
    newest = current_epoch(directory)
    for path in _json(Layout(directory).publishers_dir):
        found = _unreadable(path, CLAIM_LIMIT, parse_claim)
        if found is not None:
            meaning = _CLAIM if path.stem == str(newest) else _STRAY
            yield _small("claim", path, found, meaning)


def _reports(directory: Path) -> Iterator[Problem]:
    for path in _json(Layout(directory).hosts_dir):
        found = _unreadable(path, REPORT_LIMIT, parse_report)
        if found is not None:
            yield _small("report", path, found, _REPORT)


def _small(part: Part, path: Path, found: Flaw, meaning: str) -> Problem:
    text = f"{path.parent.name}/{path.name}: {found.message}"
    return Problem(None, text, part, str(path), _UNREAD if found.unread else meaning, found.unread)


def _json(directory: Path) -> list[Path]:
    if not is_own_directory(directory):
        return []
    return sorted(path for path in directory.iterdir() if path.suffix == ".json")


def _unreadable(path: Path, limit: int, parse: Callable[[bytes, str], object]) -> Flaw | None:
    try:
        parse(durable.read_file(path, limit), path.name)
    except FileNotFoundError:
        return None
    except (WeightcastError, OSError) as error:
        return flaw(error)
    return None


def strays(channel: Channel) -> Iterator[Problem]:
    """Copies of parts of a channel under other names. What looks like nothing of ours is not spoken of;
    parts, and directories without an index beyond the pointer, belong to a publisher at work."""
    for path in sorted(channel.directory.iterdir()):
        if _LIKE_OURS.match(path.name) and path.name not in _OURS and version_of(path.name) is None:
            yield Problem(None, f"{path.name} is no part of a channel", "stray", str(path), _STRAY)
    pointer = _pointer(channel)
    for entry in entries(channel, pointer):
        if isinstance(entry.index, Index):
            for path in unlisted(entry.directory, entry.index):
                text = f"{path.name} is not named by its index"
                yield Problem(entry.version, text, "stray", str(path), _STRAY)


def _pointer(channel: Channel) -> Pointer | None:
    try:
        return channel.pointer()
    except WeightcastError:
        return None
