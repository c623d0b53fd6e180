"""Values of options, as all commands read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from command_tree import commands_of

from weightcast.shared.cli import main
from weightcast.shared.cli.options import Number, channel_option, option, path, threads_option

seen: list[dict[str, Any]] = []


@click.command
@click.argument("checkpoint", type=path, help="A directory.")
@channel_option
@option("--base", type=path, envvar="WEIGHTCAST_BASE", help="Another.")
@option("--encoding", type=click.Choice(["fast", "small"]), default="fast", help="A choice.")
@option("--wait-engine", type=Number(min=0.5), default=1.0, help="Seconds.")
@threads_option
@option("--engine", multiple=True, envvar="WEIGHTCAST_ENGINE", help="Repeatable.")
def command(**values: Any) -> None:
    seen.append(values)


def read(*words: str) -> dict[str, Any] | None:
    """None where the line is refused."""
    seen.clear()
    code = main.run(["command", *words], {"command": (f"{__name__}:command", "Reads.")})
    assert (code == 0) == bool(seen) and code in (0, 2)
    return seen[0] if seen else None


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHTCAST_CHANNEL", "WEIGHTCAST_BASE", "WEIGHTCAST_ENGINE"):
        monkeypatch.delenv(name, raising=False)


def test_the_home_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """bash leaves ~ alone after --flag=, and a service manager in every variable."""
    monkeypatch.setenv("HOME", "/h/me")
    monkeypatch.setenv("WEIGHTCAST_BASE", "~/b")
    found = read("~/ckpt", "--channel=~/c")
    assert found is not None
    paths = {name: found[name] for name in ("checkpoint", "channel", "base")}
    assert paths == {"checkpoint": Path("/h/me/ckpt"), "channel": Path("/h/me/c"), "base": Path("/h/me/b")}


def test_defaults_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_CHANNEL", "/e")
    monkeypatch.setenv("WEIGHTCAST_ENGINE", "a b")
    monkeypatch.setenv("WEIGHTCAST_BASE", "")
    assert read("d") == {
        "checkpoint": Path("d"),
        "channel": Path("/e"),
        "base": None,
        "encoding": "fast",
        "wait_engine": 1.0,
        "threads": None,
        "engine": ("a", "b"),
    }
    found = read("d", "--channel", "/c", "--engine", "x", "--engine=y", "--threads", "3", "--wait-engine=2")
    assert found is not None and found["channel"] == Path("/c") and found["engine"] == ("x", "y")
    assert (found["threads"], found["wait_engine"]) == (3, 2.0)


@pytest.mark.parametrize(
    "mistake",
    [
        "--encoding large",
        "--encoding=",
        "--threads 0",
        "--threads 1.5",
        "--wait-engine 0.25",
        "--wait-engine nan",
        "--thread 1",
        "--engine",
        "more",
    ],
)
def test_mistakes_are_refused(mistake: str) -> None:
    assert read("ckpt", "--channel", "/c", *mistake.split()) is None
    assert read("--channel", "/c") is None and read("ckpt") is None


def test_help_names_variable_default_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["publish", "--help"]) == 0
    shown = capsys.readouterr().out
    words = ("CHECKPOINT", "--take-over", "fast|small|", "default: fast", "WEIGHTCAST_CHANNEL", "required")
    assert [word for word in words if word not in shown] == []


def test_all_commands_can_be_imported_and_explain_themselves() -> None:
    undocumented = [
        (name, each.name)
        for name, found in commands_of()
        for each in found.params
        if not getattr(each, "help", "")
    ]
    assert undocumented == [] and [name for name, found in commands_of() if not found.help] == []
