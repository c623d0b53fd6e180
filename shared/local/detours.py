"""What was found damaged on the way, so that other ways are taken: deltas and full weights.

What is damaged for one reader now may be whole later: where nothing leads around it, it is tried again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from weightcast.shared.errors import DamagedFile, Refused, RetryLater, WeightcastError
from weightcast.shared.files.disk_errors import error_text
from weightcast.shared.local.fetch import NotThere
from weightcast.shared.local.plan import FULL
from weightcast.shared.local.stage import BadDelta

Stretch = tuple[int, int]
"""version and base version, `FULL` for full weights"""
LeadsFrom = Callable[[int], int]
OnDetour = Callable[[str], None]
"""called with what is damaged before another way is planned"""


class Detours:
    """Of one local checkpoint. Nothing is ever tried twice within one `run`: it ends."""

    def __init__(self) -> None:
        self.damaged: dict[Stretch, str] = {}
        """and what is wrong with each"""
        self._met: Stretch | None = None
        self._tried: set[Stretch] = set()
        self._cause: Exception | None = None

    def run(self, attempt: Callable[[], None], on_detour: OnDetour) -> None:
        """`attempt` plans and goes a way; again while it meets damage that it had not met before."""
        self._tried, self._cause = set(), None
        try:
            while True:
                self._met = None
                try:
                    return attempt()
                except (WeightcastError, OSError) as error:
                    met = self._new()
                    if met is None:
                        raise
                    self._tried.add(met)
                    self._cause = error
                    on_detour(self.damaged[met])
        finally:
            self._cause = None

    def _new(self) -> Stretch | None:
        """What the last attempt met, unless an earlier one had."""
        return None if self._met in self._tried else self._met

    def none_left(self) -> None:
        """No way leads around what was met. Raises what was met first; returns where nothing was."""
        if self._cause is not None:
            raise self._cause

    def passed(self, version: int) -> None:
        """What leads to versions up to this one is no longer needed."""
        self.damaged = {stretch: why for stretch, why in self.damaged.items() if stretch[0] > version}

    @contextlib.contextmanager
    def delta(self, leads_from: LeadsFrom) -> Iterator[None]:
        try:
            yield
        except BadDelta as error:
            self._meet((error.version, leads_from(error.version)), error)
            raise DamagedFile(error.message, remedy=error.remedy) from error
        except NotThere as error:
            self._meet((error.version, leads_from(error.version)), error)
            raise RetryLater(error.message, remedy=error.remedy) from error

    @contextlib.contextmanager
    def full_weights(self, version: int) -> Iterator[None]:
        try:
            yield
        except (Refused, FileNotFoundError) as error:
            self._meet((version, FULL), error)
            raise

    def _meet(self, stretch: Stretch, error: Exception) -> None:
        self.damaged[stretch] = error_text(error)
        self._met = stretch
