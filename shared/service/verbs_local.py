"""Verbs that look at a local checkpoint: `local verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightcast.shared.errors import DamagedFile, Refused
from weightcast.shared.local.hashing import HashReport, full_hash
from weightcast.shared.local.local_checkpoint import LocalCheckpoint, LocalPaths
from weightcast.shared.local.locks import FileLock
from weightcast.shared.local.state import Phase
from weightcast.shared.progress import Advance
from weightcast.shared.service.cli import group
from weightcast.shared.service.output import JsonOption, Output, printable
from weightcast.shared.service.settings import working_threads

LOCK_SECONDS = 60.0


def register_local(app: typer.Typer) -> None:
    group(app, "local", "Inspect local checkpoints.").command("verify")(verify)


def verify(
    local: Annotated[
        Path, typer.Option("--local", envvar="WEIGHTCAST_LOCAL", help="Directory of the local checkpoint.")
    ],
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Working threads; unset: every core allowed.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a local checkpoint and compare it with the version that it claims to be."""
    output = Output(json=as_json)
    with output.progress(f"reading {local}", None) as advance:
        report = hash_local(local, working_threads(threads), advance)
    facts = {
        "local": str(local),
        "version": report.version,
        "root": report.root,
        "expected_root": report.expected_root,
        "intact": report.intact,
        "differing": list(report.differing),
    }
    output.result(facts, lambda console: _show(console, local, report))
    if not report.intact:
        raise typer.Exit(DamagedFile.exit_code)


def hash_local(local: Path, threads: int, advance: Advance | None = None) -> HashReport:
    """A full hash while the checkpoint stands still. Raises Refused when there is none, or when it is not a
    version now; RetryLater while it is being patched."""
    paths = LocalPaths(local)
    if not paths.state.is_file():
        raise Refused(f"{local} is no local checkpoint", remedy="give the --local of a daemon")
    with FileLock(paths.patch).holding(shared=True, seconds=LOCK_SECONDS):
        opened = LocalCheckpoint.open(local)
        if opened is None:
            raise Refused(f"{local} is no local checkpoint", remedy="give the --local of a daemon")
        with opened:
            if opened.state.phase is not Phase.CLEAN:
                raise Refused(
                    f"{local} is {opened.state.phase.value}: no version to compare it with",
                    remedy="start its daemon, or `weightcast sync`, which repair it",
                )
            return full_hash(opened, threads=threads, advance=advance)


def _show(console: Console, local: Path, report: HashReport) -> None:
    for name in report.differing:
        console.print(f"differs: {printable(name)}")
    if report.intact:
        console.print(f"{local}: every byte is that of version {report.version}, root {report.root}")
    else:
        console.print(f"{local}: {len(report.differing)} tensors are not those of version {report.version}")
