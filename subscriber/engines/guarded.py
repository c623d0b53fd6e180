"""What an adapter was not prepared for is a failure of its engine alone: other engines, seeding and versions
go on, and a pause ends as after any failure.

Adapters decide from replies what these prove. An error that none of them knows proves nothing: an engine that
was asked is not reached, one that was told to load is suspect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from weightcast.shared.errors import EngineFailed
from weightcast.subscriber.engines.around import Around
from weightcast.subscriber.engines.base import (
    QUOTED,
    Confirmation,
    EngineFacts,
    EngineSpec,
    ReloadOutcome,
    Suspect,
)

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
