"""deploy/weightcast.env against the settings of the daemons."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.daemon.settings import ServiceSettings, describe_settings, load_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LINE = re.compile(r"(#?)(WEIGHTCAST_[A-Z_]+)=(.*)")
DAEMONS: tuple[type[ServiceSettings], ...] = (PublisherSettings, SubscriberSettings)


def lines() -> list[tuple[bool, str, str]]:
    """(set, not only shown; variable; value) in the order of the file."""
    matches = [LINE.fullmatch(line) for line in (DEPLOY / "weightcast.env").read_text().splitlines()]
    return [(match[1] == "", match[2], match[3]) for match in matches if match is not None]


def test_the_file_is_what_the_code_says() -> None:
    made = runpy.run_path(str(DEPLOY / "make_env.py"))["env_file"]()
    message = "run: python deploy/make_env.py > deploy/weightcast.env"
    assert (DEPLOY / "weightcast.env").read_text() == made, message


@pytest.mark.parametrize("daemon", DAEMONS)
def test_every_setting_stands_there_with_its_default(daemon: type[ServiceSettings]) -> None:
    shown = {(variable, value) for is_set, variable, value in lines() if not is_set}
    named = {variable for is_set, variable, _ in lines() if is_set}
    for doc in describe_settings(daemon):
        assert doc.env in named or (doc.env, doc.default) in shown, doc.name
        assert doc.help


@pytest.mark.parametrize("daemon", DAEMONS)
def test_the_file_as_it_is_starts_a_daemon(
    daemon: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_set, variable, value in lines():
        if is_set:
            monkeypatch.setenv(variable, value)
    monkeypatch.setenv("WEIGHTCAST_LOCAL", "/var/lib/weightcast/x")
    settings = load_settings(daemon, {})
    assert (settings.host, settings.token) == ("127.0.0.1", None)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_the_defaults_shown_are_values_that_may_be_set(
    daemon: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {"channel": "/c", "base": "/b", "local": "/l"}
    plain = load_settings(daemon, needed)
    for doc in describe_settings(daemon):
        if doc.default:
            monkeypatch.setenv(doc.env, doc.default)
    assert load_settings(daemon, needed) == plain


def test_no_variable_is_set_twice() -> None:
    named = [variable for is_set, variable, _ in lines() if is_set]
    assert len(named) == len(set(named))


READERS = {
    PublisherSettings: ("publisher", "shared/daemon"),
    SubscriberSettings: ("subscriber", "shared/daemon"),
}


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_daemon_takes_no_setting_that_it_does_not_read(daemon: type[ServiceSettings]) -> None:
    rooms = (*READERS[daemon], "shared/cli")
    sources = [path for room in rooms for path in (DEPLOY.parent / room).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    names = [doc.name for doc in describe_settings(daemon)]
    assert [name for name in names if not re.search(rf"(settings|self)\.{name}\b", text)] == []
