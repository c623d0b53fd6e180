"""The publisher's side of a hand-over: the newest complete slot of main and of each adapter, and a memory of
what became of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from weightcast.publisher.components import ComponentWeights, tensors_of
from weightcast.publisher.daemon.sources.source import Memory, Requested, SourceJob, new_request
from weightcast.publisher.publish.publish_job import Publication
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.publisher.trainer.handover import Export, Handed
from weightcast.publisher.weights.export_rules import NO_RULES, ExportRules
from weightcast.publisher.weights.tensors import CheckpointWeights, NewWeights
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import Refused, RetryLater, on_error
from weightcast.shared.channel.components import ADAPTER
from weightcast.shared.channel.run_files import is_adapter
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.daemon.status import Failure
from weightcast.shared.files.paths import is_own_directory

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

    def __init__(
        self, directory: Path, memory: Path, rules: ExportRules = NO_RULES, component: str = MAIN
    ) -> None:
        """`component`: whose slots it has; that of `main` looks for adapters in directories of their names.
        Raises DamagedFile for a memory that is not one of ours."""
        self.export, self.rules, self.component = Export(directory), rules, component
        self._path = memory
        self.memory = Memory(memory, _Taken(), _LIMIT, "remove it")
        self._adapters: dict[str, HandOverSource] = {}

    def resume(self, publisher: RunPublisher) -> None:
        """What was being published has become a version, or is new again."""
        taken = self.memory.value
        if taken.before is not None:
            made = publisher.made_for(taken.request, taken.before, self.component)
            self.memory.store(_Taken() if made is None else taken.model_copy(update={"before": None}))
        for each in self._adapters.values():
            each.resume(publisher)

    def next(self, publisher: RunPublisher) -> HandOverJob | None:
        """Of main first, on which adapters were trained."""
        handed = self.newest()
        if handed is not None:
            return HandOverJob(self, publisher, handed)
        self._look_for_adapters(publisher)
        jobs = (each.next(publisher) for each in self._adapters.values())
        return next((job for job in jobs if job is not None), None)

    def upcoming(self, publisher: RunPublisher, before: Requested) -> list[str]:
        handed = self.newest()
        self._look_for_adapters(publisher)
        others = [name for each in self._adapters.values() for name in each.upcoming(publisher, before)]
        return ([] if handed is None else [HandOverJob(self, publisher, handed).name]) + others

    def _look_for_adapters(self, publisher: RunPublisher) -> None:
        room = self.export.directory / ADAPTER
        for path in sorted(room.iterdir()) if self.component == MAIN and is_own_directory(room) else ():
            name = ADAPTER + path.name
            if name not in self._adapters and is_adapter(name) and is_own_directory(path):
                memory = self._path.with_name(f"{self._path.stem}-{name.replace('/', '-')}.json")
                self._adapters[name] = HandOverSource(path, memory, component=name)
                # an earlier process may have begun with it
                self._adapters[name].resume(publisher)

    def newest(self) -> Handed | None:
        """The newest complete slot, unless it or a later one was taken before."""
        self.export.check()
        newest, taken = self.export.newest(), self.memory.value
        if newest is not None and newest.writer == taken.writer and newest.sequence <= taken.sequence:
            return None
        return newest


class HandedWeights(CheckpointWeights):
    """A slot that cannot change: locked until `close`. Raises RetryLater once it is written again."""

    def __init__(self, export: Export, handed: Handed, **component: Any) -> None:
        self._export, self._handed = export, handed
        self._lock = export.lock(handed.slot)
        self._lock.acquire(shared=True)
        with on_error(self._lock.release):
            if not self._is_same():
                raise RetryLater(
                    f"{export.slot(handed.slot)} now has newer weights",
                    remedy="nothing to do: they are published next",
                )
            super().__init__(export.slot(handed.slot), follow_links=False, **component)

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


class HandedAdapter(HandedWeights, ComponentWeights):
    """A slot is as a directory of peft."""


class HandOverJob(SourceJob):
    def __init__(self, source: HandOverSource, publisher: RunPublisher, handed: Handed) -> None:
        self._source, self._publisher, self._handed = source, publisher, handed
        self.name = f"{source.export.slot(handed.slot)} #{handed.sequence}"
        self.step, self.component = handed.step, source.component

    def main_version(self) -> int | None:
        return self._handed.main_version

    def target(self, publisher: RunPublisher) -> RunPublisher:
        return publisher.component(self.component, lambda: tensors_of(self._weights(), self.component))

    def _weights(self) -> HandedWeights:
        if self.component == MAIN:
            return HandedWeights(self._source.export, self._handed)
        return HandedAdapter(self._source.export, self._handed, component=self.component)

    def open(self) -> NewWeights:
        return self._publisher.component(self.component).adapted(self._weights(), self._source.rules)

    def begin(self, version: int) -> str:
        request, handed = new_request(), self._handed
        self._source.memory.store(
            _Taken(writer=handed.writer, sequence=handed.sequence, before=version, request=request)
        )
        return request

    def done(self, outcome: Publication | Failure) -> None:
        if isinstance(outcome, Failure):
            log.warning("not published", checkpoint=self.name, **outcome.by_name())
        self._source.memory.store(self._source.memory.value.model_copy(update={"before": None}))
