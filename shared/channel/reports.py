"""What hosts say about themselves: `hosts/<host>-<8 hex>.json`. docs/FORMAT.md, Reports.

Anybody with access to the channel can write a report: they are hints, never a reason to delete or to wait for
ever, and the paths in them are text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.records import FORMAT, check_format
from weightcast.shared.errors import WeightcastError
from weightcast.shared.files import durable
from weightcast.shared.files.paths import is_plain
from weightcast.shared.files.strict_json import Members, parse_object, write_object

REPORT_LIMIT = 64 << 10
"""bytes"""
REPORTS_LIMIT = 4096
_ENGINES_LIMIT = 64
_ERROR_LIMIT = 4096
_SUFFIX = ".json"


@dataclass(frozen=True)
class Report:
    """`lag` counts versions; `target` is `latest`, a version or a tag. `counter` rises with each report: a
    host whose counter stands still is not heard from, whatever its clock says."""

    host: str
    local: str
    run_id: str
    state: str
    local_version: int | None
    served_version: int | None
    target: str
    lag: int | None
    last_error: str
    engines: tuple[Mapping[str, object], ...]
    """one object per engine, as in the daemon's status"""
    counter: int
    software: str


def write_report(channel: Path, report: Report) -> None:
    """Raises OSError, on a channel mounted read-only for instance."""
    layout = Layout(channel)
    layout.hosts_dir.mkdir(exist_ok=True)
    durable.replace(layout.report(report.host, report.local), pack_report(report))


def pack_report(report: Report) -> bytes:
    """The error's text is cut and its control characters are dropped, so that readers take the report."""
    error = "".join(c if is_plain(c) else " " for c in report.last_error[:_ERROR_LIMIT])
    return write_object({"format": FORMAT, **asdict(replace(report, last_error=error))})


def parse_report(data: bytes, what: str) -> Report:
    """Raises DamagedFile and UnknownFormat."""
    members = Members(parse_object(data, what), what)
    check_format(members, what)
    engines = members.array("engines")
    if len(engines) > _ENGINES_LIMIT or any(type(engine) is not dict for engine in engines):
        raise members.bad("engines", f"at most {_ENGINES_LIMIT} objects")
    return Report(
        host=members.text("host", 256),
        local=members.text("local", 4096),
        run_id=members.text("run_id", 128),
        state=members.text("state", 64),
        local_version=members.optional_integer("local_version"),
        served_version=members.optional_integer("served_version"),
        target=members.text("target", 256),
        lag=members.optional_integer("lag", low=-(1 << 62)),
        last_error=members.text("last_error", _ERROR_LIMIT),
        engines=tuple(cast(list[dict[str, object]], engines)),
        counter=members.integer("counter"),
        software=members.text("software", 256),
    )


def read_reports(channel: Path, limit: int = REPORTS_LIMIT) -> list[Report]:
    """In the order of file names, at most `limit`. What cannot be read as a report is left out: one bad host
    must not hide the others."""
    found = (_read(path) for path in _paths(channel)[:limit])
    return [report for report in found if report is not None]


def _paths(channel: Path) -> list[Path]:
    hosts = Layout(channel).hosts_dir
    try:
        with os.scandir(hosts) as scan:
            names = [entry.name for entry in scan if entry.name.endswith(_SUFFIX)]
    except FileNotFoundError:
        return []
    return [hosts / name for name in sorted(names) if not durable.is_temporary(name)]


def _read(path: Path) -> Report | None:
    try:
        return parse_report(durable.read_file(path, REPORT_LIMIT), path.name)
    except (WeightcastError, OSError):
        return None
