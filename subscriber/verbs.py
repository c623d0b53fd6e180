"""Verbs of the subscriber: `subscriber run`, `sync`."""

from __future__ import annotations

import typer

from weightcast.shared.service.cli import group
from weightcast.shared.service.options import settings_command
from weightcast.subscriber.daemon import run_subscriber
from weightcast.subscriber.settings import SubscriberSettings


def register(app: typer.Typer) -> None:
    subscriber = group(app, "subscriber", "Keep a rollout host's checkpoint and engines on a channel.")
    settings_command(
        subscriber, "run", SubscriberSettings, "Follow a channel and reload the engines, until stopped."
    )(run_subscriber)
