"""`weightcast run-engine`: a process that becomes an engine, next to a subscriber."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hosts import Run, SGLang, Site, on_disk
from in_process import Command
from test_subscriber_daemon import Daemon
from waiting import wait_until

from weightcast.shared.base.errors import NeedsReseed, RetryLater
from weightcast.shared.checkpoint.state.locks import FileLock
from weightcast.shared.cli.main import run as run_command
from weightcast.shared.daemon.settings import describe_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.engines.launch import hold_still, run_engine

ENGINE = """
import os, signal, sys
from pathlib import Path
from typing import Any
room = Path(sys.argv[1])
blocked = sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
def note(number, frame):
    (room / f"got-{signal.Signals(number).name}").touch()
    if number == signal.SIGTERM:
        sys.exit(7)
for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(one, note)
(room / "started.part").write_text(f"{os.getpid()} {blocked} {'secret' in os.environ.values()}")
(room / "started.part").rename(room / "started")
while True:
    signal.pause()
"""

SECRETS = [
    name
    for setting in describe_settings(SubscriberSettings)
    if not setting.flag
    for name in (setting.env, setting.env.lower())
]


class Started:
    """run-engine in a fork: the command's start would take longer than all that it does. What it starts notes
    in a directory what it got.

    `launch`: what the command would have made of its options."""

    def __init__(
        self,
        site: Site,
        local: Path,
        *options: str,
        code: str = ENGINE,
        launch: Mapping[str, Any] | None = None,
    ) -> None:
        self.room = site.root / "engine"
        self.room.mkdir(exist_ok=True)
        self.code: int | None = None
        engine = [sys.executable, "-I", "-S", "-c", code, str(self.room)]
        self.pid = os.fork()
        if self.pid == 0:
            if launch is None:
                self._run(lambda: run_command(["run-engine", "--local", str(local), *options, "--", *engine]))
            else:
                given = {"loaded": lambda: False, "load_seconds": 60} | dict(launch)
                self._run(lambda: run_engine(local, engine, **given))
        site.stack.callback(self.end)

    def _run(self, command: Callable[[], int]) -> None:
        code = 99
        try:
            os.environ.update(dict.fromkeys(SECRETS, "secret"))
            sys.stderr = (self.room / "stderr").open("w", buffering=1)
            code = command()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def end(self) -> None:
        if self.code is None:
            if self.has("started"):
                os.kill(self.engine, signal.SIGKILL)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    @property
    def engine(self) -> int:
        return int(self.read("started").split()[0])

    def has(self, name: str) -> bool:
        return (self.room / name).exists()

    def read(self, name: str) -> str:
        return (self.room / name).read_text()

    def runs(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        wait_until(lambda: not self.runs())
        assert self.code is not None
        return self.code


def locked(local: Path) -> bool:
    lock = FileLock(local / ".weightcast" / "patch")
    try:
        lock.acquire()
    except RetryLater:
        return True
    lock.release()
    return False


def test_no_version_comes_while_an_engine_loads(site: Site, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    host = site.host(run)
    host.step()
    run.publish()
    starting = Started(site, host.local, "--engine", f"sglang=http://127.0.0.1:{port}")
    wait_until(lambda: starting.has("started"))
    assert locked(host.local) and on_disk(host.local) == run.digest(0)

    site.serve(SGLang(), port)
    wait_until(lambda: not locked(host.local))
    host.step()
    assert host.at(run, 1)

    assert starting.read("started") == f"{starting.engine} [] False" and starting.engine == starting.pid
    starting.send(signal.SIGUSR1)
    wait_until(lambda: starting.has("got-SIGUSR1"))
    starting.send(signal.SIGTERM)
    assert starting.wait() == 7 and starting.has("got-SIGTERM")
    told = starting.read("stderr")
    assert "version 0 is locked" in told and "has loaded" in told


def test_a_daemon_that_waits_for_a_loading_engine_ends_when_told(site: Site, run: Run) -> None:
    host = site.host(run)
    host.step()
    run.publish()
    lock = FileLock(host.local / ".weightcast" / "patch")
    ends: list[float] = []

    def stop(seconds: float) -> bool:
        ends.append(seconds)
        return len(ends) > 40

    before = host.sync.host.stop
    host.sync.host.stop = stop
    with lock.holding(shared=True), pytest.raises(RetryLater, match="the process ends"):
        host.step()
    host.sync.host.stop = before
    host.step()
    assert host.at(run, 1)


@pytest.mark.parametrize("first", ["daemon", "engine"])
def test_a_host_of_a_loading_engine_waits_and_has_not_failed(
    site: Site, run: Run, first: str, weightcast: Command
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = f"sglang=http://127.0.0.1:{taken.getsockname()[1]}"
    host = site.host(run)
    host.step()
    host.sync.close()
    daemon = Daemon(site, run, options=("--engine", engine)) if first == "daemon" else None
    if daemon is not None:
        wait_until(lambda: daemon.port_file.exists() and daemon.status()["state"] == "idle")
    starting = Started(site, host.local, "--engine", engine)
    wait_until(lambda: starting.has("started"))
    run.publish()
    daemon = daemon or Daemon(site, run, options=("--engine", engine))
    wait_until(daemon.port_file.exists)
    url = f"http://127.0.0.1:{daemon.port_file.read_text().strip()}"

    def row() -> dict[str, Any]:
        found = json.loads(weightcast("fleet", "--channel", run.channel, "--json").out)["hosts"]
        return found[0] if found else {"last_error": ""}

    wait_until(lambda: row()["last_error"].startswith("waits: an engine is loading the local checkpoint"))
    assert row()["standing"] == "behind" and row()["remedy"].startswith("wait: ")
    said = weightcast("status", url).out
    assert "waits: an engine is loading the local checkpoint" in said
    assert "remedy: wait: " in said and "last error" not in said
    assert weightcast("local", "verify", "--local", host.local).code == 0
    starting.send(signal.SIGTERM)
    assert starting.wait() == 7
    wait_until(lambda: daemon.status()["local_version"] == 1)
    wait_until(lambda: daemon.status()["last_error"] is None)
    assert daemon.status()["loop"]["failures"] == 0


def test_the_lock_ends_with_the_deadline_and_the_engine_goes_on(site: Site, run: Run) -> None:
    host = site.host(run)
    host.step()
    starting = Started(site, host.local, "--ready-url", "http://127.0.0.1:9/", "--load-deadline", "1")
    wait_until(lambda: starting.has("started") and not locked(host.local))
    assert starting.runs()
    starting.send(signal.SIGTERM)
    assert starting.wait() == 7 and "versions come all the same" in starting.read("stderr")


@pytest.mark.parametrize("asks", ["never answers", "cannot be asked"])
def test_the_deadline_waits_for_no_answer(site: Site, run: Run, asks: str) -> None:
    host = site.host(run)
    host.step()

    def loaded() -> bool:
        return threading.Event().wait() if asks == "never answers" else 1 / 0 > 0

    starting = Started(site, host.local, launch={"loaded": loaded, "load_seconds": 1})
    wait_until(lambda: starting.has("started") and not locked(host.local))
    assert starting.runs()
    starting.send(signal.SIGTERM)
    assert starting.wait() == 7


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("", 0)],
)
def test_the_engines_end_is_its_own(site: Site, run: Run, code: str, expected: int) -> None:
    host = site.host(run)
    host.step()
    starting = Started(site, host.local, "--ready-url", "http://127.0.0.1:9/", code=code)
    assert starting.wait() == expected
    wait_until(lambda: not locked(host.local))


def test_it_waits_for_a_checkpoint_whatever_starts_first(site: Site, run: Run) -> None:
    host = site.host(run)
    starting = Started(site, host.local, "--ready-url", "http://127.0.0.1:9/")
    host.step()
    wait_until(lambda: starting.has("started"))
    starting.send(signal.SIGTERM)
    assert starting.wait() == 7


def drop_a_shard(local: Path) -> None:
    """From the index: engines load all that the named files hold."""
    index = local / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    lost = names["weight_map"]["model.steps"]
    names["weight_map"] = {name: file for name, file in names["weight_map"].items() if file != lost}
    index.write_text(json.dumps(names))


def cut(local: Path) -> None:
    path = local / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def leave_unfinished(local: Path) -> None:
    path = local / ".weightcast" / "state.json"
    path.write_text(path.read_text().replace('"phase":"clean"', '"phase":"patching"'))


@pytest.mark.parametrize("damage", [drop_a_shard, cut, leave_unfinished])
def test_no_engine_is_let_at_what_is_no_version(site: Site, run: Run, damage: Callable[[Path], None]) -> None:
    host = site.host(run)
    host.step()
    host.sync.close()
    damage(host.local)
    before = {path: path.read_bytes() for path in host.local.rglob("*.json")}
    lock = FileLock(host.local / ".weightcast" / "patch")
    with pytest.raises((NeedsReseed, RetryLater), match=str(host.local)) as refused:
        hold_still(host.local, lock, 0)
    assert refused.value.remedy and not locked(host.local)
    assert {path: path.read_bytes() for path in host.local.rglob("*.json")} == before


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--engine", "sglang=http://a", "--ready-url", "http://a"),
        ("--engine", "llama=http://a"),
        ("--ready-url", "http://a..b/"),
    ],
)
def test_usage(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert run_command(["run-engine", "--local", str(tmp_path), *options, "--", "true"]) == 2


def test_usage_says_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run-engine", "--local", str(tmp_path), "--", "true"]) == 2
    text = capsys.readouterr().err
    assert "neither of --engine and --ready-url is given" in text and "remedy: give one: --engine" in text


def test_a_command_that_is_none(site: Site, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    host = site.host(run)
    host.step()
    arguments = ["run-engine", "--local", str(host.local), "--ready-url", "http://a"]
    assert run_command([*arguments, "--", "/no/such/engine"]) == 3
    assert "/no/such/engine cannot be started" in capsys.readouterr().err
    assert not locked(host.local)


def test_sync_waits_for_an_engine_that_is_just_starting(
    site: Site, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.publish()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    engine = SGLang()
    local = site.root / "host"
    arguments = ["sync", "--channel", str(run.channel), "--local", str(local), "--base", str(run.base_dir)]
    arguments += ["--engine", f"sglang=http://127.0.0.1:{port}"]
    assert run_command(arguments) == 5 and on_disk(local) == run.digest(1)
    capsys.readouterr()
    run.publish()

    def start_late() -> None:
        wait_until(lambda: on_disk(local) == run.digest(2))
        site.serve(engine, port)

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start_late)
        assert run_command([*arguments, "--wait-engine", "60", "--json"]) == 0
        started.result()
    assert json.loads(capsys.readouterr().out)["served_version"] == 2
    assert engine.held == run.digest(2)
