"""Verbs of the subscriber: `subscriber run`; `sync`, `run-engine` and `doctor` have modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from weightcast.shared.base.progress import Advance
from weightcast.shared.cli import local
from weightcast.shared.cli.app import group
from weightcast.shared.cli.local import EngineFound
from weightcast.shared.cli.options import settings_command, show_settings_command
from weightcast.subscriber import commands_doctor, commands_engine, commands_sync
from weightcast.subscriber.daemon.settings import SubscriberSettings


def register(app: typer.Typer) -> None:
    subscriber = group(app, "subscriber", "The rollout hosts' side.")
    settings_command(
        subscriber, "run", SubscriberSettings, "Follow a channel and reload the engines, until stopped."
    )(_run)
    show_settings_command(app, "subscriber", SubscriberSettings)
    commands_sync.VERB.register(app)
    commands_engine.register(app)
    commands_doctor.register(app)
    local.engines_are_read_by(_look)


def _look(option: str, local: Path, names: Sequence[str], advance: Advance | None) -> EngineFound:
    # needed by one verb: the others start without it
    from weightcast.subscriber.engines.inspect import look

    return look(option, local, names, advance)


def _run(settings: SubscriberSettings) -> None:
    # the web framework costs a second of start-up that one-shots need not pay
    from weightcast.subscriber.daemon.daemon import run_subscriber

    run_subscriber(settings)
