"""An unmodified vLLM with weightcast-engine, without dev mode, patched by the subscriber's daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_world import KEY, LiveServer
from ports import free_port
from vllm_world import (
    COMMAND,
    FULL,
    LONG,
    REPOSITORY,
    SHORT,
    STEP_SECONDS,
    FreshLoad,
    Host,
    Run,
    World,
    answers_name_their_versions,
    one_shot,
    running,
    wait_until,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
full = pytest.mark.skipif(not FULL, reason="a start of its own: make test-engines-full")

VARIANT = "llama-untied-single-fp32"


@dataclass
class LiveWorld(World):
    def require_named(self, version: int) -> None:
        [engine] = self.host.status["engines"]
        assert engine["version"] == version and engine["confirmed_by"] in ("label", "digest")

    @property
    def live(self) -> Any:
        [engine] = self.host.status["engines"]
        return engine["live"]


@contextmanager
def served(root: Path, models: Path, judge: FreshLoad, site: Path, *arguments: str) -> Iterator[LiveWorld]:
    local = root / "local"
    with Run(root, models / VARIANT) as run:
        one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", local)
        with LiveServer(local, root, site, *arguments) as server:
            option = f"vllm={server.url},via=live,name=live,api_key_env=LIVE_KEY"
            host = Host(root, run.channel, run.base, local, option)
            with running(host):
                host.wait_served(0)
                yield LiveWorld(root, run, server, host, judge)


@pytest.fixture(scope="module")
def world(
    models: Path, judge: FreshLoad, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveWorld]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIVE_KEY", KEY)
        with served(tmp_path_factory.mktemp("live"), models, judge, site) as world:
            yield world


def served_under_traffic(world: World) -> int:
    """The next version. Requests in flight end with its weights, or with those before it."""
    old = world.run.newest
    running = [world.server.begin(prompt, 120) for prompt in (SHORT, LONG)]
    version = world.run.publish()
    world.host.wait_served(version)
    for future in running:
        answer = future.result(STEP_SECONDS)
        assert answer.status == 200 and world.switch(answer, old) is not None
    return version


def test_versions_are_patched_under_traffic(world: LiveWorld) -> None:
    before = world.live
    pauses = []
    for _ in range(6):
        world.require(served_under_traffic(world))
        pauses.append(round(1000 * world.host.status["updates"][-1]["pause_seconds"]))
    after = world.live
    print(f"pauses {pauses} ms", json.dumps(after))
    assert (after["way"], after["patches"] - before["patches"]) == ("live", 6)
    assert after["reloads"] == before["reloads"], after["reason"]


@contextmanager
def gateway(*gates: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    given = [word for gate in gates for word in ("--gates", gate)]
    with subprocess.Popen([COMMAND, "gateway", "run", *given, "--port", str(port)]) as process:
        try:
            wait_until(lambda: is_ready(url), "a host behind the gateway")
            yield url
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    return False


@pytest.mark.parametrize("updates", ["pass", "partial"])
def test_a_gateway_names_the_versions_of_every_answer(world: LiveWorld, updates: str) -> None:
    port = free_port()
    world.host.extra = ("--gate", str(port), "--gate-updates", updates)
    world.host.with_engine(world.host.engine)
    world.host.wait_served(world.run.newest)
    patches = world.live["patches"]
    with gateway(f"http://127.0.0.1:{port}") as url:
        answers_name_their_versions(world, world.server.through(url), updates)
    assert world.live["patches"] >= patches + 4, world.live
    world.host.extra = ()
    world.host.with_engine(world.host.engine)
    world.host.wait_served(world.run.newest)


def test_what_is_resident_is_verified(world: LiveWorld) -> None:
    require_verified(world)


def require_verified(world: LiveWorld) -> None:
    local, option = world.host.local, f"{world.server.url},api_key_env=LIVE_KEY"
    found = json.loads(one_shot("local", "verify", "--json", "--local", local, "--engine", f"vllm={option}"))
    [engine] = found["engines"]
    assert engine["differing"] == [] and engine["version"] == world.run.newest
    assert engine["root"] == found["root"] or engine["refused"]


STEPS = (
    "engine.staged", "engine.checked", "patch.begun", "patch.recorded", "engine.noted", "engine.paused",
    "engine.applied", "engine.read-back", "engine.resumed", "engine.recorded",
)  # fmt: skip


def test_a_daemon_killed_at_every_step_leaves_engine_and_disk_together(world: LiveWorld) -> None:
    for step in STEPS:
        world.require(killed_and_back(world, step))
    patches = world.live["patches"]
    world.host.wait_served(world.run.publish())
    assert world.live["patches"] == patches + 1


def killed_and_back(world: World, step: str) -> int:
    """The daemon is killed at `step` of the next version, which the one after it serves."""
    host = world.host
    host.stop()
    host.program = (sys.executable, REPOSITORY / "tests/engines/killed_at.py", step, "SIGKILL")
    host.start()
    version = world.run.publish()
    process = host.process
    assert process is not None
    wait_until(lambda: not process.running, f"killed at {step}")
    assert process.child.returncode == -signal.SIGKILL
    host.stop()
    host.program = (COMMAND,)
    host.start()
    host.wait_served(version)
    return version


def test_a_restarted_engine_is_loaded_once_and_patched_again(world: LiveWorld) -> None:
    reloads = world.live["reloads"]
    world.server.restart()
    world.host.wait_served(world.run.newest)
    assert world.live["reloads"] == reloads + 1
    version = world.run.publish()
    world.host.wait_served(version)
    world.require(version)
    assert world.live["way"] == "live" and world.live["reloads"] == reloads + 1


@pytest.mark.parametrize(
    ("step", "whole"),
    [
        pytest.param("engine.checked", True, marks=full),
        ("engine.paused", False),
        ("engine.applied", True),
        pytest.param("engine.resumed", False, marks=full),
    ],
)
def test_an_engine_that_dies_at_any_step_comes_back_current(world: LiveWorld, step: str, whole: bool) -> None:
    """`whole`: the server's processes all end at once; else its worker alone, and the server by that."""
    host = world.host
    host.stop()
    host.program = (sys.executable, REPOSITORY / "tests/engines/killed_at.py", step, "SIGSTOP")
    host.start()
    world.run.publish()
    process = host.process
    assert process is not None
    wait_until(lambda: _state_of(process.child.pid) == "T", f"stopped at {step}")
    pids = _below(world.server.process.child.pid)
    for pid in pids if whole else pids[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    world.server.restart()
    process._signal(signal.SIGCONT)
    host.wait_served(world.run.newest)
    world.require(world.run.newest)
    host.stop()
    host.program = (COMMAND,)
    host.start()
    version = world.run.publish()
    host.wait_served(version)
    assert world.live["way"] == "live"


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _below(pid: int) -> list[int]:
    """The process and all that it has begun, itself first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in _below(int(child)))]


@full
def test_two_workers_are_patched_as_one(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIVE_KEY", KEY)
    with served(tmp_path, models, judge, site, "--tensor-parallel-size", "2") as world:
        patched_as_one(world)


@full
def test_data_parallel_replicas_are_patched_as_one(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded from disk once, then patched; requests at one time are shared out among the replicas."""
    monkeypatch.setenv("LIVE_KEY", KEY)
    with served(tmp_path, models, judge, site, "--data-parallel-size", "2") as world:
        patched_as_one(world)


def patched_as_one(world: LiveWorld) -> None:
    assert world.server.fetch("/v1/weightcast")["ranks"] == 2
    for _ in range(4):
        version = world.run.publish()
        world.host.wait_served(version)
        world.require(version)
        for future in [world.server.send(prompt, 24) for prompt in (SHORT, LONG, LONG, SHORT)]:
            answer = future.result(STEP_SECONDS)
            assert answer.status == 200 and world.judged(answer, version)
    assert world.live["patches"] == 4, world.live
    require_verified(world)
