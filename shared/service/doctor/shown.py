"""Findings as a table, the serious ones last, where a terminal ends."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightcast.shared.files.paths import printable
from weightcast.shared.service.doctor.findings import LEVELS, Finding, Level, counts

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
