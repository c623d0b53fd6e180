"""Publications asked for over HTTP: a bounded queue, on disk, one record per idempotency key.

A key answers for content, not for a path: a retry puts the record back into the queue, and the recorded
answer counts again once the checkpoint was read and found to have the content of that version.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from weightcast.publisher.publish.report import Publication
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.index import Index
from weightcast.shared.daemon.frozen import Frozen
from weightcast.shared.daemon.status import Failure
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import parse_object

QUEUE_LIMIT = 16
REMEMBERED = 256
"""ended publications; a key older than that is a new one"""
_FILE_LIMIT = 16 << 20


class Job(Frozen):
    id: str
    checkpoint: str
    """as it was asked for"""
    step: int | None = None
    key: str | None = None
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
    def has_ended(self) -> bool:
        return self.state in ("done", "failed")


class _Stored(Frozen):
    format: Literal[1] = 1
    jobs: tuple[Job, ...] = ()


class QueueFull(Exception):
    pass


class KeyReused(Exception):
    """The same key with another checkpoint or step."""


class Queue:
    """Any thread may ask; one thread takes and ends. Every change is on disk before the call returns."""

    def __init__(self, path: Path, remembered: int = REMEMBERED) -> None:
        """Raises DamagedFile when the file at `path` is not one of ours."""
        self._path = path
        self._remembered = remembered
        self._lock = threading.Lock()
        self._jobs = {job.id: job for job in _read(path)}

    def ask(self, checkpoint: str, step: int | None, key: str | None) -> Job:
        """The job, or the one that was made for this key: queued once more if it has ended, since its
        checkpoint has to be compared. Raises QueueFull and KeyReused."""
        with self._lock:
            known = self._of_key(checkpoint, step, key)
            if known is not None and not known.has_ended:
                return self._put(known.model_copy(update={"repeat": known.state == "running"}))
            if len(self._open()) >= QUEUE_LIMIT:
                raise QueueFull
            job = Job(id=new_request(), checkpoint=checkpoint, step=step, key=key)
            return self._put(job if known is None else _again(known))

    def known(self, checkpoint: str, step: int | None, key: str | None) -> Job | None:
        """What was asked with this key before. Raises KeyReused."""
        with self._lock:
            return self._of_key(checkpoint, step, key)

    def get(self, id: str) -> Job | None:
        return self._jobs.get(id)

    def open(self) -> tuple[Job, ...]:
        with self._lock:
            return self._open()

    def succeed(self, job: Job, report: Publication) -> None:
        self.change(job, state="done", report=report, error=None, note=_compared(job, report))

    def change(self, job: Job, **facts: object) -> Job:
        with self._lock:
            # As it is by now: a request may have come meanwhile. Validated: model_copy would take anything.
            now = self._jobs.get(job.id, job)
            changed = Job.model_validate({**now.model_dump(), **facts})
            return self._put(_again(changed) if changed.repeat and changed.has_ended else changed)

    def resume(self, ended: Callable[[Job], Publication | None]) -> None:
        """After a kill. `ended`: what a job that ran has become, if it has become a version."""
        for job in self.open():
            if job.state != "running":
                continue
            report = ended(job)
            if report is None:
                self.change(job, state="queued")
            else:
                self.succeed(job, report)

    def _of_key(self, checkpoint: str, step: int | None, key: str | None) -> Job | None:
        known = next((job for job in self._jobs.values() if key is not None and job.key == key), None)
        if known is not None and (known.checkpoint, known.step) != (checkpoint, step):
            raise KeyReused
        return known

    def _open(self) -> tuple[Job, ...]:
        return tuple(job for job in self._jobs.values() if not job.has_ended)

    def _put(self, job: Job) -> Job:
        known = self._jobs.get(job.id)
        jobs = {**self._jobs, job.id: job}
        if known is not None and known.has_ended:
            # behind those that wait
            jobs[job.id] = jobs.pop(job.id)
        ended = [each.id for each in jobs.values() if each.has_ended]
        for id in ended[: max(0, len(ended) - self._remembered)]:
            del jobs[id]
        if jobs != self._jobs:
            durable.replace(self._path, _Stored(jobs=tuple(jobs.values())).model_dump_json().encode())
            self._jobs = jobs
        return job


def _again(job: Job) -> Job:
    """To be compared with its earlier answer, if it has one."""
    earlier = job.earlier if job.report is None else job.report
    facts = {
        "state": "queued",
        "earlier": earlier,
        "report": None,
        "error": None,
        "note": "",
        "repeat": False,
    }
    return job.model_copy(update=facts)


def _compared(job: Job, report: Publication) -> str:
    if job.earlier is None:
        return ""
    if report.version == job.earlier.version:
        return f"unchanged: the checkpoint has the content of version {report.version}"
    return f"the content changed since version {job.earlier.version} was published with this key"


def unread(answer: Publication) -> str:
    """The note of an answer from memory."""
    root = answer.root or "unknown (recorded by an older release)"
    return f"not compared: the checkpoint cannot be read now; it was version {answer.version}, root {root}"


def _read(path: Path) -> Iterable[Job]:
    try:
        data = durable.read_file(path, _FILE_LIMIT)
    except FileNotFoundError:
        return ()
    try:
        return _Stored.model_validate(parse_object(data, str(path))).jobs
    except (ValidationError, DamagedFile) as error:
        raise DamagedFile(
            f"{path} does not hold publications",
            remedy="remove it: keys of earlier requests are then forgotten",
        ) from error


MadeFor = Callable[[str, int], Index | None]
"""The version that came of a request, if it is one after another version."""


def new_request() -> str:
    return secrets.token_hex(8)
