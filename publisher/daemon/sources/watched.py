"""The watched directory with its memory on disk: looks, asks the inbox's rules, stores before it acts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weightcast.publisher.daemon.sources import observation
from weightcast.publisher.daemon.sources.inbox import (
    MEMORY_LIMIT,
    Candidate,
    Choice,
    Inbox,
    InboxEntry,
    InboxRules,
    LastContent,
    Marks,
    content_alone,
    covers_tree,
    may_be_checkpoint,
    pack_entries,
    parse_entries,
    without_ctime,
)
from weightcast.publisher.daemon.sources.layouts import ROOT, Unpublished, is_nested, parents_of, step_of
from weightcast.publisher.daemon.sources.observation import marks
from weightcast.publisher.daemon.sources.source import MadeFor, SourceJob, new_request
from weightcast.publisher.publish.report import Publication
from weightcast.publisher.service_publisher import ServicePublisher
from weightcast.publisher.weights.export_rules import ExportRules
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import TensorTable
from weightcast.shared.base.errors import DamagedFile, Refused, WeightcastError
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.daemon.backoff import Backoff
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.status import Failure
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import is_directory

_CONSUMING = Backoff(0.5, 300.0)
_EXISTING = "before the first version, restart with --existing to publish them; later, `POST /v1/publish`"
_NAMED = 5
"""checkpoints that a line of the log names"""
_SKIPPED_KEPT = 20

log = get_log("inbox")


class RenamedDirectories:
    """Names of directories that were seen to be renamed into place: noted by one thread, taken by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def note(self, name: str) -> None:
        with self._lock:
            self._names.add(name)

    def take(self) -> set[str]:
        with self._lock:
            taken, self._names = self._names, set()
            return taken


class WatchedDirectory:
    """Used by one thread. `memory`: the file that survives restarts."""

    def __init__(
        self,
        directory: Path,
        memory: Path,
        rules: InboxRules,
        renamed: RenamedDirectories,
        own: Iterable[Path] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own`: directories of weightcast's that may lie in it."""
        self.directory = directory
        self.waiting: tuple[Unpublished, ...] = ()
        self._memory = memory
        self._consume = rules.consume
        self._own = frozenset(map(os.path.realpath, own))
        self._renamed = renamed
        self._arriving: set[str] = set()
        self._arrived: dict[str, Marks] = {}
        """checkpoints that were renamed into place, as they were then"""
        self._told: set[tuple[str, str]] = set()
        """what the log has: names and reasons"""
        self._clock = clock
        self._half_consumed: set[str] = set()
        """published, and kept from being deleted by an error of the disk"""
        self._warned: set[str] = set()
        """of those, what the log has heard of"""
        self._failures, self._next_try = 0, 0.0
        """of deleting them, in a row; when next, on the clock"""
        self._not_consumed: set[str] = set()
        """published, and not what was published any more"""
        self._present: frozenset[str] | None = None
        """what the last look saw"""
        self._place = os.path.realpath(directory)
        self.skipped: dict[str, str] = {}
        """by name, newest last: known content whose files changed, and which content that is"""
        self.skips = 0
        self._is_known, self._covers_tree, known = _read(memory, self._place)
        """whether this directory was watched from here before, and with what is nested in it"""
        self._inbox = Inbox(rules, known)
        self._stored = b""

    def start(self, made_for: MadeFor, base: TensorTable | None) -> None:
        """Once the local checkpoint is owned: keeps what construction saw, finishes what a kill left. `base`:
        None where checkpoints have other names for its tensors."""
        self._inbox.base = base
        self.resume(made_for)
        self._sample_unread()
        if self._consume and is_directory(self.directory):
            self._begin_consuming()

    def ignore_existing(self, began: float, version: int) -> None:
        """Before anything else, if this directory was never watched from here: what is complete now was
        there before, also if this start comes to nothing, unless the channel has no `version` yet and it was
        completed after this process `began` (unix time)."""
        if self._inbox.rules.existing:
            self._inbox.forget_existing()
        skip = self._covers_tree if self._is_known else self._inbox.rules.existing
        if skip or not is_directory(self.directory):
            return
        # For an older release the first level was all.
        found = [each for each in self._look().unknown if not self._is_known or is_nested(each.name)]
        began_ns = None if version else int((began + observation.clock_offset(self.directory)) * 1e9)
        names = self._inbox.ignore_existing(found, began_ns)
        self._covers_tree = True
        self._store()
        self._sample_unread()
        if names:
            log.info("checkpoints left alone", checkpoints=names[:_NAMED], count=len(names), remedy=_EXISTING)

    def _look(self) -> observation.Observation:
        # Being put back does not count: the writer may be at it.
        self._arriving = self._renamed.take() - self._not_consumed
        found = observation.look(
            self.directory,
            self._inbox.rules.marker,
            self._inbox.is_known,
            self._has_arrived,
            self._inbox.layouts.is_left,
            self._own,
        )
        self._arrived = {name: files for name, files in self._arrived.items() if name in found.names}
        self._not_consumed &= found.names
        self._present = found.names
        return found

    def _has_arrived(self, name: str, files: Marks) -> bool:
        """Until something in it changes: it may be written again in its place. Nothing in it when it arrived:
        what comes is written in its place."""
        if not self._arriving.isdisjoint((name, *parents_of(name))):
            self._arrived[name] = files
        return self._arrived.get(name) == files

    def resume(self, made_for: MadeFor) -> None:
        """After an error or a kill."""

        def version(request: str, above: int) -> int | None:
            index = made_for(request, above) if request else None
            return None if index is None else index.version

        for name in self._inbox.resume(version):
            self._consume_published(name)
        self._store()

    def next(self) -> Choice:
        """Raises RetryLater when the directory is not there."""
        failpoint("inbox.looked", self.directory)
        self._finish_consuming()
        found = self._look()
        choice = self._inbox.choose(found.unknown, self._clock())
        self.waiting = (*choice.waiting, *found.unreadable)
        self._tell()
        self._inbox.forget_vanished(found.names)
        for broken in choice.refused:
            if broken.problem is not None:
                self.refuse(broken, broken.problem)
        return choice

    def begin(self, choice: Choice, version: int) -> str:
        """`version`: the channel's before the publication. Returns the request to publish it by."""
        request = new_request()
        self._inbox.begin(choice, version, request)
        self._store()
        failpoint("inbox.chosen", self.directory)
        return request

    def succeed(self, candidate: Candidate, version: int, root: str) -> None:
        failpoint("inbox.published", self.directory)
        self._inbox.succeed(candidate.name, version, root)
        # before it is noted as published: a kill in between is made up for by `resume`
        self._consume_published(candidate.name)
        self._store()
        self._sample_unread()

    def content(self, candidate: Candidate, root_of: Callable[[int], str]) -> LastContent:
        """What it has to differ from to be published."""
        content = self._inbox.content_of(candidate) or LastContent()
        if content.root or content.version is None:
            return content
        return replace(content, root=root_of(content.version))

    def has_sample(self, candidate: Candidate, sample: str) -> bool:
        return bool(sample) and self._sample(candidate.name, candidate.weights) == sample

    def skip_published(self, candidate: Candidate, content: LastContent) -> None:
        """Its files changed, and it was read in full: its content did not. Deleted only if it came back after
        it was consumed: it may have been published on request, or before `--consume`."""
        if content.version is not None:
            came_back = self._inbox.is_consumed(candidate.name)
            self._inbox.adopt(candidate, content.version, content.root)
            if came_back:
                self._consume_published(candidate.name)
            self._skipped(
                candidate.name, f"only its files changed, not the content of version {content.version}"
            )

    def skip_unread(self, candidate: Candidate, content: LastContent) -> None:
        """As `skip_published`, for what was left alone or passed over: by its sample."""
        self._inbox.skip(candidate, content)
        reason = "only its files changed since it was left alone; POST /v1/publish publishes it"
        self._skipped(candidate.name, reason)

    def _skipped(self, name: str, reason: str) -> None:
        self._store()
        self.skips += 1
        self.skipped.pop(name, None)
        self.skipped = dict([*self.skipped.items(), (name, reason)][-_SKIPPED_KEPT:])
        log.info("checkpoint skipped", checkpoint=name, reason=reason)

    def version_with(self, root: str) -> int | None:
        """An earlier version with this content, as far as it came from here."""
        contents = [entry.content for entry in self._inbox.entries.values()]
        return next((each.version for each in contents if each is not None and each.root == root), None)

    def _sample_unread(self) -> None:
        """Of what was left alone or passed over, so that a change of its files alone is seen as that."""
        for name in self._inbox.unsampled():
            if self._present is not None and name not in self._present:
                continue
            found = self._sample(name, self._inbox.entries[name].files)
            if found:
                self._inbox.sampled(name, found)
        self._store()

    def _sample(self, name: str, files: Marks) -> str:
        """Empty unless these are the files before and after."""
        try:
            before = observation.marks_of(self.directory, name)
            if not (files <= before or files <= without_ctime(before)):
                return ""
            found = observation.sample(self.directory / name)
            return found if observation.marks_of(self.directory, name) == before else ""
        except (OSError, WeightcastError):
            return ""

    def see(self, directory: Path) -> Candidate | None:
        """A directory that is about to be published on request; None unless it is one of the watched."""
        try:
            name = str(directory.relative_to(self.directory.resolve()))
            if name != ROOT and not all(map(may_be_checkpoint, name.split("/"))):
                return None
            return observation.observe_candidate(
                self.directory, name, observation.marks_of(self.directory, name), None, arrived=False
            )
        except (OSError, ValueError):
            return None

    def adopt(self, candidate: Candidate, version: int, root: str) -> None:
        """It was published on request: not once more for lying here."""
        if candidate.weights:
            self._inbox.adopt(candidate, version, root)
            self._store()

    def fail(self, candidate: Candidate, failure: Failure) -> None:
        """Refused for good, unless it is not the checkpoint any more that was chosen."""
        if self._marks(candidate.name) == candidate.files:
            self.refuse(candidate, failure)
        else:
            log.info(
                "checkpoint changed while it was read", checkpoint=candidate.name, reason=failure.message
            )
            self._inbox.give_up(candidate.name)
            self._store()

    def refuse(self, candidate: Candidate, failure: Failure) -> None:
        log.warning("checkpoint refused", checkpoint=candidate.name, **failure.by_name())
        self._inbox.refuse(candidate, failure)
        self._store()

    def refused(self) -> list[tuple[str, Failure]]:
        """Of those that are there."""
        return [
            (name, failure)
            for name, failure in self._inbox.refused()
            if self._present is None or name in self._present
        ]

    def left_alone(self) -> list[Unpublished]:
        present = self._inbox.entries if self._present is None else self._present
        return self._inbox.left_alone(present)

    def _tell(self) -> None:
        """Logs each checkpoint that waiting may not publish, once; of many at once, the first ones."""
        current = {
            (each.name, each.reason): each for each in (*self.waiting, *self._inbox.layouts.left.values())
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

    def _marks(self, name: str) -> Marks | None:
        try:
            return observation.marks_of(self.directory, name, self._inbox.rules.marker)
        except FileNotFoundError:
            return None

    def _consume_published(self, name: str) -> None:
        if self._consume:
            self._try_to_consume(name, observation.consume)

    def _try_to_consume(self, name: str, consume: Callable[[Path, str, Marks], None]) -> None:
        try:
            consume(self.directory, name, self._inbox.consumable(name))
            self._not_consumed.discard(name)
            self._inbox.consumed(name)
        except FileNotFoundError:
            return  # by the process that was killed, or it is still set aside
        except Refused as error:
            log.warning("checkpoint not consumed", checkpoint=name, reason=str(error))
            self._not_consumed.add(name)
        except OSError as error:
            self._half_consumed.add(name)
            if name not in self._warned:
                log.warning(
                    "checkpoint not consumed yet", checkpoint=name, reason=disk_text(error, self.directory)
                )
                self._warned.add(name)

    def _bury_leftovers(self) -> None:
        observation.delete_leftovers(self.directory, self._inbox.entries)
        for name in observation.set_aside(self.directory, self._inbox.entries):
            self._try_to_consume(name, observation.consume_aside)

    def _begin_consuming(self) -> None:
        try:
            self._bury_leftovers()
        except OSError as error:
            log.warning(
                "consumed checkpoints left behind",
                directory=str(self.directory),
                reason=disk_text(error, self.directory),
            )

    def _finish_consuming(self) -> None:
        """In the look after an error, and ever more rarely while it lasts."""
        if not self._half_consumed or self._clock() < self._next_try:
            return
        names, self._half_consumed = self._half_consumed, set()
        try:
            self._bury_leftovers()
        except OSError:
            self._half_consumed |= names
        else:
            for name in sorted(names & self._inbox.entries.keys()):
                self._consume_published(name)
        self._warned &= self._half_consumed
        self._failures = self._failures + 1 if self._half_consumed else 0
        self._next_try = self._clock() + _CONSUMING.pause(self._failures) if self._failures else 0.0

    def _store(self) -> None:
        packed = pack_entries(self._inbox.entries, self._place, tree=self._covers_tree)
        if packed != self._stored:
            durable.replace(self._memory, packed)
            self._stored = packed


class _Memory(NamedTuple):
    is_known: bool
    """it is of this directory"""
    covers_tree: bool
    entries: dict[str, InboxEntry]


def _read(memory: Path, watch: str) -> _Memory:
    """Of another directory, which may have been moved here, only which content was published under which
    name."""
    try:
        data = durable.read_file(memory, MEMORY_LIMIT)
        found = parse_entries(data, str(memory), watch)
        if found is not None:
            return _Memory(True, covers_tree(data, str(memory)), found)
        contents = {n: content_alone(entry) for n, entry in (parse_entries(data, str(memory)) or {}).items()}
        return _Memory(False, True, {name: each for name, each in contents.items() if each is not None})
    except FileNotFoundError:
        return _Memory(False, True, {})
    except DamagedFile as error:
        raise DamagedFile(
            error.message,
            remedy="remove the file: present checkpoints then count as published",
        ) from error


class WatchedSource:
    """`refused`: is called for each checkpoint that is found damaged."""

    def __init__(
        self,
        directory: WatchedDirectory,
        publisher: ServicePublisher,
        rules: ExportRules,
        refused: Callable[[str, Failure], None],
    ) -> None:
        self.directory, self.publisher, self.rules, self._refused = directory, publisher, rules, refused

    def resume(self) -> None:
        self.directory.resume(self.publisher.made_for)

    def next(self) -> WatchedJob | None:
        choice = self.directory.next()
        for broken in choice.refused:
            if broken.problem is not None:
                self._refused(broken.name, broken.problem)
        return None if choice.chosen is None else WatchedJob(self, choice, choice.chosen)


class WatchedJob(SourceJob):
    def __init__(self, source: WatchedSource, choice: Choice, chosen: Candidate) -> None:
        self.name, self.step = chosen.name, step_of(chosen.name)
        self._source, self._choice, self._chosen = source, choice, chosen
        self._watched, self._sampled = source.directory, False

    def open(self) -> NewWeights:
        """From here on the checkpoint itself tells when it changes."""
        directory = self._watched.directory / self.name
        weights = self._source.publisher.open_checkpoint(directory, self._source.rules)
        if not self._chosen.weights <= marks(directory):
            weights.close()
            raise Refused(
                f"{directory} changed after it was examined",
                remedy="nothing to do: it is examined again; rename complete checkpoints in",
            )
        return weights

    def known(self) -> LastContent:
        return self._watched.content(self._chosen, self._source.publisher.root_of)

    def has_sample(self, known: LastContent) -> bool:
        self._sampled = self._watched.has_sample(self._chosen, known.sample)
        return self._sampled

    def unchanged(self, known: LastContent) -> None:
        skip = self._watched.skip_unread if self._sampled else self._watched.skip_published
        skip(self._chosen, known)

    def begin(self, version: int) -> str:
        return self._watched.begin(self._choice, version)

    def done(self, outcome: Publication | Failure) -> None:
        if isinstance(outcome, Failure):
            self._watched.fail(self._chosen, outcome)
        else:
            self._watched.succeed(self._chosen, outcome.version, outcome.root)
