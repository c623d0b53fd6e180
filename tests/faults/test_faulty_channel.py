"""A channel that misbehaves, under a real daemon: errors, short reads, late and stale files, hangs."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faultkit import Daemon, Faulty, Place, until
from hosts import Run, SGLang, Site, on_disk

INDEX = "model.safetensors.index.json"
VERSION = "weight_v000002"


@dataclass
class Host:
    """A subscriber on a mounted view of a run's channel, at version 1."""

    run: Run
    channel: Faulty
    daemon: Daemon
    local: Path
    engine: SGLang

    def at(self, version: int) -> bool:
        status = self.daemon.status
        return (status["served_version"], status["ready"]) == (version, True)

    def arrives(self, version: int) -> None:
        until(lambda: self.at(version), f"version {version}: {self.daemon.words()}")
        assert on_disk(self.local) == self.run.digest(version) == self.engine.held

    def stays(self, version: int) -> None:
        """Ready, and serving it."""
        assert self.at(version), self.daemon.status
        assert on_disk(self.local) == self.run.digest(version) == self.engine.held
        assert self.daemon.get("/readyz").status_code == 200


@pytest.fixture
def host(place: Place, site: Site) -> Host:
    run = site.run()
    run.publish()
    channel = place.faulty(run.channel, place.root / "mounted")
    engine = SGLang()
    daemon = place.daemon(*arguments(place, run, channel.mount), "--engine", site.option(engine))
    made = Host(run, channel, daemon, place.root / "host", engine)
    made.arrives(1)
    return made


def arguments(place: Place, run: Run, channel: Path) -> tuple[Any, ...]:
    return (
        *("subscriber", "run", "--channel", channel, "--base", run.base_dir, "--local", place.root / "host"),
        *("--poll-seconds", "0.05", "--threads", "1", "--visible-deadline", "1", "--stop-seconds", "1"),
    )


SHARD = f"{VERSION}/*-of-*.safetensors"
PASSING = {
    "EIO in a shard, twice": {"path": SHARD, "action": "error", "op": "READ", "times": 2},
    "EIO at opening a shard": {"path": SHARD, "action": "error", "op": "OPEN", "times": 2},
    "EIO in the index": {"path": f"{VERSION}/{INDEX}", "action": "error", "op": "READ", "times": 2},
    "EIO in the pointer": {"path": "latest", "action": "error", "op": "READ", "times": 2},
    "EIO in base.json": {"path": "base.json", "action": "error", "op": "READ", "times": 1},
    "a stale handle": {"path": "*", "action": "error", "op": "OPEN", "times": 3, "errno": errno.ESTALE},
    "the root is gone": {"path": "", "action": "error", "times": 6, "errno": errno.ENOTCONN},
}


@pytest.mark.parametrize("what", PASSING)
def test_errors_that_pass_cost_a_little_time(host: Host, what: str) -> None:
    host.channel.rules(PASSING[what])
    host.run.publish()
    host.arrives(2)
    assert "crashed" not in host.daemon.words()


LASTING: dict[str, tuple[dict[str, Any], str]] = {
    "EIO in a shard": ({"path": SHARD, "action": "error", "op": "READ"}, "Input/output"),
    "a short shard": ({"path": SHARD, "action": "short", "bytes": 100}, "100 bytes"),
    "a short index": ({"path": f"{VERSION}/{INDEX}", "action": "short", "bytes": 100}, ""),
    "the version is hidden": ({"path": VERSION, "action": "hide"}, "2"),
    "the index is hidden": ({"path": f"{VERSION}/{INDEX}", "action": "hide"}, "2"),
    "its shards are hidden": ({"path": SHARD, "action": "hide"}, "is not there"),
    "no permission": ({"path": VERSION, "action": "error", "errno": errno.EACCES}, "Permission"),
    "everything is an error": ({"path": "*", "action": "error"}, "Input/output"),
    "the server is gone": ({"path": "*", "action": "error", "errno": errno.ENOTCONN}, "not connected"),
}


@pytest.mark.parametrize("what", LASTING)
def test_errors_that_last_are_told_and_outlived(host: Host, what: str) -> None:
    rule, word = LASTING[what]
    host.channel.rules(rule)
    host.run.publish()
    until(lambda: host.daemon.told(word), f"status tells: {host.daemon.words()}")
    host.stays(1)
    assert "crashed" not in host.daemon.words()
    host.channel.rules()
    host.arrives(2)
    assert host.daemon.status["last_error"] is None
