"""The command `sync`, in a module of its own: it imports no more than it needs, for help only settings."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from weightcast.shared.base.errors import EngineFailed
from weightcast.shared.cli.options import Number, json_option, option
from weightcast.shared.cli.output import Output, facts_table, or_dash
from weightcast.shared.cli.settings_options import options_of_settings
from weightcast.shared.daemon.logs import setup_logs, size_text
from weightcast.shared.daemon.settings import load_settings
from weightcast.shared.files.paths import printable, require_places
from weightcast.subscriber.daemon.settings import SubscriberSettings

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.subscriber.status import HostStatus
    from weightcast.subscriber.sync.sync import Sync

_LOOK_SECONDS = 0.5
_FIRST_SECONDS, _TELL_SECONDS = 3.0, 10.0
"""after which, and how often, a line says how far the command is"""
_SETTINGS = (
    "channel", "local", "base", "base_version", "draft", "engine", "target", "adapters", "adapters_kept",
    "adapters_plain_names", "allow_base_drift", "threads", "visible_deadline", "fetch_rate", "trusted_key",
)  # fmt: skip
"""of the daemon that are options here"""


@click.command
@option(
    "--wait-channel",
    type=Number(min=0),
    default=0.0,
    help="Seconds to wait for a channel that is not there yet.",
)
@option(
    "--wait-engine",
    type=Number(min=0),
    default=0.0,
    help="Seconds to wait for engines that do not serve yet.",
)
@option("--rehash", is_flag=True, help="Read every byte first and repair what differs.")
@json_option
def sync(wait_channel: float, wait_engine: float, rehash: bool, as_json: bool, **flags: Any) -> None:
    """Bring a local checkpoint (and engines) to the target once, then end."""
    from weightcast.subscriber.daemon.wiring import open_engines, open_lead, options_of
    from weightcast.subscriber.sync.host import Callbacks
    from weightcast.subscriber.sync.sync import Sync

    setup_logs(level="error")
    settings = load_settings(SubscriberSettings, flags)
    require_places(settings.channel, settings.local)
    lead = open_lead(settings)
    engines = open_engines(settings, lead)
    # asked for by name: also a follower comes to the target
    options = replace(options_of(settings), group_follower=False)
    output = Output(json=as_json)
    with _term_as_interrupt(), output.progress(str(options.local), None) as advance:
        one = Sync(options, engines, lead, Callbacks(show=_tell(), advance=advance))
        try:
            status = _first(one, rehash, wait_channel)
            deadline = time.monotonic() + wait_engine
            while not status.ready and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                status = one.sync_once()
        finally:
            one.close()
    output.result(status, lambda console: _show(console, status))
    _judge(status)


sync.params[:0] = options_of_settings(SubscriberSettings, _SETTINGS)


def _first(one: Sync, rehash: bool, seconds: float) -> HostStatus:
    """Of the step that is taken as soon as there is a channel."""
    from weightcast.shared.channel.channel import NoChannel

    deadline, told = time.monotonic() + seconds, False
    # asked for once: the bytes here are read while a channel is waited for, too
    step = one.rehash if rehash else one.sync_once
    while True:
        try:
            return step()
        except NoChannel as error:
            if time.monotonic() >= deadline:
                raise
            if not told:
                print(f"{printable(error.message)}; waiting up to {seconds:g} s", file=sys.stderr)
            told, step = True, one.sync_once
            time.sleep(_LOOK_SECONDS)


def _tell() -> Callable[[HostStatus], None]:
    """Says once what the command waits for, and every some seconds how far it is, where no bar shows that."""
    told, due = False, time.monotonic() + _FIRST_SECONDS

    def tell(status: HostStatus) -> None:
        nonlocal told, due
        if time.monotonic() >= due and status.progress_bytes and not sys.stderr.isatty():
            due = time.monotonic() + _TELL_SECONDS
            total = f" of {size_text(status.progress_total)}" if status.progress_total else ""
            done = f"{size_text(status.progress_bytes)}{total}"
            print(f"{status.state} version {or_dash(status.target_version)}: {done}", file=sys.stderr)
        waiting = status.waiting_for
        if waiting is not None and not told:
            told = True
            seconds = waiting.until - time.time()
            print(printable(f"{waiting}; up to {seconds:.0f} s more"), file=sys.stderr)

    return tell


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
    failed = [f"{name}: {one.error}" for name, one in status.components.items() if not one.ready]
    if reasons := list(status.not_ready_reasons) or failed:
        known = (one.remedy for one in status.components.values() if one.remedy and not one.ready)
        remedy = next(known, "fix what the message names, or see the engines' logs; then sync again")
        raise EngineFailed("; ".join(reasons), remedy=remedy)


def _show(console: Console, status: HostStatus) -> None:
    from weightcast.shared.files.hf_checkpoint import left_text

    rows = [
        ("local", status.local),
        ("run", status.run_id or "-"),
        ("version", f"{status.local_version} (target {status.target_version})"),
        ("root", status.local_root or "-"),
        ("signed", status.signed),
        ("carried", ", ".join(status.carried)),
        *(
            ("restart", f"{name}: it read its config files before they changed")
            for name in status.engines_to_restart
        ),
        ("left behind", left_text(status.left_behind, most=20)),
        ("base notes", "; ".join(status.base_notes)),
        ("base files", status.base_files),
        *(("degraded", reason) for reason in status.degraded),
    ]
    for update in status.updates:
        untaken = "" if update.taken else ", no engine took it"
        seconds = update.seconds["total"]
        size = size_text(update.bytes)
        rows.append((update.kind, f"to {update.version}, {size}, {seconds:.2f} s{untaken}"))
    for engine in status.engines:
        version = or_dash(engine.version)
        rows.append((engine.name, f"{engine.mark} {version} {engine.reason}"))
    for name, one in status.components.items():
        loaded = ", ".join(map(str, one.loaded)) or "-"
        state = one.state if status.engines or one.state != "loaded" else "holds"
        rows.append((name, f"{state} {loaded} (target {or_dash(one.target)}) {one.error}"))
    console.print(facts_table((printable(name), printable(text)) for name, text in rows if text))
