"""Help texts: what a person reads who knows one command, or none."""

from __future__ import annotations

import re
import shlex

import click
import pytest
from click.testing import CliRunner
from command_tree import commands_of, find

from weightcast.shared.cli.examples import EXAMPLES
from weightcast.shared.cli.main import COMMANDS, program

LEAVES = [name for name, (place, _) in COMMANDS.items() if place]


def test_all_commands_are_listed_by_what_they_are_for() -> None:
    text = CliRunner().invoke(program(), ["--help"], terminal_width=80).output
    for name in LEAVES:
        shown = " ".join(name.split()[:2])
        assert re.search(rf"^  {shown}  +\S", text, re.MULTILINE), name
    found = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert found == ["Options", "Run", "Watch", "Channel", "Host", "Tools"]
    rows = text.partition("Run:\n")[2].splitlines()
    assert all(re.match(r"  \S|$|\w+:$", row) for row in rows), "one line each at 80 columns"


@pytest.mark.parametrize("words", LEAVES)
def test_examples_are_lines_that_the_command_takes(words: str) -> None:
    for line in EXAMPLES[words]:
        assert all(len(part) <= 78 for part in f"  weightcast {line}".splitlines())
        command, arguments = find(shlex.split(line.replace("\\\n", "")))
        command.make_context(words, list(arguments))


def test_important_settings_come_first_and_common_ones_last() -> None:
    first = {
        "publisher run": ["--channel", "--local", "--base", "--watch"],
        "subscriber run": ["--channel", "--local", "--base", "--base-version", "--draft", "--engine"],
        "gateway run": ["--channel", "--publisher", "--gates"],
        "mirror run": ["--to", "--from"],
    }
    for name, command in commands_of():
        if name in first:
            text = command.get_help(click.Context(command, info_name=name))
            own, _, common = text.partition("HTTP, TLS, log, keys and limits:")
            options = re.findall(r"^  (--[a-z-]+)", own, re.MULTILINE)
            assert options[: len(first[name])] == first[name]
            assert {"--host", "--tls-cert", "--log-level"} <= set(re.findall(r"--[a-z-]+", common))


def test_types_and_variables_are_written_in_one_way() -> None:
    for name, command in commands_of():
        text = command.get_help(click.Context(command, info_name=name, max_content_width=300))
        assert not re.search(r"RANGE|env var|--[a-z-]+ LIST|FLOAT|CHANNEL_ADDRESS", text), name
        for help in (
            param.help for param in command.params if isinstance(param, click.Option) and param.help
        ):
            assert not re.match(r"(Of|Its|As|That|Instead|With)\b|.*: of ", help), (name, help)
