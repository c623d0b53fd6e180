"""Prints the help of every command as a page: python docs/make_commands.py"""

from __future__ import annotations

from collections.abc import Iterator

import click

from weightcast.shared.cli.main import LazyCommand, program

TOP = """\
# Commands

The help of every command. Exit codes: [runbook](../runbook.md#exit-codes). Flags of the daemons with their
variables and defaults: [settings](../settings.md). Completion of commands, options and values in bash,
zsh and fish: `weightcast --install-completion`.
"""


def document() -> str:
    found = ((name, _help(name, command)) for name, command in commands_of(program()))
    return TOP + "".join(f"\n## weightcast {name}\n\n```text\n{help}\n```\n" for name, help in found)


def commands_of(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Name and command of all that are not groups."""
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{name}{word} ")
        elif isinstance(command, LazyCommand):
            yield f"{name}{word}", command.load()


def _help(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"weightcast {name}", max_content_width=100)
    return command.get_help(context)


if __name__ == "__main__":
    print(document(), end="")
