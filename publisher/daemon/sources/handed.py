"""The publisher's side of a hand-over: the newest complete slot, and a memory of what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from weightcast.publisher.daemon.sources.source import Memory, SourceJob, new_request
from weightcast.publisher.publish.publish_job import Publication
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.publisher.trainer.handover import Export, Handed
from weightcast.publisher.weights.export_rules import NO_RULES, ExportRules
from weightcast.publisher.weights.tensors import CheckpointWeights, NewWeights
from weightcast.shared.base.errors import Refused, RetryLater
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.status import Failure

_LIMIT = 64 << 10

log = get_log("publisher")


class _Taken(BaseModel, frozen=True):
    """`writer`, `sequence`: what was taken last. `before`: while it is being published, the channel's version
    before; None once that has ended."""

    format: Literal[1] = 1
    writer: str = ""
    sequence: int = 0
    before: int | None = None
    request: str = ""
    """while it is being published: what the version's index says if it came to be"""


class HandOverSource:
    """Used by one thread. `memory`: the file that survives restarts."""

    def __init__(self, directory: Path, memory: Path, rules: ExportRules = NO_RULES) -> None:
        """Raises DamagedFile for a memory that is not one of ours."""
        self.export, self.rules = Export(directory), rules
        self._memory = Memory(memory, _Taken(), _LIMIT, "remove it")

    def resume(self, publisher: RunPublisher) -> None:
        """What was being published has become a version, or is new again."""
        taken = self._memory.value
        if taken.before is not None:
            made = publisher.made_for(taken.request, taken.before)
            self._memory.store(_Taken() if made is None else taken.model_copy(update={"before": None}))

    def next(self, publisher: RunPublisher) -> HandOverJob | None:
        handed = self.newest()
        return None if handed is None else HandOverJob(self, publisher, handed)

    def newest(self) -> Handed | None:
        """The newest complete slot, unless it or a later one was taken before."""
        self.export.check()
        newest, taken = self.export.newest(), self._memory.value
        if newest is not None and newest.writer == taken.writer and newest.sequence <= taken.sequence:
            return None
        return newest

    def begin(self, handed: Handed, version: int) -> str:
        """`version`: the channel's before the publication. Returns the request to publish it by."""
        request = new_request()
        self._memory.store(
            _Taken(writer=handed.writer, sequence=handed.sequence, before=version, request=request)
        )
        return request

    def end(self) -> None:
        """It is published, or refused permanently."""
        self._memory.store(self._memory.value.model_copy(update={"before": None}))


class HandedWeights(CheckpointWeights):
    """A slot that cannot change: locked until `close`. Raises RetryLater once it is written again."""

    def __init__(self, export: Export, handed: Handed) -> None:
        self._export, self._handed = export, handed
        self._lock = export.lock(handed.slot)
        self._lock.acquire(shared=True)
        try:
            if not self._is_same():
                raise RetryLater(
                    f"{export.slot(handed.slot)} now has newer weights",
                    remedy="nothing to do: they are published next",
                )
            super().__init__(export.slot(handed.slot), follow_links=False)
        except BaseException:
            self._lock.release()
            raise

    def _is_same(self) -> bool:
        return self._export.read(self._handed.slot) == self._handed

    def finish(self) -> None:
        super().finish()
        if not self._is_same():
            raise Refused(
                f"{self._export.slot(self._handed.slot)} changed while it was read; nothing was published",
                remedy="stop the process that writes it without its lock",
            )

    def close(self) -> None:
        super().close()
        self._lock.release()


class HandOverJob(SourceJob):
    def __init__(self, source: HandOverSource, publisher: RunPublisher, handed: Handed) -> None:
        self._source, self._publisher, self._handed = source, publisher, handed
        self.name = f"{source.export.slot(handed.slot)} #{handed.sequence}"
        self.step = handed.step

    def open(self) -> NewWeights:
        weights = HandedWeights(self._source.export, self._handed)
        return self._publisher.adapted(weights, self._source.rules)

    def begin(self, version: int) -> str:
        return self._source.begin(self._handed, version)

    def done(self, outcome: Publication | Failure) -> None:
        if isinstance(outcome, Failure):
            log.warning("not published", checkpoint=self.name, **outcome.by_name())
        self._source.end()
