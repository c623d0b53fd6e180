"""Publications asked for over HTTP: a bounded queue, on disk, one record per idempotency key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from weightcast.publisher.service.request import new_request
from weightcast.publisher.version.report import Publication
from weightcast.shared.errors import DamagedFile
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import parse_object
from weightcast.shared.service.facts import Failure
from weightcast.shared.service.snapshot import Frozen

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
    error: Failure | None = None
    """why it failed, or why its last try did not succeed"""


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
        """The job, or the one that was made for this key. Raises QueueFull and KeyReused."""
        with self._lock:
            known = self._of_key(checkpoint, step, key)
            if known is not None:
                return known
            if len(self._open()) >= QUEUE_LIMIT:
                raise QueueFull
            job = Job(id=new_request(), checkpoint=checkpoint, step=step, key=key)
            self._put(job)
            return job

    def known(self, checkpoint: str, step: int | None, key: str | None) -> Job | None:
        """What was asked with this key before. Raises KeyReused."""
        with self._lock:
            return self._of_key(checkpoint, step, key)

    def get(self, id: str) -> Job | None:
        return self._jobs.get(id)

    def open(self) -> tuple[Job, ...]:
        with self._lock:
            return self._open()

    def change(self, job: Job, **facts: object) -> Job:
        with self._lock:
            # Validated: model_copy would take anything.
            changed = Job.model_validate({**job.model_dump(), **facts})
            self._put(changed)
            return changed

    def resume(self, ended: Callable[[Job], Publication | None]) -> None:
        """After a kill. `ended`: what a job that ran has become, if it has become a version."""
        for job in self.open():
            if job.state != "running":
                continue
            report = ended(job)
            if report is None:
                self.change(job, state="queued")
            else:
                self.change(job, state="done", report=report, error=None)

    def _of_key(self, checkpoint: str, step: int | None, key: str | None) -> Job | None:
        known = next((job for job in self._jobs.values() if key is not None and job.key == key), None)
        if known is not None and (known.checkpoint, known.step) != (checkpoint, step):
            raise KeyReused
        return known

    def _open(self) -> tuple[Job, ...]:
        return tuple(job for job in self._jobs.values() if job.state in ("queued", "running"))

    def _put(self, job: Job) -> None:
        jobs = {**self._jobs, job.id: job}
        ended = [each.id for each in jobs.values() if each.state in ("done", "failed")]
        for id in ended[: max(0, len(ended) - self._remembered)]:
            del jobs[id]
        durable.replace(self._path, _Stored(jobs=tuple(jobs.values())).model_dump_json().encode())
        self._jobs = jobs


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
