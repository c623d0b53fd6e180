"""What status, answers and `--json` show, as plain values: pydantic and FastAPI read these classes as they
are, and commands that answer nobody over HTTP do without both."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Literal, Self, TypeVar, dataclass_transform

from weightcast.shared.base.errors import Refused
from weightcast.shared.codec.warm_up import warm_up
from weightcast.shared.daemon.logs import get_log
from weightcast.shared.kernels.load import kernels

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


class FollowerStatus(Facts):
    """What a host's status and a mirror's have in common."""

    software: str
    host: str
    channel: str
    """that is followed"""
    local: str
    target: str
    """latest, a version or a tag, as configured"""
    run_id: str | None = None
    state: str = "starting"
    local_version: int | None = None
    target_version: int | None = None
    served_version: int | None = None
    lag_versions: int | None = None
    """target version less served version"""
    last_error: Failure | None = None
    report_error: str = ""
    """why the last report was not delivered"""
    ready: bool = False
    not_ready_reasons: tuple[str, ...] = ("starting",)
    loop: LoopStatus = LoopStatus()


log = get_log("kernels")


class KernelStatus(Facts):
    """`kind`: what digest and codec run on."""

    kind: Literal["starting", "numba", "unusable"] = "starting"
    cached_in: str = ""
    """directory that keeps compiled kernels; empty: every process compiles them anew"""
    problem: str = ""
    """why kernels are not compiled, or not kept"""


STATUS = Snapshot(KernelStatus())
"""of this process"""


def warm_up_in_background() -> None:
    """At a daemon's start: about a minute of one core where nothing is cached. The process may end before it
    is done."""
    threading.Thread(target=_warm_up, name="warm-up", daemon=True).start()


def _warm_up() -> None:
    if kernel_status().kind == "numba":
        is_first = not are_kept()
        if is_first:
            log.info("compiling kernels: takes about a minute of one core, once")
        warm_up()
        if is_first:
            log.info("kernels compiled")
    STATUS.set(kernel_status())
    if STATUS.get().problem:
        log.warning("kernels", **STATUS.get().by_name())


def are_kept() -> bool:
    """Whether no kernel is to be compiled any more."""
    from weightcast.shared.kernels.compiler import STORE

    return STORE.complete


def kernel_status() -> KernelStatus:
    """Compiles a first kernel if none is."""
    try:
        kernels()
    except Refused as error:
        return KernelStatus(kind="unusable", problem=f"{error.message}; {error.remedy}")
    from weightcast.shared.kernels.compiler import CACHE, STORE

    if CACHE is None:
        return KernelStatus(
            kind="numba", problem="no private directory to keep kernels in: set WEIGHTCAST_CACHE"
        )
    lost = f"not all can be kept, so that every process compiles some: {STORE.problem}"
    return KernelStatus(kind="numba", cached_in=str(CACHE), problem=lost if STORE.problem else "")


VERSION = "0.1.0"
"""as in pyproject.toml"""
SOFTWARE = f"weightcast {VERSION}"
"""what a daemon says that it is"""
