"""What a gateway knows of the hosts, and which of them a request is sent to: rules without IO.

All of it may be old: a gate checks the conditions of a request again, and labels its answer itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightcast.shared.daemon.status import Facts
from weightcast.shared.daemon.timing import Backoff, jittered
from weightcast.subscriber.gate.conditions import Conditions, adapter_named, affinity
from weightcast.subscriber.gate.traffic import NotAdmitted, not_loaded

LOST_SECONDS = 15.0
"""without an answer to a look, after which the requests at a gate are given up"""
_OUT = Backoff(0.5, 15.0)
_BUSY_SECONDS = 0.5
Adapter = tuple[str, int | None]
"""a name, and a version if only that will do"""
MODEL: Adapter = ("", None)
"""the model itself is asked for"""


class HostLine(Facts):
    """A host as the gateway's status shows it."""

    name: str
    url: str
    """of its gate"""
    version: int | None
    """null: it takes no requests"""
    target: int
    requests: int
    """under way and waiting there, of all callers"""
    adapters: Mapping[str, tuple[int, ...]]
    """versions of each that are loaded there"""
    reason: str
    """why it gets no requests"""


@dataclass(eq=False)
class Host:
    """`url`: of its gate; `version`: what that serves, None where it takes no requests. `adapters`: versions
    of each that are loaded there; `targets`: their newest in the channel. `others`: requests that it had from
    other callers at the last look. `calls`: ours, each ended by its time-out."""

    name: str
    url: str
    version: int | None = None
    target: int = 0
    adapters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)
    others: int = 0
    calls: set[asyncio.Timeout] = field(default_factory=set)
    out_until: float = 0.0
    failures: int = 0
    failing_since: float = 0.0
    reason: str = "not asked yet"
    logged: str = ""
    """why it cannot be asked, as the log has it"""

    @property
    def load(self) -> int:
        return self.others + len(self.calls)

    @property
    def line(self) -> HostLine:
        return HostLine(
            name=self.name,
            url=self.url,
            version=self.version,
            target=self.target,
            requests=self.load,
            adapters=self.adapters,
            reason=self.reason,
        )


class Hosts:
    """Used by one event loop. `changes` rises when a request that found no host may find one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.by_url: dict[str, Host] = {}
        self.changes = 0

    @property
    def ready(self) -> list[Host]:
        return [host for host in self.by_url.values() if host.version is not None]

    @property
    def target(self) -> int:
        """The newest version that a host is to reach."""
        return max((host.target for host in self.by_url.values()), default=0)

    @property
    def served(self) -> int | None:
        """The newest version that requests may be sent to."""
        return max((host.version or 0 for host in self.ready), default=None)

    @property
    def adapters(self) -> set[str]:
        """Those that a host follows."""
        return {name for host in self.by_url.values() for name in host.targets}

    def adapter_of(self, named: Iterable[str]) -> Adapter:
        """What a request asks for that has these names in it."""
        return adapter_named(named, self.adapters)

    def target_of(self, adapter: Adapter) -> int:
        targets = (host.targets.get(adapter[0], 0) for host in self.by_url.values())
        return self.target if adapter == MODEL else max(targets, default=0)

    def choose(
        self, conditions: Conditions, tried: Collection[Host], adapter: Adapter = MODEL
    ) -> Host | NotAdmitted:
        """The host of the session, else one with the fewest requests; none of `tried`."""
        ready, now, target = self.ready, self._clock(), self.target_of(adapter)
        fit = [h for h in ready if any(conditions.allow(each, target) for each in _versions(h, adapter))]
        idle = [host for host in fit if host.out_until <= now]
        free = [host for host in idle if host not in tried]
        if free and conditions.session:
            return max(free, key=lambda host: affinity(conditions.session, host.url))
        if free:
            return min(free, key=lambda host: (host.load, random.random()))
        if ready and not fit and adapter != MODEL:
            name, _ = adapter
            has = {each for host in ready for each in host.adapters.get(name, ())}
            return not_loaded("hosts have", name, has)
        if ready and not fit:
            return NotAdmitted(409, f"hosts serve up to {self.served}, asked for {conditions.wanted(target)}")
        if fit and not idle:
            return NotAdmitted(429, "all hosts have as many requests as they take")
        return NotAdmitted(503, "no host can take the request now")

    def newest(self, adapter: Adapter = MODEL) -> Host:
        """For a version that nobody is known to serve: hosts move on between two looks."""
        return max(self.ready, key=lambda host: max(_versions(host, adapter), default=-1))

    def oldest(self) -> Host | None:
        """All others serve its version or a later one."""
        return min(self.ready, key=lambda host: host.version or 0, default=None)

    def is_usual(self, host: Host, session: str) -> bool:
        """Whether the session's requests go to it while all hosts can take them."""
        return host is max(self.by_url.values(), key=lambda each: affinity(session, each.url), default=None)

    def looked(self, host: Host, facts: Mapping[str, Any]) -> None:
        """`facts`: of its gate's `/readyz`."""
        requests = facts.get("requests")
        by_engine = requests.values() if isinstance(requests, dict) else ()
        counts = [count for count in (*by_engine, facts.get("waiting")) if isinstance(count, int)]
        host.others = max(0, sum(counts) - len(host.calls))
        if host.failures:
            host.failures, host.out_until = 0, 0.0
        host.target = _version(facts, "target") or host.target
        rows = facts.get("adapters")
        named = rows.items() if isinstance(rows, dict) else ()
        known = {name: row for name, row in named if isinstance(row, dict)}
        loaded = {name: _integers(row.get("loaded")) for name, row in known.items()}
        self.changes += loaded != host.adapters
        host.adapters = loaded
        # retired, or not followed there: its gate says so
        targets = {name: _version(row, "target") for name, row in known.items()}
        host.targets = {name: target for name, target in targets.items() if target is not None}
        self._serves(host, _version(facts, "version"))

    def refused(self, host: Host, status: int, facts: Mapping[str, Any]) -> NotAdmitted:
        """What its gate answered to a request."""
        error = str(facts.get("error") or f"its gate answered {status}")
        if status == 409:
            host.target = max(host.target, _version(facts, "target") or 0)
            self._serves(host, _version(facts, "served"))
        elif status == 429:
            host.out_until = self._clock() + jittered(_BUSY_SECONDS)
        elif status == 401:
            return self.failed(host, "its gate refuses the token; set WEIGHTCAST_GATE_TOKEN")
        elif not facts.get("retryable"):
            # null where no engine is open: one that is may only lack an adapter
            self._serves(host, _version(facts, "served"))
        return NotAdmitted(status, error, failed=bool(facts.get("retryable")) and "ended_by" not in facts)

    def failed(self, host: Host, reason: str) -> NotAdmitted:
        """It does not answer: left out for a time, and after long its requests are given up."""
        now = self._clock()
        host.failing_since = host.failing_since if host.failures else now
        host.failures += 1
        host.out_until, host.reason = now + jittered(_OUT.pause(host.failures)), reason
        host.version = None
        if now - host.failing_since > LOST_SECONDS:
            for call in host.calls:
                call.reschedule(0)
        return NotAdmitted(503, f"{host.name} does not answer: {reason}")

    def _serves(self, host: Host, version: int | None) -> None:
        if version is not None and version != host.version:
            self.changes += 1
        host.version, host.reason = version, "" if version is not None else "no engine there is open"


def _versions(host: Host, adapter: Adapter) -> Collection[int]:
    """Of what is asked for."""
    name, version = adapter
    if not name:
        return (host.version or 0,)
    return [each for each in host.adapters.get(name, ()) if version in (None, each)]


def _integers(found: object) -> tuple[int, ...]:
    return tuple(each for each in found if isinstance(each, int)) if isinstance(found, list) else ()


def _version(facts: Mapping[str, Any], name: str) -> int | None:
    found = facts.get(name)
    return found if isinstance(found, int) and found >= 0 else None
