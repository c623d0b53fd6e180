"""The publisher's side of a hand-over: the newest complete slot, and a memory of what became of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weightcast.publisher.daemon.sources.source import MadeFor, SourceJob, new_request
from weightcast.publisher.publish.report import Publication
from weightcast.publisher.service_publisher import ServicePublisher
from weightcast.publisher.trainer.handover import Export, Handed
from weightcast.publisher.weights.export_rules import ExportRules
from weightcast.publisher.weights.tensors import CheckpointWeights, NewWeights
from weightcast.shared.base.errors import DamagedFile, Refused, RetryLater
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.status import Failure
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import Members, parse_object, write_object

FORMAT = 1
_LIMIT = 64 << 10

log = get_log("publisher")


@dataclass(frozen=True)
class Memory:
    """`writer`, `sequence`: what was taken last. `before`: while it is being published, the channel's version
    before; None once that has ended."""

    writer: str = ""
    sequence: int = 0
    before: int | None = None
    request: str = ""
    """while it is being published: what the version's index says if it came to be"""


class HandOverDirectory:
    """Used by one thread. `memory`: the file that survives restarts."""

    def __init__(self, directory: Path, memory: Path) -> None:
        """Raises DamagedFile for a memory that is not one of ours."""
        self.export = Export(directory)
        self._path = memory
        self._memory = _read(memory)

    def resume(self, made_for: MadeFor) -> None:
        """After an error or a kill: what was being published has become a version, or is new again."""
        memory = self._memory
        if memory.before is not None:
            made = made_for(memory.request, memory.before) if memory.request else None
            self._store(Memory() if made is None else replace(memory, before=None))

    def next(self) -> Handed | None:
        """What is to be published: the newest complete slot, unless it or a later one was taken before."""
        self.export.check()
        newest, taken = self.export.newest(), self._memory
        if newest is not None and newest.writer == taken.writer and newest.sequence <= taken.sequence:
            return None
        return newest

    def begin(self, handed: Handed, version: int) -> str:
        """`version`: the channel's before the publication. Returns the request to publish it by."""
        request = new_request()
        self._store(Memory(handed.writer, handed.sequence, version, request))
        return request

    def end(self) -> None:
        """It is published, or refused for good."""
        self._store(replace(self._memory, before=None))

    def open(self, handed: Handed) -> HandedWeights:
        return HandedWeights(self.export, handed)

    def _store(self, memory: Memory) -> None:
        facts: dict[str, object] = {"writer": memory.writer, "sequence": memory.sequence}
        facts |= {"before": memory.before, "request": memory.request}
        durable.replace(self._path, write_object({"format": FORMAT, **facts}))
        self._memory = memory


class HandedWeights(CheckpointWeights):
    """A slot that cannot change: locked until `close`. Raises RetryLater once it is written again."""

    def __init__(self, export: Export, handed: Handed) -> None:
        self._export, self._handed = export, handed
        self._lock = export.lock(handed.slot)
        self._lock.acquire(shared=True)
        try:
            self._require_same()
            super().__init__(export.slot(handed.slot), follow_links=False)
        except BaseException:
            self._lock.release()
            raise

    def _require_same(self) -> None:
        if self._export.read(self._handed.slot) != self._handed:
            raise RetryLater(
                f"{self._export.slot(self._handed.slot)} now has newer weights",
                remedy="nothing to do: they are published next",
            )

    def finish(self) -> None:
        super().finish()
        if self._export.read(self._handed.slot) != self._handed:
            raise Refused(
                f"{self._export.slot(self._handed.slot)} changed while it was read; nothing was published",
                remedy="stop the process that writes it without its lock",
            )

    def close(self) -> None:
        super().close()
        self._lock.release()


def _read(path: Path) -> Memory:
    try:
        data = durable.read_file(path, _LIMIT)
    except FileNotFoundError:
        return Memory()
    members = Members(parse_object(data, str(path)), str(path))
    if members.integer("format") != FORMAT:
        raise DamagedFile(f"{path} has an unknown format", remedy="remove it")
    return Memory(
        members.text("writer", 64),
        members.integer("sequence"),
        members.optional_integer("before"),
        members.text("request", 16) if "request" in members else "",
    )


class HandOverSource:
    def __init__(self, directory: HandOverDirectory, publisher: ServicePublisher, rules: ExportRules) -> None:
        self.directory, self.publisher, self.rules = directory, publisher, rules

    def resume(self) -> None:
        self.directory.resume(self.publisher.made_for)

    def next(self) -> HandOverJob | None:
        handed = self.directory.next()
        return None if handed is None else HandOverJob(self, handed)


class HandOverJob(SourceJob):
    def __init__(self, source: HandOverSource, handed: Handed) -> None:
        self._source, self._handed = source, handed
        self.name = f"{source.directory.export.slot(handed.slot)} #{handed.sequence}"
        self.step = handed.step

    def open(self) -> NewWeights:
        weights = self._source.directory.open(self._handed)
        return self._source.publisher.adapted(weights, self._source.rules)

    def begin(self, version: int) -> str:
        return self._source.directory.begin(self._handed, version)

    def done(self, outcome: Publication | Failure) -> None:
        if isinstance(outcome, Failure):
            log.warning("not published", checkpoint=self.name, **outcome.by_name())
        self._source.directory.end()
