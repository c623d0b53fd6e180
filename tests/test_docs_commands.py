"""Shell blocks of the documents are valid shell, and every `weightcast` command line in them is one that
weightcast takes: commands, options and values are parsed as in a call, and nothing is run. They
are run by tests/e2e: test_tutorial.py and test_shell_blocks.py."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
from command_tree import find

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.mirror.settings import MirrorSettings
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.daemon.settings import PREFIX, DaemonSettings, load_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.gateway.settings import GatewaySettings

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "deploy" / "package.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
BLOCK = re.compile(r"^ *```(?:sh|shell|bash|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ENDS = {"|", "||", "&&", ";", "&", "--", "<", ">", ">>", "2>", "2>>"}
ELIDED = "..."
DAEMONS: Mapping[str, type[DaemonSettings]] = {
    "publisher": PublisherSettings,
    "subscriber": SubscriberSettings,
    "mirror": MirrorSettings,
    "gateway": GatewaySettings,
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}TOKEN", "a-token")
    monkeypatch.setenv(f"{PREFIX}GROUP_TOKEN", "a-token")


def blocks_of(document: Path) -> list[str]:
    return BLOCK.findall(document.read_text())


def command_lines(document: Path) -> Iterator[list[str]]:
    """The words after `weightcast`, up to what is another program's."""
    for block in blocks_of(document):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "weightcast " in line else []
            for at, word in enumerate(words):
                if word == "weightcast" and all("=" in before for before in words[:at]):
                    yield own_words(words[at + 1 :])


def own_words(words: list[str]) -> list[str]:
    """`run-engine` takes the engine's command line too."""
    ends = ENDS - {"--"} if words[:1] == ["run-engine"] else ENDS
    end = next((at for at, word in enumerate(words) if word in ends), len(words))
    return words[:end]


def problem_of(words: list[str]) -> str:
    """Why weightcast does not take them; empty when it does. Values in capitals (`VERSION`) are elided."""
    given = [word for word in words if word != ELIDED]
    try:
        command, rest = find(given)
    except KeyError as unknown:
        return f"no such command: {unknown.args[0]}"
    if isinstance(command, click.Group) or "--help" in rest:
        return ""
    try:
        context = command.make_context(words[0], list(rest))
        side = "subscriber" if words[0] == "sync" else words[words[:2] == ["config", "show"] and 2]
        if side in DAEMONS and words[1:] != ["sync"]:
            flags = {key: value for key, value in context.params.items() if key in DAEMONS[side].model_fields}
            load_settings(DAEMONS[side], flags)
    except click.MissingParameter as missing:
        return "" if ELIDED in words else missing.format_message()
    except click.UsageError as error:
        return error.format_message()
    except WeightcastError as error:
        return "" if ELIDED in words and "required" in str(error) else str(error)
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_command_lines_are_taken(document: Path) -> None:
    wrong = {" ".join(words): said for words in command_lines(document) if (said := problem_of(words))}
    assert wrong == {}


def test_blocks_are_shell() -> None:
    for document in DOCUMENTS:
        for block in blocks_of(document):
            done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
            assert done.stderr == "", f"{document}:\n{block}"


def test_the_recipes_are_found_and_misspelt_ones_noticed() -> None:
    lines = list(command_lines(ROOT / "docs" / "engines.md"))
    assert len(lines) > 2 and any(words[:1] == ["run-engine"] for words in lines)
    assert "--chanel" in problem_of(["subscriber", "run", "--chanel", "x"])
    assert "ran" in problem_of(["subscriber", "ran"])
    host = ["subscriber", "run", "--channel", "/c", "--local", "/l"]
    assert problem_of(host) == "" and "engine" in problem_of([*host, "--engine", "sglan=http://127.0.0.1:1"])
    assert "--version" in problem_of(["wait", "--version", "x", "--channel", "/c"])
    assert "--local" in problem_of(["sync", "--channel", "/c"])
