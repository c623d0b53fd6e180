"""The verb `sync`, in a module of its own: that command imports no more than it needs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from weightcast.shared.errors import EngineFailed
from weightcast.shared.service.logs import setup_logs
from weightcast.shared.service.output import (
    ChannelOption,
    JsonOption,
    Output,
    TrustedKeyOption,
    printable,
)
from weightcast.shared.service.settings import load_settings
from weightcast.subscriber.board import Board
from weightcast.subscriber.settings import SubscriberSettings
from weightcast.subscriber.status import HostStatus
from weightcast.subscriber.sync import Sync
from weightcast.subscriber.wiring import open_engines, open_lead, options_of

if TYPE_CHECKING:
    from rich.console import Console

_LOOK_SECONDS = 0.5


def register(app: typer.Typer) -> None:
    app.command("sync")(sync)


def sync(
    channel: ChannelOption,
    local: Annotated[
        Path,
        typer.Option("--local", envvar="WEIGHTCAST_LOCAL", help="Local checkpoint: what engines load from."),
    ],
    base: Annotated[
        Path | None,
        typer.Option("--base", envvar="WEIGHTCAST_BASE", help="HF checkpoint that the run starts from."),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", help="Inference engine kind=URL[,...]; repeatable.")
    ] = None,
    target: Annotated[str, typer.Option("--target", help="latest, a version or a tag.")] = "latest",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Working threads; unset: every core allowed.")
    ] = None,
    visible_deadline: Annotated[
        float | None,
        typer.Option("--visible-deadline", min=0.1, help="Seconds to wait for what the pointer names; 120."),
    ] = None,
    wait_engine: Annotated[
        float, typer.Option("--wait-engine", min=0, help="Seconds to wait for engines that do not serve yet.")
    ] = 0.0,
    trusted_key: TrustedKeyOption = None,
    rehash: Annotated[
        bool, typer.Option("--rehash", help="Read every byte first and repair what differs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a local checkpoint (and engines) to the target once, then end."""
    flags: dict[str, object] = {
        "channel": channel,
        "local": local,
        "base": base,
        "engine": engine or None,
        "target": target,
        "threads": threads,
        "visible_deadline": visible_deadline,
        "trusted_key": trusted_key or None,
    }
    setup_logs(level="error")
    settings = load_settings(SubscriberSettings, flags)
    output = Output(json=as_json)
    with _term_as_interrupt():
        status = _sync(settings, output, rehash, wait_engine)
    output.result(status, lambda console: _show(console, status))
    _judge(status)


def _sync(settings: SubscriberSettings, output: Output, rehash: bool, engine_seconds: float) -> HostStatus:
    # asked for by name: also a follower comes to the target
    options = replace(options_of(settings), group_follower=False)
    board = Board(options)
    with output.progress(f"{settings.local}", None) as advance:
        patience = _Patience(settings.visible_deadline)
        lead = open_lead(settings)
        one = Sync(
            options, open_engines(settings, lead), lead, show=board.show, stop=patience.wait, advance=advance
        )
        try:
            outcome = one.rehash() if rehash else one.sync_once()
            deadline = time.monotonic() + engine_seconds
            while not outcome.ready and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                outcome = one.sync_once()
            return board.status.get()
        finally:
            one.close()


class _Patience:
    """Waits, and says so once: a person looks on."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._told = seconds, False

    def wait(self, seconds: float) -> bool:
        if seconds > 0 and not self._told:
            self._told = True
            typer.echo(f"something is not there yet; waiting up to {self._seconds:g} s", err=True)
        time.sleep(seconds)
        return False


@contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """An engine that is paused is resumed before the process ends."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _judge(status: HostStatus) -> None:
    """Raises EngineFailed when an engine does not hold the target."""
    if status.blocked and status.local_version != status.target_version:
        refused = status.blocked[-1]
        raise EngineFailed(
            f"version {refused.version} was refused: {refused.reason}", remedy="publish a newer version"
        )
    if status.not_ready_reasons:
        raise EngineFailed(
            "; ".join(status.not_ready_reasons), remedy="see the engines' logs, then sync again"
        )


def _show(console: Console, status: HostStatus) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("local", printable(status.local))
    table.add_row("run", printable(status.run_id or "-"))
    table.add_row("version", f"{status.local_version} (target {status.target_version})")
    table.add_row("root", status.local_root or "-")
    table.add_row("signed", status.signed)
    for update in status.updates:
        table.add_row(
            update.kind, f"to {update.version}, {update.bytes} bytes, {update.seconds['total']:.2f} s"
        )
    for engine in status.engines:
        table.add_row(
            printable(engine.name),
            f"{engine.mark} {'-' if engine.version is None else engine.version} {printable(engine.reason)}",
        )
    console.print(table)
