"""Which checkpoint directory of a watched directory is published next: rules without IO.

Name, inode, size and times of the files that hold weights and configuration only tell whether a directory has
to be looked at again. Its content is then compared with what was published, left alone or passed over under
this name: other content is a new checkpoint, the same content is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, PlainSerializer

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources.layouts import ROOT, Fit, Layouts, Unpublished, pattern_of, save_of
from weightcast.publisher.daemon.sources.source import NO_CONTENT, LastContent
from weightcast.publisher.weights.config import is_config
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.channel.index import Index
from weightcast.shared.daemon.status import Failure
from weightcast.shared.files.hf_checkpoint import is_other_format
from weightcast.shared.files.paths import file_name, is_plain

_VANISHED_KEPT = 4096
_CONSUMED_KEPT, _CONTENTS_KEPT = 64, 1024
"""with their files, and with the digest of their content alone: a backup may bring them back"""
_MIXED_TIMES = 60
"""the stillness after which a directory counts that has a hole or was saved over in part, in times of the
usual one"""
_RENAME_TIMES = 5
"""likewise, after which a save under a temporary name is reported"""
_COMPLETE = "rename complete checkpoints in, or use --marker; POST /v1/publish publishes it as it is"
_OPTIONS = {"cast", "rename", "drop", "quantise", "non_finite", "carry_config"}
"""that a refusal may depend on"""
_EARLIER = "refused under earlier options: publish it again with `POST /v1/publish`"
_NUMBERS = re.compile(r"(\d+)", re.ASCII)
_Number = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""times may lie before 1970; inodes of some file systems use 64 bits"""


class FileMark(NamedTuple):
    """Without the device: network mounts get another number at every reboot."""

    name: Annotated[str, AfterValidator(file_name)]
    inode: _Number
    size: _Number
    mtime_ns: _Number
    ctime_ns: _Number = 0
    """also changes when a writer puts the mtime back"""


Marks = Annotated[frozenset[FileMark], PlainSerializer(sorted)]


def without_ctime(marks: Marks) -> Marks:
    return frozenset(mark._replace(ctime_ns=0) for mark in marks)


def configs_of(marks: Marks) -> Marks:
    return frozenset(mark for mark in marks if is_config(mark.name) and not mark.name.startswith("."))


def have_other_configs(known: Marks, found: Marks) -> bool:
    """Whether the config files among them differ; False where none are known."""
    configs = configs_of(known)
    return bool(configs) and configs != configs_of(found)


@dataclass(frozen=True)
class Candidate:
    """One look at a directory. `name`: its path relative to the watched directory. `weights`: shards and
    index, empty unless the checkpoint is complete."""

    name: str
    files: Marks
    weights: Marks = frozenset()
    completed_ns: int = 0
    """when the last of it was put in place, on the file system's clock"""
    finished: bool = False
    """its writer says so: marker there and no older than the weights, or renamed into place"""
    problem: Failure | None = None
    """why it is not complete"""
    hidden: Marks = frozenset()
    """files that do not count as its own"""
    table: TensorTable | None = field(default=None, compare=False)
    """of a complete checkpoint"""
    temporary: bool = False
    """its writer may be going to rename it"""
    hole: str = ""
    """of an unfinished checkpoint: which file has unallocated bytes"""

    @property
    def is_damaged(self) -> bool:
        """Although it is finished."""
        return self.finished and not self.weights and any(holds_weights(mark.name) for mark in self.files)


class InboxOutcome(StrEnum):
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    CONSUMED = "consumed"
    PASSED_OVER = "passed over"
    EXISTING = "existing"
    REFUSED = "refused"


_PUBLISHED = (InboxOutcome.PUBLISHED, InboxOutcome.CONSUMED)


def _entry_name(name: str) -> str:
    """A path relative to the watched directory. Raises DamagedFile."""
    return name if name == ROOT else "/".join(map(file_name, name.split("/")))


@dataclass(frozen=True)
class InboxEntry:
    """What became of a directory. `files`: its weights, or everything in it if it was refused.
    `version`: what it became; while publishing, the channel's version before."""

    name: Annotated[str, AfterValidator(_entry_name)]
    outcome: InboxOutcome
    files: Marks = frozenset()
    version: Annotated[int, Field(ge=0)] | None = None
    behind: str = ""
    """passed over for this one, whose publication has not ended"""
    request: str = ""
    """while publishing: what the version's index says if it came to be"""
    beside: Marks = frozenset()
    """all else that lay there when it was chosen, hidden files too"""
    content: LastContent = NO_CONTENT
    failure: Failure | None = None
    options: str = ""
    """it was refused under these"""

    def holds(self, files: Marks) -> bool:
        """Whether these are the weights and config files that this entry is about."""
        if self.outcome is InboxOutcome.REFUSED or not self.files or not self.files <= files:
            return False
        return not have_other_configs(self.beside, files)

    def content_alone(self) -> InboxEntry | None:
        """What is left when the files no longer count; None: nothing to compare with."""
        if self.content == NO_CONTENT:
            return None
        outcome = InboxOutcome.EXISTING if self.content.version is None else InboxOutcome.PUBLISHED
        if self.outcome is InboxOutcome.CONSUMED:
            outcome = self.outcome
        return InboxEntry(self.name, outcome, version=self.content.version, content=self.content)


def _no_name_twice(entries: tuple[InboxEntry, ...]) -> tuple[InboxEntry, ...]:
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("two entries have the same name")
    return entries


class InboxMemory(BaseModel, frozen=True):
    format: Literal[1] = 1
    watch: str = ""
    """real path of the directory that the entries are of; empty before the first"""
    entries: Annotated[tuple[InboxEntry, ...], AfterValidator(_no_name_twice)] = ()

    def by_name(self, watch: str) -> dict[str, InboxEntry]:
        """Of another directory than `watch`, which may have been moved here, only which content was published
        under which name."""
        known = (entry if self.watch == watch else entry.content_alone() for entry in self.entries)
        return {entry.name: entry for entry in known if entry is not None}


@dataclass(frozen=True)
class Choice:
    """`chosen` is to be published now, which says what is wrong with it if it is damaged; `passed` are older
    and complete; `ready`: oldest first, what could be published now."""

    chosen: Candidate | None
    passed: tuple[Candidate, ...] = ()
    waiting: tuple[Unpublished, ...] = ()
    ready: tuple[Candidate, ...] = ()


def may_be_checkpoint(name: str) -> bool:
    """Whether a directory of this name may be published: hidden ones and `*.tmp` are still being made."""
    return not is_temporary(name) and is_plain(name) and len(name) <= 255


def is_temporary(name: str) -> bool:
    return name.startswith(".") or name.endswith(".tmp")


@dataclass
class Inbox:
    """What is known of one watched directory. Whoever changes it stores `entries` before it acts on that."""

    settings: PublisherSettings
    entries: dict[str, InboxEntry] = field(default_factory=dict)
    base: TensorTable | None = None
    """None as long as it is not known, and where its tensors have other names than those of checkpoints"""
    _since: dict[str, tuple[Marks, float]] = field(default_factory=dict)
    """per name: what was seen, and when first, on a monotonic clock"""

    def __post_init__(self) -> None:
        self.layouts = Layouts(self.settings.watch_pattern)

    def is_known(self, name: str, files: Marks) -> bool:
        own, others = self.entries.get(name), self.entries.values()
        if own is not None and own.outcome is InboxOutcome.REFUSED and own.files == files:
            return True
        candidates = others if own is None else (own, *others)
        known = next((each for each in candidates if each.holds(files)), None)
        if own is None and known is not None and not known.request and not known.behind:
            # it was renamed: from now on other files under this name are compared too
            self.entries[name] = replace(known, name=name, beside=configs_of(known.beside))
        return known is not None

    def content(self, name: str) -> LastContent:
        """What a checkpoint of this name is compared with before it is published."""
        return self.entries[name].content if name in self.entries else NO_CONTENT

    def content_of(self, candidate: Candidate) -> LastContent:
        """As `content`; for a new name, of the checkpoint whose files these seem to be: hard links change the
        ctime."""
        weights = without_ctime(candidate.weights)
        names = [n for n, each in self.entries.items() if each.files and without_ctime(each.files) <= weights]
        return self.content(candidate.name if candidate.name in self.entries or not names else names[0])

    def unsampled(self) -> list[str]:
        """Names of checkpoints that were not read and have no sample yet."""
        return [
            name
            for name, entry in self.entries.items()
            if entry.outcome in (InboxOutcome.EXISTING, InboxOutcome.PASSED_OVER)
            and not (entry.behind or entry.content.sample)
        ]

    def sampled(self, name: str, sample: str) -> None:
        entry = self.entries[name]
        self.entries[name] = replace(entry, content=entry.content.but(sample=sample))

    def ignore_existing(self, candidates: Iterable[Candidate], began_ns: int | None) -> Sequence[str]:
        """At the very first start: what is complete now was there before, unless it was completed after
        `began_ns`. Returns the names."""
        found = [
            each
            for each in candidates
            if each.weights and (began_ns is None or each.completed_ns <= began_ns)
        ]
        for each in found:
            self._note(InboxOutcome.EXISTING, each)
        return sorted(each.name for each in found)

    def forget_existing(self) -> None:
        """They are new, unless something was published already: a fleet would go back to them."""
        entries = {n: each for n, each in self.entries.items() if each.outcome is not InboxOutcome.EXISTING}
        if not any(entry.outcome in _PUBLISHED for entry in entries.values()):
            self.entries = entries

    def left_alone(self, present: Collection[str], remedy: str) -> list[Unpublished]:
        """`present`: names of what is there."""
        existing = [
            Unpublished(name, "complete when this publisher first looked", remedy)
            for name, each in self.entries.items()
            if each.outcome is InboxOutcome.EXISTING and each.files and name in present
        ]
        patterns = set(map(pattern_of, present))
        layouts = [each for pattern, each in self.layouts.left.items() if pattern in patterns]
        return [*dict.fromkeys(layouts), *existing]

    def choose(self, candidates: Sequence[Candidate], now: float) -> Choice:
        """`candidates`: of directories that are not known; `now` in seconds on a monotonic clock."""
        quiet = self._quiet_seconds(candidates, now)
        waits = {each.name: self._wait(each, quiet[each.name]) for each in candidates}
        whole = sorted((each for each in candidates if self._is_whole(each)), key=_in_order)
        self._judge_layouts([each for each in whole if waits[each.name] is None])
        whole = [each for each in whole if self.layouts.is_clear(each.name)]
        ready = [each for each in whole if waits[each.name] is None]
        waiting = tuple(wait for wait in waits.values() if wait is not None and wait.reason)
        if not ready:
            return Choice(next((each for each in candidates if each.is_damaged), None), waiting=waiting)
        if self.settings.every:
            # One that is older and only has to settle comes first.
            chosen = ready[0] if ready[0] is whole[0] else None
            return Choice(chosen, waiting=waiting, ready=tuple(ready))
        newest = ready[-1]
        return Choice(newest, tuple(whole[: whole.index(newest)]), waiting, tuple(ready))

    def _is_whole(self, candidate: Candidate) -> bool:
        if not candidate.weights or self._is_no_model(candidate):
            return False
        return candidate.finished or self.settings.marker is None

    def _is_no_model(self, candidate: Candidate) -> bool:
        """Whether other safetensors are in the watched directory itself."""
        fit = self._fit(candidate)
        return candidate.name == ROOT and not (fit.complete or fit.found)

    def _judge_layouts(self, ready: Sequence[Candidate]) -> None:
        if all(self.layouts.is_clear(each.name) for each in ready):
            return
        published = {
            (each.version, name)
            for name, each in self.entries.items()
            if each.outcome is InboxOutcome.PUBLISHED and each.files and each.version is not None
        }
        self.layouts.judge({each.name: self._fit(each) for each in ready}, published)

    def _fit(self, candidate: Candidate) -> Fit:
        """Without a base all fit equally."""
        if self.base is None or candidate.table is None:
            return Fit(complete=True)
        return Fit.of(candidate.table, self.base)

    def _quiet_seconds(self, candidates: Iterable[Candidate], now: float) -> Mapping[str, float]:
        """How long nothing has changed, by name: in a save of several checkpoints in any of them."""
        before, self._since = self._since, {}
        changed: dict[str, float] = {}
        for candidate in candidates:
            files, since = before.get(candidate.name, (candidate.files, now))
            since = since if files == candidate.files else now
            self._since[candidate.name] = (candidate.files, since)
            save = save_of(candidate.name)
            changed[save] = max(since, changed.get(save, since))
        return {name: now - changed[save_of(name)] for name in self._since}

    def _wait(self, candidate: Candidate, quiet: float) -> Unpublished | None:
        """Why it is not published yet; without a reason where there is nothing to say yet, or it is about to
        be refused. Two looks are needed even if the clock says otherwise: one look shows no stillness."""

        def is_still(times: int = 1) -> bool:
            return 0 < quiet >= self.settings.settle_seconds * times

        def wait(reason: str, remedy: str = "") -> Unpublished:
            is_checkpoint = not candidate.files or any(
                is_of_a_checkpoint(mark.name) for mark in candidate.files
            )
            still = is_checkpoint and (candidate.finished or is_still())
            return Unpublished(candidate.name, reason, remedy, still)

        if candidate.temporary:
            reason = "temporary name: hidden, or ends in .tmp" if is_still(_RENAME_TIMES) else ""
            return wait(reason, "rename it when it is complete, with the directories around it")
        if candidate.is_damaged:
            return wait("")
        if candidate.problem is not None:
            return wait(candidate.problem.message, candidate.problem.remedy)
        if self._is_no_model(candidate):
            return wait("none of its tensors is in the base", "move files that are not a model elsewhere")
        if candidate.finished and not self._is_marked_as_before(candidate):
            return None
        marker = self.settings.marker
        if marker is not None and not candidate.finished:
            old = any(mark.name == marker for mark in candidate.files)
            reason = f"{marker} is {'older than the weights' if old else 'not there'}"
            return wait(reason, f"write {marker} into it after all weights (--marker)")
        mixed = self._is_mixed(candidate)
        if (mixed or candidate.hole) and not is_still(_MIXED_TIMES):
            reason = f"{candidate.hole}: still being written"
            reason = "some of its files are those from before" if mixed else reason
            wanted = self.settings.settle_seconds * _MIXED_TIMES
            reason += f": waits until nothing changed for {wanted:g} s"
            return wait(reason, "" if mixed else _COMPLETE)
        return None if is_still() else wait("may still be written: waits for a second look")

    def _is_mixed(self, candidate: Candidate) -> bool:
        """Whether a checkpoint seems to be saved over file by file: whole by its headers all the while."""
        own = self.entries.get(candidate.name)
        if own is None:
            return False
        weights, before = without_ctime(candidate.weights), without_ctime(own.files)
        if weights.isdisjoint(before):
            return False
        return not weights <= before or have_other_configs(
            without_ctime(own.beside), without_ctime(candidate.files)
        )

    def _is_marked_as_before(self, candidate: Candidate) -> bool:
        """Whether it is saved over in part, and its marker is that of the save before, given a new ctime."""
        own = self.entries.get(candidate.name)
        if own is None or self.settings.marker is None or not self._is_mixed(candidate):
            return False
        before = without_ctime(own.files | own.beside)
        return any(mark.name == self.settings.marker for mark in without_ctime(candidate.files) & before)

    def begin(self, choice: Choice, version: int, request: str) -> None:
        """`version`: the channel's before the publication."""
        if choice.chosen is None:
            return
        self._note(InboxOutcome.PUBLISHING, choice.chosen, version=version, request=request)
        for passed in choice.passed:
            self._note(InboxOutcome.PASSED_OVER, passed, behind=choice.chosen.name)

    def _note(self, outcome: InboxOutcome, candidate: Candidate, **facts: Any) -> None:
        name, weights = candidate.name, candidate.weights
        beside = (candidate.files | candidate.hidden) - weights
        entry = InboxEntry(name, outcome, weights, beside=beside, content=self.content(name).but(sample=""))
        self.entries[name] = replace(entry, **facts)

    def succeed(self, name: str, version: int, root: str) -> None:
        self.entries[name] = replace(
            self.entries[name],
            outcome=InboxOutcome.PUBLISHED,
            version=version,
            request="",
            content=LastContent(version=version, root=root),
        )
        for other, entry in self.entries.items():
            if entry.behind == name:
                self.entries[other] = replace(entry, behind="")

    def adopt(self, candidate: Candidate, version: int, root: str) -> None:
        self._note(InboxOutcome.PUBLISHED, candidate)
        self.succeed(candidate.name, version, root)

    def skip(self, candidate: Candidate, content: LastContent) -> None:
        """It was not read in full before, and its sample is the same."""
        own = self.entries.get(candidate.name)
        passed = own is not None and own.outcome is InboxOutcome.PASSED_OVER
        outcome = InboxOutcome.PASSED_OVER if passed else InboxOutcome.EXISTING
        self._note(outcome, candidate, content=content)

    def give_up(self, name: str) -> None:
        """The publication did not happen: it and those passed over for it are new again."""
        for other, entry in list(self.entries.items()):
            if other == name or entry.behind == name:
                self._forget_files(other)

    def _forget_files(self, name: str) -> None:
        left = self.entries[name].content_alone()
        if left is None:
            del self.entries[name]
        else:
            self.entries[name] = left

    def refuse(self, candidate: Candidate, failure: Failure) -> None:
        name, content = candidate.name, self.content(candidate.name)
        self.give_up(name)
        entry = InboxEntry(name, InboxOutcome.REFUSED, candidate.files, content=content)
        self.entries[name] = replace(entry, failure=failure, options=self._options)

    @property
    def _options(self) -> str:
        return self.settings.model_dump_json(include=_OPTIONS)

    def refused(self, present: Collection[str]) -> list[tuple[str, Failure]]:
        """Names and reasons."""
        found, current = [], ("", self._options)
        for name, entry in self.entries.items():
            if (why := entry.failure) is not None and name in present:
                found.append((name, why if entry.options in current else why.but(remedy=_EARLIER)))
        return found

    def resume(self, made_for: Callable[[str, int], Index | None]) -> list[str]:
        """After a kill. `made_for`: which version came of a request, if it is one after another version.
        Returns the names of what has become one."""
        published = []
        for name, entry in list(self.entries.items()):
            if entry.outcome is InboxOutcome.PUBLISHING and entry.version is not None:
                index = made_for(entry.request, entry.version)
                if index is None:
                    self.give_up(name)
                else:
                    self.succeed(name, index.version, index.root)
                    published.append(name)
        return published

    def consumed(self, name: str) -> None:
        version, content = self.entries[name].version, self.entries[name].content
        self.entries[name] = InboxEntry(name, InboxOutcome.CONSUMED, version=version, content=content)

    def consumable(self, name: str) -> Marks:
        """All files of a published checkpoint as it was when it was chosen; none of any other."""
        entry = self.entries.get(name)
        if entry is None or entry.outcome is not InboxOutcome.PUBLISHED:
            return frozenset()
        return entry.files | entry.beside

    def forget_vanished(self, present: frozenset[str]) -> None:
        """Keeps the memory bounded. The latest vanished ones are kept: a mount may be away for a moment. What
        was published and consumed is known by its content before long."""
        vanished = [name for name in self.entries if name not in present]
        ended = [
            name for name in vanished if self.settings.consume and self.entries[name].outcome in _PUBLISHED
        ]
        for name in {*vanished[:-_VANISHED_KEPT], *ended[:-_CONTENTS_KEPT]}:
            del self.entries[name]
        for name in self.entries.keys() & ended[:-_CONSUMED_KEPT]:
            self._forget_files(name)


def holds_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or says where they are."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def is_of_a_checkpoint(name: str) -> bool:
    """Whether a directory with a file of this name is taken for a checkpoint, if not for a whole one."""
    return holds_weights(name) or is_other_format(name) or name in ("config.json", "adapter_config.json")


def _in_order(candidate: Candidate) -> tuple[int, list[tuple[int, str]]]:
    """By completion; in one tick of the clock by name, numbers by value."""
    pieces = _NUMBERS.split(candidate.name)
    return candidate.completed_ns, [(int(p), "") if p.isascii() and p.isdigit() else (-1, p) for p in pieces]
