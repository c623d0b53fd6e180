"""Requests that pass through a host, and the versions that may have made their answers.

The work thread closes an engine before its pause and opens it when its durable record says what it serves;
the gate's event loop admits requests in between. A request's answer comes from versions within
[`low`, `high`]: its engine held one of them at every moment since it was admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from weightcast.subscriber.gate.conditions import Conditions, UpdatePolicy, adapter_named, affinity

_ENDING_SECONDS = 5.0
"""for requests to end after the gate ended them"""
_OUTCOMES = {409: "unmet", 429: "too_many", 503: "not_ready"}


class NotAdmitted(Exception):
    """`status`: of HTTP."""

    def __init__(self, status: int, error: str, *, failed: bool = False, of_version: bool = False) -> None:
        """`failed`: an engine that had taken it did not answer; `of_version`: what it asks for is not here,
        which 409 always means."""
        super().__init__(error)
        self.status, self.error, self.failed = status, error, failed
        self.outcome, self._of_version = _OUTCOMES[status], of_version or status == 409

    def patience(self, conditions: Conditions, hold_seconds: float) -> float:
        """Seconds that the request may wait: a version that is not here may be long in coming, and who asks
        for it says how long to wait for it."""
        if self._of_version and conditions.wait is not None:
            return conditions.wait
        return 0.0 if self.status == 409 else hold_seconds


def not_loaded(who_has: str, name: str, versions: Collection[int]) -> NotAdmitted:
    """For a request of an adapter that has only other `versions` loaded."""
    found = " and ".join(f"{name}@{version}" for version in sorted(versions)) or f"no version of {name}"
    return NotAdmitted(409 if versions else 503, f"{who_has} {found} loaded", of_version=True)


@dataclass(eq=False)
class Call:
    """A request. `end`: called from any thread to end it; `rids`: what its engine calls it."""

    conditions: Conditions
    end: Callable[[], object] = lambda: None
    rids: tuple[str, ...] = ()
    engine: str = ""
    """that answers it; empty while it waits for one"""
    low: int = -1
    high: int = -1
    process: str | None = None
    began: float = 0.0
    ended_by: Literal["", "update", "abort"] = ""
    named: tuple[str, ...] = ()
    """what may be the name of an adapter, with or without a version"""
    adapter: str = ""
    """that it asks for; empty: for the model itself"""
    adapter_version: int | None = None
    """that it asks for; once it is admitted, the version that answers"""

    def allows(self, version: int, target: int) -> bool:
        """Of its adapter, or of the model."""
        return self.adapter_version in (None, version) and self.conditions.allow(version, target)

    @property
    def adapter_label(self) -> str:
        """What its engine calls the adapter, once it is admitted; empty for the model itself."""
        return f"{self.adapter}@{self.adapter_version}" if self.adapter else ""


@dataclass(eq=False)
class Door:
    """What is known of an engine. `version`: what it serves; None: no request is admitted."""

    version: int | None = None
    calls: set[Call] = field(default_factory=set)
    process: str | None = None
    was_open: bool = False
    looked_at: float = 0.0
    adapters: dict[str, frozenset[int]] = field(default_factory=dict)
    """versions of each that its process has loaded"""
    unsure_since: float = math.inf
    """its process may have ended then: only a later look says which one is there, and what it serves"""

    @property
    def is_sure(self) -> bool:
        return self.looked_at >= self.unsure_since


class Traffic:
    """Safe for several threads. `policy`, `drain_seconds`: of updates; `most`: requests per engine, and as
    many again that wait."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        policy: UpdatePolicy,
        drain_seconds: float,
        hold_seconds: float,
        most: int,
    ) -> None:
        self.doors = {name: Door() for name in names}
        self.target = 0
        """the version that the host is to reach"""
        self.adapters: Mapping[str, int | None] = {}
        """the version that each adapter is to reach; None: none is served here"""
        self._models: Collection[str] = ()
        """what else requests may name, as far as is known"""
        self._retired: Collection[str] = ()
        self._names_adapters = False
        """they are known"""
        self.drifts = False
        """adapters go on over other main weights"""
        self.policy, self._drain_seconds = policy, drain_seconds
        self._hold_seconds, self._most = hold_seconds, most
        self._held: set[Call] = set()
        self._changed, self._changes = threading.Condition(), 0
        self._wakers: set[Callable[[], None]] = set()

    # of the work thread

    def close(self, name: str, toward: int) -> None:
        """No request is admitted to the engine any more, and those that must not see version `toward` have
        ended when this returns, or had all their time."""
        with self._changed:
            door = self.doors[name]
            door.version = None
            deadline = time.monotonic() + (0.0 if self.policy == "partial" else self._drain_seconds)
            while self._must_end(door, toward) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for call in self._must_end(door, toward):
                call.ended_by = "update"
                call.end()
            deadline = time.monotonic() + _ENDING_SECONDS
            while self._must_end(door, toward) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for call in door.calls:
                call.low, call.high = min(call.low, toward), max(call.high, toward)

    def _must_end(self, door: Door, toward: int) -> list[Call]:
        if self.policy != "pass":
            return list(door.calls)
        return [call for call in door.calls if not self._may_see(call, toward)]

    def _may_see(self, call: Call, version: int) -> bool:
        """Conditions of a request for an adapter are about that."""
        return self.drifts if call.adapter else call.conditions.allow(version, version)

    def open(self, name: str, version: int | None, process: str | None, looked_at: float) -> None:
        """What the engine's record says that it serves, and its process, as of a look at this moment of a
        monotonic clock."""
        with self._changed:
            door = self.doors[name]
            if process != door.process:
                door.adapters = {}
            door.process, door.looked_at = process, looked_at
            if not door.is_sure:
                version = None
            if version is not None:
                for call in door.calls:
                    call.low, call.high = min(call.low, version), max(call.high, version)
            door.version, door.was_open = version, door.was_open or version is not None
            self._tell()

    def name_adapters(
        self,
        adapters: Mapping[str, int | None],
        models: Collection[str] = (),
        retired: Collection[str] = (),
    ) -> None:
        """As of `self.adapters` and `self._models`."""
        with self._changed:
            self.adapters, self._models, self._names_adapters = adapters, models, True
            self._retired = retired
            self._tell()

    def offer(self, name: str, adapter: str, versions: Collection[int]) -> None:
        """What the engine has loaded of an adapter: requests may be admitted to these."""
        with self._changed:
            door, found = self.doors[name], frozenset(versions)
            if door.adapters.get(adapter, frozenset()) != found:
                door.adapters = {**door.adapters, adapter: found}
                self._tell()

    def withdraw(self, name: str) -> None:
        """All adapters of the engine."""
        with self._changed:
            self.doors[name].adapters = {}

    def uses(self, name: str, adapter: str, version: int) -> bool:
        with self._changed:
            calls = self.doors[name].calls
            return any((call.adapter, call.adapter_version) == (adapter, version) for call in calls)

    # of the gate

    def doubt(self, name: str, since: float) -> None:
        """Another process may answer since that moment; infinity: nobody can tell it from its predecessor."""
        with self._changed:
            door = self.doors[name]
            door.version, door.unsure_since, door.adapters = None, since, {}

    async def is_same(self, call: Call) -> bool:
        """Whether the process that a request was admitted to is there still, as of a look after its answer
        began."""
        door = self.doors[call.engine]
        if door.unsure_since <= call.began:
            return True
        deadline = time.monotonic() + _ENDING_SECONDS
        while not door.is_sure and (left := deadline - time.monotonic()) > 0:
            await self._change_after(self._changes, left)
        return door.is_sure and door.process is not None and door.process == call.process

    async def admit(self, call: Call) -> None:
        """Raises NotAdmitted."""
        began, seen, refusal = time.monotonic(), self._changes, self._try(call)
        if refusal is None:
            return
        if self.waiting >= self._most * len(self.doors):
            raise NotAdmitted(429, "too many requests are waiting here")
        self._held.add(call)
        try:
            while refusal is not None:
                left = began + refusal.patience(call.conditions, self._hold_seconds) - time.monotonic()
                if left <= 0:
                    raise refusal
                await self._change_after(seen, left)
                seen, refusal = self._changes, self._try(call)
        finally:
            self._held.discard(call)

    async def _change_after(self, seen: int, seconds: float) -> None:
        """Returns when there were more changes than `seen`, or after so long."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._changed:
            if self._changes != seen:
                return
            self._wakers.add(wake)
        try:
            # not wait_for: in Python 3.11 it drops a cancellation that comes together with the change
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed.wait()
        finally:
            with self._changed:
                self._wakers.discard(wake)

    def _try(self, call: Call) -> NotAdmitted | None:
        """To the engine with the fewest requests; those of a session to one of their own, while it may."""
        with self._changed:
            return self._refusal(call)

    @property
    def may_name_adapters(self) -> bool:
        """Whether requests may name an adapter, as far as is known."""
        return bool(self.adapters) or not self._names_adapters

    def _refusal(self, call: Call) -> NotAdmitted | None:
        conditions = call.conditions
        if not self._names_adapters:
            # an engine that does not check names would answer one of an adapter without it
            return NotAdmitted(503, "the adapters of the run are not known yet")
        call.adapter, call.adapter_version = adapter_named(call.named, self.adapters)
        if not call.adapter and self.adapters and self._models:
            # engines that do not check names would answer by the model alone
            for name in (each for each in call.named if each and each not in self._models):
                followed = sorted(each for each, target in self.adapters.items() if target is not None)
                return NotAdmitted(
                    409, f"no adapter or model {name[:80]} here (adapters: {', '.join(followed) or 'none'})"
                )
        open_doors = {name: door for name, door in self.doors.items() if door.version is not None}
        fit = {name: door for name, door in open_doors.items() if self._fitting(call, door) is not None}
        free = {name: door for name, door in fit.items() if len(door.calls) < self._most}
        if not free:
            if fit:
                return NotAdmitted(429, f"{self._most} requests per engine are under way")
            if len(open_doors) < len(self.doors):
                return NotAdmitted(503, "no engine serves here now")
            if call.adapter:
                return self._no_adapter(call.adapter, open_doors.values())
            served = max((door.version or 0 for door in open_doors.values()), default=None)
            return NotAdmitted(409, f"this host serves version {served}")
        name = (
            max(free, key=lambda each: affinity(conditions.session, each))
            if conditions.session
            else min(free, key=lambda each: len(free[each].calls))
        )
        door, version = free[name], free[name].version or 0
        call.engine, call.low, call.high = name, version, version
        call.process, call.began = door.process, time.monotonic()
        if call.adapter:
            call.adapter_version = self._fitting(call, door)
        door.calls.add(call)
        return None

    def _no_adapter(self, name: str, doors: Iterable[Door]) -> NotAdmitted:
        if self.adapters.get(name) is None:
            why = "retired" if name in self._retired else "not followed by this host (--adapters)"
            return NotAdmitted(409, f"adapter {name} is {why}")
        has = {version for door in doors for version in door.adapters.get(name, ())}
        return not_loaded("this host has", name, has)

    def _fitting(self, call: Call, door: Door) -> int | None:
        """The version that the call would get there: of its adapter the newest that it allows."""
        target, found = self.target, [door.version or 0]
        if call.adapter:
            target, found = self.adapters.get(call.adapter) or 0, [*door.adapters.get(call.adapter, ())]
        return max((version for version in found if call.allows(version, target)), default=None)

    @property
    def offered(self) -> dict[str, dict[str, object]]:
        """Of each adapter the versions that requests are admitted to, and its target."""
        doors = [door for door in self.doors.values() if door.version is not None]
        return {
            name: {"loaded": sorted({v for door in doors for v in door.adapters.get(name, ())}), "target": to}
            for name, to in self.adapters.items()
        }

    @property
    def waiting(self) -> int:
        """Requests that no engine can take now."""
        return len(self._held)

    @property
    def served(self) -> int | None:
        """The lowest version of the engines that requests are admitted to."""
        return min((door.version for door in self.doors.values() if door.version is not None), default=None)

    @property
    def is_healthy(self) -> bool:
        """An engine serves here, or does so again after an update."""
        return any(door.was_open and door.is_sure for door in self.doors.values())

    def leave(self, call: Call) -> None:
        """Its engine has answered, or does so no more."""
        with self._changed:
            if self.has(call):
                self.doors[call.engine].calls.discard(call)
                self._tell()

    def has(self, call: Call) -> bool:
        """Whether an engine is answering it."""
        return bool(call.engine) and call in self.doors[call.engine].calls

    def end(self, fits: Callable[[Call], bool]) -> int:
        """Ends the requests that fit. Returns how many."""
        with self._changed:
            calls = self._held.union(*(door.calls for door in self.doors.values()))
            found = [call for call in calls if fits(call) and not call.ended_by]
        for call in found:
            call.ended_by = "abort"
            call.end()
        return len(found)

    def _tell(self) -> None:
        self._changes += 1
        self._changed.notify_all()
        for wake in self._wakers:
            wake()
