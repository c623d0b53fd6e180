"""A channel that misbehaves, under a real daemon: errors, short reads, late and stale files, hangs."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faultkit import Daemon, Faulty, Namespace, Place, Rule, until
from hosts import Run, SGLang, Site, on_disk

INDEX = "model.safetensors.index.json"


@dataclass
class Host:
    """A subscriber on a mounted view of a run's channel. One for all tests: each publishes a version more."""

    run: Run
    channel: Faulty
    daemon: Daemon
    local: Path
    engine: SGLang
    version: int = 1

    def disturbed(self, *rules: Rule) -> int:
        """Publishes under rules, whose {v} is the new version; the one before."""
        before, self.version = self.version, self.version + 1
        name = f"weight_v{self.version:06d}"
        self.channel.rules(*({**rule, "path": rule["path"].format(v=name)} for rule in rules))
        assert self.run.publish() == self.version
        return before

    def hangs(self) -> bool:
        """Whether one step goes on and on."""
        loop = self.daemon.status["loop"]
        return loop["step_began"] is not None and time.time() - loop["step_began"] > 0.5

    def at(self, version: int) -> bool:
        status = self.daemon.status
        return (status["served_version"], status["ready"]) == (version, True)

    def arrives(self, version: int) -> None:
        def there() -> bool:
            self.daemon.wake()
            return self.at(version)

        until(there, f"version {version}: {self.daemon.words()}")
        assert on_disk(self.local) == self.run.digest(version) == self.engine.held

    def stays(self, version: int) -> None:
        """Ready, and serving it."""
        assert self.at(version), self.daemon.status
        assert on_disk(self.local) == self.run.digest(version) == self.engine.held
        assert self.daemon.get("/readyz").status_code == 200


@pytest.fixture(scope="module")
def one_host(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = tmp_path_factory.mktemp("host")
    with ExitStack() as stack:
        place, site = Place(namespace, root, stack), Site(root, stack)
        run = site.run()
        run.publish()
        channel = place.faulty(run.channel, root / "mounted")
        engine = SGLang()
        daemon = place.daemon(*arguments(place, run, channel.mount), "--engine", site.option(engine))
        made = Host(run, channel, daemon, root / "host", engine)
        made.arrives(1)
        yield made


@pytest.fixture
def host(one_host: Host) -> Iterator[Host]:
    """Whatever a test did to its channel, in the end the newest version is served and nothing is amiss."""
    yield one_host
    if one_host.daemon.ended is not None:
        one_host.daemon.start()
    one_host.channel.rules()
    one_host.arrives(one_host.version)
    until(lambda: one_host.daemon.status["last_error"] is None, "no error")


def arguments(place: Place, run: Run, channel: Path) -> tuple[Any, ...]:
    return (
        *("subscriber", "run", "--channel", channel, "--base", run.base_dir, "--local", place.root / "host"),
        *("--poll-seconds", "0.05", "--threads", "1", "--visible-deadline", "1", "--stop-seconds", "1"),
    )


SHARD = "{v}/*-of-*.safetensors"
PASSING = {
    "EIO in a shard, twice": {"path": SHARD, "action": "error", "op": "READ", "times": 2},
    "EIO at opening a shard": {"path": SHARD, "action": "error", "op": "OPEN", "times": 2},
    "EIO in the index": {"path": f"{{v}}/{INDEX}", "action": "error", "op": "READ", "times": 2},
    "EIO in the pointer": {"path": "latest", "action": "error", "op": "READ", "times": 2},
    "EIO in base.json": {"path": "base.json", "action": "error", "op": "READ", "times": 1},
    "a stale handle": {"path": "*", "action": "error", "op": "OPEN", "times": 3, "errno": errno.ESTALE},
    "the root is gone": {"path": "", "action": "error", "times": 6, "errno": errno.ENOTCONN},
}


@pytest.mark.parametrize("what", PASSING)
def test_errors_that_pass_cost_a_little_time(host: Host, what: str) -> None:
    host.disturbed(PASSING[what])
    host.arrives(host.version)
    assert "crashed" not in host.daemon.words()


LASTING: dict[str, tuple[dict[str, Any], str]] = {
    "EIO in a shard": ({"path": SHARD, "action": "error", "op": "READ"}, "Input/output"),
    "a short shard": ({"path": SHARD, "action": "short", "bytes": 100}, "100 bytes"),
    "a short index": ({"path": f"{{v}}/{INDEX}", "action": "short", "bytes": 100}, ""),
    "the version is hidden": ({"path": "{v}", "action": "hide"}, "is missing"),
    "the index is hidden": ({"path": f"{{v}}/{INDEX}", "action": "hide"}, "is missing"),
    "its shards are hidden": ({"path": SHARD, "action": "hide"}, "is missing"),
    "no permission": ({"path": "{v}", "action": "error", "errno": errno.EACCES}, "Permission"),
    "everything is an error": ({"path": "*", "action": "error"}, "Input/output"),
    "the server is gone": ({"path": "*", "action": "error", "errno": errno.ENOTCONN}, "not connected"),
}


@pytest.mark.parametrize("what", LASTING)
def test_errors_that_last_are_told_and_outlived(host: Host, what: str) -> None:
    rule, word = LASTING[what]
    before = host.disturbed(rule)
    until(lambda: host.daemon.told(word), f"status tells: {host.daemon.words()}")
    host.stays(before)
    assert "crashed" not in host.daemon.words()


def test_a_pointer_of_a_moment_ago_moves_nobody_back(host: Host, tmp_path: Path) -> None:
    stale = tmp_path / "latest"
    stale.write_text(f"{host.version - 1:06d}")
    steps = host.daemon.status["loop"]["steps"]
    host.channel.rules({"path": "latest", "action": "show", "file": stale})
    until(lambda: host.daemon.status["loop"]["steps"] > steps + 2, "steps go on")
    host.stays(host.version)


@pytest.mark.parametrize("text", ["", "0000", "00"])
def test_a_torn_pointer_is_read_again(host: Host, tmp_path: Path, text: str) -> None:
    torn = tmp_path / "latest"
    torn.write_text(text)
    before = host.disturbed({"path": "latest", "action": "show", "file": torn})
    until(lambda: host.daemon.told("half written"), "status tells")
    host.stays(before)


# a channel that does not answer


@pytest.mark.parametrize("op", ["LOOKUP", "READ"])
def test_status_answers_while_the_channel_hangs(host: Host, op: str) -> None:
    before = host.disturbed({"path": SHARD, "action": "hang", "op": op})
    until(host.hangs, "a step hangs")
    host.stays(before)
    assert host.daemon.get("/metrics").status_code == 200


def test_a_daemon_whose_channel_hangs_ends_at_its_deadline(host: Host) -> None:
    host.disturbed({"path": SHARD, "action": "hang", "op": "READ"})
    until(host.hangs, "a step hangs")
    assert host.daemon.term() == 4
    assert "did not end within" in host.daemon.words() and host.engine.paused is False


def test_a_daemon_starts_while_its_channel_hangs(host: Host) -> None:
    assert host.daemon.term() == 0
    host.channel.rules({"path": "*", "action": "hang"})
    host.daemon.start()
    until(host.hangs, "status answers")
    assert host.daemon.get("/healthz").status_code == 200
    assert host.daemon.get("/readyz").status_code == 503
    assert host.daemon.get("/readyz").json()["reasons"], "says why"


def test_a_one_shot_asks_to_be_tried_again(host: Host, place: Place) -> None:
    host.channel.rules({"path": "latest", "action": "error", "op": "READ"})
    code, words = place.verb(*("sync", "--channel", host.channel.mount), "--local", place.root / "other")
    assert code == 75 and "Input/output" in words


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO])
def test_a_host_is_ready_again_although_its_channel_is_an_error(host: Host, number: int) -> None:
    assert host.daemon.term() == 0
    host.channel.rules({"path": "*", "action": "error", "errno": number})
    host.daemon.start()
    until(lambda: host.daemon.status["last_error"], "status tells")
    host.stays(host.version)
