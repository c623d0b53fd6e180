"""The watched directory with its memory on disk: looks, asks the inbox's rules, stores before it acts.
Adapters in it have a watched directory each, which sees that adapter alone. Published checkpoints are
deleted (`Consumer`) exactly as they were when they were chosen."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from errno import EEXIST, ENOTEMPTY
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.daemon.sources import observation
from weightcast.publisher.daemon.sources.inbox import (
    Candidate,
    Choice,
    Inbox,
    InboxMemory,
    InboxOutcome,
    Marks,
    holds_weights,
    may_be_checkpoint,
)
from weightcast.publisher.daemon.sources.layouts import ROOT, Unpublished, parents_of, step_of
from weightcast.publisher.daemon.sources.observation import OURS, all_files
from weightcast.publisher.daemon.sources.source import LastContent, Memory, Requested, SourceJob, new_request
from weightcast.publisher.publish.publish_job import Publication
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import Refused, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.components import ADAPTER, check_name
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.status import Failure
from weightcast.shared.daemon.timing import Backoff
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.hf_checkpoint import ADAPTER_MODEL
from weightcast.shared.files.paths import exists, is_directory, is_file, is_link, is_own_directory, matching

_EXISTING = "restart with --existing to publish them, in order; or publish one with `POST /v1/publish`"
_POST = "publish one with `POST /v1/publish` and its absolute path: docs/publishing.md#on-request"
_REMEDY = "remove the file: present checkpoints then count as published"
_HELD = "publishing is held; it is published after `weightcast channel resume`"
_HELD_REMEDY = "move it away before you resume if it must not be published"
_RENAME = "rename the adapter to letters, digits and ._-, or publish it with `POST /v1/publish`"
_LIMIT = 256 << 20
_NAMED = 5
"""checkpoints that a line of the log names"""
WAITING_SHOWN, REFUSED_SHOWN, SKIPPED_SHOWN = 20, 20, 20
_ASIDE = f"{OURS}consuming-"
"""before a checkpoint's name: out of its writer's reach, not compared yet"""
_CONSUMED = f"{OURS}consumed-"
"""compared with what was published: to be deleted"""
_PAUSE = Backoff(0.5, 300.0)
MAIN_VERSION = "main_version"
"""a file next to an adapter: the version of main on which it was trained"""

log = get_log("inbox")

_DEFAULT, _MEMORY = f"{ADAPTER}default", "inbox-adapter-"
_SAVE = re.compile(r"((checkpoint|global_?step|step|iter|epoch)[-_]?)?\d+", re.ASCII | re.IGNORECASE)


def component_of(name: str) -> str:
    """Of a directory with an adapter, relative to the watched one: in peft's own layout a save has its
    default adapter in itself, and others in directories of their names. Raises Refused."""
    *above, last = name.split("/")
    return _DEFAULT if not above or _SAVE.fullmatch(last) else check_name(ADAPTER + last)


class Consumer:
    """Of one watched directory and thread."""

    def __init__(self, directory: Path, inbox: Inbox, is_ours: Callable[[str, Path], bool]) -> None:
        """`is_ours`: whether a directory that was set aside, by name and path, is for this inbox."""
        self.changed: set[str] = set()
        """published, and not what was published any more"""
        self._directory, self._inbox, self._is_ours = directory, inbox, is_ours
        self._unfinished = {ROOT}
        """published, and kept from being deleted by an error of the disk; ROOT: there may be leftovers"""
        self._warned: set[str] = set()
        self._failures, self._next_try = 0, 0.0

    def consume(self, name: str) -> None:
        self._try(name, consume)

    def _try(self, name: str, consume: Callable[[Path, str, Marks], None]) -> None:
        try:
            consume(self._directory, name, self._inbox.consumable(name))
            self.changed.discard(name)
            self._inbox.consumed(name)
        except FileNotFoundError:
            return  # by the process that was killed, or it is still set aside
        except Refused as error:
            log.warning("checkpoint not consumed", checkpoint=name, reason=str(error))
            self.changed.add(name)
        except OSError as error:
            self._unfinished.add(name)
            self._warn(name, error)

    def _warn(self, name: str, error: OSError) -> None:
        if name not in self._warned:
            reason = disk_text(error, self._directory)
            log.warning("checkpoint not consumed yet", checkpoint=name, reason=reason)
            self._warned.add(name)

    def finish(self) -> None:
        """What a kill or an error left: in the next look, and ever more rarely while it lasts."""
        if not self._unfinished or time.monotonic() < self._next_try:
            return
        names, self._unfinished = self._unfinished, set()
        try:
            delete_leftovers(self._directory, self._inbox.entries)
            for name in set_aside(self._directory, self._inbox.entries):
                if self._is_ours(name, _aside(self._directory / name)):
                    self._try(name, consume_aside)
        except OSError as error:
            self._unfinished |= names | {ROOT}
            self._warn(ROOT, error)
        else:
            for name in sorted(names & self._inbox.entries.keys() - {ROOT}):
                self.consume(name)
        self._warned &= self._unfinished
        self._failures = self._failures + 1 if self._unfinished else 0
        self._next_try = time.monotonic() + _PAUSE.pause(self._failures) if self._unfinished else 0.0


def consume(watch: Path, name: str, known: Marks) -> None:
    """Deletes a published directory if all files in it, hidden ones too, are `known`, and nothing else is in
    it. Raises Refused; it is then untouched, or set aside where something else has its name by now."""
    directory = watch / name
    if name == ROOT:
        raise Refused(
            f"{directory} is not consumed: it is the watched directory itself",
            remedy="save into a subdirectory, or run without --consume",
        )
    _require_known(directory, directory, known)
    # What comes under its name from here on is another one.
    directory.rename(_aside(directory))
    failpoint("inbox.aside", directory)
    consume_aside(watch, name, known)


def consume_aside(watch: Path, name: str, known: Marks) -> None:
    """The rest of `consume`, for a checkpoint that was renamed first: its writer may have changed it."""
    directory, aside = watch / name, _aside(watch / name)
    try:
        _require_known(aside, directory, known)
    except Refused as error:
        if _put_back(aside, directory):
            raise
        raise Refused(f"{error.message}, and its name is in use again", remedy=f"check {aside}") from error
    grave = directory.with_name(f"{_CONSUMED}{secrets.token_hex(8)}")
    aside.rename(grave)
    failpoint("inbox.buried", directory)
    shutil.rmtree(grave)
    failpoint("inbox.deleted", directory)


def _aside(directory: Path) -> Path:
    return directory.with_name(f"{_ASIDE}{directory.name}")


def set_aside(watch: Path, names: Iterable[str] = ()) -> list[str]:
    """Names of checkpoints that a kill or an error left renamed and not compared. `names`: of checkpoints
    that may be among them, where they are not directly in `watch`."""
    asides = [path.relative_to(watch) for path in _left_behind(watch, names, _ASIDE)]
    return [str(path.with_name(path.name.removeprefix(_ASIDE))) for path in asides]


def delete_leftovers(watch: Path, names: Iterable[str] = ()) -> None:
    """What a kill left of directories being deleted. `names`: see `set_aside`."""
    for path in _left_behind(watch, names, _CONSUMED):
        shutil.rmtree(path)


def _left_behind(watch: Path, names: Iterable[str], prefix: str) -> list[Path]:
    parents = sorted({watch, *((watch / name).parent for name in names if name != ROOT)})
    return [path for parent in parents for path in matching(parent, f"{prefix}*") if is_own_directory(path)]


def _require_known(at: Path, directory: Path, known: Marks) -> None:
    """`directory`: what it was called when it was published."""
    names = {mark.name for mark in known}
    if is_link(at):
        problem = "it is a link"
    elif ADAPTER_MODEL in names and any(map(holds_weights, names - {ADAPTER_MODEL})):
        problem = "it holds full weights and an adapter"
    elif any(is_link(path) or not is_file(path) for path in at.iterdir()):
        problem = "it holds links or directories"
    elif known != all_files(at):
        problem = "it was changed after it was chosen"
    else:
        return
    raise Refused(f"{directory} is not consumed: {problem}", remedy="remove it by hand")


def _put_back(aside: Path, directory: Path) -> bool:
    """False where its name is taken: nothing is ever replaced but an empty directory of our own."""
    try:
        directory.mkdir()
        aside.rename(directory)
    except OSError as error:
        if error.errno in (EEXIST, ENOTEMPTY):
            return False
        raise
    # Or the rename would say that all of it was written before it got its name.
    os.utime(directory)
    return True


class RefusedStatus(BaseModel, frozen=True):
    name: str
    error: Failure


class SkippedStatus(BaseModel, frozen=True):
    """A checkpoint whose files changed and whose content did not."""

    name: str
    reason: str


class InboxStatus(BaseModel, frozen=True):
    watch: str
    waiting: tuple[Unpublished, ...] = ()
    refused: tuple[RefusedStatus, ...] = ()
    waiting_count: int = 0
    refused_count: int = 0
    """of all, shown or not"""
    skipped: tuple[SkippedStatus, ...] = ()
    """the latest, newest last"""
    skipped_count: int = 0
    """since the daemon started"""
    left_alone: tuple[Unpublished, ...] = ()
    """checkpoints, and layouts of the watched directory, that waiting will not publish"""
    left_alone_count: int = 0

    def and_of(self, others: Sequence[InboxStatus], left: tuple[Unpublished, ...]) -> InboxStatus:
        """With those of the adapters in the directory. `left`: that are none's."""
        found = [each.model_dump(exclude={"watch"}) for each in (self, *others)]
        whole = {name: sum((each[name] for each in found), type(found[0][name])()) for name in found[0]}
        whole["left_alone"] += left
        whole |= {name: each[-WAITING_SHOWN:] for name, each in whole.items() if isinstance(each, tuple)}
        whole["left_alone_count"] += len(left)
        return InboxStatus(watch=self.watch, **whole)


class WatchedDirectory:
    """Used by one thread."""

    def __init__(
        self,
        directory: Path,
        settings: PublisherSettings,
        renamed: deque[str] | None = None,
        component: str = MAIN,
    ) -> None:
        """`renamed`: names that were seen to be renamed into place; `component`: whose checkpoints it has."""
        self.directory, self.component = directory, component
        self._waiting: tuple[Unpublished, ...] = ()
        self._ready: tuple[Candidate, ...] = ()
        self._remedy = _POST
        """for what is left alone"""
        self._skipped: list[SkippedStatus] = []
        self._skips = 0
        # A trainer may save over the base, as over any checkpoint.
        own = [path for name, path in settings.own_places.items() if name != "base"]
        self.own = frozenset(map(os.path.realpath, own))
        self.settings = settings
        self._renamed = deque[str]() if renamed is None else renamed
        self._arriving: set[str] = set()
        self._arrived: dict[str, Marks] = {}
        """checkpoints that were renamed into place, as they were then"""
        self._told: set[tuple[str, str]] = set()
        """what the log has: names and reasons"""
        self._present: frozenset[str] | None = None
        """what the last look saw"""
        self._place = os.path.realpath(directory)
        memory = "inbox.json" if self.is_main else f"{_MEMORY}{component.removeprefix(ADAPTER)}.json"
        self._memory = Memory(LocalPaths(settings.local).room / memory, InboxMemory(), _LIMIT, _REMEDY)
        known = self._memory.value
        self.is_first = known.watch != self._place
        self.inbox = Inbox(settings, known.by_name(self._place))
        self._consumer = Consumer(directory, self.inbox, self._consumes)

    @property
    def is_main(self) -> bool:
        return self.component == MAIN

    def ignore_existing(self, began: float, version: int) -> None:
        """Before anything else, if this directory was never watched from here: what is complete now was
        there before, also if this start comes to nothing, unless the channel has no `version` yet and it was
        completed after this process `began` (unix time)."""
        self._remedy = _POST if version else _EXISTING
        if self.settings.existing:
            self.inbox.forget_existing()
        if self.settings.existing or not self.is_first or not is_directory(self.directory):
            return
        began_ns = None if version else int((began + observation.clock_offset(self.directory)) * 1e9)
        names = self.inbox.ignore_existing(self._look().unknown, began_ns)
        self.store()
        self.sample_unread()
        if names:
            log.info(
                "checkpoints left alone", checkpoints=names[:_NAMED], count=len(names), remedy=self._remedy
            )

    def resume(self, publisher: RunPublisher) -> None:
        # names of an export that is renamed are not the base's
        self.inbox.base = publisher.run[1].table if self.is_main and not self.settings.rename else None
        for name in self.inbox.resume(partial(publisher.made_for, component=self.component)):
            self.consume(name)
        self.store()
        self.sample_unread()

    def next(self, publisher: RunPublisher) -> WatchedJob | None:
        """Raises RetryLater when the directory is not there."""
        failpoint("inbox.looked", self.directory)
        self.finish()
        found = self._look()
        choice = self.inbox.choose(found.unknown, time.monotonic())
        self._waiting, self._ready = (*choice.waiting, *found.unreadable), choice.ready
        self._tell()
        self.inbox.forget_vanished(found.names)
        return None if choice.chosen is None else WatchedJob(self, publisher, choice, choice.chosen)

    def upcoming(self, publisher: RunPublisher, before: Requested) -> list[str]:
        self.next(publisher)
        return self._upcoming(before)

    def _upcoming(self, before: Requested = ()) -> list[str]:
        """As of the last look."""
        names = [each.name for each in self._ready]
        if before:
            names = [n for n in names if (self.component, os.path.realpath(self.directory / n)) not in before]
        return names if self.settings.every else names[-1:]

    def finish(self) -> None:
        """What was left of checkpoints being deleted."""
        if self.settings.consume:
            self._consumer.finish()

    def _look(self) -> observation.Observation:
        # Being put back does not count: the writer may be at it.
        arriving = {self._renamed.popleft() for _ in range(len(self._renamed))}
        self._arriving = arriving - self._consumer.changed
        found = observation.look(
            self.directory,
            self.settings.marker,
            self.inbox.is_known,
            self._has_arrived,
            self.inbox.layouts.is_left,
            self.own,
            None if self.is_main else self._is_ours,
        )
        self._arrived = {name: files for name, files in self._arrived.items() if name in found.names}
        self._consumer.changed.intersection_update(found.names)
        self._present = found.names
        return found

    def _is_ours(self, name: str) -> bool:
        with contextlib.suppress(Refused):
            return component_of(name) == self.component
        return False

    def _consumes(self, name: str, at: Path) -> bool:
        return not exists(at / ADAPTER_MODEL) if self.is_main else self._is_ours(name)

    def _has_arrived(self, name: str, files: Marks) -> bool:
        """Until something in it changes: it may be written again in its place. Nothing in it when it arrived:
        what comes is written in its place."""
        if not self._arriving.isdisjoint((name, *parents_of(name))):
            self._arrived[name] = files
        return self._arrived.get(name) == files

    def skip(self, name: str, reason: str) -> None:
        self.store()
        self._skips += 1
        others = [each for each in self._skipped if each.name != name]
        self._skipped = [*others, SkippedStatus(name=name, reason=reason)][-SKIPPED_SHOWN:]
        log.info("checkpoint skipped", checkpoint=name, reason=reason)

    def version_with(self, root: str) -> int | None:
        """An earlier version with this content, as far as it came from here."""
        contents = [entry.content for entry in self.inbox.entries.values()]
        return next((each.version for each in contents if each.root == root), None)

    def sample_unread(self) -> None:
        """Of what was left alone or passed over, so that a change of its files alone is seen as that."""
        for name in self.inbox.unsampled():
            found = self.sample(name, self.inbox.entries[name].files) if name in self._there else ""
            if found:
                self.inbox.sampled(name, found)
        self.store()

    def sample(self, name: str, files: Marks) -> str:
        """Empty unless these are the files before and after."""
        try:
            before = observation.marks_of(self.directory, name)
            if not files <= before:
                return ""
            found = observation.sample(self.directory / name, not self.is_main)
            return found if observation.marks_of(self.directory, name) == before else ""
        except (OSError, WeightcastError):
            return ""

    def see(self, directory: Path) -> Candidate | None:
        """A directory that is about to be published on request; None unless it is one of the watched."""
        try:
            name = str(directory.relative_to(self.directory.resolve()))
            if name != ROOT and not all(map(may_be_checkpoint, name.split("/"))):
                return None
            marks = observation.marks_of(self.directory, name)
            return observation.observe_candidate(self.directory, name, marks, None, False, not self.is_main)
        except (OSError, ValueError):
            return None

    def adopt(self, candidate: Candidate, version: int, root: str) -> None:
        """It was published on request: not once more for lying here."""
        if candidate.weights:
            self.inbox.adopt(candidate, version, root)
            self.store()

    def fail(self, candidate: Candidate, failure: Failure) -> None:
        """Refused permanently, unless it is not the checkpoint any more that was chosen."""
        name = candidate.name
        try:
            found = observation.marks_of(self.directory, name, self.settings.marker)
        except FileNotFoundError:
            found = None
        if found == candidate.files:
            log.warning("checkpoint refused", checkpoint=name, **failure.by_name())
            self.inbox.refuse(candidate, failure)
        else:
            log.info("checkpoint changed while it was read", checkpoint=name, reason=failure.message)
            self.inbox.give_up(name)
        self.store()

    def status(self, *, held: bool) -> InboxStatus:
        """`held`: nothing is published until an operator resumes."""
        names = self._upcoming() if held else ()
        ready = tuple(Unpublished(name, _HELD, _HELD_REMEDY) for name in names)
        waiting = (*ready, *self._waiting)
        refused = [RefusedStatus(name=n, error=why) for n, why in self.inbox.refused(self._there)]
        left = self.inbox.left_alone(self._there, self._remedy)
        return InboxStatus(
            watch=str(self.directory),
            waiting=waiting[:WAITING_SHOWN],
            refused=tuple(refused[-REFUSED_SHOWN:]),
            waiting_count=len(waiting),
            refused_count=len(refused),
            skipped=tuple(self._skipped),
            skipped_count=self._skips,
            left_alone=tuple(left[:WAITING_SHOWN]),
            left_alone_count=len(left),
        )

    @property
    def _there(self) -> Collection[str]:
        """Before the first look all that is known."""
        return self.inbox.entries if self._present is None else self._present

    def _tell(self) -> None:
        """Logs each checkpoint that waiting may not publish, once; of many at once, the first ones."""
        current = {
            (each.name, each.reason): each for each in (*self._waiting, *self.inbox.layouts.left.values())
        }
        self._told &= current.keys()
        new = [current[key] for key in sorted(current.keys() - self._told) if current[key].still]
        for each in new[:_NAMED]:
            log.info("not published yet", checkpoint=each.name, reason=each.reason, remedy=each.remedy)
        if new[_NAMED:]:
            log.info(
                "more checkpoints are not published", count=len(new) - _NAMED, remedy="see status, inbox"
            )
        self._told |= {(each.name, each.reason) for each in new}

    def consume(self, name: str) -> None:
        if self.settings.consume:
            self._consumer.consume(name)

    def store(self) -> None:
        entries = tuple(self.inbox.entries.values())
        self._memory.store(InboxMemory(watch=self._place, entries=entries))


class WatchedAdapters:
    """Used by one thread."""

    def __init__(self, watched: WatchedDirectory) -> None:
        self._directory, self._settings, self._own = watched.directory, watched.settings, watched.own
        self._of: dict[str, WatchedDirectory] = {}
        for memory in sorted(matching(LocalPaths(self._settings.local).room, f"{_MEMORY}*.json")):
            self._add(ADAPTER + memory.stem.removeprefix(_MEMORY))
        self.left: tuple[Unpublished, ...] = ()
        """those with names that no component can have"""

    def ignore_existing(self, began: float, version_of: Callable[[str], int]) -> None:
        """As of WatchedDirectory. `version_of`: of a component, 0 where there is none."""
        if is_directory(self._directory):
            for name in self._found():
                self._of[name].ignore_existing(began, version_of(name))

    def resume(self, publisher: RunPublisher) -> None:
        for each in self._of.values():
            each.resume(publisher)

    def next(self, publisher: RunPublisher) -> WatchedJob | None:
        jobs = (each.next(publisher) for each in self._present(publisher))
        return next((job for job in jobs if job is not None), None)

    def upcoming(self, publisher: RunPublisher, before: Requested) -> list[str]:
        return [name for each in self._present(publisher) for name in each.upcoming(publisher, before)]

    def _present(self, publisher: RunPublisher) -> list[WatchedDirectory]:
        known = set(self._of)
        for each in self._of.values():
            each.finish()
        found = self._found()
        for name in set(found) - known:
            # an earlier process may have begun with it
            self._of[name].resume(publisher)
        return [self._of[name] for name in found]

    def of(self, component: str) -> WatchedDirectory | None:
        return self._of.get(component)

    def status(self, main: InboxStatus, *, held: bool) -> InboxStatus:
        """As of WatchedDirectory, of it and all adapters in it. `main`: its own."""
        return main.and_of([each.status(held=held) for each in self._of.values()], self.left)

    def _add(self, name: str) -> None:
        self._of[name] = WatchedDirectory(self._directory, self._settings, component=name)

    def _found(self) -> list[str]:
        """The components that are there."""
        names, left = set[str](), []
        for directory in observation.adapters_in(self._directory, self._own):
            try:
                names.add(component_of(directory))
            except Refused as error:
                left.append(Unpublished(directory, error.message, _RENAME))
        self.left = tuple(left)
        for name in names - self._of.keys():
            self._add(name)
        # peft's default adapter has the others below it: it is consumed once these are
        return sorted(names, key=lambda name: (name == _DEFAULT, name))


class WatchedJob(SourceJob):
    def __init__(
        self, watched: WatchedDirectory, publisher: RunPublisher, choice: Choice, chosen: Candidate
    ) -> None:
        self.name, self.component = chosen.name, watched.component
        self.directory = watched.directory / chosen.name
        of_adapter = not watched.is_main and self.component == ADAPTER + chosen.name.rpartition("/")[2]
        self.step = step_of(chosen.name.rpartition("/")[0] if of_adapter else chosen.name)
        self._watched, self._publisher, self._choice, self._chosen = watched, publisher, choice, chosen
        self._sampled = False

    def open(self) -> NewWeights:
        """From here on the checkpoint itself tells when it changes."""
        weights = self.open_in(self._publisher, self._watched.settings.rules)
        if not self._chosen.weights <= observation.marks(self.directory):
            weights.close()
            raise Refused(
                f"{self.directory} changed after it was examined",
                remedy="nothing to do: it is examined again; rename complete checkpoints in",
            )
        return weights

    def main_version(self) -> int | None:
        """As a file of that name in its directory, or in the one around it, says it."""
        around = [self.directory.parent] if "/" in self.name else []
        for at in [place / MAIN_VERSION for place in (self.directory, *around)]:
            if exists(at):
                text = durable.read_file(at, 64, follow_links=True).strip()
                if not text.isdigit():
                    raise Refused(f"{at} is not a number", remedy="write a version of main into it")
                return int(text)
        return None

    def known(self) -> LastContent:
        return self._watched.inbox.content_of(self._chosen)

    def has_sample(self, known: LastContent) -> bool:
        found = self._watched.sample(self.name, self._chosen.weights) if known.sample else ""
        self._sampled = bool(found) and found == known.sample
        return self._sampled

    def unchanged(self, known: LastContent) -> None:
        """Deleted only if it came back after it was consumed: it may have been published on request, or
        before `--consume`."""
        watched, inbox = self._watched, self._watched.inbox
        if self._sampled:
            inbox.skip(self._chosen, known)
            reason = "only its files changed since it was left alone; POST /v1/publish publishes it"
            watched.skip(self.name, reason)
        elif known.version is not None:
            own = inbox.entries.get(self.name)
            came_back = own is not None and own.outcome is InboxOutcome.CONSUMED
            inbox.adopt(self._chosen, known.version, known.root)
            if came_back:
                watched.consume(self.name)
            watched.skip(self.name, f"only its files changed, not the content of version {known.version}")

    def begin(self, version: int) -> str:
        request = new_request()
        self._watched.inbox.begin(self._choice, version, request)
        self._watched.store()
        failpoint("inbox.chosen", self._watched.directory)
        return request

    def done(self, outcome: Publication | Failure) -> None:
        if isinstance(outcome, Failure):
            self._watched.fail(self._chosen, outcome)
            return
        failpoint("inbox.published", self._watched.directory)
        self._watched.inbox.succeed(self.name, outcome.version, outcome.root)
        # before it is noted as published: a kill in between is made up for by `resume`
        self._watched.consume(self.name)
        self._watched.store()
        self._watched.sample_unread()
