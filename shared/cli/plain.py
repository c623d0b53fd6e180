"""Commands that are called for every version: their command lines are read here where they are plain.

typer, and pydantic which it imports, take longer than a small version does. The options of such a verb are
data: `Verb.read` takes a line in which nothing is missing, wrong or unusual, and typer is made from the same
data for all others, so that it alone says what is wrong and gives help.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from weightcast.shared.files.paths import at_home

if TYPE_CHECKING:
    import typer

_INTEGER, _NUMBER = r"\d{1,15}", r"\d{1,8}(\.\d{1,7})?"


@dataclass(frozen=True)
class Option:
    """`kind`: Path, str, int, float, bool (a switch) or list (of str, repeatable). `default` None: unset.
    `choices`: the only texts; `least`: of a number."""

    name: str
    kind: type
    help: str
    default: object = None
    flag: str = ""
    env: str | None = None
    least: float | None = None
    choices: tuple[str, ...] = ()
    is_required: bool = False
    is_argument: bool = False

    @property
    def written(self) -> str:
        return self.flag or "--" + self.name.replace("_", "-")

    def value(self, given: list[str] | None, environment: Mapping[str, str]) -> object:
        """Of the texts that were given, else of the environment. Raises ValueError for what is wrong or
        unusual."""
        if given is None and self.env is not None and self.env in environment:
            given = [environment[self.env]] if self.kind is not list else [""]
        if given is None:
            if self.is_required:
                raise ValueError(self.name)
            return self.default
        text = given[-1]
        if self.kind is bool:
            return True
        if not all(given) or (self.choices and text not in self.choices):
            raise ValueError(self.name)
        if self.kind is list:
            return given
        if self.kind is Path:
            return at_home(Path(text))
        return text if self.kind is str else self._number(text)

    def _number(self, text: str) -> int | float:
        if not re.fullmatch(_INTEGER if self.kind is int else _NUMBER, text, re.ASCII):
            raise ValueError(self.name)
        number: int | float = self.kind(text)
        if self.least is not None and number < self.least:
            raise ValueError(self.name)
        return number


@dataclass(frozen=True)
class Verb:
    """`body` is called with a value for each option, by name."""

    name: str
    body: Callable[..., None]
    options: Sequence[Option]

    def register(self, app: typer.Typer) -> None:
        def verb(**given: Any) -> None:
            _check_choices(self.options, given)
            self.body(**given)

        parameters = list(map(_parameter, self.options))
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        verb.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(self.name, help=inspect.getdoc(self.body))(verb)

    def read(self, arguments: Iterable[str], environment: Mapping[str, str]) -> dict[str, object] | None:
        """A value for each option; None where typer is to read the line."""
        flags = {one.written: one for one in self.options if not one.is_argument}
        places = [one for one in self.options if one.is_argument]
        given: dict[str, list[str]] = {}
        left = iter(arguments)
        try:
            for word in left:
                flag, equals, value = word.partition("=")
                if not word.startswith("-"):
                    option, value = places.pop(0), word
                elif flags[flag].kind is bool:
                    option, value = flags[word], ""
                else:
                    option, value = flags[flag], value if equals else next(left)
                before = given.setdefault(option.name, [])
                # a value that looks like a flag may be a forgotten one
                if value.startswith("-") or (before and option.kind is not list):
                    return None
                before.append(value)
            return {one.name: one.value(given.get(one.name), environment) for one in self.options}
        except (LookupError, StopIteration, ValueError):
            return None


def _parameter(option: Option) -> inspect.Parameter:
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if option.is_required else option.default,
        annotation=_annotation(option),
    )


def _annotation(option: Option) -> Any:
    import typer

    kind: Any = list[str] if option.kind is list else option.kind
    if option.default is None and not option.is_required:
        kind = kind | None
    if option.is_argument:
        return Annotated[kind, typer.Argument(help=option.help)]
    return Annotated[
        kind,
        typer.Option(
            option.written,
            help=option.help,
            envvar=option.env,
            min=option.least,
            metavar="|".join(option.choices) or None,
        ),
    ]


def _check_choices(options: Iterable[Option], given: Mapping[str, object]) -> None:
    import typer

    for option in options:
        text = given[option.name]
        if option.choices and text not in option.choices:
            raise typer.BadParameter(
                f"{text} is not one of {', '.join(option.choices)}", param_hint=option.written
            )


CHANNEL = Option("channel", Path, "The channel's directory.", env="WEIGHTCAST_CHANNEL", is_required=True)
TRUSTED_KEY = Option(
    "trusted_key",
    list,
    "Public key (ed25519:...), or file of them; repeatable. Unsigned versions are refused.",
    env="WEIGHTCAST_TRUSTED_KEY",
)
SIGN_KEY = Option("sign_key", Path, "File with the key that signs.", env="WEIGHTCAST_SIGN_KEY")
THREADS = Option("threads", int, "Worker threads; unset: all usable cores.", least=1)
JSON = Option("as_json", bool, "Print one JSON object instead of text.", default=False, flag="--json")
