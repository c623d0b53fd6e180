"""What was found, in words, and what it means for the exit code. No IO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from weightcast.shared.base.errors import OK, EngineFailed, NotInTime, Refused

Level = Literal["ok", "note", "warning", "failure"]
"""`note`: nothing is wrong, but it is good to know; `failure`: something of weightcast will not work here."""
LEVELS: Sequence[Level] = ("ok", "note", "warning", "failure")
Role = Literal["publisher", "subscriber"]


@dataclass(frozen=True)
class Finding:
    place: str
    """`channel`, `local`, `machine` or an engine's name"""
    check: str
    level: Level
    says: str
    remedy: str = ""
    exit_code: int = Refused.exit_code
    """of a failure"""


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without failures. What hangs (4) hides the rest, and a wrong place (3) matters before an engine (5),
    which may only not have been started yet."""
    codes = {finding.exit_code for finding in findings if finding.level == "failure"}
    order = (NotInTime.exit_code, Refused.exit_code, EngineFailed.exit_code)
    return next((code for code in order if code in codes), OK)


def counts(findings: Iterable[Finding]) -> dict[Level, int]:
    found = [finding.level for finding in findings]
    return {level: found.count(level) for level in LEVELS}


def size_text(nbytes: float) -> str:
    """Three digits and a decimal unit: `1.23 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB" if nbytes < 999.5 else f"{nbytes:,.0f} TB"
