"""Every `weightcast` command line in a shell block of the documents is one that exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_tree import find

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(?:sh|shell|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENDS = {"|", "||", "&&", ";", "&", "--", ">", "2>"}


def command_lines(document: Path) -> Iterator[list[str]]:
    """The words after `weightcast`, up to what is another program's."""
    for block in BLOCK.findall(document.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "weightcast " in line else []
            for at, word in enumerate(words):
                if word == "weightcast" and all("=" in before for before in words[:at]):
                    yield own_words(words[at + 1 :])


def own_words(words: list[str]) -> list[str]:
    end = next((at for at, word in enumerate(words) if word in ENDS), len(words))
    return words[:end]


def unknown_in(words: list[str]) -> list[str]:
    try:
        command, rest = find(words)
    except KeyError as unknown:
        return [unknown.args[0]]
    known = {"--help"} | {
        name for option in command.params for name in (*option.opts, *option.secondary_opts)
    }
    given = (word.partition("=")[0] for word in rest if word.startswith("--"))
    return [name for name in given if name not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_command_lines_exist(document: Path) -> None:
    unknown = {" ".join(words): found for words in command_lines(document) if (found := unknown_in(words))}
    assert unknown == {}


def test_the_recipes_are_found_and_misspelt_ones_noticed() -> None:
    lines = list(command_lines(ROOT / "docs" / "engines.md"))
    assert len(lines) > 2 and any(words[:1] == ["run-engine"] for words in lines)
    assert unknown_in(["subscriber", "run", "--chanel", "x"]) == ["--chanel"]
    assert unknown_in(["subscriber", "ran"]) == ["ran"]
