"""One examination: places and machine looked at, with a deadline, and judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightcast.shared.base.errors import USAGE, NotInTime, Refused, WeightcastError
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.doctor.observe import (
    Hangs,
    observe_bucket,
    observe_channel,
    observe_contents,
    observe_local,
    observe_machine,
    observe_run,
    within_seconds,
)
from weightcast.shared.doctor.rules import (
    CHANNEL,
    LEVELS,
    LOCAL,
    Finding,
    Level,
    Role,
    counts,
    judge_bucket,
    judge_channel,
    judge_local,
    judge_machine,
)
from weightcast.shared.files.paths import ChannelAddress, printable, require_no_overlap


def examine(
    channel: ChannelAddress | None, local: Path | None, role: Role | None, seconds: float
) -> list[Finding]:
    """Everything but engines. `seconds`: how long each place may take to answer. Places that are not given
    are not looked at; nothing of what is tried stays."""
    findings: list[Finding] = []
    machine, run, inside = observe_machine(), None, None
    if channel is not None:
        with _hindrances(CHANNEL, channel, findings):
            if isinstance(channel, str):
                open_store(channel)
                run = within_seconds(lambda: observe_run(channel), seconds)
                is_host = role == "subscriber"
                races = None if is_host else within_seconds(lambda: observe_bucket(channel), seconds)
                findings += judge_bucket(races, run, role)
            else:
                place, run = within_seconds(lambda: (observe_channel(channel), observe_run(channel)), seconds)
                findings += judge_channel(place, run, role)
    if local is not None:
        with _hindrances(LOCAL, local, findings):
            place, inside = within_seconds(lambda: (observe_local(local), observe_contents(local)), seconds)
            findings += judge_local(place, inside, run, machine)
            if run is not None and channel is not None:
                try:
                    require_no_overlap("--local", local, "--channel", channel)
                except Refused as error:
                    findings.append(Finding(LOCAL, "apart", "failure", error.message, error.remedy))
    return [*judge_machine(machine, run, inside), *findings]


@contextmanager
def _hindrances(place: str, path: ChannelAddress, findings: list[Finding]) -> Iterator[None]:
    """What keeps `path` from being looked at becomes a finding."""
    try:
        yield
    except Hangs as hangs:
        says, remedy = f"{path} {hangs}", "the mount or server hangs: check the server and the network"
        findings.append(Finding(place, "answers", "failure", says, remedy, NotInTime.exit_code))
    except (OSError, WeightcastError) as error:
        if getattr(error, "exit_code", None) == USAGE:
            raise
        says = f"{path} cannot be looked at: {getattr(error, 'strerror', '') or error}"
        remedy = "check the mount, and that this user may enter every directory on the way"
        if isinstance(error, WeightcastError):
            says, remedy = error.message, error.remedy
        findings.append(Finding(place, "path", "failure", says, remedy))


_STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("", "place", "check", "found"):
        table.add_column(title, overflow="fold")
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        level = Text(finding.level, _STYLES[finding.level])
        text = Text(printable(finding.says))
        if finding.remedy:
            text.append(f"\n→ {printable(finding.remedy)}", "dim")
        table.add_row(level, printable(finding.place), finding.check, text)
    console.print(table)
    found = counts(findings)
    console.print(", ".join(f"{found[level]} {level}" for level in LEVELS if found[level]))
