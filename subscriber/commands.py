"""Commands `run-engine` and `doctor`, which asks engines too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from weightcast.shared.base.errors import OK, USAGE, EngineFailed, Refused
from weightcast.shared.cli.options import (
    Number,
    any_channel_option,
    ca_option,
    json_option,
    key_option,
    local_option,
    option,
    path,
)
from weightcast.shared.cli.output import Output
from weightcast.shared.daemon.logs import get_log, setup_logs
from weightcast.shared.doctor.sizing import (
    DEFAULT_THREADS,
    GET_PRICE,
    PUT_PRICE,
    Encoding,
    Weights,
    Workload,
    plan_facts,
    show_plan,
    sizing,
)
from weightcast.shared.files.paths import ChannelAddress
from weightcast.subscriber.engines.base import (
    BadEngineOption,
    EngineFacts,
    Timeouts,
    parse_engine,
    unreachable,
)

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.shared.doctor.rules import Finding, Role
    from weightcast.subscriber.engines.wire import Wire

log = get_log("run-engine")


class NoProbe(Refused):
    exit_code = USAGE


@click.command
@click.argument(
    "command", nargs=-1, required=True, metavar="-- COMMAND...", help="The engine's command line."
)
@local_option
@option(
    "--engine", help="The engine, as the subscriber has it: KIND=URL[,...]. Versions wait until it answers."
)
@option("--ready-url", help="URL that answers 2xx once the engine has loaded, instead of --engine.")
@option(
    "--wait", type=Number(min=0), default=600.0, help="Seconds to wait for a checkpoint that can be loaded."
)
@option(
    "--load-deadline",
    type=Number(min=1),
    default=1800.0,
    help="Seconds after which versions are patched in although the engine does not answer.",
)
def start_engine(
    command: Sequence[str],
    local: Path,
    engine: str | None,
    ready_url: str | None,
    wait: float,
    load_deadline: float,
) -> None:
    """Start an engine while no version is patched in: it takes the place of this process."""
    from weightcast.subscriber.engines.launch import run_engine

    setup_logs()
    local = local.absolute()
    loaded = _loaded(engine, ready_url, local)
    run_engine(local, command, loaded, load_deadline, wait, log.info)


def _loaded(engine: str | None, ready_url: str | None, local: Path) -> Callable[[], bool]:
    """Whether the engine, or the URL, answers; a hindrance is logged once. An unfit engine has loaded too."""
    from weightcast.subscriber.engines.host import HostEngine
    from weightcast.subscriber.engines.kinds import open_engine
    from weightcast.subscriber.engines.launch import PROBE_SECONDS
    from weightcast.subscriber.engines.wire import Key, Keys, Wire

    look: Callable[[], EngineFacts]
    timeouts = Timeouts(connect=PROBE_SECONDS, probe=PROBE_SECONDS, control=PROBE_SECONDS)
    if engine is not None and ready_url is None:
        look = HostEngine(open_engine(parse_engine(engine, local), timeouts=timeouts)).probe
    elif ready_url is not None and engine is None:
        try:
            url = parse_engine(f"webhook={ready_url}", local).url
        except BadEngineOption as error:
            given = f"--ready-url: {ready_url!r} cannot be asked"
            raise NoProbe(given, remedy="give http[s]://HOST/...") from error
        key = Key(remedy="give --engine with api_key_env= in place of --ready-url, or a URL without a key")
        look = partial(_look_at, Wire(url, timeouts, Keys(key)), PROBE_SECONDS)
    else:
        given = "neither" if engine is None else "both"
        raise NoProbe(
            f"{given} of --engine and --ready-url is given: how is it seen that the engine has loaded?",
            remedy="give one: --engine kind=URL as the subscriber has it, or --ready-url URL",
        )
    logged = ""

    def loaded() -> bool:
        nonlocal logged
        facts = look()
        if facts.hindrance not in ("", logged):
            log.warning("not usable", reason=facts.hindrance, remedy=facts.remedy)
            logged = facts.hindrance
        return facts.reachable or facts.unfit

    return loaded


def _look_at(wire: Wire, seconds: float) -> EngineFacts:
    try:
        return EngineFacts(reachable=200 <= wire.get("", seconds).require_key().status < 300)
    except EngineFailed as failure:
        return unreachable(failure)


_MOST_SECONDS, _MOST = 1e9, 1_000_000
"""that a plan is made for: what it says stays a number"""


@click.command
@any_channel_option
@option("--local", type=path, envvar="WEIGHTCAST_LOCAL", help="Local checkpoint, or where it will be.")
@option("--draft", type=path, envvar="WEIGHTCAST_DRAFT", help="Local checkpoint of the run's draft model.")
@option(
    "--engine",
    multiple=True,
    envvar="WEIGHTCAST_ENGINE",
    help="Inference engine KIND=URL[,KEY=VALUE...]; repeatable.",
)
@option(
    "--role", type=click.Choice(["publisher", "subscriber"]), help="What runs on this machine; unset: both."
)
@option("--timeout", type=Number(0.1, 3600), default=30.0, help="Seconds that each check may take.")
@option(
    "--tls-cert",
    type=path,
    envvar="WEIGHTCAST_TLS_CERT",
    help="PEM file with a daemon's certificate: check its dates, names, key and authority.",
)
@option(
    "--tls-name",
    multiple=True,
    envvar=("WEIGHTCAST_GATE_URL", "WEIGHTCAST_HOST"),
    help="Host or URL by which callers reach that daemon, to check the certificate's names; repeatable; "
    "unset: this machine's name.",
)
@key_option
@ca_option
@option("--plan", type=path, help="HF checkpoint: say what a run of it will need; no weights are read.")
@option("--density", type=Number(0, 1), default=0.01, help="Plan: share of elements that a version changes.")
@option(
    "--interval", type=Number(0.001, _MOST_SECONDS), default=30.0, help="Plan: seconds between two versions."
)
@option("--hosts", type=click.IntRange(1, _MOST), default=1, help="Plan: number of rollout hosts.")
@option(
    "--away",
    type=Number(0, _MOST_SECONDS),
    default=600.0,
    help="Plan: seconds that a host is away.",
)
@option("--link", type=Number(0.001, _MOST), default=10.0, help="Plan: a host's link to the channel, Gbit/s.")
@option(
    "--threads",
    type=click.IntRange(1, _MOST),
    default=DEFAULT_THREADS,
    help="Plan: worker threads of a host.",
)
@option("--encoding", type=click.Choice(get_args(Encoding)), default="fast", help="Plan: delta encoding.")
@option(
    "--poll",
    type=Number(0.001, _MOST_SECONDS),
    default=1.0,
    help="Plan: seconds between two polls.",
)
@option(
    "--get-price", type=Number(0, _MOST), default=GET_PRICE, help="Plan: dollars per 1,000 GET of a bucket."
)
@option("--put-price", type=Number(0, _MOST), default=PUT_PRICE, help="Plan: dollars per 1,000 PUT and LIST.")
@json_option
def doctor(
    channel: ChannelAddress | None,
    local: Path | None,
    draft: Path | None,
    engine: Sequence[str],
    role: Role | None,
    timeout: float,
    tls_cert: Path | None,
    tls_name: Sequence[str],
    tls_key: Path | None,
    ca: Path | None,
    plan: Path | None,
    link: float,
    as_json: bool,
    **workload: Any,
) -> None:
    """Check this machine, its file systems and engines, or say what a run will need (--plan). Changes
    nothing."""
    from weightcast.shared.doctor.certificates import judge_certificate
    from weightcast.shared.doctor.examine import examine, show_findings
    from weightcast.shared.doctor.rules import counts, exit_code
    from weightcast.subscriber.engines.inspect import judge_engines

    asked = Workload(link=link * 1e9, **workload)
    weights = None if plan is None else _weights(plan)
    found = None if weights is None else sizing(weights, asked)
    findings: list[Finding] = []
    if plan is None or channel is not None or local is not None or engine or tls_cert is not None:
        findings += examine(channel, local, role, timeout)
        findings += [] if tls_cert is None else judge_certificate(tls_cert, tls_key, ca, tls_name)
        findings += judge_engines(engine, Path.cwd() if local is None else local.absolute(), timeout, draft)

    def show(console: Console) -> None:
        if weights is not None and found is not None:
            show_plan(console, weights, asked, found)
        if findings:
            show_findings(console, findings)

    needs = None if weights is None or found is None else plan_facts(weights, asked, found)
    plain = [{key: fact for key, fact in asdict(each).items() if key != "exit_code"} for each in findings]
    Output(json=as_json).result({"findings": plain, "counts": counts(findings), "plan": needs}, show)
    code = exit_code(findings)
    if code != OK:
        raise click.exceptions.Exit(code)


def _weights(model: Path) -> Weights:
    """Reads headers alone. Raises Refused for a directory without a checkpoint."""
    from weightcast.shared.files.hf_checkpoint import open_checkpoint

    try:
        return Weights.of(open_checkpoint(model, follow_links=True, need_index=False).table)
    except FileNotFoundError as error:
        raise Refused(f"{model} is not there", remedy="give an HF checkpoint directory") from error
