"""Rollback, resume, keep and tag through running daemons: a publisher's and hosts', each a process."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import forked
import pytest
from core_cases import Model, bytes_of, read_checkpoint
from daemonkit import Daemon, Places, base_tensors, changed, rename_in
from waiting import wait_until

from weightcast.shared.cli.main import run as weightcast


def arrives(daemon: Daemon, version: int) -> None:
    daemon.wait_for_version(version)


class Trainer:
    """Leaves checkpoints; `models` by version as long as nothing else is published."""

    def __init__(self, places: Places) -> None:
        self.places, self.models = places, [base_tensors()]

    def leave(self) -> Model:
        self.models.append(changed(self.models[-1], len(self.models)))
        rename_in(self.places.watch / f"step-{len(self.models) - 1}", self.models[-1])
        return self.models[-1]


@contextlib.contextmanager
def host(places: Places, name: str, *flags: str, base: bool = True) -> Iterator[Path]:
    """A subscriber's daemon; its local checkpoint."""
    local = places.root / name
    with (places.root / f"{name}.log").open("ab") as log:
        process = forked.weightcast(
            *("subscriber", "run", "--channel", places.channel, "--local", local),
            *(("--base", places.base) if base else ()),
            *("--port", "0", "--poll-seconds", "0.1", "--threads", "1", *flags),
            stderr=log,
            env={**os.environ, "WEIGHTCAST_TOKEN": ""},
        )
    try:
        yield local
        assert process.poll() is None, (places.root / f"{name}.log").read_text()
    finally:
        process.terminate()
        process.wait(60)


def version_at(local: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        state = json.loads((local / ".weightcast/state.json").read_text())
        return int(state["position"]["version"]) if state["phase"] == "clean" else None
    return None


def holds(local: Path, version: int, tensors: Model) -> None:
    wait_until(lambda: version_at(local) == version)
    assert read_checkpoint(local) == bytes_of(tensors)


def verb(places: Places, *arguments: object) -> int:
    return weightcast(["channel", *map(str, arguments), "--channel", str(places.channel)])


def test_a_fleet_is_rolled_back_held_and_let_go(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, daemon = Trainer(places), Daemon.start(places, "--every").ready()
    try:
        with host(places, "host") as local:
            for version in (1, 2, 3):
                trainer.leave()
                arrives(daemon, version)
            holds(local, 3, trainer.models[3])
            assert verb(places, "rollback", "--to", 1) == 0
            holds(local, 4, trainer.models[1])
            held = wait_until(lambda: daemon.status()["held"])
            assert held == "rolled back to version 1 (version 4 has its weights)"
            capsys.readouterr()
            assert verb(places, "log", "--json") == 0
            listed = json.loads(capsys.readouterr().out)["versions"]
            assert [row["same_as"] for row in listed] == [None, None, None, 1]
            # the page's view follows the channel by itself
            shown = partial(daemon.get, "/v1/versions")
            wait_until(lambda: [row["same_as"] for row in shown().json()["versions"]][:1] == [1])
            newest = trainer.leave()
            daemon.kill()
            daemon = Daemon.start(places, "--every")
            assert wait_until(lambda: daemon.status()["held"]), "the order outlives its publisher"
            assert places.latest() == "000004" and read_checkpoint(local) == bytes_of(trainer.models[1])
            waiting = wait_until(lambda: daemon.status()["inbox"]["waiting"])
            assert [each["name"] for each in waiting] == ["step-4"] and "held" in waiting[0]["reason"]
            wait_until(lambda: (places.channel / "orders/waiting").read_text() == "step-4")
            line = partial(daemon.get, "/v1/fleet")
            wait_until(lambda: (line().json()["publisher"] or {}).get("waiting") == ["step-4"])
            log = daemon.log.read_text()
            assert "publishing is held" in log and "step-4" in log
            capsys.readouterr()
            assert verb(places, "resume") == 0
            assert "published next: step-4" in capsys.readouterr().out
            arrives(daemon, 5)
            assert daemon.status()["held"] is None
            holds(local, 5, newest)
    finally:
        daemon.kill()


def test_a_running_publisher_writes_an_anchor_for_hosts_without_a_base(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, daemon = Trainer(places), Daemon.start(places).ready()
    try:
        assert verb(places, "anchor") == 3 and "has no version yet" in capsys.readouterr().err
        trainer.leave()
        arrives(daemon, 1)
        assert verb(places, "anchor") == 0 and "version 1 has an anchor" in capsys.readouterr().out
        # moved away: no record of it helps this host
        places.base.rename(places.root / "elsewhere")
        with host(places, "host", base=False) as local:
            holds(local, 1, trainer.models[1])
        assert daemon.stop() == 0
        assert verb(places, "anchor") == 0 and "the next publisher writes it" in capsys.readouterr().out
    finally:
        daemon.kill()


def test_what_is_kept_or_tagged_outlives_the_rest(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, daemon = Trainer(places), Daemon.start(places, "--every", "--keep-versions", "2").ready()

    def gone(version: int) -> bool:
        return not (places.channel / f"weight_v{version:06d}").exists()

    def publish_until(condition: Callable[[], bool]) -> int:
        """When pruning comes to it depends on when full weights were written. The newest version."""
        while not condition():
            assert len(trainer.models) < 40
            trainer.leave()
            arrives(daemon, len(trainer.models) - 1)
        return len(trainer.models) - 1

    try:
        publish_until(lambda: len(trainer.models) == 3)
        assert verb(places, "keep", 1) == 0 and verb(places, "tag", "best", 2) == 0
        newest = publish_until(lambda: len(trainer.models) > 3 and gone(3))
        assert not gone(1) and not gone(2)
        capsys.readouterr()
        assert verb(places, "tag") == 0 and "best is 2" in capsys.readouterr().out
        with host(places, "best", "--target", "best") as local:
            holds(local, 2, trainer.models[2])
            assert verb(places, "tag", "best", newest) == 0
            holds(local, newest, trainer.models[newest])
        assert verb(places, "unkeep", 1) == 0
        publish_until(lambda: gone(1) and gone(2))
    finally:
        daemon.kill()
