from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from waiting import is_running, wait_until

from weightcast.shared.base.errors import (
    EngineFailed,
    NeedsReseed,
    NotInTime,
    Refused,
    RetryLater,
    WeightcastError,
)
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.loop import Loop, Stop, Wakeup, listen, next_status, run_daemon
from weightcast.shared.daemon.settings import ServiceSettings
from weightcast.shared.daemon.status import LoopStatus, Readiness, Snapshot

Serve = Callable[..., Any]

SCRIPT = """
import resource
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from weightcast.shared.daemon.loop import Wakeup, run_daemon
from weightcast.shared.daemon.hooks import run_hook
from weightcast.shared.daemon.http import make_app
from weightcast.shared.daemon.logs import setup_logs
from weightcast.shared.daemon.settings import ServiceSettings
from weightcast.shared.daemon.status import LoopStatus, Readiness, Snapshot

folder, mode = Path(sys.argv[1]), sys.argv[2]
if mode == "few files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
setup_logs("json", "info")
loop, wakeup = Snapshot(LoopStatus()), Wakeup()

def note(text):
    with (folder / "notes").open("a") as notes:
        notes.write(text + "\\n")

def step(stop):
    note("step")
    if mode == "long":
        stop.wait(None)
        while not (folder / "finish").exists():
            stop_pause.wait(0.01)
        note("finished")
    if mode == "stuck":
        stop_pause.wait(60)
    if mode in HOOKS:
        command = f"sh -c '{HOOKS[mode]}'"
        run_hook(command, version=1, directory=folder, phase="pre_read", deadline_seconds=300)

HOOKS = {
    "hook": f"sleep 300 & echo $$ $! > {folder}/pids; exec sleep 300",
    "deaf hook": f'trap "" TERM; sleep 300 & echo $$ $! > {folder}/pids; exec sleep 300',
}
import threading
STOP = {"stuck": 0.3, "hook": 4, "deaf hook": 4}
stop_pause = threading.Event()
settings = ServiceSettings(
    port=0, port_file=folder / "port", poll_seconds=3600, stop_seconds=STOP.get(mode, 30)
)
ready = lambda: Readiness(ready=True)
app = make_app("test", loop.get, ready, CollectorRegistry(), None, wakeup.set, LoopStatus)
run_daemon(app, step, wakeup, settings, lambda: note("start"), lambda: note("stop"), loop)
note("end")
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    script = tmp_path / "daemon_script.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[bytes]] = []

    def run(mode: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / "log").open("wb")
        with log:
            process = subprocess.Popen([sys.executable, str(script), str(tmp_path), mode], stderr=log)
        started.append(process)
        wait_until(lambda: (tmp_path / "port").exists() and "step" in notes(tmp_path))
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return path.read_text().splitlines() if path.exists() else []


def url_of(folder: Path) -> str:
    return f"http://127.0.0.1:{(folder / 'port').read_text().strip()}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_steps_ends_with_success(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, number: signal.Signals
) -> None:
    process = start("idle")
    process.send_signal(number)
    assert process.wait(20) == 0
    assert notes(tmp_path) == ["start", "step", "stop", "end"]
    assert not (tmp_path / "port").exists()
    assert '"event": "stopped"' in (tmp_path / "log").read_text()


def test_a_signal_lets_the_running_step_finish(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start("long")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)

    def is_stopping() -> bool:
        return httpx.get(f"{url_of(tmp_path)}/readyz", trust_env=False).status_code == 503

    wait_until(is_stopping)
    assert httpx.get(f"{url_of(tmp_path)}/healthz", trust_env=False).status_code == 200
    (tmp_path / "finish").touch()
    assert process.wait(20) == 0
    assert notes(tmp_path) == ["start", "step", "finished", "stop", "end"]


def test_a_step_that_does_not_end_is_left_at_the_deadline(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start("stuck")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 1
    assert "NotInTime" in (tmp_path / "log").read_text()
    assert "end" not in notes(tmp_path)


@pytest.mark.parametrize("mode", ["hook", "deaf hook"])
def test_a_hook_ends_with_the_daemon(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, mode: str
) -> None:
    process = start(mode)
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0 and notes(tmp_path)[-1] == "end"
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))
    assert "was ended: this process ends" in (tmp_path / "log").read_text()


def test_a_crowd_of_idle_connections_keeps_no_file_from_the_steps(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = start("few files")
    address = urlsplit(url_of(tmp_path))
    with contextlib.ExitStack() as crowd:
        for _ in range(200):
            crowd.enter_context(socket.create_connection((address.hostname, address.port), timeout=60))
        before = notes(tmp_path).count("step")
        assert httpx.post(f"{url_of(tmp_path)}/v1/wake", trust_env=False, timeout=60).status_code == 202
        wait_until(lambda: notes(tmp_path).count("step") > before)
        assert httpx.get(f"{url_of(tmp_path)}/healthz", trust_env=False, timeout=60).status_code == 200
        status = httpx.get(f"{url_of(tmp_path)}/v1/status", trust_env=False, timeout=60).json()
    assert status["failures"] == status["crashes"] == 0
    assert "Too many open files" not in (tmp_path / "log").read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_expected_errors_are_shown_and_the_loop_goes_on(serve: Serve) -> None:
    fail = threading.Event()
    fail.set()

    def step(stop: Stop) -> None:
        if fail.is_set():
            raise RetryLater("version 9 is not visible yet", remedy="wait")

    served = serve(step=step)
    wait_until(lambda: served.loop.get().failures)
    with served.client() as client:
        failure = client.get("/v1/status").json()["loop"]["last_failure"]
    assert failure == {"error": "RetryLater", "message": "version 9 is not visible yet", "remedy": "wait"}
    fail.clear()
    served.wakeup.set()
    wait_until(lambda: served.loop.get().last_failure is None)
    assert served.loop.get().failures_in_a_row == 0


def test_a_crash_is_counted_logged_and_retried(serve: Serve, quiet: io.StringIO) -> None:
    def step(stop: Stop) -> None:
        raise ZeroDivisionError("by design")

    served = serve(step=step)
    wait_until(lambda: served.loop.get().crashes == 1)
    event = json.loads(quiet.getvalue().splitlines()[-1])
    assert event["event"] == "step crashed"
    assert event["exception"][0]["exc_type"] == "ZeroDivisionError"
    served.wakeup.set()
    wait_until(lambda: served.loop.get().crashes == 2)
    assert served.loop.get().failures == 0
    with served.client() as client:
        assert client.get("/healthz").status_code == 200


def test_a_dead_work_thread_is_unhealthy(serve: Serve) -> None:
    def step(stop: Stop) -> None:
        raise SystemExit("no way on")

    served = serve(step=step)
    with served.client() as client:
        wait_until(lambda: client.get("/healthz").status_code == 503)
        assert "no way on" in client.get("/healthz").json()["reasons"][0]
        assert client.get("/readyz").status_code == 503
        assert client.get("/v1/status").status_code == 200
    served.stop.set()
    served.thread.join(20)
    assert isinstance(served.errors[0], WeightcastError)


def run_briefly(settings: ServiceSettings, **callbacks: Callable[[], None]) -> list[str]:
    """Runs a daemon whose first step stops it; returns the names of the threads of step and callbacks."""
    stop, wakeup = Stop(), Wakeup()
    threads: list[str] = []

    def step(stop: Stop) -> None:
        threads.append(threading.current_thread().name)
        stop.set()

    ready = Readiness(ready=True)
    app = make_app("t", LoopStatus, lambda: ready, CollectorRegistry(), None, wakeup.set, LoopStatus)
    run_daemon(app, step, wakeup, settings, stop=stop, **callbacks)
    return threads


def test_callbacks_and_steps_share_a_thread() -> None:
    names: list[str] = []

    def note() -> None:
        names.append(threading.current_thread().name)

    steps = run_briefly(ServiceSettings(port=0), on_start=note, on_stop=note)
    assert names + steps == ["work"] * 3


def test_a_refused_start_ends_the_daemon_with_its_error() -> None:
    def refuse() -> None:
        raise Refused("another daemon owns this directory")

    with pytest.raises(Refused, match="another daemon"):
        run_briefly(ServiceSettings(port=0), on_start=refuse)


def test_a_taken_port_is_refused_by_name(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"port {port}") as refused:
            run_briefly(ServiceSettings(port=port, port_file=tmp_path / "port"))
    assert refused.value.remedy
    assert not (tmp_path / "port").exists()


def test_ipv6_loopback() -> None:
    try:
        probe = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    probe.close()
    with listen("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


def test_the_port_of_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    port_file.write_text("1\n")
    seen: list[str] = []
    run_briefly(
        ServiceSettings(port=0, port_file=port_file), on_start=lambda: seen.append(port_file.read_text())
    )
    assert int(seen[0]) > 1
    assert os.listdir(tmp_path) == []


def test_a_wakeup_during_a_step_counts_for_the_next_pause() -> None:
    wakeup = Wakeup()
    wakeup.set()
    assert wakeup.take(60)
    assert not wakeup.take(0)


def test_a_stop_before_the_first_step_runs_none() -> None:
    stop, status = Stop(), Snapshot(LoopStatus())
    stop.set()
    Loop(lambda stop: pytest.fail("stepped"), Wakeup(), stop, 1.0, status).run()
    assert status.get().steps == 0


def test_a_disk_error_is_a_failure_that_names_the_file_not_a_crash() -> None:
    def step(stop: Stop) -> None:
        raise OSError(errno.EIO, "Input/output error", "/channel/latest")

    status = Snapshot(LoopStatus())
    loop = Loop(step, Wakeup(), Stop(), 3600.0, status)
    loop.run_once()
    loop.run_once()
    seen = status.get()
    assert (seen.steps, seen.failures, seen.crashes, seen.failures_in_a_row) == (2, 2, 0, 2)
    assert seen.last_failure is not None and seen.pause_seconds < 3600
    assert seen.last_failure.message == "/channel/latest: Input/output error"
    assert "disk" in seen.last_failure.remedy and "mount" in seen.last_failure.remedy


ERRORS = [
    None,
    RetryLater("x"),
    NotInTime("x"),
    EngineFailed("x"),
    Refused("x"),
    NeedsReseed("x"),
    WeightcastError("x"),
    OSError(5, "x"),
]


@given(st.lists(st.sampled_from(ERRORS), max_size=60), st.floats(0.01, 100))
def test_pauses_are_bounded_and_counts_add_up(errors: list[Exception | None], poll_seconds: float) -> None:
    status = LoopStatus()
    for error in errors:
        status = next_status(status, error, poll_seconds)
        assert 0 < status.pause_seconds <= max(120.0, poll_seconds)
    bad = [error for error in errors if error is not None]
    assert status.steps == len(errors)
    assert status.failures + status.crashes == len(bad)
    assert status.crashes == sum(isinstance(error, OSError) for error in bad)
    assert (status.last_failure is None) == (not errors or errors[-1] is None)


def test_refusals_wait_longer_than_what_passes_by_itself() -> None:
    soon = next_status(LoopStatus(), RetryLater("x"), 1.0).pause_seconds
    later = next_status(LoopStatus(), Refused("x"), 1.0).pause_seconds
    assert soon < 1 < later
    again = next_status(next_status(LoopStatus(), RetryLater("x"), 1.0), RetryLater("x"), 1.0)
    assert again.pause_seconds == 2 * soon
