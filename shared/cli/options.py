"""The settings of a daemon as options of its verb."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from weightcast.shared.cli.app import JsonOption, group
from weightcast.shared.cli.output import Output
from weightcast.shared.daemon.settings import (
    EffectiveSetting,
    ServiceSettings,
    describe_settings,
    effective_settings,
    exact_size,
    flag_of,
    is_list,
    is_size,
    is_switch,
    load_settings,
    require_files,
    trace_settings,
)
from weightcast.shared.files.paths import printable

if TYPE_CHECKING:
    from rich.console import Console

S = TypeVar("S", bound=ServiceSettings)


def settings_command(
    app: typer.Typer, name: str, cls: type[S], help: str
) -> Callable[[Callable[[S], None]], None]:
    """Decorator: `body(settings)` becomes the verb `name` of `app`, with one option for each setting of `cls`
    that is not a secret, and `--config FILE`. The options hand on text: `cls` judges all values together."""

    def register(body: Callable[[S], None]) -> None:
        def verb(**flags: Any) -> None:
            config = flags.pop("config")
            settings = load_settings(cls, flags, config)
            require_files(settings)
            body(settings)

        parameters = _parameters(cls)
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        verb.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, help=help)(verb)

    return register


def show_settings_command(app: typer.Typer, side: str, cls: type[S]) -> None:
    """The command `config show SIDE`: takes the options of the daemon and prints its effective settings."""

    def verb(**flags: Any) -> None:
        config, as_json = flags.pop("config"), flags.pop("as_json")
        shown = effective_settings(trace_settings(cls, flags, config))
        facts = {"settings": [asdict(one) for one in shown]}
        sizes = {name for name, field in cls.model_fields.items() if is_size(field)}
        Output(json=as_json).result(facts, lambda console: _show(console, shown, sizes))

    parameters = _parameters(cls)
    parameters.append(
        inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)
    )
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {each.name: each.annotation for each in parameters}
    config_group = group(app, "config", "Settings of the daemons.")
    show = group(config_group, "show", "Effective settings and their source.")
    show.command(side, help=f"Effective settings of `weightcast {side} run` with these options.")(verb)


def _show(console: Console, settings: Sequence[EffectiveSetting], sizes: Collection[str]) -> None:
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for one in settings:
        in_bytes = one.value if one.name in sizes else None
        text = exact_size(in_bytes) if isinstance(in_bytes, int) else _text(one.value)
        table.add_row(one.name, printable(text), printable(one.place or one.source))
    console.print(table)


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
