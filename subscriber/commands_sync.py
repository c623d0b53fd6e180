"""The verb `sync`, in a module of its own: that command imports no more than it needs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from weightcast.shared.base.errors import EngineFailed
from weightcast.shared.channel.channel import NoChannel
from weightcast.shared.cli.output import Output
from weightcast.shared.cli.plain import CHANNEL, JSON, THREADS, TRUSTED_KEY, Option, Verb
from weightcast.shared.daemon.logs import setup_logs
from weightcast.shared.daemon.threads import working_threads
from weightcast.shared.files.paths import printable, require_places
from weightcast.shared.files.side_files import left_text
from weightcast.subscriber.daemon.status import StatusBuilder
from weightcast.subscriber.status import HostStatus
from weightcast.subscriber.sync.host import Outcome, SyncOptions
from weightcast.subscriber.sync.sync import Sync
from weightcast.subscriber.sync.target import parse_target

if TYPE_CHECKING:
    from rich.console import Console

    from weightcast.subscriber.engines.host import Engines
    from weightcast.subscriber.groups.lead import Lead

_LOOK_SECONDS = 0.5
_PREFIX = "WEIGHTCAST_"
_READ_HERE = frozenset(_PREFIX + name for name in ("CHANNEL", "LOCAL", "BASE", "CACHE"))
_OPTIONS = (
    CHANNEL,
    Option(
        "local",
        Path,
        "Local checkpoint: what engines load from.",
        env="WEIGHTCAST_LOCAL",
        is_required=True,
    ),
    Option("base", Path, "HF checkpoint that the run starts from.", env="WEIGHTCAST_BASE"),
    Option("engine", list, "Inference engine kind=URL[,...]; repeatable."),
    Option("target", str, "latest, a version or a tag.", default="latest"),
    THREADS,
    Option("visible_deadline", float, "Seconds to wait for what the pointer names; 120.", least=0.1),
    Option(
        "wait_channel", float, "Seconds to wait for a channel that is not there yet.", default=0.0, least=0
    ),
    Option("wait_engine", float, "Seconds to wait for engines that do not serve yet.", default=0.0, least=0),
    TRUSTED_KEY,
    Option("rehash", bool, "Read every byte first and repair what differs.", default=False),
    JSON,
)


def sync(
    channel: Path,
    local: Path,
    base: Path | None,
    engine: list[str] | None,
    target: str,
    threads: int | None,
    visible_deadline: float | None,
    wait_channel: float,
    wait_engine: float,
    trusted_key: list[str] | None,
    rehash: bool,
    as_json: bool,
) -> None:
    """Bring a local checkpoint (and engines) to the target once, then end."""
    setup_logs(level="error")
    require_places(channel, local)
    if engine or trusted_key or not is_plain(os.environ):
        flags = {
            "channel": channel,
            "local": local,
            "base": base,
            "engine": engine or None,
            "target": target,
            "threads": threads,
            "visible_deadline": visible_deadline,
            "trusted_key": trusted_key or None,
        }
        parts = _by_settings(flags)
    else:
        parts = Parts(plain_options(channel, local, base, target, threads, visible_deadline))
    output = Output(json=as_json)
    with _term_as_interrupt():
        status = _sync(parts, output, rehash, wait_channel, wait_engine)
    output.result(status, lambda console: _show(console, status))
    _judge(status)


VERB = Verb("sync", sync, _OPTIONS)


@dataclass(frozen=True)
class Parts:
    options: SyncOptions
    engines: Engines | None = None
    lead: Lead | None = None


def is_plain(environment: Mapping[str, str]) -> bool:
    """Whether it sets nothing that only the settings' class knows."""
    ours = {name.upper() for name in environment if name.upper().startswith(_PREFIX)}
    return ours <= _READ_HERE


def plain_options(
    channel: Path,
    local: Path,
    base: Path | None,
    target: str,
    threads: int | None,
    visible_deadline: float | None,
) -> SyncOptions:
    """What the settings come to where nothing else is set, without their class and pydantic under it. Raises
    BadTarget."""
    options = SyncOptions(
        channel=channel,
        local=local.absolute(),
        base=base,
        target=parse_target(target),
        threads=working_threads(threads),
    )
    return options if visible_deadline is None else replace(options, visible_seconds=visible_deadline)


def _by_settings(flags: Mapping[str, object]) -> Parts:
    from weightcast.shared.daemon.settings import load_settings
    from weightcast.subscriber.daemon.settings import SubscriberSettings
    from weightcast.subscriber.daemon.wiring import open_engines, open_lead, options_of

    settings = load_settings(SubscriberSettings, flags)
    lead = open_lead(settings)
    # asked for by name: also a follower comes to the target
    options = replace(options_of(settings), group_follower=False)
    return Parts(options, open_engines(settings, lead), lead)


def _sync(
    parts: Parts, output: Output, rehash: bool, channel_seconds: float, engine_seconds: float
) -> HostStatus:
    options = parts.options
    status_builder = StatusBuilder(options)
    with output.progress(f"{options.local}", None) as advance:
        one = Sync(options, parts.engines, parts.lead, show=_Patience(status_builder).show, advance=advance)
        try:
            outcome = _first(one, rehash, channel_seconds)
            deadline = time.monotonic() + engine_seconds
            while not outcome.ready and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                outcome = one.sync_once()
            return status_builder.status.get()
        finally:
            one.close()


def _first(one: Sync, rehash: bool, seconds: float) -> Outcome:
    """Of the step that is taken as soon as there is a channel."""
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


class _Patience:
    """Says once what the command waits for: a person looks on."""

    def __init__(self, status_builder: StatusBuilder) -> None:
        self._status_builder, self._told = status_builder, False

    def show(self, sync: Sync) -> None:
        self._status_builder.show(sync)
        waiting = sync.log.view.waiting_for
        if waiting is not None and not self._told:
            self._told = True
            seconds = waiting.until - time.time()
            text = f"waiting for version {waiting.version}: {waiting.reason}; up to {seconds:.0f} s more"
            print(printable(text), file=sys.stderr)


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
            "; ".join(status.not_ready_reasons),
            remedy="fix what the message names, or see the engines' logs; then sync again",
        )


def _show(console: Console, status: HostStatus) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("local", printable(status.local))
    table.add_row("run", printable(status.run_id or "-"))
    table.add_row("version", f"{status.local_version} (target {status.target_version})")
    table.add_row("root", status.local_root or "-")
    table.add_row("signed", status.signed)
    if status.carried:
        table.add_row("carried", printable(", ".join(status.carried)))
    for name in status.engines_to_restart:
        table.add_row("restart", f"{printable(name)}: it read its config files before they changed")
    if status.left_behind:
        table.add_row("left behind", left_text(status.left_behind, most=20))
    if status.base_notes:
        table.add_row("base notes", printable("; ".join(status.base_notes)))
    if status.base_files:
        table.add_row("base files", printable(status.base_files))
    for reason in status.degraded:
        table.add_row("degraded", printable(reason))
    for update in status.updates:
        untaken = "" if update.taken else ", no engine took it"
        table.add_row(
            update.kind,
            f"to {update.version}, {update.bytes} bytes, {update.seconds['total']:.2f} s{untaken}",
        )
    for engine in status.engines:
        table.add_row(
            printable(engine.name),
            f"{engine.mark} {'-' if engine.version is None else engine.version} {printable(engine.reason)}",
        )
    console.print(table)
