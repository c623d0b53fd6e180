"""The verb `doctor`: of either side, here because engines are this side's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weightcast.shared.base.errors import OK, Refused
from weightcast.shared.cli.app import JsonOption
from weightcast.shared.cli.output import Output
from weightcast.shared.doctor.examine import Examined, examine, show_findings
from weightcast.shared.doctor.findings import Finding, Role, counts, exit_code
from weightcast.shared.doctor.sizing import (
    DEFAULT_THREADS,
    Encoding,
    Sizing,
    Weights,
    Workload,
    plan_facts,
    show_plan,
    sizing,
)
from weightcast.shared.files.hf_checkpoint import open_checkpoint
from weightcast.subscriber.engines.inspect import judge_engines

_MOST_SECONDS, _MOST = 1e9, 1_000_000
"""that a plan is made for: what it says stays a number"""


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
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="HF checkpoint: say what a run of it will need; no weights are read."),
    ] = None,
    density: Annotated[
        float,
        typer.Option("--density", min=0, max=1, help="Plan: share of elements that a version changes."),
    ] = 0.01,
    interval: Annotated[
        float,
        typer.Option("--interval", min=0.001, max=_MOST_SECONDS, help="Plan: seconds between two versions."),
    ] = 30.0,
    hosts: Annotated[int, typer.Option("--hosts", min=1, max=_MOST, help="Plan: rollout hosts.")] = 1,
    away: Annotated[
        float, typer.Option("--away", min=0, max=_MOST_SECONDS, help="Plan: seconds that a host misses.")
    ] = 600.0,
    link: Annotated[
        float,
        typer.Option("--link", min=0.001, max=_MOST, help="Plan: a host's link to the channel, Gbit/s."),
    ] = 10.0,
    threads: Annotated[
        int, typer.Option("--threads", min=1, max=_MOST, help="Plan: of a host.")
    ] = DEFAULT_THREADS,
    encoding: Annotated[Encoding, typer.Option("--encoding", help="Plan: of the deltas.")] = "fast",
    as_json: JsonOption = False,
) -> None:
    """Look whether this machine, its file systems and engines are fit for weightcast, or what a run will need
    (--plan). Changes nothing."""
    asked = Workload(density, interval, encoding, hosts, away, link * 1e9, threads)
    planned = None if plan is None else _planned(plan, asked)
    findings: list[Finding] = []
    if plan is None or channel is not None or local is not None or engine:
        findings += examine(Examined(channel, local, role, timeout))
        findings += judge_engines(engine or (), Path.cwd() if local is None else local.absolute(), timeout)
    Output(json=as_json).result(_facts(findings, planned), lambda console: _show(console, findings, planned))
    code = exit_code(findings)
    if code != OK:
        raise typer.Exit(code)


@dataclass(frozen=True)
class _Planned:
    weights: Weights
    asked: Workload
    found: Sizing


def _planned(model: Path, asked: Workload) -> _Planned:
    """Reads headers alone. Raises Refused for a directory without a checkpoint."""
    try:
        weights = Weights.of(open_checkpoint(model, follow_links=True, need_index=False).table)
    except FileNotFoundError as error:
        raise Refused(f"{model} is not there", remedy="give an HF checkpoint directory") from error
    return _Planned(weights, asked, sizing(weights, asked))


def _show(console: Console, findings: list[Finding], planned: _Planned | None) -> None:
    if planned is not None:
        show_plan(console, planned.weights, planned.asked, planned.found)
    if findings:
        show_findings(console, findings)


def _facts(findings: list[Finding], planned: _Planned | None) -> dict[str, Any]:
    return {
        "findings": [_plain(finding) for finding in findings],
        "counts": counts(findings),
        "plan": None if planned is None else plan_facts(planned.weights, planned.asked, planned.found),
    }


def _plain(finding: Finding) -> dict[str, Any]:
    facts = asdict(finding)
    del facts["exit_code"]
    return facts
