"""The verb `run-engine`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from weightcast.shared.base.errors import USAGE, EngineFailed, Refused
from weightcast.shared.daemon.logs import get_log, setup_logs
from weightcast.subscriber.engines.base import (
    BadEngineOption,
    EngineFacts,
    EngineSpec,
    Timeouts,
    parse_engine,
    unreachable,
)
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.launch import PROBE_SECONDS, Launch, run_engine
from weightcast.subscriber.engines.wire import Key, Keys, Wire

log = get_log("run-engine")
PROBING = Timeouts(connect=PROBE_SECONDS, probe=PROBE_SECONDS, control=PROBE_SECONDS)


NO_KEY = Key(remedy="give --engine with api_key_env= in place of --ready-url, or a URL without a key")


class NoProbe(Refused):
    exit_code = USAGE


def register(app: typer.Typer) -> None:
    app.command("run-engine")(run)


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The engine's command line.")],
    local: Annotated[
        Path,
        typer.Option("--local", envvar="WEIGHTCAST_LOCAL", help="Local checkpoint that the engine loads."),
    ],
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="The engine as the subscriber has it; it has loaded once it answers."),
    ] = None,
    ready_url: Annotated[
        str | None, typer.Option("--ready-url", help="Instead: it has loaded once this URL answers 2xx.")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for a checkpoint that may be loaded.")
    ] = 600.0,
    load_deadline: Annotated[
        float, typer.Option("--load-deadline", min=1, help="Seconds after which versions come all the same.")
    ] = 1800.0,
) -> None:
    """Start an engine while no version is patched in; pass signals on, end with its exit code."""
    setup_logs()
    local = local.absolute()
    loaded = _loaded(engine, ready_url, local)
    code = run_engine(Launch(local, command, loaded, load_deadline, wait, log.info))
    raise typer.Exit(code)


def _loaded(engine: str | None, ready_url: str | None, local: Path) -> Callable[[], bool]:
    if engine is not None and ready_url is None:
        return _Loaded(HostEngine(open_engine(parse_engine(engine, local), timeouts=PROBING)).probe)
    if ready_url is not None and engine is None:
        wire = Wire(_spec(ready_url, local).url, PROBING, Keys(NO_KEY))
        return _Loaded(lambda: _look_at(wire))
    given = "neither" if engine is None else "both"
    raise NoProbe(
        f"{given} of --engine and --ready-url is given: how is it seen that the engine has loaded?",
        remedy="give one: --engine kind=URL as the subscriber has it, or --ready-url URL",
    )


def _spec(url: str, local: Path) -> EngineSpec:
    try:
        return parse_engine(f"webhook={url}", local)
    except BadEngineOption as error:
        raise NoProbe(f"--ready-url: {url!r} cannot be asked", remedy="give http[s]://HOST/...") from error


class _Loaded:
    """Whether an engine, or a URL, answers; what hinders it is logged once. An unfit one has loaded too."""

    def __init__(self, look: Callable[[], EngineFacts]) -> None:
        self._look, self._logged = look, ""

    def __call__(self) -> bool:
        facts = self._look()
        if facts.hindrance not in ("", self._logged):
            log.warning("not usable", reason=facts.hindrance, remedy=facts.remedy)
            self._logged = facts.hindrance
        return facts.reachable or facts.unfit


def _look_at(wire: Wire) -> EngineFacts:
    try:
        return EngineFacts(reachable=200 <= wire.get("", PROBE_SECONDS).require_key().status < 300)
    except EngineFailed as failure:
        return unreachable(failure)
