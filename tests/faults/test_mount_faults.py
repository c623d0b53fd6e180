"""Mounts that fill up, become read-only or vanish, under real daemons."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from faultkit import Daemon, Place, fill, until
from hosts import Run, SGLang, Site, Weights, on_disk

MIB = 1 << 20


@dataclass
class Fleet:
    """A run whose channel is seen at `channel`, and what follows or fills it."""

    place: Place
    site: Site
    run: Run
    channel: Path

    def host(self, local: Path, *more: str) -> Host:
        engine, seen = SGLang(), self.place.namespace.inside(local)
        daemon = self.place.daemon(
            *("subscriber", "run", "--channel", self.channel, "--base", self.run.base_dir),
            *("--local", local, "--poll-seconds", "0.05", "--threads", "1", "--visible-deadline", "1"),
            *("--engine", f"{self.site.option(engine)},path={seen}"),
            *more,
        )
        return Host(self.run, daemon, seen, engine)

    def publisher(self, local: Path) -> Daemon:
        """It watches `inbox`."""
        self.inbox.mkdir(exist_ok=True)
        return self.place.daemon(
            *("publisher", "run", "--channel", self.channel, "--base", self.run.base_dir),
            *("--local", local, "--watch", self.inbox, "--marker", "complete", "--poll-seconds", "0.05"),
            *("--threads", "1", "--every", "--existing"),
        )

    @property
    def inbox(self) -> Path:
        return self.place.root / "inbox"

    def hand_over(self, weights: Weights, name: str) -> None:
        directory = weights.write(self.place.root / f"unfinished-{name}")
        (directory / "complete").touch()
        directory.rename(self.inbox / name)


@dataclass
class Host:
    run: Run
    daemon: Daemon
    local: Path
    """as seen from outside"""
    engine: SGLang

    def at(self, version: int) -> bool:
        self.daemon.wake()
        status = self.daemon.status
        return (status["served_version"], status["ready"]) == (version, True)

    def arrives(self, version: int) -> None:
        until(lambda: self.at(version), f"version {version}: {self.daemon.words()}")
        assert on_disk(self.local) == self.run.digest(version) == self.engine.held

    def stays(self, version: int) -> None:
        assert self.daemon.get("/readyz").status_code == 200, self.daemon.status
        assert self.daemon.status["served_version"] == version
        assert on_disk(self.local) == self.run.digest(version) == self.engine.held
        assert "crashed" not in self.daemon.words()


@pytest.fixture
def fleet(place: Place, site: Site) -> Fleet:
    """The channel is mounted somewhere else than where it lies."""
    run = site.run()
    run.publish()
    channel = place.root / "mounted"
    place.bind(run.channel, channel)
    return Fleet(place, site, run, channel)


# the channel


def test_a_channel_that_vanishes_under_a_host(fleet: Fleet) -> None:
    host = fleet.host(fleet.place.root / "host")
    host.arrives(1)
    fleet.place.namespace.sh("umount", "-l", fleet.channel)
    until(lambda: host.daemon.told("channel.json is gone"), "status tells")
    host.stays(1)
    assert host.daemon.term() == 0
    assert list(fleet.channel.iterdir()) == [], "nothing is written where nothing is mounted"
    host.daemon.start()
    until(lambda: host.daemon.get("/readyz").status_code == 200, "ready again, without a channel")
    host.stays(1)
    fleet.place.namespace.sh("mount", "--bind", fleet.run.channel, fleet.channel)
    host.arrives(fleet.run.publish())


def test_a_host_that_was_never_seeded_waits_for_its_channel(place: Place, site: Site) -> None:
    run = site.run()
    channel = place.root / "mounted"
    channel.mkdir()
    host = Fleet(place, site, run, channel).host(place.root / "host")
    until(lambda: host.daemon.told("neither channel.json nor a pointer"), "status tells")
    assert host.daemon.get("/readyz").status_code == 503
    assert not list(host.local.glob("*.safetensors"))
    place.bind(run.channel, channel)
    host.arrives(0)


def test_a_channel_that_vanishes_under_a_publisher(fleet: Fleet) -> None:
    run, namespace = fleet.run, fleet.place.namespace
    run.close()
    publisher = fleet.publisher(run.root / "publisher")
    until(lambda: publisher.status["ready"], "the publisher is ready")
    namespace.sh("umount", "-l", fleet.channel)
    new = run.versions[-1].changed(7)
    fleet.hand_over(new, "step_2")
    until(
        lambda: "there again" in json.dumps(publisher.status["last_error"]),
        f"status tells: {publisher.words()}",
    )
    assert publisher.get("/readyz").status_code == 503
    assert publisher.term() == 0
    assert publisher.start().wait() == 75 and "mount the" in publisher.words()
    assert list(fleet.channel.iterdir()) == [], "nothing is written where nothing is mounted"
    assert "crashed" not in publisher.words()
    namespace.sh("mount", "--bind", run.channel, fleet.channel)
    publisher.start()
    until(lambda: publisher.status["version"] == 2, "published")
    run.versions.append(new)
    fleet.host(fleet.place.root / "host").arrives(2)


def test_a_read_only_channel(fleet: Fleet) -> None:
    run, namespace = fleet.run, fleet.place.namespace
    run.close()
    publisher = fleet.publisher(run.root / "publisher")
    until(lambda: publisher.status["ready"], "ready")
    host = fleet.host(fleet.place.root / "host")
    host.arrives(1)
    namespace.read_only(fleet.channel)
    new = run.versions[-1].changed(7)
    fleet.hand_over(new, "step_2")
    until(lambda: publisher.told("Read-only"), f"status tells: {publisher.words()}")
    assert publisher.get("/readyz").status_code == 503
    host.stays(1)
    assert host.daemon.status["last_error"] is None
    namespace.sh("mount", "-o", "remount,bind,rw", fleet.channel)
    run.versions.append(new)
    host.arrives(2)
    until(lambda: publisher.status["ready"], "ready")
    assert "crashed" not in publisher.words()


def test_a_host_needs_no_right_to_write_to_the_channel(fleet: Fleet) -> None:
    fleet.place.namespace.read_only(fleet.channel)
    host = fleet.host(fleet.place.root / "host")
    host.arrives(1)
    until(lambda: "Read-only" in host.daemon.status["report_error"], "status tells of the report")
    host.arrives(fleet.run.publish())


def test_a_channel_under_two_names_is_one(fleet: Fleet) -> None:
    before = sorted(path.name for path in fleet.run.channel.iterdir())
    for channel, local in ((fleet.run.channel, fleet.channel), (fleet.channel, fleet.run.channel)):
        places = ("--channel", channel, "--local", local / "host", "--base", fleet.run.base_dir)
        code, told = fleet.place.verb("sync", *places)
        assert code == 3 and f"--local {local / 'host'} is inside --channel {channel}" in told
    assert sorted(path.name for path in fleet.run.channel.iterdir()) == before


def test_a_full_channel(place: Place, site: Site) -> None:
    mount = place.root / "mounted"
    seen = place.tmpfs(mount, 2)
    run = site.run()
    run.close()
    fleet = Fleet(place, site, run, mount)
    publisher = fleet.publisher(place.root / "own")
    until(lambda: publisher.status["ready"], "ready")
    host = fleet.host(place.root / "host")
    host.arrives(0)
    filler = fill(seen)
    new = run.versions[-1].changed(7)
    fleet.hand_over(new, "step_1")
    until(lambda: publisher.told("No space"), f"status tells: {publisher.words()}")
    assert publisher.get("/readyz").status_code == 503
    host.stays(0)
    filler.unlink()
    run.versions.append(new)
    host.arrives(1)
    assert "crashed" not in publisher.words()
    assert not list(seen.glob("*.parts")) or until(lambda: not list(seen.glob("*.parts")), "swept")


# the local checkpoint


MOMENTS = ["journal.begun", "file.begun state", "file.written state"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_disk_that_is_full_at_a_moment_of_an_update(fleet: Fleet, moment: str) -> None:
    """The check for space has passed."""
    mount = fleet.place.root / "small"
    seen = fleet.place.tmpfs(mount, 4)
    host = fleet.host(mount / "host", "--verify-rate", "0")
    host.arrives(1)
    namespace, daemon = fleet.place.namespace, host.daemon
    until(lambda: daemon.status["loop"]["step_began"] is None, "idle")
    namespace.tell("order", pid=daemon.pid, key=moment, nth=1, action="stop")
    version = fleet.run.publish(Weights.make(9))
    until(lambda: _stopped(daemon.pid), "stopped there")
    filler = fill(seen)
    os.kill(daemon.pid, signal.SIGCONT)
    # a state that is written already makes room for the next one
    until(lambda: daemon.told("No space", "free") or host.at(version), "told, or done without")
    assert "crashed" not in daemon.words() and not host.engine.paused
    filler.unlink()
    host.arrives(version)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"


def test_a_local_disk_that_is_read_only_for_a_while(fleet: Fleet) -> None:
    local = fleet.place.root / "host"
    host = fleet.host(local)
    host.arrives(1)
    # over it: files that are open for writing keep a mount from becoming read-only itself
    fleet.place.bind(local, local)
    fleet.place.namespace.read_only(local)
    version = fleet.run.publish()
    until(lambda: host.daemon.told("Read-only"), "status tells")
    steps = host.daemon.status["loop"]["steps"]
    until(lambda: host.daemon.wake() or host.daemon.status["loop"]["steps"] > steps + 1, "tried again")
    host.stays(1)
    fleet.place.namespace.sh("umount", "-l", local)
    host.arrives(version)


def test_a_local_disk_that_vanishes_and_comes_back(fleet: Fleet) -> None:
    mount, disk = fleet.place.root / "disk", fleet.place.root / "real"
    disk.mkdir()
    fleet.place.bind(disk, mount)
    host = fleet.host(mount / "host")
    host.arrives(1)
    fleet.place.namespace.sh("umount", "-l", mount)
    host.arrives(fleet.run.publish())
    fleet.place.namespace.sh("mount", "--bind", disk, mount)
    assert on_disk(host.local) == fleet.run.digest(1)
    host.arrives(fleet.run.publish())


def test_a_local_file_with_holes_on_a_full_disk(place: Place, site: Site) -> None:
    """As a copy of it that skips zeros would leave it: a store to a hole would kill the process."""
    zeros = {"zeros": ("BF16", (1 << 19,), bytes(MIB)), **Weights.make().tensors}
    run = Run(site.root / "big", site.stack, base=Weights(zeros))
    mount = place.root / "small"
    seen = place.tmpfs(mount, 16)
    host = Fleet(place, site, run, run.channel).host(mount / "host", "--verify-rate", "0")
    host.arrives(0)
    assert host.daemon.term() == 0
    for path in host.local.glob("*.safetensors"):
        place.namespace.sh("fallocate", "--dig-holes", path)
    assert min(path.stat().st_blocks for path in host.local.glob("*.safetensors")) * 512 < MIB
    filler = fill(seen)
    version = run.publish(Weights({**zeros, "zeros": ("BF16", (1 << 19,), b"\x01\x02" * (1 << 19))}))
    host.daemon.start()
    until(lambda: host.daemon.status["loop"]["steps"] > 1, "steps go on")
    assert host.daemon.status["loop"]["last_failure"] is not None
    filler.unlink()
    host.arrives(version)
    assert "crashed" not in host.daemon.words()
