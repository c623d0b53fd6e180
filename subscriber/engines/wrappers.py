"""What stands around an engine, and lets everything through but for what it changes."""

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


class Around:
    """As the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def spec(self) -> EngineSpec:
        return self.engine.spec

    @property
    def copies_weights(self) -> bool:
        return self.engine.copies_weights

    def probe(self) -> EngineFacts:
        return self.engine.probe()

    def pause(self) -> None:
        self.engine.pause()

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        return self.engine.reload(path, version, label)

    def read_back(self, label: str) -> Confirmation:
        return self.engine.read_back(label)

    def resume(self) -> None:
        self.engine.resume()

    def relabel(self, label: str) -> Confirmation:
        return self.engine.relabel(label)

    def close(self) -> None:
        self.engine.close()


class Group(Protocol):
    """The other hosts. Both raise EngineFailed."""

    def standing(self) -> Mapping[str, str]:
        """What each of them granted; only when all hold the version."""

    def stood(self, grants: Mapping[str, str]) -> None:
        """Whether they held it since."""


class Grouped(Around):
    """As the engine, with a look at the group before its reload and before its weights are believed."""

    def __init__(self, engine: Engine, group: Group) -> None:
        super().__init__(engine)
        self._group = group
        self._grants: Mapping[str, str] = {}

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        try:
            self._grants = self._group.standing()
        except EngineFailed as failure:
            return Intact(str(failure))
        return super().reload(path, version, label)

    def read_back(self, label: str) -> Confirmation:
        confirmed = super().read_back(label)
        self._group.stood(self._grants)
        return confirmed


def is_grouped(engine: Engine) -> bool:
    """Whatever stands around it."""
    while isinstance(engine, Around) and not isinstance(engine, Grouped):
        engine = engine.engine
    return isinstance(engine, Grouped)


# Of the standard library: the log repeats such a record only once in a while, and every look may fail.
log = logging.getLogger("engines")


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
            f"{spec.name} cannot be spoken to: {type(error).__name__}: {str(error)[:QUOTED]}",
            remedy="this is a fault of weightcast: report it with the log's traceback",
        ) from error


class Guarded(Around):
    """As the engine, and as good as the word of `Engine` whatever the adapter does."""

    def probe(self) -> EngineFacts:
        try:
            with guarded(self.spec):
                return super().probe()
        except EngineFailed as failure:
            return EngineFacts(reachable=False, hindrance=failure.message)

    def pause(self) -> None:
        with guarded(self.spec):
            super().pause()

    def reload(self, path: str, version: int, label: str) -> ReloadOutcome:
        try:
            with guarded(self.spec):
                return super().reload(path, version, label)
        except EngineFailed as failure:
            return Suspect(failure.message)

    def read_back(self, label: str) -> Confirmation:
        with guarded(self.spec):
            return super().read_back(label)

    def resume(self) -> None:
        with guarded(self.spec):
            super().resume()

    def relabel(self, label: str) -> Confirmation:
        with guarded(self.spec):
            return super().relabel(label)
