"""What happens while a host stands still in the middle of something, and clocks that jump."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from faultkit import Daemon, Place, until
from hosts import Run, SGLang, Site, on_disk


@pytest.fixture
def run(site: Site) -> Run:
    made = site.run()
    made.publish()
    return made


def following(place: Place, site: Site, run: Run, engine: SGLang) -> Daemon:
    daemon = place.daemon(
        *("subscriber", "run", "--channel", run.channel, "--base", run.base_dir),
        *("--local", place.root / "host", "--engine", site.option(engine), "--poll-seconds", "0.05"),
        *("--threads", "1", "--visible-deadline", "1", "--verify-rate", "0"),
    )
    until(lambda: serves(daemon, 1), "version 1")
    return daemon


def serves(daemon: Daemon, version: int) -> bool:
    daemon.wake()
    status = daemon.status
    return (status["served_version"], status["ready"]) == (version, True)


def stop_at(daemon: Daemon, row: str, run: Run) -> int:
    """Publishes; the host stands still at that place of following it."""
    until(lambda: daemon.status["loop"]["step_began"] is None, "between two steps")
    daemon.namespace.tell("order", pid=daemon.pid, key=row, action="stop")
    version = run.publish()
    stat = Path(f"/proc/{daemon.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt", f"stopped at {row}")
    return version


@pytest.mark.parametrize("row", ["patch.begun", "patch.record", "patch.written", "engine.noted"])
def test_an_engine_that_starts_in_the_middle_of_a_patch(place: Place, site: Site, run: Run, row: str) -> None:
    engine = SGLang()
    daemon = following(place, site, run, engine)
    version = stop_at(daemon, row, run)
    engine.restart()
    engine.held = on_disk(place.root / "host")
    engine.label = str(version)
    os.kill(daemon.pid, signal.SIGCONT)
    until(lambda: serves(daemon, version), daemon.words())
    assert engine.held == run.digest(version) and not engine.paused and not engine.resumed_broken


@pytest.mark.parametrize("row", ["fetch.copied", "journal.begun", "journal.complete"])
def test_a_host_that_was_suspended_while_versions_were_pruned(
    place: Place, site: Site, run: Run, row: str
) -> None:
    engine = SGLang()
    daemon = following(place, site, run, engine)
    first = stop_at(daemon, row, run)
    run.publish()
    newest = run.publish(anchor=True)
    trash = run.channel / ".trash"
    trash.mkdir(exist_ok=True)
    for version in range(1, newest):
        name = f"weight_v{version:06d}"
        (run.channel / name).rename(trash / name)
    os.kill(daemon.pid, signal.SIGCONT)
    until(lambda: serves(daemon, newest), daemon.words())
    assert first < newest and engine.held == on_disk(place.root / "host") == run.digest(newest)
    assert "crashed" not in daemon.words()


def test_a_clock_that_jumps_moves_nothing(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine)
    for at in (4e9, 0.0, 1.7e9, 5.0):
        host.sync.host.now = lambda at=at: at
        version = run.publish()
        assert host.step().ready and host.at(run, version)
        assert engine.held == run.digest(version)
        assert host.status.updates[-1].at == at
