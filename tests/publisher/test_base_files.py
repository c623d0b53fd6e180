"""What commands and daemons say of the base's files: those left behind, and those missing on a host."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest
from daemonkit import Daemon, Places
from forked import weightcast
from in_process import Command
from waiting import wait_until

LEFT = ["optimizer.pt", "pytorch_model.bin"]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places.made(tmp_path)
    (places.base / "templates").mkdir()
    for name in (*LEFT, "templates/tool.jinja", "spk.pt"):
        (places.base / name).write_text("x")
    return places


def sync(places: Places, host: Path, *more: object) -> tuple[object, ...]:
    return "sync", "--channel", places.channel, "--local", host, *more


def test_init_and_sync_list_what_is_left_behind(places: Places, weightcast: Command) -> None:
    init = ("channel", "init", "--channel", places.channel, "--base", places.base)
    assert json.loads(weightcast(*init, "--json")[1])["left_behind"] == LEFT
    assert "optimizer.pt, pytorch_model.bin" in weightcast(*init)[1]
    host = places.root / "host"
    code, out, _ = weightcast(*sync(places, host, "--base", places.base))
    assert code == 0 and "optimizer.pt, pytorch_model.bin" in out
    assert (host / "templates" / "tool.jinja").read_text() == "x" and (host / "spk.pt").exists()
    assert (
        json.loads(weightcast(*sync(places, host, "--base", places.base, "--json"))[1])["left_behind"] == LEFT
    )


def test_nothing_is_said_of_a_base_that_is_copied_whole(places: Places, weightcast: Command) -> None:
    for name in LEFT:
        (places.base / name).unlink()
    code, out, _ = weightcast("channel", "init", "--channel", places.channel, "--base", places.base)
    assert code == 0 and "left" not in out
    code, out, _ = weightcast(*sync(places, places.root / "host", "--base", places.base))
    assert code == 0 and "left" not in out and "base files" not in out


def test_missing_files_are_named_until_a_base_is_given(places: Places, weightcast: Command) -> None:
    host = places.root / "host"
    weightcast("channel", "init", "--channel", places.channel, "--base", places.base)
    weightcast(*sync(places, host, "--base", places.base))
    (host / "templates" / "tool.jinja").unlink()
    code, out, _ = weightcast(*sync(places, host, "--json"))
    status = json.loads(out)
    assert code == 0 and status["base_files"] == "missing: templates/tool.jinja"
    assert any("templates/tool.jinja" in reason for reason in status["degraded"])
    status = json.loads(weightcast(*sync(places, host, "--base", places.base, "--json"))[1])
    assert (status["base_files"], status["degraded"]) == ("", [])
    assert (host / "templates" / "tool.jinja").read_text() == "x"


def test_both_daemons_say_it_in_log_and_status(places: Places) -> None:
    publisher = Daemon.start(places, "--log-format", "json").ready()
    port, log = places.root / "host-port", places.root / "host-log"
    with log.open("wb") as stream:
        subscriber = weightcast(
            *("subscriber", "run", "--channel", places.channel, "--base", places.base),
            *("--local", places.root / "host", "--port", "0", "--port-file", port),
            *("--poll-seconds", "0.1", "--log-format", "json"),
            stderr=stream,
        )
    try:
        assert publisher.get("/v1/status").json()["left_behind"] == LEFT
        wait_until(lambda: b"files left behind" in log.read_bytes() or subscriber.poll() is not None)
        url = f"http://127.0.0.1:{int(port.read_text())}/v1/status"
        status = httpx.get(url, trust_env=False, timeout=10).json()
        assert (status["left_behind"], status["base_files"]) == (LEFT, "")
        subscriber.send_signal(signal.SIGTERM)
        assert subscriber.wait(30) == 0
    finally:
        subscriber.kill()
        subscriber.wait()
        publisher.kill()
    for written in (publisher.log, log):
        lines = [json.loads(line) for line in written.read_text().splitlines()]
        assert [line["files"] for line in lines if line["event"] == "files left behind"] == [LEFT]
