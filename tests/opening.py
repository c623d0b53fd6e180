"""Publishers whose options are given by name, and whose upkeep happens when the test asks for it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from weightcast.publisher import PublisherOptions
from weightcast.publisher.run_publisher import RunPublisher

_NAMES = {field.name for field in fields(PublisherOptions)}


def open_publisher(channel: str | Path, **given: Any) -> RunPublisher:
    options = PublisherOptions(
        upkeep_thread=False, **{name: value for name, value in given.items() if name in _NAMES}
    )
    others = {name: value for name, value in given.items() if name not in _NAMES}
    return RunPublisher.open(channel, options=options, **others)
