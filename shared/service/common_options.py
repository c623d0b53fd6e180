"""Options that many verbs have, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weightcast.shared.service.plain import CHANNEL, JSON, SIGN_KEY, THREADS, TRUSTED_KEY, Option


def _option(option: Option) -> Any:
    return typer.Option(option.written, envvar=option.env, min=option.least, help=option.help)


JsonOption = Annotated[bool, _option(JSON)]
ChannelOption = Annotated[Path, _option(CHANNEL)]
TrustedKeyOption = Annotated[list[str] | None, _option(TRUSTED_KEY)]
SignKeyOption = Annotated[Path | None, _option(SIGN_KEY)]
ThreadsOption = Annotated[int | None, _option(THREADS)]
