"""Verbs of the subscriber: `subscriber run`; `sync`, `run-engine` and `doctor` have modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from weightcast.shared.progress import Advance
from weightcast.shared.service import verbs_local
from weightcast.shared.service.app import group
from weightcast.shared.service.options import settings_command, show_settings_command
from weightcast.shared.service.verbs_local import EngineFound
from weightcast.subscriber import verbs_doctor, verbs_engine, verbs_sync
from weightcast.subscriber.service.settings import SubscriberSettings


def register(app: typer.Typer) -> None:
    subscriber = group(app, "subscriber", "The rollout hosts' side.")
    settings_command(
        subscriber, "run", SubscriberSettings, "Follow a channel and reload the engines, until stopped."
    )(_run)
    show_settings_command(app, "subscriber", SubscriberSettings)
    verbs_sync.VERB.register(app)
    verbs_engine.register(app)
    verbs_doctor.register(app)
    verbs_local.engines_are_read_by(_look)


def _look(option: str, local: Path, names: Sequence[str], advance: Advance | None) -> EngineFound:
    # needed by one verb: the others start without it
    from weightcast.subscriber.engines.look import look

    return look(option, local, names, advance)


def _run(settings: SubscriberSettings) -> None:
    # the web framework costs a second of start-up that one-shots need not pay
    from weightcast.subscriber.service.daemon import run_subscriber

    run_subscriber(settings)
