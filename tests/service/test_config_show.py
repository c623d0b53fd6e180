"""`weightcast config show`, and what a daemon says when it cannot start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Command

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.cli.main import run
from weightcast.shared.daemon.settings import BadSettings, load_settings, require_files
from weightcast.subscriber.daemon.settings import SubscriberSettings

Shown = dict[str, dict[str, Any]]


@pytest.fixture
def show(weightcast: Command) -> Callable[..., Shown]:
    def call(*arguments: str) -> Shown:
        code, out, _ = weightcast("config", "show", *arguments, "--json")
        assert code == 0
        return {one["name"]: one for one in json.loads(out)["settings"]}

    return call


def test_every_setting_is_shown_with_where_it_came_from(
    show: Callable[..., Shown], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('poll-seconds = 7\nlog_format = "json"\nport = 1\n')
    monkeypatch.setenv("WEIGHTCAST_TOKEN", "hunter2")
    monkeypatch.setenv("WEIGHTCAST_LOG_FORMAT", "console")
    monkeypatch.setenv("WEIGHTCAST_GROUP_TOKEN", "hunter3")
    shown = show(
        *(
            "subscriber",
            "--config",
            str(config),
            "--channel",
            "/c",
            "--local",
            "/l",
            "--memory-budget",
            "64MiB",
        ),
        *("--engine", "sglang=http://a:1", "--engine", "vllm=http://b:1", "--port", "0"),
    )
    assert set(shown) == set(SubscriberSettings.model_fields)
    assert shown["poll_seconds"] == {
        "name": "poll_seconds",
        "value": 7.0,
        "source": "file",
        "place": str(config),
    }
    assert shown["log_format"]["value"] == "console"
    assert (shown["log_format"]["source"], shown["log_format"]["place"]) == (
        "environment",
        "WEIGHTCAST_LOG_FORMAT",
    )
    assert (shown["port"]["value"], shown["port"]["source"], shown["port"]["place"]) == (0, "flag", "--port")
    assert shown["engine"]["value"] == ["sglang=http://a:1", "vllm=http://b:1"]
    assert shown["memory_budget"]["value"] == 64 << 20
    assert (shown["base"]["value"], shown["base"]["source"], shown["base"]["place"]) == (None, "default", "")
    assert shown["token"]["source"] == "environment"
    assert "hunter" not in json.dumps(shown)


def test_the_table_masks_secrets_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTCAST_TOKEN", "hunter2")
    assert run(["config", "show", "publisher", "--channel", "/c", "--local", "/l", "--base", "/b"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text and "WEIGHTCAST_TOKEN" in text
    assert len(text.splitlines()) == len(PublisherSettings.model_fields) + 1


def test_sizes_have_units_in_the_table_and_in_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["config", "show", "publisher", "--channel", "/c", "--local", "/l", "--base", "/b"]
    assert run([*asked, "--verify-rate", "0"]) == 0
    rows = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert (rows["memory_budget"], rows["verify_rate"]) == ("256MiB", "0B")
    assert run([*asked, "--memory-budget", "1MiB"]) == 2
    text = capsys.readouterr().err
    assert "memory_budget: give at least 16MiB (--memory-budget)" in text and "remedy: correct them" in text
    bad = tmp_path / "bad.toml"
    bad.write_text("local = /data")
    for config, remedy in ((bad, "texts in quotes"), (tmp_path / "none", "correct --config")):
        assert run([*asked, "--config", str(config)]) == 2
        text = capsys.readouterr().err
        assert str(config) in text and remedy in text


def test_settings_that_are_wrong_are_all_listed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        *("--local", "/l", "--host", "0.0.0.0", "--target", "../x", "--poll-seconds", "0"),
        *("--engine", "nobody=http://a", "--engine", "sglang=nowhere"),
    ]
    assert run(["config", "show", "subscriber", *wrong, "--json"]) == 2
    assert run(["subscriber", "run", *wrong]) == 2
    written = capsys.readouterr()
    for text in (json.loads(written.out)["message"], written.err):
        for problem in ("channel: required", "nobody", "nowhere", "../x", "poll_seconds", "0.0.0.0"):
            assert problem in text
        assert text.count("no token is set") == 1


def test_two_engines_of_one_name_are_a_problem_of_the_settings() -> None:
    given = {"channel": "/c", "local": "/l", "engine": ["sglang=http://a:1", "sglang=http://a:1/x"]}
    with pytest.raises(BadSettings, match="give them name="):
        load_settings(SubscriberSettings, given)


def test_files_that_a_daemon_cannot_start_with_are_all_listed(tmp_path: Path) -> None:
    key = tmp_path / "no key"
    settings = load_settings(
        PublisherSettings,
        {
            "channel": "/c",
            "local": "/l",
            "base": tmp_path / "nowhere",
            "sign_key": key,
            "trusted_key": ["ed25519:x", str(tmp_path / "gone")],
        },
    )
    with pytest.raises(BadSettings) as bad:
        require_files(settings)
    for problem in ("nowhere", "no key", "ed25519", "gone"):
        assert problem in bad.value.message
    assert bad.value.exit_code == 2
    with pytest.raises(BadSettings, match="gone"):
        require_files(
            SubscriberSettings(channel=Path("/c"), local=Path("/l"), trusted_key=(str(tmp_path / "gone"),))
        )


def test_changed_settings_alone(show: Callable[..., Shown], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_LOG_FORMAT", "json")
    shown = show("subscriber", "--changed", "--channel", "/c", "--local", "/l", "--log-level", "info")
    assert list(shown) == ["log_format", "log_level", "channel", "local"]
