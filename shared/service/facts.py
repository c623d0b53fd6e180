"""What status, answers and `--json` show, as plain values: pydantic and FastAPI read these classes as they
are, and commands that answer nobody over HTTP do without both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Self, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Facts:
    """Subclasses are frozen dataclasses, their members given by name."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]

    def by_name(self) -> dict[str, Any]:
        """Facts within them likewise."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]


class Snapshot(Generic[T]):
    """Holds one frozen value. One thread sets it, any thread gets it."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value


class Failure(Facts):
    """An error as status and HTTP answers show it."""

    error: str
    """name of the class"""
    message: str
    remedy: str = ""


class Readiness(Facts):
    ready: bool
    reasons: tuple[str, ...] = ()
    """why not"""


class LoopStatus(Facts):
    """What a daemon's loop did. `steps` counts finished steps; `failures` those that ended in a
    WeightcastError, `crashes` those that ended in anything else."""

    steps: int = 0
    failures: int = 0
    crashes: int = 0
    failures_in_a_row: int = 0
    retries: int = 0
    """steps begun because the one before had failed"""
    errors: Mapping[str, int] = field(default_factory=dict)
    """failures and crashes by kind: the class in the tree of errors, or `crash`"""
    last_failure: Failure | None = None
    """of the last step; None once a step succeeded"""
    step_began: float | None = None
    """unix time; None between steps. One that lasts tells of a file system or an engine that hangs"""
    pause_seconds: float = 0.0
    """until the next step, unless something wakes the loop"""
