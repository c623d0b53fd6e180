from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.daemon.settings import (
    CONFIG_LIMIT,
    BadSettings,
    ServiceSettings,
    describe_settings,
    load_settings,
)
from weightcast.subscriber.daemon.settings import SubscriberSettings


class ExampleSettings(ServiceSettings):
    port: int = Field(8341, ge=0, le=65535, description="Port.")
    local: Path = Field(description="Local checkpoint.")
    engine: list[str] = Field(default_factory=list, description="Engines.")
    signed: bool = Field(False, description="Only signed versions.")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_LOCAL", "/env")


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.write_text('port = 1\npoll_seconds = 2\nlog_level = "debug"\nengine = ["a", "b"]\n')
    monkeypatch.setenv("WEIGHTCAST_PORT", "3")
    monkeypatch.setenv("WEIGHTCAST_POLL_SECONDS", "4")
    settings = load_settings(ExampleSettings, {"port": "0", "poll_seconds": None}, config)
    assert (settings.port, settings.poll_seconds, settings.log_level) == (0, 4.0, "debug")
    assert settings.engine == ["a", "b"]
    assert settings.local == Path("/env")
    assert settings.memory_budget == 256 << 20


def test_the_home_directory_is_found_in_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.write_text('watch = "~/watch"\nallow = ["~/a", "/b"]\n')
    monkeypatch.setenv("HOME", "/h/me")
    monkeypatch.setenv("WEIGHTCAST_LOCAL", "~/local")
    settings = load_settings(PublisherSettings, {"channel": "~/channel", "base": "~user/base"}, config)
    assert (settings.watch, settings.local) == (Path("/h/me/watch"), Path("/h/me/local"))
    assert (settings.channel, settings.base) == (Path("/h/me/channel"), Path("~user/base"))
    assert settings.allow == [Path("/h/me/a"), Path("/b")]


def test_a_file_may_spell_settings_as_flags_do(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("poll-seconds = 2\n")
    assert load_settings(ExampleSettings, {"port": 0, "local": "x"}, config).poll_seconds == 2.0


def test_empty_environment_is_unset_and_lists_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_TOKEN", "")
    monkeypatch.setenv("WEIGHTCAST_ENGINE", "sglang=http://a,path=/x  vllm=http://b")
    settings = load_settings(ExampleSettings, {})
    assert settings.token is None
    assert settings.engine == ["sglang=http://a,path=/x", "vllm=http://b"]


def test_all_problems_are_listed_with_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.write_text("typo = 1\nstop_seconds = -1\n")
    monkeypatch.delenv("WEIGHTCAST_LOCAL")
    monkeypatch.setenv("WEIGHTCAST_PORT", "70000")
    monkeypatch.setenv("WEIGHTCAST_TOKEN", "hunter two")
    with pytest.raises(BadSettings) as bad:
        load_settings(ExampleSettings, {"poll_seconds": "nan", "memory_budget": "lots"}, config)
    text = bad.value.message
    for place in [
        "typo",
        str(config),
        "WEIGHTCAST_PORT",
        "WEIGHTCAST_TOKEN",
        "--poll-seconds",
        "--memory-budget",
    ]:
        assert place in text
    assert "local: required" in text
    assert "hunter" not in str(bad.value)
    assert bad.value.exit_code == 2


@pytest.mark.parametrize("content", [b"port = ", b"\xff", b"#" * (CONFIG_LIMIT + 1), None])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, content: bytes | None) -> None:
    config = tmp_path / "c.toml"
    if content is not None:
        config.write_bytes(content)
    with pytest.raises(BadSettings, match=r"c\.toml"):
        load_settings(ExampleSettings, {}, config)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "host.example", "127.0.0.1.example"])
def test_an_open_door_needs_a_token(host: str) -> None:
    with pytest.raises(BadSettings, match="token"):
        load_settings(ExampleSettings, {"host": host})
    assert load_settings(ExampleSettings, {"host": host, "token": "s3cret"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert load_settings(ExampleSettings, {"host": host}).token is None


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *((SubscriberSettings, name) for name in ("channel", "local", "base", "port_file")),
        *((PublisherSettings, name) for name in ("channel", "local", "base", "watch", "hand_over", "allow")),
    ],
)
@pytest.mark.parametrize("path", ["/there/h\udcff", "relative"])
def test_paths_are_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[ServiceSettings], name: str, path: str
) -> None:
    here = tmp_path / "h\udcff"
    here.mkdir()
    monkeypatch.chdir(here)
    places = {"channel": "/c", "local": "/l", "base": "/b"}
    value = [path] if name == "allow" else path
    with pytest.raises(BadSettings, match=f"{name}: the path is not UTF-8") as bad:
        load_settings(cls, {**places, name: value})
    assert bad.value.exit_code == 2 and bad.value.message.count("UTF-8") == 1
    bad.value.message.encode()


def test_a_token_is_not_shown() -> None:
    settings = load_settings(ExampleSettings, {"token": "s3cret"})
    assert "s3cret" not in repr(settings) + str(settings) + settings.model_dump_json()


def test_every_setting_is_described() -> None:
    docs = {doc.name: doc for doc in describe_settings(ExampleSettings)}
    assert set(docs) == set(ExampleSettings.model_fields)
    assert all(doc.help for doc in docs.values())
    assert docs["port"].default == "8341"
    assert docs["memory_budget"].default == "256MiB"
    assert docs["memory_budget"].type == "size"
    assert docs["log_format"].type == "console|json"
    assert docs["poll_seconds"].env == "WEIGHTCAST_POLL_SECONDS"
    assert docs["poll_seconds"].flag == "--poll-seconds"
    assert docs["local"].required and docs["local"].default == ""
    assert (docs["engine"].type, docs["engine"].default) == ("list", "")
    assert docs["signed"].default == "false"
    assert docs["token"].flag == ""


def test_a_port_that_kubernetes_sets_is_told_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For a service called weightcast, in every pod of its namespace."""
    monkeypatch.setenv("WEIGHTCAST_PORT", "tcp://10.0.0.7:8340")
    with pytest.raises(BadSettings, match=r"port: set by Kubernetes .* `enableServiceLinks: false`"):
        load_settings(SubscriberSettings, {"channel": tmp_path, "local": tmp_path / "local"})


def test_a_hook_before_reads_needs_a_directory() -> None:
    flags = {"pre_read": "true", "channel": "s3://weights/run7"}
    with pytest.raises(BadSettings, match="pre_read: s3://weights/run7 is not a directory"):
        load_settings(SubscriberSettings, flags)
    assert load_settings(SubscriberSettings, {**flags, "channel": "/mnt/run7"}).pre_read == "true"
