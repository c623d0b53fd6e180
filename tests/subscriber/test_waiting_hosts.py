"""A host that waits for a file of the channel says so, and its engines do not wait with it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Run, SGLang, Site, on_disk
from in_process import Command
from test_subscriber_daemon import Daemon
from waiting import wait_until

from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import read_reports

PATIENT = ("--visible-deadline", "600")
"""no test would see the end of it"""
INDEX = "model.safetensors.index.json"
SHARD = "model-00000-of-00001.safetensors"
Heal = Callable[[], object]


def damaged(path: Path) -> Heal:
    """One bit, at the end."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return lambda: path.write_bytes(data)


def short(path: Path) -> Heal:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return lambda: path.write_bytes(data)


def garbage(path: Path) -> Heal:
    data = path.read_bytes()
    path.write_bytes(b"\xff{")
    return lambda: path.write_bytes(data)


def absent(path: Path) -> Heal:
    aside = path.with_name(f".{path.name}")
    path.rename(aside)
    return lambda: aside.rename(path)


def unreadable(path: Path) -> Heal:
    """As where rights are missing, which the tests' user may not know."""
    heal = absent(path)
    path.mkdir()
    return lambda: (path.rmdir(), heal())


FAULTS: dict[str, tuple[str, Callable[[Path], Heal]]] = {
    "a bit of a shard": (SHARD, damaged),
    "half a shard": (SHARD, short),
    "no shard": (SHARD, absent),
    "a shard that cannot be read": (SHARD, unreadable),
    "half an index": (INDEX, short),
    "no index": (INDEX, absent),
    "no directory": ("", absent),
}


def version_dir(run: Run, number: int) -> Path:
    return run.channel / f"weight_v{number:06}"


def waits_and_serves(daemon: Daemon, number: int) -> bool:
    """It waits for the version, and engines are confirmed at the one before."""
    status = daemon.status()
    waiting = status["waiting_for"]
    return waiting is not None and waiting["version"] == number and status["served_version"] == number - 1


def test_a_start_beside_a_damaged_delta_serves_the_local_version(site: Site) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    before = Daemon(site, run, engine)
    wait_until(lambda: before.serves(1))
    assert before.term() == 0
    run.publish()
    shard = version_dir(run, 2) / SHARD
    heal = damaged(shard)
    engine.restart()
    daemon = Daemon(site, run, engine, options=PATIENT)
    wait_until(lambda: daemon.port_file.exists() and waits_and_serves(daemon, 2))
    assert engine.held == run.digest(1) and not engine.paused
    status = wait_until(lambda: (now := daemon.status())["ready"] and now["state"] == "waiting" and now)
    assert status["waiting_for"]["file"] == str(shard)
    assert "the index says" in status["waiting_for"]["reason"] and status["waiting_for"]["retries"] > 0
    assert status["waiting_for"]["until"] - status["waiting_for"]["since"] == pytest.approx(600, abs=1)
    assert daemon.get("/readyz").status_code == 200
    wait_until(lambda: str(shard) in read_reports(open_store(run.channel))[0].last_error)
    # an engine that restarts in the middle of the wait does not wait for its end
    engine.restart()
    engine.held = "something else"
    wait_until(lambda: engine.held == run.digest(1) and waits_and_serves(daemon, 2))
    heal()
    wait_until(lambda: daemon.serves(2))
    wait_until(lambda: (now := daemon.status())["state"] == "idle" and now["waiting_for"] is None)
    assert on_disk(daemon.local) == run.digest(2) == engine.held
    assert daemon.term() == 0
    log = (site.root / "log").read_text()
    assert log.count("waiting for version 2: ") == 1 and SHARD in log


def test_every_file_that_is_late_is_named(site: Site) -> None:
    run, engine = site.run(), SGLang()
    daemon = Daemon(site, run, engine, options=PATIENT)
    wait_until(lambda: daemon.serves(0))
    for number, (fault, (name, spoil)) in enumerate(FAULTS.items(), 1):
        daemon.process.send_signal(signal.SIGSTOP)
        run.publish()
        file = version_dir(run, number) / name
        heal = spoil(file)
        engine.restart()
        daemon.process.send_signal(signal.SIGCONT)
        wait_until(lambda number=number: waits_and_serves(daemon, number), what=fault)
        status = daemon.status()
        assert str(file) in status["waiting_for"]["reason"], fault
        assert engine.held == run.digest(number - 1), fault
        heal()
        wait_until(lambda number=number: daemon.serves(number), what=fault)


def test_a_new_host_says_what_it_waits_for(site: Site) -> None:
    run = site.run()
    run.publish()
    absent(version_dir(run, 1) / INDEX)
    daemon = Daemon(site, run, SGLang(), options=PATIENT)
    wait_until(lambda: daemon.port_file.exists() and daemon.status()["waiting_for"])
    status = daemon.status()
    assert not status["ready"] and INDEX in status["not_ready_reasons"][-1]


@pytest.mark.parametrize("spoiled", ["latest", "channel.json", "base.json", "the channel"])
def test_no_file_of_the_channel_keeps_engines_from_the_local_version(site: Site, spoiled: str) -> None:
    run, engine = site.run(), SGLang()
    run.publish()
    host = site.host(run, engine)
    host.step()
    path = run.channel if spoiled == "the channel" else run.channel / spoiled
    heal = absent(path) if path.is_dir() else garbage(path)
    engine.restart()
    engine.held = "something else"
    host.restart()
    with pytest.raises(WeightcastError):
        host.step()
    assert engine.held == run.digest(1) and host.status.ready
    assert host.status.last_error is not None and str(path) in host.status.last_error.message
    heal()
    assert host.step().ready


def test_a_start_before_the_channel_is_no_warning(site: Site) -> None:
    run = site.run()
    aside = run.channel.rename(site.root / "aside")
    daemon = Daemon(site, run, SGLang())
    log = site.root / "log"
    missing = f"is not a directory: {run.channel.name} is missing in {run.channel.parent}"
    wait_until(
        lambda: log.exists() and f"waiting for the channel: {run.channel} {missing}" in log.read_text()
    )
    wait_until(lambda: daemon.status()["loop"]["steps"] > 2)
    assert missing in daemon.status()["last_error"]["message"]
    aside.rename(run.channel)
    wait_until(lambda: daemon.serves(0))
    run.publish()
    wait_until(lambda: daemon.serves(1) and "serving version 1" in log.read_text())
    assert daemon.term() == 0
    told = log.read_text()
    assert told.count("waiting for the channel") == 1 and "warning" not in told
    assert "seeded version 0: " in told and "serving version 1 (step 1): " in told
    assert "% changed, " in told and "total_s" not in told


def test_an_engine_that_takes_no_version_is_told_once(site: Site) -> None:
    run, engine = site.run(), SGLang()
    engine.missing.add("/update_weights_from_disk")
    daemon = Daemon(site, run, engine)
    wait_until(
        lambda: daemon.port_file.exists() and any(one["failures"] >= 2 for one in daemon.status()["engines"])
    )
    assert daemon.term() == 0
    lines = (site.root / "log").read_text().splitlines()
    assert len([line for line in lines if "not reloaded" in line or "not where" in line]) == 1


def test_the_command_says_what_it_waits_for(site: Site, weightcast: Command) -> None:
    run, local = site.run(), site.root / "host"
    words = ("sync", "--channel", str(run.channel), "--local", str(local), "--base", str(run.base_dir))
    assert weightcast(*words)[0] == 0
    run.publish()
    damaged(version_dir(run, 1) / SHARD)
    code, _, error = weightcast(*words, "--visible-deadline", "6")
    assert code == 3
    assert f"waiting for version 1: {version_dir(run, 1) / SHARD}" in error
