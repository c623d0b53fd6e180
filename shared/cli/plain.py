"""Verbs that are called for every version: their command lines are read here where they are plain.

typer, and pydantic which it imports, take longer than a small version does. The options of such a verb are
data: `Verb.read` takes a line in which nothing is missing, wrong or unusual, and typer is made from the same
data for all others, so that it alone says what is wrong and gives help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from weightcast.shared.files.paths import at_home

if TYPE_CHECKING:
    import typer

_MOST_DIGITS = 15


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

    def read(self, arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, object] | None:
        """A value for each option; None where typer is to read the line."""
        words = _Words(self.options)
        try:
            words.take(arguments)
            return dict(words.values(environment))
        except _NotPlainError:
            return None


class _NotPlainError(Exception):
    pass


class _Words:
    def __init__(self, options: Sequence[Option]) -> None:
        self._options = options
        self._flags = {one.written: one for one in options if not one.is_argument}
        self._places = [one for one in options if one.is_argument]
        self._given: dict[str, list[str]] = {}

    def take(self, arguments: Iterable[str]) -> None:
        left = iter(arguments)
        for word in left:
            if not word.startswith("-"):
                self._put(self._next_place(), word)
                continue
            flag, equals, value = word.partition("=")
            option = self._flags.get(flag)
            if option is None or (equals and option.kind is bool):
                raise _NotPlainError
            if not equals:
                value = "" if option.kind is bool else next(left, "-")
            self._put(option, value)

    def _next_place(self) -> Option:
        place = next((one for one in self._places if one.name not in self._given), None)
        if place is None:
            raise _NotPlainError
        return place

    def _put(self, option: Option, value: str) -> None:
        before = self._given.setdefault(option.name, [])
        # a value that looks like a flag may be a forgotten one
        if value.startswith("-") or (before and option.kind is not list):
            raise _NotPlainError
        before.append(value)

    def values(self, environment: Mapping[str, str]) -> Iterable[tuple[str, object]]:
        for option in self._options:
            yield option.name, self._value(option, environment)

    def _value(self, option: Option, environment: Mapping[str, str]) -> object:
        given = self._given.get(option.name)
        if given is None and option.env is not None and option.env in environment:
            if option.kind is list:
                raise _NotPlainError
            given = [environment[option.env]]
        if given is None:
            if option.is_required:
                raise _NotPlainError
            return option.default
        return _parsed(option, given)


def _parsed(option: Option, given: list[str]) -> object:
    text = given[-1]
    if option.kind is bool:
        return True
    if not all(given) or (option.choices and text not in option.choices):
        raise _NotPlainError
    if option.kind is list:
        return given
    if option.kind is Path:
        return at_home(Path(text))
    return text if option.kind is str else _number(option, text)


def _number(option: Option, text: str) -> int | float:
    whole, dot, part = text.partition(".")
    digits = whole + part
    is_plain = digits.isascii() and digits.isdigit() and whole and len(digits) <= _MOST_DIGITS
    if not is_plain or (dot and (option.kind is int or not part)):
        raise _NotPlainError
    number: int | float = option.kind(text)
    if option.least is not None and number < option.least:
        raise _NotPlainError
    return number


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
