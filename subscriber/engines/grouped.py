"""An engine whose weights lie on several hosts: its reload counts only if all of them stood still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weightcast.shared.errors import EngineFailed
from weightcast.subscriber.engines.around import Around
from weightcast.subscriber.engines.base import Confirmation, Engine, Intact, ReloadOutcome


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
