"""An engine as the host uses it, around the adapter that speaks its dialect."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from weightcast.shared.base.errors import EngineFailed
from weightcast.subscriber.engines.base import (
    QUOTED,
    Confirmation,
    Engine,
    EngineFacts,
    EngineSpec,
    Intact,
    ReloadOutcome,
    Suspect,
)

# Of the standard library: the log repeats such a record only once in a while, and every look may fail.
log = logging.getLogger("engines")


class Group(Protocol):
    """The other hosts of an engine group. Both raise EngineFailed."""

    def standing(self) -> Mapping[str, str]:
        """What each of them granted; only when all hold the version."""

    def stood(self, grants: Mapping[str, str]) -> None:
        """Whether they held it since."""


@contextmanager
def guarded(spec: EngineSpec) -> Iterator[None]:
    """The block raises EngineFailed and nothing else."""
    try:
        yield
    except EngineFailed:
        raise
    except Exception as error:
        log.error(f"adapter of engine {spec.name} failed", exc_info=error)
        raise EngineFailed(
            f"unexpected error in the adapter of engine {spec.name}: {type(error).__name__}: "
            f"{str(error)[:QUOTED]}",
            remedy="report this fault of weightcast with the traceback in the log",
        ) from error


class EngineProxy:
    """An `Engine` that keeps the promises of that protocol whatever the adapter raises. Where the engine
    reads the files of a group of hosts, the group is asked before its reload and before it may resume."""

    def __init__(self, adapter: Engine, group: Group | None = None) -> None:
        self.adapter = adapter
        self.spec = adapter.spec
        self.grouped = group is not None
        self._group = group
        self._grants: Mapping[str, str] = {}

    @property
    def copies_weights(self) -> bool:
        return self.adapter.copies_weights

    def probe(self) -> EngineFacts:
        try:
            with guarded(self.spec):
                return self.adapter.probe()
        except EngineFailed as failure:
            return EngineFacts(reachable=False, hindrance=failure.message)

    def pause(self) -> None:
        with guarded(self.spec):
            self.adapter.pause()

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        if self._group is not None:
            try:
                self._grants = self._group.standing()
            except EngineFailed as failure:
                return Intact(str(failure))
        try:
            with guarded(self.spec):
                return self.adapter.reload(path, version, label)
        except EngineFailed as failure:
            return Suspect(failure.message)

    def read_back(self, label: str) -> Confirmation:
        with guarded(self.spec):
            confirmed = self.adapter.read_back(label)
        if self._group is not None:
            self._group.stood(self._grants)
        return confirmed

    def resume(self) -> None:
        with guarded(self.spec):
            self.adapter.resume()

    def relabel(self, label: str) -> Confirmation:
        with guarded(self.spec):
            return self.adapter.relabel(label)

    def close(self) -> None:
        self.adapter.close()
