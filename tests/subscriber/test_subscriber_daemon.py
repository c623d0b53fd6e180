"""The daemon as a process of its own: status over HTTP, signals, verbs beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO, Any

import forked
import httpx
import pytest
from doubles import Drop, Hang
from hosts import Run, SGLang, Site, on_disk
from in_process import Command
from waiting import wait_until

from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.reports import read_reports
from weightcast.shared.channel.signing import PrivateKey
from weightcast.subscriber import commands_sync
from weightcast.subscriber.sync import host as sync_host

TOKEN = "correct-horse"


class Daemon:
    def __init__(
        self,
        site: Site,
        run: Run,
        *engines: SGLang,
        token: str | None = None,
        options: tuple[str, ...] = (),
        stderr: IO[bytes] | None = None,
        of_engines: str = "",
        port: str = "port",
    ) -> None:
        """`of_engines`: more of the option of each; `port`: name of the file with it."""
        self.local = site.root / "host"
        self.port_file = site.root / port
        self.port_file.unlink(missing_ok=True)
        self.log = (site.root / "log").open("ab")
        self.token = token
        arguments = [
            *("subscriber", "run", "--channel", str(run.channel), "--base", str(run.base_dir)),
            *("--local", str(self.local), "--port", "0", "--port-file", str(self.port_file)),
            *("--poll-seconds", "0.1", "--threads", "1", "--stop-seconds", "20"),
            *options,
        ]
        for engine in engines:
            arguments += ["--engine", site.option(engine) + of_engines]
        environment = dict(os.environ) | ({} if token is None else {"WEIGHTCAST_TOKEN": token})
        self.process = forked.weightcast(*arguments, env=environment, stderr=stderr or self.log)
        site.stack.callback(self.end)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def get(self, path: str) -> httpx.Response:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        port = int(self.port_file.read_text())
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, trust_env=False, timeout=10)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/v1/status").json()
        return status

    def engine_state(self) -> str:
        return "".join(engine["state"] for engine in self.status()["engines"])

    def serves(self, version: int) -> bool:
        assert self.process.poll() is None, "the daemon ended"
        return self.port_file.exists() and self.status()["served_version"] == version

    def term(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def test_a_daemon_follows_tells_and_ends(site: Site, run: Run, weightcast: Command) -> None:
    engine = SGLang()
    daemon = Daemon(site, run, engine)
    wait_until(lambda: daemon.serves(0))
    run.publish()
    wait_until(lambda: daemon.serves(1))
    wait_until(lambda: daemon.status()["state"] == "idle")
    assert on_disk(daemon.local) == run.digest(1) == engine.held

    status = daemon.status()
    assert (status["local_version"], status["target_version"], status["lag_versions"]) == (1, 1, 0)
    assert status["assurance"] == "full" and status["ready"] and status["last_error"] is None
    assert status["last_full_hash_age_seconds"] >= 0 and status["bytes_read"] > 0
    [shown] = status["engines"]
    assert (shown["mark"], shown["version"], shown["confirmed_by"]) == ("served", 1, "label")
    assert {"plan", "total"} <= set(status["updates"][0]["seconds"])
    assert daemon.get("/readyz").status_code == 200 and daemon.get("/healthz").status_code == 200
    metrics = daemon.get("/metrics").text
    assert "weightcast_local_version 1.0" in metrics and "weightcast_served_version 1.0" in metrics
    assert 'weightcast_updates_total{kind="patch"} 1.0' in metrics
    schema = daemon.get("/openapi.json").json()
    assert "HostStatus" in schema["components"]["schemas"]

    wait_until(lambda: [r.served_version for r in read_reports(open_store(run.channel))] == [1])
    [report] = read_reports(open_store(run.channel))
    assert (report.local, report.state, report.lag) == (str(daemon.local), "ready", 0)
    before = report.counter

    beside = weightcast(
        "sync", "--channel", str(run.channel), "--local", str(daemon.local), "--base", str(run.base_dir)
    )
    assert beside.code == 75 and "already has a writer" in beside.err and "remedy" in beside.err
    verified = weightcast("local", "verify", "--local", str(daemon.local))
    assert verified.code == 0, verified.err

    assert daemon.term() == 0
    assert not daemon.port_file.exists()
    [report] = read_reports(open_store(run.channel))
    assert report.counter > before


def test_a_second_daemon_on_one_local_checkpoint_ends_and_says_who_has_it(site: Site, run: Run) -> None:
    engine = SGLang()
    first = Daemon(site, run, engine)
    wait_until(lambda: first.serves(0))
    wait_until(lambda: [report.state for report in read_reports(open_store(run.channel))] == ["ready"])
    second = Daemon(site, run, engine, port="second")
    assert second.process.wait(30) == 75
    assert f"(pid {first.process.pid} on {socket.gethostname()})" in (site.root / "log").read_text()
    [report] = read_reports(open_store(run.channel))
    assert (report.state, report.last_error) == ("ready", ""), "that of the one which has it"
    assert first.term() == 0
    third = Daemon(site, run, engine, port="third")
    wait_until(lambda: third.serves(0))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("--engine", "vllm=http://a..b:8000"),
        ("--group-member", "http://a..b:8341"),
        ("--report-to", "http://a..b:8340"),
        ("--host", "a..b"),
    ],
)
def test_a_host_that_cannot_be_asked_for_is_a_wrong_setting(
    site: Site, run: Run, setting: str, value: str
) -> None:
    places = ("--channel", str(run.channel), "--base", str(run.base_dir), "--local", str(site.root / "host"))
    done = forked.run_weightcast(
        *("subscriber", "run", *places, "--port", "0", setting, value),
        env=dict(os.environ) | {"WEIGHTCAST_TOKEN": TOKEN},
    )
    assert done.returncode == 2
    assert "wrong settings" in done.stderr and setting[2:].replace("-", "_") in done.stderr
    assert done.stderr.count("remedy:") == 1 and "Traceback" not in done.stderr
    assert not (site.root / "host").exists()


@pytest.mark.parametrize("log", ["a full disk", "a pipe whose reader goes"])
def test_a_log_that_cannot_be_written_ends_neither_daemon_nor_step(site: Site, run: Run, log: str) -> None:
    reader, writer = os.pipe()
    engine = SGLang()
    with os.fdopen(writer, "wb") as pipe, Path("/dev/full").open("wb") as full:
        daemon = Daemon(site, run, engine, stderr=full if log == "a full disk" else pipe)
    wait_until(lambda: daemon.serves(0))
    os.close(reader)
    run.publish()
    wait_until(lambda: daemon.serves(1))
    assert daemon.status()["loop"]["crashes"] == 0 and daemon.status()["ready"]
    assert daemon.term() == 0


def test_a_daemon_that_is_told_to_end_resumes_the_engine_it_paused(site: Site, run: Run) -> None:
    engine = SGLang()
    daemon = Daemon(site, run, engine)
    wait_until(lambda: daemon.serves(0))
    engine.script("/update_weights_from_disk", Hang())
    run.publish()
    engine.wait_until_hanging()
    assert engine.paused
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: daemon.get("/readyz").status_code == 503)
    engine.release()
    assert daemon.process.wait(30) == 0
    assert (engine.paused, engine.held, engine.label) == (False, run.digest(1), "1")


def hanging(site: Site, run: Run, path: str, *options: str, of_engines: str = "") -> tuple[SGLang, Daemon]:
    """In the middle of a reload that does not go on."""
    engine = SGLang()
    site.stack.callback(engine.release)
    daemon = Daemon(site, run, engine, options=options, of_engines=of_engines)
    wait_until(lambda: daemon.serves(0))
    engine.script(path, Hang())
    run.publish()
    engine.wait_until_hanging()
    return engine, daemon


@pytest.mark.parametrize(("of_all", "of_this"), [("300", ""), ("0.5", ",deadline=300")])
def test_a_reload_longer_than_the_stop_time_is_waited_for(
    site: Site, run: Run, of_all: str, of_this: str
) -> None:
    times = ("--stop-seconds", "0.5", "--engine-deadline", of_all)
    engine, daemon = hanging(site, run, "/update_weights_from_disk", *times, of_engines=of_this)
    daemon.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.process.wait(3)
    engine.release()
    assert daemon.process.wait(30) == 0
    assert (engine.paused, engine.held, engine.label) == (False, run.digest(1), "1")


def test_a_roll_ends_with_the_engine_it_is_at_when_the_daemon_is_to_end(site: Site, run: Run) -> None:
    engines = SGLang(), SGLang()
    for engine in engines:
        site.stack.callback(engine.release)
    daemon = Daemon(site, run, *engines, options=("--reload", "rolling"))
    wait_until(lambda: daemon.serves(0))
    pauses = len(engines[1].of("/pause_generation"))
    engines[0].script("/update_weights_from_disk", Hang())
    run.publish()
    engines[0].wait_until_hanging()
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in daemon.get("/readyz").text)
    engines[0].release()
    assert daemon.process.wait(30) == 0
    assert (engines[0].paused, engines[0].held) == (False, run.digest(1))
    assert (len(engines[1].of("/pause_generation")), engines[1].held) == (pauses, run.digest(0))
    again = Daemon(site, run, *engines, options=("--reload", "rolling"))
    wait_until(lambda: again.port_file.exists() and again.serves(1))
    assert engines[1].held == run.digest(1) and again.term() == 0


@pytest.mark.parametrize(("of_all", "of_this"), [("2", ""), ("300", ",deadline=2")])
def test_an_engine_that_hangs_is_waited_for_no_longer_than_its_deadline(
    site: Site, run: Run, of_all: str, of_this: str
) -> None:
    """A pause has thirty seconds."""
    times = ("--stop-seconds", "0.5", "--engine-deadline", of_all)
    _, daemon = hanging(site, run, "/pause_generation", *times, of_engines=of_this)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 4
    assert "did not end within its grace period of 0.5 s" in (site.root / "log").read_text()


def test_a_killed_daemon_goes_on_where_it_was(site: Site, run: Run) -> None:
    engine = SGLang()
    daemon = Daemon(site, run, engine)
    wait_until(lambda: daemon.serves(0))
    engine.script("/update_weights_from_disk", Hang())
    run.publish()
    engine.wait_until_hanging()
    daemon.process.kill()
    daemon.process.wait()
    engine.release()
    again = Daemon(site, run, engine)
    wait_until(lambda: again.port_file.exists() and again.serves(1))
    assert (engine.paused, engine.held) == (False, run.digest(1))
    assert again.term() == 0


def test_a_daemon_may_end_with_its_engine(site: Site, run: Run) -> None:
    engine = SGLang()
    engine.script("/update_weights_from_disk", *[Drop()] * 100)
    daemon = Daemon(site, run, engine, options=("--engine-attempts", "1", "--on-engine-failed", "exit"))
    assert daemon.process.wait(60) == 5
    log = (site.root / "log").read_text()
    assert "engine failed" in log and "broke the connection" in log and engine.paused


def test_a_failed_engine_is_told_with_its_reason(site: Site, run: Run, weightcast: Command) -> None:
    engine = SGLang()
    engine.script("/update_weights_from_disk", *[Drop()] * 100)
    daemon = Daemon(site, run, engine, options=("--engine-attempts", "1", "--report-seconds", "0.5"))
    asked = ("fleet", "--channel", str(run.channel))

    def shown() -> dict[str, Any]:
        [host] = weightcast(*asked, "--json").json["hosts"] or [{"standing": ""}]
        return dict(host)

    host = wait_until(lambda: host if (host := shown())["standing"] == "failed" else None)
    assert "broke the connection" in host["last_error"] and "engine's log" in host["remedy"]
    assert [update["outcome"] for update in host["updates"] if update["kind"] == "reload"] == ["refused"]
    assert "broke the connection" in weightcast(*asked).out
    late = weightcast("wait", "--channel", str(run.channel), "--version", "0", "--timeout", "0")
    assert late.code == 4 and "broke the connection" in late.err
    log = (site.root / "log").read_text()
    assert "engines not reloaded" in log and "engines reloaded" not in log
    assert daemon.term() == 0


def test_the_verb_wake_retries_a_failed_engine(site: Site, run: Run, weightcast: Command) -> None:
    engine = SGLang()
    engine.script("/update_weights_from_disk", *[Drop(), Drop()])
    daemon = Daemon(site, run, engine, token=TOKEN, options=("--engine-attempts", "1"))
    wait_until(lambda: daemon.port_file.exists() and daemon.engine_state() == "failed")
    port = daemon.port_file.read_text().strip()
    refused = weightcast("wake", port)
    assert refused.code == 3 and "needs a token (401)" in refused.err
    assert daemon.engine_state() == "failed"
    woken = weightcast("wake", port, "--token", TOKEN, "--json")
    assert (woken.code, woken.json["url"]) == (0, f"http://127.0.0.1:{port}")
    wait_until(lambda: daemon.serves(0))
    assert daemon.term() == 0


def test_a_channel_that_cannot_be_read_is_told_and_outlived(site: Site, run: Run) -> None:
    engine = SGLang()
    daemon = Daemon(site, run, engine, token=TOKEN)
    wait_until(lambda: daemon.serves(0))
    (run.channel / "latest").write_text("nonsense")
    wait_until(lambda: daemon.status()["last_error"] is not None)
    error = daemon.status()["last_error"]
    assert error["error"] == "DamagedFile" and error["remedy"] and abs(error["at"] - time.time()) < 60
    assert daemon.get("/readyz").status_code == 200
    daemon.token = None
    assert daemon.get("/v1/status").status_code == 401
    assert daemon.term() == 0


def test_a_sync_says_how_far_it_is(
    site: Site, run: Run, weightcast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_sync, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(commands_sync, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(sync_host, "_SHOW_EVERY_SECONDS", -1.0)
    run.publish()
    asked = ("sync", "--channel", run.channel, "--local", site.root / "host", "--base", run.base_dir)
    done = weightcast(*asked, "--json")
    assert done.code == 0 and done.json["local_version"] == 1
    assert re.search(r"^seeding version 1: [0-9.]+ [kM]?B$", done.err, re.MULTILINE), done.err
    assert re.search(r"^fetching version 1: ([0-9.]+ [kM]?B) of \1$", done.err, re.MULTILINE), done.err


def test_targets_that_are_not_there_say_what_to_give(site: Site, run: Run, weightcast: Command) -> None:
    run.publish()
    asked = ("sync", "--channel", str(run.channel), "--local", str(site.root / "host"))
    later = weightcast(*asked, "--base", str(run.base_dir), "--target", "99")
    assert later.code == 75 and "the newest is 1" in later.err and "channel log" in later.err
    none = weightcast(*asked, "--target=-1")
    assert none.code == 2 and "give latest, a version's number or a tag" in none.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--local", "L"), "channel"),
        (("--channel", "C"), "local"),
        (("--channel", "C", "--local", "L", "--engine", "ollama=http://x"), "unknown engine kind"),
        (("--channel", "C", "--local", "L", "--engine", "sglan=http://x"), "did you mean sglang?"),
        (("--channel", "C", "--local", "L", "--engine", "http://x"), "give sglang=http://x or vllm=http://x"),
        (("--channel", "C", "--local", "L", "--engine", "vllm=http://x/v1"), "ends in /v1; give http://x"),
        (("--channel", "C", "--local", "L", "--target", "../x"), "target"),
        (("--channel", "C", "--local", "L", "--host", "0.0.0.0"), "token"),
    ],
)
def test_usage_errors(weightcast: Command, arguments: tuple[str, ...], told: str) -> None:
    done = weightcast("subscriber", "run", *arguments)
    assert done.code == 2 and told in done.err


def test_sync_as_a_verb(site: Site, run: Run, weightcast: Command) -> None:
    engine, local = SGLang(), site.root / "host"
    run.publish()
    common = ("sync", "--channel", str(run.channel), "--base", str(run.base_dir), "--local", str(local))
    option = site.option(engine)
    done = weightcast(*common, "--engine", option, "--rehash", "--json")
    assert done.code == 0, done.err
    status = done.json
    assert (status["local_version"], status["served_version"], status["ready"]) == (1, 1, True)
    assert on_disk(local) == run.digest(1) == engine.held
    assert weightcast(*common).code == 0
    absent = weightcast(*common, "--engine", "sglang=http://127.0.0.1:9")
    assert absent.code == 5 and "does not answer" in absent.err
    _rot(local)
    damaged = weightcast("local", "verify", "--local", str(local), "--json")
    assert damaged.code == 3
    assert len(damaged.json["differing"]) == 1
    done = weightcast(*common, "--rehash", "--json")
    assert [move["kind"] for move in done.json["updates"]] == ["repair"]
    assert on_disk(local) == run.digest(1)


@pytest.mark.parametrize(
    ("mounted", "options", "told"),
    [
        (False, (), b"is not a directory: channel is missing in"),
        (True, (), b"neither channel.json nor a pointer"),
        (True, ("--trusted-key", str(PrivateKey.generate().public)), b"neither channel.json nor a pointer"),
    ],
)
def test_sync_waits_for_a_channel_that_is_not_there_yet(
    site: Site, run: Run, mounted: bool, options: tuple[str, ...], told: bytes
) -> None:
    """As a host of a cluster does that begins before the publisher."""
    places = ("--channel", str(run.channel), "--base", str(run.base_dir), "--local", str(site.root / "host"))
    later = run.channel.rename(site.root / "later")
    if mounted:
        run.channel.mkdir()
    command = ("sync", *places, *options, "--json")
    assert forked.run_weightcast(*command).returncode == 75
    with forked.weightcast(
        *command, "--wait-channel", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as waiting:
        assert waiting.stdout is not None and waiting.stderr is not None
        said = waiting.stderr.readline()
        assert told in said and b"; waiting up to 60 s" in said
        later.rename(run.channel)
        answer = json.loads(waiting.stdout.read())
    if options:
        assert (waiting.returncode, answer["error"]) == (3, "Untrusted"), "it is there, and not signed"
    else:
        assert (waiting.returncode, answer["local_version"]) == (0, 0)


def _rot(local: Path) -> None:
    """A byte goes bad without a trace in the file's times, as on a failing disk."""
    path = min(local.glob("model-*.safetensors"))
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_local_verify_refuses_what_is_none(site: Site, weightcast: Command) -> None:
    done = weightcast("local", "verify", "--local", str(site.root))
    assert done.code == 3 and "is not a local checkpoint" in done.err
