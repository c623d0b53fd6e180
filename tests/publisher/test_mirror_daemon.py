"""`weightcast mirror run` as processes: hosts behind them, kills, what status, metrics and fleet show."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from core_cases import bytes_of, read_checkpoint, write_checkpoint
from forked import Forked, weightcast
from in_process import Command
from mirrors import Run, require_equal
from waiting import wait_until

from weightcast.publisher import init_channel
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.claims import claim, this_process
from weightcast.shared.channel.directory_store import DirectoryStore, open_store
from weightcast.shared.channel.index import INDEX_NAME
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

HOSTS = 20


@dataclass
class Daemon:
    process: Forked
    log: Path
    port: int = 0

    @classmethod
    def of(
        cls, root: Path, source: object, to: object, *flags: object, token: str = ""
    ) -> AbstractContextManager[Daemon]:
        words = ("mirror", "run", "--from", source, "--to", to, "--report-seconds", 0.5)
        return cls.started(root, *words, *flags, token=token)

    @classmethod
    @contextmanager
    def started(cls, root: Path, *words: object, token: str = "") -> Iterator[Daemon]:
        root.mkdir(exist_ok=True)
        (root / "port").unlink(missing_ok=True)
        more = ("--port", 0, "--port-file", root / "port", "--poll-seconds", 0.1)
        with (root / "log").open("ab") as log:
            process = weightcast(*words, *more, stderr=log, env={**os.environ, "WEIGHTCAST_TOKEN": token})
        try:
            yield cls(process, root / "log")
        finally:
            process.kill()
            process.wait(30)

    def get(self, path: str, **headers: str) -> httpx.Response:
        if not self.port:
            file = self.log.parent / "port"
            wait_until(lambda: file.exists() or self.process.poll() is not None)
            assert self.process.poll() is None, self.log.read_text()
            self.port = int(file.read_text())
        return httpx.get(f"{self.url}{path}", timeout=20, headers=headers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> Daemon:
        wait_until(lambda: self.get("/readyz").is_success, what=f"{self.log}")
        return self

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/v1/status").json()
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.begin(tmp_path, DirectoryStore(tmp_path / "a"))


def test_hosts_behind_two_mirrors_follow_while_one_is_killed(tmp_path: Path, weightcast: Command) -> None:
    places = [str(tmp_path / name) for name in ("a", "b", "c")]
    source, *mirrors = map(open_store, places)
    run, arrived = Run.begin(tmp_path, source), threading.Event()
    versions = [0] * HOSTS

    def fleet() -> Any:
        return weightcast("fleet", "--channel", run.store.place(), "--json").json

    def follow(number: int) -> None:
        channel = mirrors[number % 2]
        options = UpdaterOptions(visible_seconds=0.2)
        with closing(LocalUpdater(channel, tmp_path / f"host{number}", run.base, options)) as host:
            while not arrived.wait(0.05):
                try:
                    if channel.stat("channel.json") is None:
                        continue  # not a channel yet: without it, it looks like another tool's
                    host.update_to(Channel.open(channel))
                except (WeightcastError, OSError):
                    continue  # tried again
                assert host.local is not None
                versions[number] = host.local.state.position.version

    hosts = [threading.Thread(target=follow, args=(number,)) for number in range(HOSTS)]
    with Daemon.of(tmp_path / "two", places[0], places[2]) as steady:
        with Daemon.of(tmp_path / "one", *places[:2]) as killed:
            for host in hosts:
                host.start()
            try:
                run.grow(3, anchor_every=2)
                wait_until(lambda: versions[0] > 0)
                killed.process.kill()
                run.grow(3, anchor_every=2)
                wait_until(lambda: set(versions[1::2]) == {6}, what=f"{versions}")
                with Daemon.of(tmp_path / "one", *places[:2]) as again:
                    again.ready()
                    run.grow(2, anchor_every=2)
                    wait_until(lambda: set(versions) == {8}, what=f"{versions}")
                    steady.ready()
                    wait_until(lambda: fleet()["counts"]["ready"] == 2)
                    rows = {host["local"]: host for host in fleet()["hosts"]}
                    assert rows.keys() == set(places[1:])
                    assert [(row["lag"], row["engines"][0]["kind"]) for row in rows.values()] == [
                        (0, "mirror")
                    ] * 2
                    assert again.stop() == 0
            finally:
                arrived.set()
                for host in hosts:
                    host.join()
        assert steady.stop() == 0
    for number in range(HOSTS):
        assert read_checkpoint(tmp_path / f"host{number}") == bytes_of(run.models[8])
    for mirror in mirrors:
        run.copy(mirror)
        require_equal(run.store, mirror)


def test_status_metrics_and_a_token(run: Run, tmp_path: Path, weightcast: Command) -> None:
    run.grow(2)
    with Daemon.of(tmp_path / "one", run.store.place(), tmp_path / "b", token="secret") as mirror:
        token = {"Authorization": "Bearer secret"}
        assert mirror.get("/v1/status").status_code == 401
        wait_until(lambda: mirror.get("/readyz", **token).is_success)
        status = mirror.get("/v1/status", **token).json()
        assert (status["served_version"], status["lag_versions"], status["versions"]) == (2, 0, 2)
        assert "weightcast_lag_versions 0.0" in mirror.get("/metrics", **token).text
        said = weightcast("status", mirror.port, "--token", "secret")
        assert said.code == 0 and "is ready: serves version 2" in said.out
        assert mirror.stop() == 0
    [reported] = weightcast("fleet", "--channel", run.store.place(), "--json").json["hosts"]
    assert reported["standing"] == "stopped"


def test_its_report_reaches_a_publisher_over_http(run: Run, tmp_path: Path, weightcast: Command) -> None:
    places = ("--channel", run.store.place(), "--base", run.base, "--local", tmp_path / "pub")
    with (
        Daemon.started(tmp_path / "publisher", "publisher", "run", *places) as publisher,
        Daemon.of(
            *(tmp_path / "one", run.store.place(), tmp_path / "b"),
            *("--report-to", publisher.ready().url),
        ) as mirror,
    ):
        mirror.ready()
        wait_until(lambda: weightcast("fleet", "--url", publisher.url, "--json").json["counts"]["ready"] == 1)
        [row] = weightcast("fleet", "--url", publisher.url, "--json").json["hosts"]
        assert (row["local"], row["engines"][0]["kind"]) == (str(tmp_path / "b"), "mirror")
        assert mirror.status()["report_error"] == ""
        assert mirror.stop() == publisher.stop() == 0


def test_hosts_read_what_a_mirror_serves_and_the_source_is_read_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTCAST_CHANNEL_TOKEN", "secret")
    token = {"Authorization": "Bearer secret"}
    run.grow(2, anchor_every=2)
    copy = tmp_path / "b"
    with ExitStack() as stack:
        flags = ("--serve", "--keep-bytes", "1GB", "--keep-versions", 3)
        mirror = stack.enter_context(
            Daemon.of(tmp_path / "one", run.store.place(), copy, *flags, token="secret")
        )
        wait_until(lambda: mirror.get("/readyz", **token).is_success)
        url = f"{mirror.url}/channel"
        places = [tmp_path / f"host{number}" for number in range(4)]
        hosts = [
            stack.enter_context(
                Daemon.started(
                    *(place, "subscriber", "run", "--channel", url, "--local", place / "local"),
                    *("--threads", 1),
                )
            )
            for place in places
        ]
        for host in hosts:
            host.ready()
        run.grow(2)
        for host in hosts:
            wait_until(lambda: host.status()["local_version"] == 4, what=f"{host.log}")  # noqa: B023
        for place in places:
            assert read_checkpoint(place / "local") == bytes_of(run.models[4])
        status = mirror.get("/v1/status", **token).json()
        files = [file for file in copy.glob("weight_v*/**/*") if file.is_file() and file.name != INDEX_NAME]
        assert status["bytes"] == sum(file.stat().st_size for file in files)
        assert mirror.get("/channel/latest").status_code == 401
        assert {daemon.stop() for daemon in (mirror, *hosts)} == {0}


def test_an_anchor_ordered_of_a_mirror_is_refused(run: Run, tmp_path: Path, weightcast: Command) -> None:
    run.grow(1)
    with Daemon.of(tmp_path / "one", run.store.place(), tmp_path / "b", "--look-seconds", 0.1) as mirror:
        mirror.ready()
        ordered = weightcast("channel", "anchor", "--channel", tmp_path / "b")
        assert ordered.code == 3 and "a mirror copies anchors" in ordered.err
        assert mirror.stop() == 0
    assert "order refused" in mirror.log.read_text()


def test_only_a_directory_is_served(run: Run, tmp_path: Path) -> None:
    with Daemon.of(tmp_path / "one", run.store.place(), "s3://bucket/run7", "--serve") as mirror:
        assert mirror.process.wait(60) == 3
        assert "--serve needs a directory" in mirror.log.read_text()


def test_it_waits_for_its_source_and_says_what_is_wrong_with_it(run: Run, tmp_path: Path) -> None:
    with Daemon.of(tmp_path / "one", tmp_path / "later", tmp_path / "b") as mirror:
        assert "later" in mirror.get("/readyz").json()["reasons"][0]
        init_channel(tmp_path / "later", run.base, run_id="later")
        mirror.ready()
        (tmp_path / "later/latest").write_text("000007")
        wait_until(lambda: mirror.get("/readyz").status_code == 503)
        assert "no way from version 0 to 7" in mirror.status()["last_error"]["message"]
        (tmp_path / "later/latest").unlink()
        mirror.ready()


def test_a_wrong_destination_and_another_owner_end_it(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    init_channel(other, write_checkpoint(tmp_path / "base2", run.models[0]), run_id="other")
    with Daemon.of(tmp_path / "one", run.store.place(), other) as mirror:
        assert mirror.process.wait(60) == 3
        assert "the source of run run" in mirror.log.read_text()
    slime = tmp_path / "slime"
    (slime / "weight_v000001").mkdir(parents=True)
    (slime / "latest").write_text("000001")
    with Daemon.of(tmp_path / "three", slime, tmp_path / "c") as mirror:
        assert mirror.process.wait(60) == 3
        assert "another system's channel" in mirror.log.read_text()
    with Daemon.of(tmp_path / "two", run.store.place(), tmp_path / "b") as mirror:
        mirror.ready()
        claim(open_store(tmp_path / "b"), this_process(), take_over=True)
        run.grow(1)
        assert mirror.process.wait(60) == 3
        assert "now belongs to" in mirror.log.read_text()
