"""The `weightcast` program with every command imported."""

from __future__ import annotations

from collections.abc import Iterator

import click

from weightcast.shared.cli.main import LazyCommand, program


def commands_of(group: click.Group | None = None, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Name and command of all that are not groups."""
    for word, found in (program() if group is None else group).commands.items():
        if isinstance(found, click.Group):
            yield from commands_of(found, f"{name}{word} ")
        else:
            assert isinstance(found, LazyCommand)
            yield f"{name}{word}", found.load()


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` begin with, and the words after its name. Raises KeyError."""
    found: click.Command = program()
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        found, words = found.commands[words[0]], words[1:]
    return found.load() if isinstance(found, LazyCommand) else found, words
