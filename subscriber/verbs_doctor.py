"""The verb `doctor`: of either side, here because engines are this side's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.shared.errors import OK
from weightcast.shared.service.doctor.findings import Finding, Role, counts, exit_code
from weightcast.shared.service.doctor.look import Examined, examine
from weightcast.shared.service.doctor.shown import show_findings
from weightcast.shared.service.output import JsonOption, Output
from weightcast.subscriber.engine_findings import judge_engines


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    channel: Annotated[
        Path | None, typer.Option("--channel", envvar="WEIGHTCAST_CHANNEL", help="The channel's directory.")
    ] = None,
    local: Annotated[
        Path | None,
        typer.Option("--local", envvar="WEIGHTCAST_LOCAL", help="A local checkpoint, or where it is to be."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", envvar="WEIGHTCAST_ENGINE", help="An engine as the subscriber has it; repeatable."
        ),
    ] = None,
    role: Annotated[
        Role | None, typer.Option("--role", help="What runs on this machine; unset: warns for both.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=3600, help="Seconds that each place may take.")
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Look whether this machine, its file systems and engines are fit for weightcast; changes nothing."""
    place = Path.cwd() if local is None else local.absolute()
    findings = [
        *examine(Examined(channel, local, role, timeout)),
        *judge_engines(engine or (), place, timeout),
    ]
    Output(json=as_json).result(_facts(findings), lambda console: show_findings(console, findings))
    code = exit_code(findings)
    if code != OK:
        raise typer.Exit(code)


def _facts(findings: list[Finding]) -> dict[str, Any]:
    return {"findings": [_plain(finding) for finding in findings], "counts": counts(findings)}


def _plain(finding: Finding) -> dict[str, Any]:
    facts = asdict(finding)
    del facts["exit_code"]
    return facts
