"""Which checkpoint directory of a watched directory is published next: rules without IO.

A directory is known by the files that hold its weights, under whatever name: name, inode, size and time of
change of each. A known one is never published again; other files under an old name are a new checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from weightcast.shared.errors import DamagedFile
from weightcast.shared.files.paths import file_name, is_plain
from weightcast.shared.files.strict_json import Members, parse_object, write_object
from weightcast.shared.service.facts import Failure

FORMAT = 1
MEMORY_LIMIT = 256 << 20
"""bytes of the inbox's memory on disk"""
_VANISHED_KEPT = 4096
_CONSUMED_KEPT = 64
_MIXED_TIMES = 60
"""the stillness after which a directory counts that was saved over in part, in times of the usual one"""
_LOWEST = -(1 << 63)
"""times may lie before 1970; inodes of some file systems use 64 bits"""
_STEP = re.compile(r"(\d{1,15})$", re.ASCII)
_NUMBERS = re.compile(r"(\d+)", re.ASCII)


@dataclass(frozen=True, order=True)
class FileMark:
    """Without the device: network mounts get another number at every reboot."""

    name: str
    inode: int
    size: int
    mtime_ns: int


Marks = frozenset[FileMark]


@dataclass(frozen=True)
class Sighting:
    """One look at a directory. `weights`: shards and index, empty unless the checkpoint is complete."""

    name: str
    files: Marks
    weights: Marks
    completed_ns: int
    """when the last of it was put in place, on the file system's clock"""
    finished: bool
    """its writer says so: marker there and no older than the weights, or renamed into place"""
    problem: Failure | None = None
    """why it is not complete"""
    hidden: Marks = frozenset()
    """files that do not count as its own"""
    link: bool = False
    """it is a link to a directory"""


class InboxOutcome(StrEnum):
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    PASSED_OVER = "passed over"
    EXISTING = "existing"
    REFUSED = "refused"


@dataclass(frozen=True)
class InboxEntry:
    """What became of a directory. `files`: its weights, or everything in it if it was refused. `version`: the
    one that it became; while publishing, the channel's version before."""

    outcome: InboxOutcome
    files: Marks
    version: int | None = None
    behind: str = ""
    """passed over for this one, whose publication has not ended"""
    failure: Failure | None = None
    request: str = ""
    """while publishing: what the version's index says if it came to be"""
    beside: Marks = frozenset()
    """all else that lay there when it was chosen, hidden files too"""

    def holds(self, files: Marks) -> bool:
        """Whether these are the weights that this entry is about."""
        return self.outcome is not InboxOutcome.REFUSED and bool(self.files) and self.files <= files


@dataclass(frozen=True)
class InboxRules:
    every: bool = False
    """all in order of completion; otherwise the newest, and older ones are passed over"""
    marker: str | None = None
    settle_seconds: float = 1.0
    existing: bool = False
    consume: bool = False
    """what was published is deleted"""


@dataclass(frozen=True)
class Waiting:
    name: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """`chosen` is to be published now; `passed` are older and complete."""

    chosen: Sighting | None
    passed: tuple[Sighting, ...] = ()
    refused: tuple[Sighting, ...] = ()
    """finished and damaged"""
    waiting: tuple[Waiting, ...] = ()


def is_candidate(name: str) -> bool:
    """Whether a directory of this name is looked at: hidden ones and `*.tmp` are still being made."""
    return not name.startswith(".") and not name.endswith(".tmp") and is_plain(name) and len(name) <= 255


def step_of(name: str) -> int | None:
    """The number that the name ends in (`step_100`, `checkpoint-100`)."""
    match = _STEP.search(name)
    return None if match is None else int(match[1])


@dataclass
class Inbox:
    """The memory of one watched directory. Whoever changes it stores `pack_entries(entries)` before it acts
    on that."""

    rules: InboxRules
    entries: dict[str, InboxEntry] = field(default_factory=dict)
    _since: dict[str, tuple[Marks, float]] = field(default_factory=dict)
    """per name: what was seen, and when first, on a monotonic clock"""

    def is_known(self, name: str, files: Marks) -> bool:
        own = self.entries.get(name)
        if own is not None and own.outcome is InboxOutcome.REFUSED and own.files == files:
            return True
        others = self.entries.values()
        return any(entry.holds(files) for entry in (others if own is None else (own, *others)))

    def ignore_existing(self, sightings: Iterable[Sighting]) -> Sequence[str]:
        """At the very first start: what is complete now was there before. Returns the names."""
        found = {each.name: _entry(InboxOutcome.EXISTING, each) for each in sightings if each.weights}
        self.entries |= found
        return sorted(found)

    def choose(self, sightings: Sequence[Sighting], now: float) -> Choice:
        """`sightings`: of directories that are not known; `now` in seconds on a monotonic clock."""
        sightings = _without_second_names(sightings)
        self._remember_looks(sightings, now)
        reasons = {each.name: self._reason_to_wait(each, now) for each in sightings}
        whole = sorted((each for each in sightings if self._is_whole(each)), key=_in_order)
        ready = [each for each in whole if not reasons[each.name]]
        refused = tuple(each for each in sightings if _is_broken(each))
        broken = {each.name for each in refused}
        waiting = tuple(
            Waiting(name, reason) for name, reason in reasons.items() if reason and name not in broken
        )
        if not ready:
            return Choice(None, (), refused, waiting)
        if self.rules.every:
            # One that is older and only has to settle comes first.
            return Choice(ready[0] if ready[0] is whole[0] else None, (), refused, waiting)
        newest = ready[-1]
        return Choice(newest, tuple(whole[: whole.index(newest)]), refused, waiting)

    def _is_whole(self, sighting: Sighting) -> bool:
        return bool(sighting.weights) and (sighting.finished or self.rules.marker is None)

    def _remember_looks(self, sightings: Iterable[Sighting], now: float) -> None:
        before, self._since = self._since, {}
        for sighting in sightings:
            files, since = before.get(sighting.name, (sighting.files, now))
            self._since[sighting.name] = (sighting.files, since if files == sighting.files else now)

    def _reason_to_wait(self, sighting: Sighting, now: float) -> str:
        if not sighting.weights:
            return "incomplete" if sighting.problem is None else sighting.problem.message
        if sighting.finished and not self._is_marked_as_before(sighting):
            return ""
        if self.rules.marker is not None and not sighting.finished:
            old = any(mark.name == self.rules.marker for mark in sighting.files)
            return f"{self.rules.marker} is {'older than the weights' if old else 'not there'}"
        quiet = now - self._since[sighting.name][1]
        if self._is_mixed(sighting):
            wanted = self.rules.settle_seconds * _MIXED_TIMES
            reason = f"some of its files are those from before: waits until nothing changed for {wanted:g} s"
        else:
            wanted = self.rules.settle_seconds
            reason = "may still be written: waits for a second look"
        # Two looks are needed even if the clock says otherwise: one look shows no stillness.
        return "" if 0 < quiet >= wanted else reason

    def _is_mixed(self, sighting: Sighting) -> bool:
        """Whether a checkpoint seems to be saved over file by file: whole by its headers all the while."""
        own = self.entries.get(sighting.name)
        return own is not None and not sighting.weights.isdisjoint(own.files)

    def _is_marked_as_before(self, sighting: Sighting) -> bool:
        """Whether it is saved over in part, and its marker is that of the save before, given a new ctime."""
        own = self.entries.get(sighting.name)
        if own is None or self.rules.marker is None or not self._is_mixed(sighting):
            return False
        return any(mark.name == self.rules.marker for mark in sighting.files & (own.files | own.beside))

    def begin(self, choice: Choice, version: int, request: str) -> None:
        """`version`: the channel's before the publication."""
        if choice.chosen is None:
            return
        name = choice.chosen.name
        begun = _entry(InboxOutcome.PUBLISHING, choice.chosen)
        self.entries[name] = replace(begun, version=version, request=request)
        for passed in choice.passed:
            self.entries[passed.name] = replace(_entry(InboxOutcome.PASSED_OVER, passed), behind=name)

    def succeed(self, name: str, version: int) -> None:
        begun = self.entries[name]
        self.entries[name] = replace(begun, outcome=InboxOutcome.PUBLISHED, version=version, request="")
        for other, entry in self.entries.items():
            if entry.behind == name:
                self.entries[other] = replace(entry, behind="")

    def adopt(self, sighting: Sighting, version: int) -> None:
        self.entries[sighting.name] = replace(_entry(InboxOutcome.PUBLISHED, sighting), version=version)

    def give_up(self, name: str) -> None:
        """The publication did not happen: it and those passed over for it are new again."""
        self.entries = {
            other: entry for other, entry in self.entries.items() if other != name and entry.behind != name
        }

    def refuse(self, sighting: Sighting, failure: Failure) -> None:
        self.give_up(sighting.name)
        self.entries[sighting.name] = InboxEntry(InboxOutcome.REFUSED, sighting.files, failure=failure)

    def resume(self, made_for: Callable[[str, int], int | None]) -> list[str]:
        """After a kill. `made_for`: which version came of a request, if it is one after another version.
        Returns the names of what has become one."""
        published = []
        for name, entry in list(self.entries.items()):
            if entry.outcome is InboxOutcome.PUBLISHING and entry.version is not None:
                version = made_for(entry.request, entry.version)
                if version is None:
                    self.give_up(name)
                else:
                    self.succeed(name, version)
                    published.append(name)
        return published

    def consumable(self, name: str) -> Marks:
        """All files of a published checkpoint as it was when it was chosen; none of any other."""
        entry = self.entries.get(name)
        if entry is None or entry.outcome is not InboxOutcome.PUBLISHED:
            return frozenset()
        return entry.files | entry.beside

    def forget_vanished(self, present: frozenset[str]) -> None:
        """Keeps the memory bounded. The latest vanished ones are kept: a mount may be away for a moment. What
        was published and consumed does not come back."""
        vanished = [name for name in self.entries if name not in present]
        ended = [name for name in vanished if self._is_consumed(name)]
        dropped = {*_but_last(vanished, _VANISHED_KEPT), *_but_last(ended, _CONSUMED_KEPT)}
        self.entries = {name: entry for name, entry in self.entries.items() if name not in dropped}

    def _is_consumed(self, name: str) -> bool:
        return self.rules.consume and self.entries[name].outcome is InboxOutcome.PUBLISHED

    def refused(self) -> list[tuple[str, Failure]]:
        return [(name, entry.failure) for name, entry in self.entries.items() if entry.failure is not None]


def _but_last(names: Sequence[str], count: int) -> Sequence[str]:
    return names[: max(0, len(names) - count)]


def _without_second_names(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Without links to what is among them under its own name."""
    own = {each.files for each in sightings if not each.link}
    return [each for each in sightings if not each.link or each.files not in own]


def _entry(outcome: InboxOutcome, sighting: Sighting) -> InboxEntry:
    beside = (sighting.files | sighting.hidden) - sighting.weights
    return InboxEntry(outcome, sighting.weights, beside=beside)


def _is_broken(sighting: Sighting) -> bool:
    return sighting.finished and not sighting.weights and any(holds_weights(f.name) for f in sighting.files)


def holds_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or says where they are."""
    return name.endswith((".safetensors", ".index.json"))


def _in_order(sighting: Sighting) -> tuple[int, list[tuple[int, str]]]:
    """By completion; in one tick of the clock by name, numbers by value."""
    pieces = _NUMBERS.split(sighting.name)
    return sighting.completed_ns, [(int(p), "") if p.isascii() and p.isdigit() else (-1, p) for p in pieces]


def pack_entries(entries: Mapping[str, InboxEntry], watch: str = "") -> bytes:
    """`watch`: the directory that they are of."""
    return write_object(
        {
            "format": FORMAT,
            **({"watch": watch} if watch else {}),
            "entries": [
                {
                    "name": name,
                    "outcome": entry.outcome.value,
                    "files": [_row(mark) for mark in sorted(entry.files)],
                    "version": entry.version,
                    "behind": entry.behind,
                    **({"request": entry.request} if entry.request else {}),
                    **({"beside": [_row(mark) for mark in sorted(entry.beside)]} if entry.beside else {}),
                    "failure": None if entry.failure is None else entry.failure.by_name(),
                }
                for name, entry in entries.items()
            ],
        }
    )


def _row(mark: FileMark) -> list[object]:
    return [mark.name, mark.inode, mark.size, mark.mtime_ns]


def parse_entries(data: bytes, what: str, watch: str = "") -> dict[str, InboxEntry] | None:
    """None where they are of another directory than `watch`. Raises DamagedFile."""
    members = Members(parse_object(data, what), what)
    if members.integer("format") != FORMAT:
        raise members.bad("format", str(FORMAT))
    if watch and "watch" in members and members.text("watch") != watch:
        return None
    entries: dict[str, InboxEntry] = {}
    for row in members.array("entries"):
        each = Members(row, what)
        name = file_name(each.text("name"))
        if name in entries:
            raise DamagedFile(f"{what}: {name!r} stands twice")
        entries[name] = _parse_entry(each, what)
    return entries


def _parse_entry(members: Members, what: str) -> InboxEntry:
    outcome = members.text("outcome")
    if outcome not in [each.value for each in InboxOutcome]:
        raise members.bad("outcome", "a known outcome")
    return InboxEntry(
        InboxOutcome(outcome),
        _parse_marks(members, "files", what),
        members.optional_integer("version"),
        members.text("behind"),
        parse_failure(members, "failure", what),
        members.hex("request", 16) if "request" in members else "",
        _parse_marks(members, "beside", what) if "beside" in members else frozenset(),
    )


def parse_failure(members: Members, key: str, what: str) -> Failure | None:
    """Raises DamagedFile."""
    if members.is_null(key):
        return None
    found = members.object(key)
    error, message, remedy = found.get("error"), found.get("message"), found.get("remedy", "")
    if not (isinstance(error, str) and isinstance(message, str) and isinstance(remedy, str)):
        raise DamagedFile(f"{what}: {key} is not an error with message and remedy")
    return Failure(error=error, message=message, remedy=remedy)


def _parse_marks(members: Members, key: str, what: str) -> Marks:
    return frozenset(_mark(row, what) for row in members.array(key))


def _mark(row: object, what: str) -> FileMark:
    if type(row) is not list or len(row) != 4 or type(row[0]) is not str:
        raise DamagedFile(f"{what}: a file is not [name, inode, bytes, time]")
    if any(type(number) is not int or not _LOWEST <= number < 1 << 64 for number in row[1:]):
        raise DamagedFile(f"{what}: bad numbers of file {row[0][:80]!r}")
    return FileMark(file_name(row[0]), *row[1:])
