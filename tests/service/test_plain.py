"""Command lines that are read without typer: the same as typer reads, and nothing that it would refuse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.shared.cli.app import call, new_app
from weightcast.shared.cli.output import Output
from weightcast.shared.cli.plain import CHANNEL, JSON, THREADS, TRUSTED_KEY, Option, Verb

OPTIONS = (
    Option("checkpoint", Path, "A directory.", is_required=True, is_argument=True),
    CHANNEL,
    Option("base", Path, "Another.", env="WEIGHTCAST_BASE"),
    Option("encoding", str, "A choice.", default="fast", choices=("fast", "small")),
    Option("wait_engine", float, "Seconds.", default=1.0, least=0.5),
    THREADS,
    TRUSTED_KEY,
    Option("take_over", bool, "A switch.", default=False),
    JSON,
)
ENVIRONMENT = ("WEIGHTCAST_CHANNEL", "WEIGHTCAST_BASE", "WEIGHTCAST_TRUSTED_KEY")
FRAGMENTS = (
    ["--base", "/b"], ["--base="], ["--encoding", "small"], ["--encoding=large"], ["--wait-engine", "1.5"],
    ["--wait-engine", "0.25"], ["--wait-engine=2"], ["--wait-engine", "nan"], ["--threads", "3"],
    ["--threads", "0"], ["--threads", "٣"], ["--trusted-key", "a"], ["--trusted-key=b"], ["--take-over"],
    ["--take-over=1"], ["--json"], ["--no-json"], ["--help"], ["--"], ["--threa", "1"], ["more"], ["-5"],
    ["--base", "--json"], ["--channel", "/d"], ["--base=~/b"], ["--base", "~other"],
)  # fmt: skip


def typed(arguments: list[str], environment: dict[str, str]) -> dict[str, Any] | None:
    """As typer reads it; None where it refuses, or gives help."""
    seen: list[dict[str, Any]] = []
    app = new_app()
    Verb("verb", lambda **values: seen.append(values), OPTIONS).register(app)
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit):
            call(app, ["verb", *arguments], Output())
    return seen[0] if seen else None


def read(arguments: list[str], environment: dict[str, str]) -> dict[str, object] | None:
    return Verb("verb", lambda **values: None, OPTIONS).read(arguments, environment)


def test_the_home_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """bash leaves ~ alone after --flag=, and a service manager in every variable."""
    monkeypatch.setenv("HOME", "/h/me")
    for read_by in (read, typed):
        found = read_by(["~/ckpt", "--channel=~/c"], {"WEIGHTCAST_BASE": "~/b"})
        assert found is not None
        paths = {name: found[name] for name in ("checkpoint", "channel", "base")}
        assert paths == {
            "checkpoint": Path("/h/me/ckpt"),
            "channel": Path("/h/me/c"),
            "base": Path("/h/me/b"),
        }


def test_a_plain_line_is_read() -> None:
    line = ["ckpt", "--channel=/c", "--encoding", "small", "--threads", "3", "--trusted-key", "a", "--json"]
    assert read(line, {"WEIGHTCAST_BASE": "/b"}) == {
        "checkpoint": Path("ckpt"),
        "channel": Path("/c"),
        "base": Path("/b"),
        "encoding": "small",
        "wait_engine": 1.0,
        "threads": 3,
        "trusted_key": ["a"],
        "take_over": False,
        "as_json": True,
    }


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=4).flatmap(
        lambda some: st.permutations([["ckpt"], ["--channel", "/c"], *some])
    ),
    st.dictionaries(st.sampled_from(ENVIRONMENT), st.sampled_from(["", "/e", "a b"]), max_size=1),
)
def test_what_is_read_plainly_is_what_typer_reads(line: list[list[str]], environment: dict[str, str]) -> None:
    words = [word for fragment in line for word in fragment]
    plain = read(words, environment)
    if plain is not None:
        assert typed(words, environment) == plain


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no key but text, unlike a dictionary."""
    monkeypatch.setenv("WEIGHTCAST_CHANNEL", "/c")
    values = Verb("verb", lambda **values: None, OPTIONS).read(["d"], os.environ)
    assert values is not None and values["channel"] == Path("/c") and values["threads"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["ckpt"],
        ["ckpt", "--channel", "/c", "--help"],
        ["ckpt", "--channel", "/c", "--encoding", "large"],
        ["ckpt", "--channel", "/c", "--threads", "0"],
        ["ckpt", "--channel", "/c", "--threads", "1.5"],
        ["ckpt", "--channel", "/c", "--channel", "/d"],
        ["ckpt", "more", "--channel", "/c"],
        ["ckpt", "--channel"],
        ["ckpt", "--channel", "--json"],
        ["ckpt", "--channel", "/c", "--thread", "1"],
    ],
)
def test_mistakes_are_left_to_typer(arguments: list[str]) -> None:
    assert read(arguments, {}) is None


@pytest.mark.parametrize("text", ["large", ""])
def test_typer_takes_only_the_choices(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(["ckpt", "--channel", "/c", "--encoding", text], {}) is None
    assert "not one of fast, small" in capsys.readouterr().err


def test_help_is_typer_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(["--help"], {}) is None
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--channel", "--take-over", "fast|small", "--json"))
