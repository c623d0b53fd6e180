"""Waiting until hosts serve a version, by what they say of themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import NotInTime, Refused, RetryLater, WeightcastError, counted
from weightcast.shared.channel.components import check_name
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.daemon.fleet import Fleet, FleetReader, Host, names_of, of_run, trouble_of
from weightcast.shared.files.paths import printable

_SHOWN = 10
_MOST_ERROR = 200


@dataclass(frozen=True)
class WaitResult:
    """Hosts that take part, in the order of their reports. `behind`: with what they say of themselves;
    `absent`: those that nobody waits for, with the reason."""

    arrived: list[str]
    behind: list[str]
    absent: list[str]

    def satisfies(self, min_hosts: int | None, fraction: float | None) -> bool:
        wanted = 1 if min_hosts is None else min_hosts
        if fraction is not None:
            share = math.ceil(fraction * (len(self.arrived) + len(self.behind)) - 1e-9)
            wanted = max(share, 1) if min_hosts is None else max(share, min_hosts)
        return len(self.arrived) >= wanted


def _turnout(version: int, fleet: Fleet, component: str) -> WaitResult:
    hosts = of_run(fleet)
    names, all_names = names_of(hosts), names_of(fleet.hosts)
    arrived = {h.key for h in hosts if _has_arrived(h, version, component)}
    return WaitResult(
        [names[h.key] for h in hosts if h.key in arrived],
        [f"{names[h.key]} ({_standing(h, component)})" for h in hosts if h.key not in arrived],
        [f"{all_names[h.key]} ({h.standing})" for h in fleet.hosts if not h.takes_part],
    )


def _has_arrived(host: Host, version: int, component: str) -> bool:
    """Only a host that is ready, and was heard from lately."""
    served = host.served_version
    if component != MAIN:
        served = next((each.version for each in host.adapters if each.name == component), None)
    return host.ready and host.presence == "live" and served is not None and served >= version


def _standing(host: Host, component: str) -> str:
    state = host.state if host.presence == "live" else host.presence
    if component != MAIN:
        found = next((each for each in host.adapters if each.name == component), None)
        if found is None:
            return f"{state}, {component} not reported"
        said = f"{found.state}: {found.error}" if found.error else found.state
        return printable(f"{state}, version {found.version} of {component}, {said}")
    version = "no version" if host.served_version is None else f"version {host.served_version}"
    engines = [f"engine {one.name} {one.state}" for one in host.engines if one.state not in ("", "serving")]
    trouble, remedy = trouble_of(host, host.run_id)
    why = printable(trouble[:_MOST_ERROR]) or ", ".join(engines)
    if why and not host.last_error and remedy:
        why += f"; {printable(remedy)}"
    return f"{state}, {version}{': ' if why else ''}{why}"


def wait_for_version(
    look: Callable[[], Fleet],
    version: int,
    min_hosts: int | None,
    fraction: float | None,
    timeout: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    poll_seconds: float = 0.25,
    component: str = MAIN,
    tell: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Names of the hosts that are ready and serve `version` or a later one, as soon as they are that many.
    `look` gives the fleet as of now. `component`: `main`, or an adapter that engines are to have loaded.
    `fraction`: of the hosts of the run that take part: not those that
    stopped, are lost, or fell silent before they held a version. Both: both must hold; neither: one host.
    `tell` is called with what is still missing, after each look.

    Raises NotInTime that names the hosts which are behind, Refused for what makes no sense."""
    if component != MAIN:
        check_name(component)
    if min_hosts is not None and min_hosts < 1:
        raise Refused(f"cannot wait for {min_hosts} hosts", remedy="give 1 or more")
    if fraction is not None and not 0 < fraction <= 1:
        raise Refused(
            f"cannot wait for {fraction:g} of the hosts", remedy="give a fraction above 0 and up to 1"
        )
    deadline = clock() + timeout
    trouble: WeightcastError
    while True:
        # what cannot be read now may be read in a moment; what is permanently wrong is raised
        try:
            fleet = look()
            found = _turnout(version, fleet, component)
            if found.satisfies(min_hosts, fraction):
                return found.arrived
            trouble = _late(version, found, timeout)
            newest = "none" if fleet.latest is None else fleet.latest
            said = f"newest of main: {newest}; {_behind(found)}"
        except Refused:
            raise
        except WeightcastError as error:
            trouble, said = error, error.message
        except OSError as error:
            where = error.filename or "the channel"
            trouble = RetryLater(
                f"{where} cannot be read: {error.strerror or error}", remedy="check the channel's mount"
            )
            said = trouble.message
        if clock() >= deadline:
            if not isinstance(trouble, NotInTime):
                trouble.message += f", after {timeout:.3g} s"
            raise trouble
        tell(said)
        pause(poll_seconds)


def wait_for_hosts(
    channel: str | Path,
    version: int,
    *,
    min_hosts: int | None = None,
    fraction: float | None = None,
    timeout: float = 600.0,
    component: str = MAIN,
) -> list[str]:
    """Waits until enough hosts report that they are ready and serve `version` or a later one.

    Args:
        channel: A directory or URL.
        version: Of `component`: `main`, or `adapter/NAME`.
        min_hosts: At least so many; default 1.
        fraction: This share of the hosts that are neither stopped nor lost.
        timeout: In seconds.
        component: What `version` counts.

    Returns:
        The hosts' names. Reports are not authenticated.

    Raises:
        NotInTime: Not enough hosts within `timeout`.
    """
    look = FleetReader(open_store(channel), updates=0).read
    return wait_for_version(look, version, min_hosts, fraction, timeout, component=component)


def _late(version: int, found: WaitResult, timeout: float) -> NotInTime:
    waited = len(found.arrived) + len(found.behind)
    return NotInTime(
        f"{len(found.arrived)} of {counted(waited, 'host')} ready with version {version} or later "
        f"after {timeout:.3g} s; {_behind(found)}",
        remedy="check these hosts: `weightcast status` shows more"
        if waited
        else "start the subscribers"
        if found.absent
        else "check that a subscriber follows this channel and reports to it (--report, --report-to)",
    )


def _behind(found: WaitResult) -> str:
    absent = f"; not counted: {_some(found.absent)}" if found.absent else ""
    return f"behind: {_some(found.behind) or ('none' if absent else 'nobody reports')}{absent}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
