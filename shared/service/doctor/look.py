"""One examination: places and machine looked at, with a deadline, and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weightcast.shared.errors import NotInTime, Refused
from weightcast.shared.files.apart import require_apart
from weightcast.shared.service.doctor.channel_rules import CHANNEL, judge_channel
from weightcast.shared.service.doctor.findings import Finding, Role
from weightcast.shared.service.doctor.local_rules import LOCAL, judge_local
from weightcast.shared.service.doctor.machine import MachineFacts, look_at_machine
from weightcast.shared.service.doctor.machine_rules import judge_machine
from weightcast.shared.service.doctor.places import (
    LocalFacts,
    RunFacts,
    answered,
    look_at_channel,
    look_at_local,
    look_at_run,
    look_into_local,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Examined:
    """`seconds`: how long each place may take to answer."""

    channel: Path | None
    local: Path | None
    role: Role | None
    seconds: float


def examine(what: Examined) -> list[Finding]:
    """Everything but engines. Places that are not given are not looked at; nothing of what is tried stays."""
    findings: list[Finding] = []
    machine = look_at_machine()
    run = None if what.channel is None else _channel(what.channel, what, findings)
    inside = None if what.local is None else _local(what.local, what, run, machine, findings)
    return [*judge_machine(machine, run, inside), *findings]


def _channel(channel: Path, what: Examined, findings: list[Finding]) -> RunFacts | None:
    looked = _seen(CHANNEL, channel, what.seconds, lambda: (look_at_channel(channel), look_at_run(channel)))
    if isinstance(looked, Finding):
        findings.append(looked)
        return None
    facts, run = looked
    findings += judge_channel(facts, run, what.role)
    return run


def _local(
    local: Path, what: Examined, run: RunFacts | None, machine: MachineFacts, findings: list[Finding]
) -> LocalFacts | None:
    looked = _seen(LOCAL, local, what.seconds, lambda: (look_at_local(local), look_into_local(local)))
    if isinstance(looked, Finding):
        findings.append(looked)
        return None
    facts, inside = looked
    findings += judge_local(facts, inside, run, machine)
    if run is not None and what.channel is not None:
        findings += _apart(local, what.channel)
    return inside


def _apart(local: Path, channel: Path) -> Iterator[Finding]:
    """Of two places that answered."""
    try:
        require_apart("--local", local, "--channel", channel)
    except Refused as error:
        yield Finding(LOCAL, "apart", "failure", error.message, error.remedy)


def _seen(place: str, path: Path, seconds: float, look: Callable[[], T]) -> T | Finding:
    try:
        found = answered(look, seconds)
    except OSError as error:
        return Finding(
            place,
            "path",
            "failure",
            f"{path} cannot be looked at: {error.strerror or error}",
            "check the mount, and that this user may enter every directory on the way",
        )
    if found is not None:
        return found
    return Finding(
        place,
        "answers",
        "failure",
        f"{path} did not answer within {seconds:g} s",
        "the mount hangs: check its server and the network",
        NotInTime.exit_code,
    )
