"""The settings of a daemon as options of its verb."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from weightcast.shared.service.settings import (
    ServiceSettings,
    describe_settings,
    flag_of,
    is_list,
    is_switch,
    load_settings,
)

S = TypeVar("S", bound=ServiceSettings)


def settings_command(
    app: typer.Typer, name: str, cls: type[S], help: str
) -> Callable[[Callable[[S], None]], None]:
    """Decorator: `body(settings)` becomes the verb `name` of `app`, with one option for each setting of `cls`
    that is no secret, and `--config FILE`. The options hand on text: `cls` judges all values together."""

    def register(body: Callable[[S], None]) -> None:
        def verb(**flags: Any) -> None:
            config = flags.pop("config")
            body(load_settings(cls, flags, config))

        parameters = _parameters(cls)
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        verb.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, help=help)(verb)

    return register


def _parameters(cls: type[ServiceSettings]) -> list[inspect.Parameter]:
    config = Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="TOML file with settings."),
    ]
    annotations: dict[str, Any] = {"config": config}
    for doc in describe_settings(cls):
        if not doc.flag:
            continue
        text = f"{doc.help} [{doc.env}]" + (f" [default: {doc.default}]" if doc.default else "")
        annotations[doc.name] = _annotation(cls, doc.name, doc.type, text)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


def _annotation(cls: type[ServiceSettings], name: str, type_name: str, help: str) -> Any:
    field, flag = cls.model_fields[name], flag_of(name)
    if is_switch(field):
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help)]
    kind = list[str] if is_list(field) else str
    return Annotated[
        kind | None,
        typer.Option(flag, metavar=type_name if "|" in type_name else type_name.upper(), help=help),
    ]
