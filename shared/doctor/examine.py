"""One examination: places and machine looked at, with a deadline, and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightcast.shared.base.errors import NotInTime, Refused
from weightcast.shared.doctor.findings import LEVELS, Finding, Level, Role, counts
from weightcast.shared.doctor.observe import (
    LocalFacts,
    MachineFacts,
    RunFacts,
    observe_channel,
    observe_contents,
    observe_local,
    observe_machine,
    observe_run,
    within_seconds,
)
from weightcast.shared.doctor.rules import CHANNEL, LOCAL, judge_channel, judge_local, judge_machine
from weightcast.shared.files.paths import printable, require_no_overlap

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
    machine = observe_machine()
    run = None if what.channel is None else _channel(what.channel, what, findings)
    inside = None if what.local is None else _local(what.local, what, run, machine, findings)
    return [*judge_machine(machine, run, inside), *findings]


def _channel(channel: Path, what: Examined, findings: list[Finding]) -> RunFacts | None:
    looked = _seen(CHANNEL, channel, what.seconds, lambda: (observe_channel(channel), observe_run(channel)))
    if isinstance(looked, Finding):
        findings.append(looked)
        return None
    facts, run = looked
    findings += judge_channel(facts, run, what.role)
    return run


def _local(
    local: Path, what: Examined, run: RunFacts | None, machine: MachineFacts, findings: list[Finding]
) -> LocalFacts | None:
    looked = _seen(LOCAL, local, what.seconds, lambda: (observe_local(local), observe_contents(local)))
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
        require_no_overlap("--local", local, "--channel", channel)
    except Refused as error:
        yield Finding(LOCAL, "apart", "failure", error.message, error.remedy)


def _seen(place: str, path: Path, seconds: float, look: Callable[[], T]) -> T | Finding:
    try:
        found = within_seconds(look, seconds)
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


_STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("", "place", "check", "found"):
        table.add_column(title, overflow="fold")
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        table.add_row(
            Text(finding.level, _STYLES[finding.level]),
            printable(finding.place),
            finding.check,
            _found(finding),
        )
    console.print(table)
    found = counts(findings)
    console.print(", ".join(f"{found[level]} {level}" for level in LEVELS if found[level]))


def _found(finding: Finding) -> Text:
    text = Text(printable(finding.says))
    if finding.remedy:
        text.append(f"\n→ {printable(finding.remedy)}", "dim")
    return text
