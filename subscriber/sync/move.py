"""The move of the local checkpoint, or the reload, that is under way: its times by phase, bytes and words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weightcast.subscriber.engines.rules import EngineResult


class Move:
    """Filled by the work thread and by threads of a reload, never at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Also in place of a move that was given up."""
        self._began = self._clock()
        self._seconds: dict[str, float] = {}
        self._bytes = self._changes = 0
        self._step: int | None = None
        self._pause_seconds: float | None = None
        self._phase, self._phase_began = "", 0.0

    def end(self) -> dict[str, Any]:
        """What UpdateStatus says of it; the next move begins."""
        self.enter("")
        self._took("total", self._clock() - self._began)
        facts = {
            "bytes": self._bytes,
            "changes": self._changes,
            "seconds": self._seconds,
            "pause_seconds": self._pause_seconds,
            "step": self._step,
        }
        self.begin()
        return facts

    def enter(self, phase: str) -> None:
        """Ends the phase before; "" begins none."""
        now = self._clock()
        if self._phase:
            self._took(self._phase, now - self._phase_began)
        self._phase, self._phase_began = phase, now

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Of the move that is under way when the block ends."""
        began = self._clock()
        try:
            yield
        finally:
            self._took(phase, self._clock() - began)

    def _took(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def read(self, nbytes: int) -> None:
        self._bytes += nbytes

    def changed(self, words: int, step: int | None = None) -> None:
        """`step`: the trainer's, of the version."""
        self._changes, self._step = self._changes + words, step

    def reloaded(self, results: Sequence[EngineResult]) -> None:
        """Engines work side by side: the slowest counts."""
        for phase in ("pause", "reload", "read_back", "resume"):
            slowest = max((result.phases[phase] for result in results), default=0.0)
            if slowest:
                self._took(phase, slowest)
        pauses = [result.pause_seconds for result in results if result.pause_seconds is not None]
        self._pause_seconds = max(pauses, default=self._pause_seconds)
