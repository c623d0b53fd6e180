"""Status handed from the work thread to the HTTP threads: a frozen value, swapped whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


class Snapshot(Generic[T]):
    """Holds one frozen value. One thread sets it, any thread gets it."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Failure(Frozen):
    """An error as status and HTTP answers show it."""

    error: str
    """name of the class"""
    message: str
    remedy: str = ""


class Readiness(Frozen):
    ready: bool
    reasons: tuple[str, ...] = ()
    """why not"""


class LoopStatus(Frozen):
    """What a daemon's loop did. `steps` counts finished steps; `failures` those that ended in a
    WeightcastError, `crashes` those that ended in anything else."""

    steps: int = 0
    failures: int = 0
    crashes: int = 0
    failures_in_a_row: int = 0
    retries: int = 0
    """steps begun because the one before had failed"""
    errors: Mapping[str, int] = {}
    """failures and crashes by kind: the class in the tree of errors, or `crash`"""
    last_failure: Failure | None = None
    """of the last step; None once a step succeeded"""
    step_began: float | None = None
    """unix time; None between steps. One that lasts tells of a file system or an engine that hangs"""
    pause_seconds: float = 0.0
    """until the next step, unless something wakes the loop"""
