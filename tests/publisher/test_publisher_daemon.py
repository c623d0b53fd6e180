"""The publisher's daemon as a process, over real HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from core_cases import bytes_of, read_checkpoint, snapshot
from daemonkit import Daemon, Places, base_tensors, changed, files_of, rename_in, write
from waiting import wait_until

from weightcast.publisher.channel_init import init_channel
from weightcast.shared.cli.status import summary

Starting = Callable[..., Daemon]


@pytest.fixture
def started(places: Places) -> Iterator[Starting]:
    daemons: list[Daemon] = []

    def start(*flags: str) -> Daemon:
        daemon = Daemon.start(places, *flags)
        daemons.append(daemon)
        return daemon.ready()

    yield start
    for daemon in daemons:
        daemon.kill()


def test_publishes_what_comes_in_and_ends_on_sigterm(places: Places, started: Starting) -> None:
    rename_in(places.watch / "step_7", changed(base_tensors(), 7))
    # A rename is published at once: neither poll nor settling would come in time.
    daemon = started("--poll-seconds", "600", "--settle-seconds", "600")
    write(places.watch / ".step_1.unfinished", changed(base_tensors(), 1)).rename(places.watch / "step_1")
    status = daemon.wait_for_version(1)
    assert status["ready"] and status["publications"][0]["step"] == 1 and status["epoch"] == 1
    assert status["publications"][0]["delta_bytes"] > 0 and status["publications"][0]["full_bytes"] > 0
    assert status["inbox"]["refused"] == [] and status["last_error"] is None and status["hosts"] == []
    wait_until(lambda: read_checkpoint(places.local) == bytes_of(changed(base_tensors(), 1)))

    before = snapshot(places.channel)
    bad = base_tensors()
    bad["layer.9"] = bad.pop("layer.0.up")
    rename_in(places.watch / "step_2", bad)
    [refused] = wait_until(lambda: daemon.status()["inbox"]["refused"])
    assert "layer.9" in refused["error"]["message"] and "layer.0.up" in refused["error"]["message"]
    assert daemon.get("/readyz").status_code == 200 and daemon.status()["last_error"]["at"] > 0
    # the status is shown before the metrics are
    wait_until(lambda: "weightcast_inbox_refused 1.0" in daemon.get("/metrics").text)
    assert 'weightcast_publications_total{outcome="failed"} 1.0' in daemon.get("/metrics").text
    assert snapshot(places.channel) == before

    inside = write(places.watch / ".kept", changed(base_tensors(), 4))
    asked = {"checkpoint": str(inside), "step": 4, "key": "one"}
    url = f"/v1/publications/{daemon.post('/v1/publish', asked).json()['id']}"
    wait_until(lambda: daemon.get(url).json()["state"] == "done")
    assert daemon.get(url).json()["report"]["version"] == 2
    shutil.rmtree(inside)
    assert daemon.post("/v1/publish", asked).json() == daemon.get(url).json()

    assert 'weightcast_publications_total{outcome="done"} 2.0' in daemon.get("/metrics").text
    assert "/v1/publish" in daemon.get("/openapi.json").json()["paths"]
    assert daemon.stop() == 0
    assert not (places.root / "port").exists()


def test_slow_writing_and_kills_around_the_pointer(places: Places, started: Starting) -> None:
    hook, order = places.root / "hook", places.root / "kill_at"
    hook.write_text(
        f'#!/bin/sh\n[ "$(cat {order})" = "$WEIGHTCAST_PHASE" ] || exit 0\nrm {order}\nkill -9 $PPID\n'
    )
    hook.chmod(0o755)
    daemon = started("--post-write", str(hook))
    tensors = base_tensors()
    for step, phase in enumerate(("version", "pointer"), start=1):
        order.write_text(phase)
        tensors = changed(tensors, step)
        directory = places.watch / f"step_{step}"
        directory.mkdir()
        for name, data in files_of(tensors, 2).items():
            (directory / name).write_bytes(data[: len(data) // 2])
            steps = daemon.status()["loop"]["steps"]
            wait_until(lambda one=daemon, now=steps: one.status()["loop"]["steps"] > now + 1)
            assert order.exists()
            (directory / name).write_bytes(data)
        wait_until(lambda one=daemon: one.process.poll() is not None)
        assert not order.exists()
        daemon = started("--post-write", str(hook))
        assert daemon.wait_for_version(step)["epoch"] == step + 1
        wait_until(lambda one=daemon: one.status()["loop"]["steps"] > 5)
        assert places.latest() == f"{step:06}"
        assert read_checkpoint(places.local) == bytes_of(tensors)


def test_a_wrong_base_ends_the_daemon(places: Places) -> None:
    init_channel(places.channel, places.base)
    write(places.base, changed(base_tensors(), 1))
    daemon = Daemon.start(places)
    assert daemon.process.wait(30) == 3
    daemon.kill()
    assert "another base" in daemon.log.read_text() and "remedy" in daemon.log.read_text()


def test_a_channel_that_goes_away_is_to_be_mounted_again(places: Places, started: Starting) -> None:
    """What a first start needs would make another run."""
    daemon = started("--poll-seconds", "0.2")
    wait_until(lambda: daemon.get("/v1/fleet").json()["publisher"]["ready"])
    assert f"made a new channel {places.channel}, run run-" in daemon.log.read_text()
    away = places.channel.rename(places.root / "away")

    def remedies(text: str) -> bool:
        status, said = daemon.status(), summary(daemon.status())
        found = status["last_error"] is not None and text in status["last_error"]["message"]
        return found and said.remedy == "mount the run's channel there again, or correct --channel"

    wait_until(lambda: remedies("is not a directory"))
    wait_until(lambda: not daemon.get("/v1/fleet").json()["publisher"]["ready"])
    wait_until(lambda: "next try" in dict(summary(daemon.status()).rows))
    init_channel(places.channel, places.base)
    wait_until(lambda: remedies("to run "))
    shutil.rmtree(places.channel)
    away.rename(places.channel)
    # well before the longest pause after a refusal
    wait_until(lambda: daemon.get("/v1/fleet").json()["publisher"]["ready"])
