"""Publications asked for over HTTP: a bounded queue, on disk, one record per idempotency key.

A key answers for content, not for a path: a retry puts the record back into the queue, and the recorded
answer counts again once the checkpoint was read and found to have the content of that version.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from weightcast.publisher.daemon.sources.source import (
    NO_CONTENT,
    LastContent,
    Memory,
    Requested,
    SourceJob,
    read_back,
)
from weightcast.publisher.daemon.sources.watched import WatchedAdapters, WatchedDirectory
from weightcast.publisher.publish.publish_job import Publication
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.publisher.weights.export_rules import NO_RULES, ExportRules
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import NotInTime, Refused, RetryLater
from weightcast.shared.channel.components import check_name
from weightcast.shared.daemon.http import Answer
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.loop import failure_of
from weightcast.shared.daemon.status import Failure
from weightcast.shared.files.disk_errors import disk_text
from weightcast.shared.files.paths import is_directory, is_plain, matching

QUEUE_LIMIT = 16
REMEMBERED = 256
"""ended publications; a key older than that is a new one"""
_FILE_LIMIT = 16 << 20
_PATH_LIMIT = 4096
KEY_LIMIT = 255
_REMEDY = "remove it: keys of earlier requests are then forgotten"
_CLOSED = frozenset({EACCES, EPERM, ELOOP, ENAMETOOLONG, EISDIR, ENOTDIR})
"""errors of a checkpoint that no later try can open"""

log = get_log("publisher")


class PublishRequest(BaseModel, frozen=True, extra="forbid", strict=True):
    checkpoint: str = Field(
        min_length=1, max_length=_PATH_LIMIT, description="Absolute path of a checkpoint."
    )
    step: int | None = Field(None, ge=0, lt=1 << 63, description="The trainer's step: information only.")
    component: str = Field(
        MAIN,
        max_length=80,
        description="What the directory is: adapter/NAME (as peft saves it), draft, or main.",
    )
    main_version: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="Version of main on which the component was trained; the newest if absent.",
    )
    key: str | None = Field(
        None, min_length=1, max_length=KEY_LIMIT, description="Idempotency key, if the header is not set."
    )


class Job(PublishRequest, frozen=True, extra="ignore", strict=False):
    id: str
    state: Literal["queued", "running", "done", "failed"] = "queued"
    before: int | None = None
    """the channel's version when it was started"""
    report: Publication | None = None
    earlier: Publication | None = None
    """what the key was answered with before the last request for it"""
    repeat: bool = False
    """requested again while it ran: the checkpoint may have changed since it was read"""
    note: str = ""
    """how the answer relates to the earlier one"""
    error: Failure | None = None
    """why it failed, or why its last try did not succeed"""

    @property
    def asked(self) -> dict[str, Any]:
        return self.model_dump(include=set(PublishRequest.model_fields))

    @property
    def has_ended(self) -> bool:
        return self.state in ("done", "failed")


class _Stored(BaseModel, frozen=True):
    format: Literal[1] = 1
    jobs: tuple[Job, ...] = ()


class Queue:
    """Jobs, oldest first. Any thread may ask; one thread takes and ends. Every change is on disk before the
    call returns."""

    def __init__(
        self,
        path: Path,
        roots: Sequence[Path] = (),
        rules: ExportRules = NO_RULES,
        watched: WatchedDirectory | None = None,
        remembered: int = REMEMBERED,
        adapters: WatchedAdapters | None = None,
    ) -> None:
        """`roots`: see `check_checkpoint`; `watched`, `adapters`: their checkpoints may be requested, too.
        Raises DamagedFile when the file at `path` is not one of ours."""
        self.rules, self._watched, self._adapters = rules, watched, adapters
        self._memory = Memory(path, _Stored(), _FILE_LIMIT, _REMEDY)
        self._roots, self._remembered = roots, remembered
        self._lock = threading.RLock()
        self._poison = ""
        """id of the job whose publication crashed: not tried again"""

    def watched(self, component: str) -> WatchedDirectory | None:
        if component == MAIN:
            return self._watched
        return None if self._adapters is None else self._adapters.of(component)

    def request(self, asked: Job) -> Job:
        """As `ask`. Raises Refused for what is not a checkpoint that may be published."""
        if asked.component != MAIN:
            check_name(asked.component)
        elif asked.main_version is not None:
            raise Refused("main_version is not for main", remedy="give component too, or leave it out")
        with self._lock:
            known = self._of_key(asked)
        if known is None or known.has_ended:
            try:
                check_checkpoint(asked.checkpoint, self._roots)
            except Refused:
                if known is None:
                    raise
                # consumed, or pruned by the trainer
                return known if known.report is None else self.change(known, note=_unread(known.report))
        return self.ask(asked)

    def ask(self, asked: Job) -> Job:
        """The job, or the earlier job of this key: queued once more if it has ended, since its
        checkpoint has to be compared. Raises Answer when the queue is full, and for a key reused."""
        with self._lock:
            known = self._of_key(asked)
            if known is not None and not known.has_ended:
                return self._put(known.model_copy(update={"repeat": known.state == "running"}))
            if len(self.open()) >= QUEUE_LIMIT:
                raise Answer(
                    429,
                    f"the queue is full ({QUEUE_LIMIT} publications)",
                    "try again when one has finished",
                    {"Retry-After": "5"},
                )
            return self._put(asked if known is None else _again(known))

    def get(self, id: str) -> Job | None:
        return next((job for job in self._memory.value.jobs if job.id == id), None)

    def open(self) -> tuple[Job, ...]:
        return tuple(job for job in self._memory.value.jobs if not job.has_ended)

    def succeed(self, job: Job, report: Publication) -> None:
        self.change(job, state="done", report=report, error=None, note=_compared(job, report))

    def change(self, job: Job, **facts: object) -> Job:
        with self._lock:
            # As it is by now: a request may have come meanwhile. Validated: model_copy would take anything.
            now = self.get(job.id) or job
            changed = Job.model_validate({**now.model_dump(), **facts})
            return self._put(_again(changed) if changed.repeat and changed.has_ended else changed)

    def resume(self, publisher: RunPublisher) -> None:
        for job in self.open():
            if job.state != "running":
                continue
            asked = job.before is not None
            index = publisher.made_for(job.id, job.before or 0, job.component) if asked else None
            if index is not None:
                self.succeed(job, read_back(publisher, index, job.checkpoint, job.component))
            else:
                self.change(job, state="failed" if job.id == self._poison else "queued")

    def next(self, publisher: RunPublisher) -> QueueJob | None:
        for job in self.open():
            try:
                directory = check_checkpoint(job.checkpoint, self._roots)
            except Refused as error:
                if job.earlier is None:
                    self.change(job, state="failed", error=failure_of(error))
                else:
                    self.change(job, state="done", report=job.earlier, note=_unread(job.earlier))
                continue
            # versions of an adapter are few, and requests are not repeated: all are asked for it
            before = publisher.version if job.component == MAIN else 0
            running = self.change(job, state="running", before=before, repeat=False)
            return QueueJob(self, publisher, running, directory)
        return None

    def upcoming(self, publisher: RunPublisher, before: Requested) -> list[str]:
        return [job.checkpoint for job in self.open()]

    def requested(self) -> Requested:
        return {(job.component, os.path.realpath(job.checkpoint)) for job in self.open()}

    def interrupted(self, job: Job, error: Exception) -> None:
        self.change(job, error=failure_of(error))
        self._poison = "" if isinstance(error, RetryLater | NotInTime) else job.id

    def _of_key(self, asked: Job) -> Job | None:
        jobs = self._memory.value.jobs
        known = next((job for job in jobs if asked.key is not None and job.key == asked.key), None)
        if known is not None and known.asked != asked.asked:
            before = [f"{n} {v}" for n, v in known.asked.items() if v != asked.asked[n]]
            message = f"this key was used with {', '.join(before)}"
            raise Answer(409, message, "use a new key for each publication")
        return known

    def _put(self, job: Job) -> Job:
        known = self.get(job.id)
        jobs = {each.id: each for each in self._memory.value.jobs} | {job.id: job}
        if known is not None and known.has_ended:
            # behind those that wait
            jobs[job.id] = jobs.pop(job.id)
        ended = [each.id for each in jobs.values() if each.has_ended]
        for id in ended[: max(0, len(ended) - self._remembered)]:
            del jobs[id]
        self._memory.store(_Stored(jobs=tuple(jobs.values())))
        return job


def _again(job: Job) -> Job:
    """To be compared with its earlier answer, if it has one."""
    earlier = job.earlier if job.report is None else job.report
    return Job(id=job.id, **job.asked, earlier=earlier)


def _compared(job: Job, report: Publication) -> str:
    if job.earlier is None:
        return ""
    if report.version == job.earlier.version:
        return f"unchanged: the checkpoint has the content of version {report.version}"
    return f"the content changed since version {job.earlier.version} was published with this key"


def _unread(answer: Publication) -> str:
    """The note of an answer from memory."""
    was = f"version {answer.version}, root {answer.root}"
    return f"not compared: the checkpoint cannot be read now; it was {was}"


class QueueJob(SourceJob):
    def __init__(self, queue: Queue, publisher: RunPublisher, job: Job, directory: Path) -> None:
        self.name, self.step, self.component = job.checkpoint, job.step, job.component
        self.key = job.key or ""
        self._queue, self._publisher, self._job, self.directory = queue, publisher, job, directory
        self._watched = queue.watched(job.component)
        self._seen = None if self._watched is None else self._watched.see(directory)

    def open(self) -> NewWeights:
        try:
            return self.open_in(self._publisher, self._queue.rules)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            raise Refused(
                disk_text(error, self.directory),
                remedy="let the publisher's user read the checkpoint and its files, and ask again",
            ) from error

    def main_version(self) -> int | None:
        return self._job.main_version

    def known(self) -> LastContent:
        earlier = self._job.earlier
        return NO_CONTENT if earlier is None else LastContent(version=earlier.version, root=earlier.root)

    def unchanged(self, known: LastContent) -> None:
        log.info("retried publication is unchanged", key=self._job.key, version=known.version)
        if self._job.earlier is not None:
            self.done(self._job.earlier)

    def begin(self, version: int) -> str:
        return self._job.id

    def done(self, outcome: Publication | Failure) -> None:
        if isinstance(outcome, Failure):
            log.warning("not published", checkpoint=self.name, **outcome.by_name())
            self._queue.change(self._job, state="failed", error=outcome)
            return
        if self._watched is not None and self._seen is not None:
            self._watched.adopt(self._seen, outcome.version, outcome.root)
        self._queue.succeed(self._job, outcome)

    def interrupted(self, error: Exception) -> None:
        self._queue.interrupted(self._job, error)


def check_checkpoint(text: str, roots: Sequence[Path]) -> Path:
    """The checkpoint's real path. Raises Refused unless it is an absolute path of a directory below one of
    `roots`, links followed, or a root with weights; without roots, anywhere."""
    path = Path(text)
    if not is_plain(text) or not path.is_absolute():
        raise Refused(f"{text[:200]!r} is not an absolute path", remedy="give the absolute path")
    try:
        real = path.resolve(strict=True)
        allowed = [root.resolve() for root in roots]
    except (OSError, RuntimeError) as error:
        # The same answer inside and outside of the roots: this must not allow probing the file system.
        raise _not_allowed(text, roots) from error
    # a trainer may save into the watched directory itself
    below = [root for root in allowed if real.is_relative_to(root)]
    if roots and not any(real != root or matching(root, "*.safetensors") for root in below):
        raise _not_allowed(text, roots)
    if not is_directory(real):
        raise Refused(f"{text} is not a directory", remedy="give a checkpoint directory")
    return real


def _not_allowed(text: str, roots: Sequence[Path]) -> Refused:
    where = f" in {' or '.join(map(str, roots))}" if roots else ""
    return Refused(
        f"{text} is not a checkpoint directory{where}",
        remedy="move it there, or start the publisher with --allow",
    )
