"""Hosts and URLs of settings: what is taken can be asked for."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightcast.shared.cli.main import run
from weightcast.shared.daemon.environment import http_parts, is_host

WRONG = ["", " ", "a..b", ".a", "-a", "a" * 64, "a." * 127 + "b", "xn--a", "ä.example", "a b", "*", "[::1]"]
FIT = ["localhost", "a.example.", "a_b", "node-7", "0", "127.0.0.1", "::1", "fe80::1%lo", "xn--4ca.example"]


@pytest.mark.parametrize("host", WRONG)
def test_what_no_resolver_can_be_asked_for_is_no_host(host: str) -> None:
    assert not is_host(host)
    assert http_parts(f"http://{host}:8000") is None or host == "[::1]"


@pytest.mark.parametrize("host", FIT)
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert is_host(host)
    written = f"[{host}]" if ":" in host else host
    assert http_parts(f"https://{written}:8000/path?query") is not None


@given(st.from_regex(r"https?://[a-zA-Z0-9._\-\[\]:%@]{0,80}(:[0-9]{0,6})?(/.{0,20})?", fullmatch=True))
@example("http://[v1.x]:80")
@example("http://h/\udcff")
@example("http://h:1_0")
def test_a_url_that_is_taken_is_one_for_the_client_too(url: str) -> None:
    if http_parts(url) is not None:
        host = httpx.URL(url).raw_host.decode()
        assert host.encode("idna")
        httpx.Request("GET", url)


def test_a_url_has_a_longest_form() -> None:
    assert http_parts("http://h/" + "x" * 70_000) is None


@pytest.mark.parametrize("command", ["channel log", "publisher run", "subscriber run"])
def test_a_channel_that_is_almost_a_url_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    local = [] if command == "channel log" else ["--local", "local", "--base", "base"]
    assert run([*command.split(), "--channel", "s3:/weights/run7", *local]) == 2
    assert "s3://weights/run7" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
