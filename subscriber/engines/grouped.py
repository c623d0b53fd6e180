"""An engine whose weights lie on several hosts: its reload counts only if all of them stood still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weightcast.shared.errors import EngineFailed
from weightcast.subscriber.engines.base import (
    Confirmation,
    Engine,
    EngineFacts,
    EngineSpec,
    Intact,
    ReloadOutcome,
)


class Group(Protocol):
    """The other hosts. Both raise EngineFailed."""

    def standing(self) -> Mapping[str, str]:
        """What each of them granted; only when all hold the version."""

    def stood(self, grants: Mapping[str, str]) -> None:
        """Whether they held it since."""


class Grouped:
    """As the engine, with a look at the group before its reload and before its weights are believed."""

    def __init__(self, engine: Engine, group: Group) -> None:
        self.engine, self._group = engine, group
        self._grants: Mapping[str, str] = {}

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
        try:
            self._grants = self._group.standing()
        except EngineFailed as failure:
            return Intact(str(failure))
        return self.engine.reload(path, version, label)

    def read_back(self, label: str) -> Confirmation:
        confirmed = self.engine.read_back(label)
        self._group.stood(self._grants)
        return confirmed

    def resume(self) -> None:
        self.engine.resume()

    def relabel(self, label: str) -> Confirmation:
        return self.engine.relabel(label)

    def close(self) -> None:
        self.engine.close()
