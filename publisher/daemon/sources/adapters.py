"""Adapters in the watched directory: a watched directory of each, which sees that adapter alone."""

from __future__ import annotations

from collections.abc import Callable

from weightcast.publisher.daemon.sources import observation
from weightcast.publisher.daemon.sources.layouts import Unpublished
from weightcast.publisher.daemon.sources.watched import (
    DEFAULT,
    MEMORY,
    InboxStatus,
    WatchedDirectory,
    WatchedJob,
    component_of,
)
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.components import ADAPTER
from weightcast.shared.checkpoint.local_checkpoint import LocalPaths
from weightcast.shared.files.paths import is_directory, matching

_REMEDY = "rename the adapter to letters, digits and ._-, or publish it with `POST /v1/publish`"


class WatchedAdapters:
    """Used by one thread."""

    def __init__(self, watched: WatchedDirectory) -> None:
        self._directory, self._settings, self._own = watched.directory, watched.settings, watched.own
        self._of: dict[str, WatchedDirectory] = {}
        for memory in sorted(matching(LocalPaths(self._settings.local).room, f"{MEMORY}*.json")):
            self._add(ADAPTER + memory.stem.removeprefix(MEMORY))
        self.left: tuple[Unpublished, ...] = ()
        """those with names that no component can have"""

    def ignore_existing(self, began: float, version_of: Callable[[str], int]) -> None:
        """As of WatchedDirectory. `version_of`: of a component, 0 where there is none."""
        if is_directory(self._directory):
            for name in self._found():
                self._of[name].ignore_existing(began, version_of(name))

    def resume(self, publisher: RunPublisher) -> None:
        for each in self._of.values():
            each.resume(publisher)

    def next(self, publisher: RunPublisher) -> WatchedJob | None:
        known = set(self._of)
        for each in self._of.values():
            each.finish()
        for name in self._found():
            if name not in known:
                # an earlier process may have begun with it
                self._of[name].resume(publisher)
            job = self._of[name].next(publisher)
            if job is not None:
                return job
        return None

    def of(self, component: str) -> WatchedDirectory | None:
        return self._of.get(component)

    def status(self, main: InboxStatus, *, held: bool) -> InboxStatus:
        """As of WatchedDirectory, of it and all adapters in it. `main`: its own."""
        return main.and_of([each.status(held=held) for each in self._of.values()], self.left)

    def _add(self, name: str) -> None:
        self._of[name] = WatchedDirectory(self._directory, self._settings, component=name)

    def _found(self) -> list[str]:
        """The components that are there."""
        names, left = set[str](), []
        for directory in observation.adapters_in(self._directory, self._own):
            try:
                names.add(component_of(directory))
            except Refused as error:
                left.append(Unpublished(directory, error.message, _REMEDY))
        self.left = tuple(left)
        for name in names - self._of.keys():
            self._add(name)
        # peft's default adapter has the others below it: it is consumed once these are
        return sorted(names, key=lambda name: (name == DEFAULT, name))
