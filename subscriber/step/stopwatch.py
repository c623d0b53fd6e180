"""Seconds and bytes of one step, by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from weightcast.subscriber.engines.roster import EngineResult


@dataclass
class Stopwatch:
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    changes: int = 0
    step: int | None = None
    """the trainer's, of the version"""
    pause_seconds: float | None = None
    _began: float = 0.0
    _phase: str = ""
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.clock()

    def enter(self, phase: str) -> None:
        """Ends the phase before; "" starts none."""
        now = self.clock()
        if self._phase:
            self.add(self._phase, now - self._phase_began)
        self._phase, self._phase_began = phase, now

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.add(phase, self.clock() - began)

    def count(self, nbytes: int) -> None:
        self.bytes += nbytes

    def take(self, results: Sequence[EngineResult]) -> None:
        """Engines work side by side: the slowest counts."""
        for phase in ("pause", "reload", "read_back", "resume"):
            slowest = max((getattr(result.phases, phase) for result in results), default=0.0)
            if slowest:
                self.add(phase, slowest)
        pauses = [result.pause_seconds for result in results if result.pause_seconds is not None]
        if pauses:
            self.pause_seconds = max(pauses)

    def total(self) -> dict[str, float]:
        self.enter("")
        return {**self.seconds, "total": self.clock() - self._began}
