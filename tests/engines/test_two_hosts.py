"""One real vLLM over two hosts, with a worker, a local checkpoint and a subscriber on each.

The hosts share a machine and its loopback. The second has a mount namespace: at the path that the engine
loads from it finds a directory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_world import KEY, LiveServer
from test_live_host import (
    VARIANT,
    LiveWorld,
    full,
    killed_and_back,
    require_verified,
    served_under_traffic,
)
from test_real_adapters import ALLOWED, MOST_RANK, Lora, served
from vllm_world import (
    COMMAND,
    HERE,
    FreshLoad,
    Host,
    Process,
    Run,
    Server,
    World,
    engine_python,
    one_shot,
    reserved_port,
    running,
    wait_until,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
NODES = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")


def elsewhere(there: Path, path: Path) -> tuple[str | Path, ...]:
    """Words before a command that shall find the directory `there` at `path`."""
    script = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    return ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", there, path)


class SecondNode(Server):
    """Mixed into a server: its second node, which begins and ends with it."""

    there: Path
    """the second host's local checkpoint"""
    node: Process | None = None

    def _start(self) -> Process:
        self._stop_node()
        with reserved_port() as port:
            words = [*self._words(), "--master-port", str(port.getsockname()[1])]
        command = [*elsewhere(self.there, self._model), engine_python(), HERE / "headless_node.py"]
        self.node = Process.start(
            self._log.with_name("node.log"), [*command, *words, "--node-rank", "1"], self._environment()
        )
        command = [engine_python(), HERE / "vllm_server.py"]
        return Process.start(self._log, [*command, *words, "--node-rank", "0"], self._environment())

    def _stop_node(self) -> None:
        if self.node is not None:
            self.node.stop()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stop_node()


class PatchedOverTwo(SecondNode, LiveServer):
    def __init__(self, local: Path, there: Path, room: Path, site: Path) -> None:
        self.there = there
        LiveServer.__init__(self, local, room, site, *NODES)


class ReloadedOverTwo(SecondNode):
    def __init__(self, local: Path, there: Path, room: Path, site: Path) -> None:
        self.there = there
        arguments = (*NODES, "--enable-lora", "--max-lora-rank", str(MOST_RANK), "--max-cpu-loras", "4")
        super().__init__(local, room / "vllm.log", arguments=arguments, environment=ALLOWED)


@dataclass
class Over(LiveWorld):
    """`host` leads, `member` follows."""

    member: Host

    def require_together(self, version: int) -> None:
        self.require(version)
        assert self.member.status["local_version"] == version


@contextmanager
def two_hosts(root: Path, models: Path, judge: FreshLoad, site: Path, live: bool) -> Iterator[Over]:
    local, there = root / "local", root / "second" / "local"
    with ExitStack() as stack:
        run = stack.enter_context(Run(root, models / VARIANT))
        for directory in (local, there):
            one_shot("sync", "--channel", run.channel, "--base", run.base, "--local", directory)
        server = stack.enter_context((PatchedOverTwo if live else ReloadedOverTwo)(local, there, root, site))
        port = str(stack.enter_context(reserved_port()).getsockname()[1])
        patch = ("--group-patch",) if live else ()
        member = Host(
            root / "second",
            run.channel,
            run.base,
            local,
            "",
            extra=("--port", port, "--group-follower", *patch),
            program=(*elsewhere(there, local), COMMAND),
        )
        option = f"vllm={server.url}" + (",via=live,name=live,api_key_env=LIVE_KEY" if live else "")
        leads = ("--group-member", f"http://127.0.0.1:{port}", "--group-lease", "6", *patch)
        host = Host(root, run.channel, run.base, local, option, extra=leads)
        stack.enter_context(running(member))
        stack.enter_context(running(host))
        host.wait_served(0)
        yield Over(root, run, server, host, judge, member)


@pytest.fixture(scope="module")
def world(
    models: Path, judge: FreshLoad, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Over]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIVE_KEY", KEY)
        with two_hosts(tmp_path_factory.mktemp("hosts"), models, judge, site, live=True) as world:
            yield world


def test_versions_are_patched_into_the_workers_of_both_hosts(world: Over) -> None:
    before = world.live
    for _ in range(3):
        world.require_together(served_under_traffic(world))
    after = world.live
    assert (after["way"], after["patches"] - before["patches"]) == ("live", 3)
    assert after["reloads"] == before["reloads"], after["reason"]
    require_verified(world)


def test_nobody_moves_without_the_second_host(world: Over) -> None:
    old = world.run.newest
    world.member.stop()
    version = world.run.publish()

    def told() -> bool:
        error = world.host.status["last_error"]
        return error is not None and "127.0.0.1" in error["message"]

    wait_until(told, "the leader says who is away")
    world.require(old)
    world.member.start()
    world.host.wait_served(version)
    world.require_together(version)


def test_a_host_that_stages_no_patch_is_no_harm(world: Over) -> None:
    """The engine refuses the patch that one of its workers has no file of, and is loaded from disk."""
    patched = world.member.extra
    world.member.stop()
    world.member.extra = tuple(word for word in patched if word != "--group-patch")
    world.member.start()
    before = world.live
    version = world.run.publish()
    world.host.wait_served(version)
    world.require_together(version)
    assert world.live["reloads"] == before["reloads"] + 1 and world.live["way"] == "reload"
    world.member.stop()
    world.member.extra = patched
    world.member.start()
    version = world.run.publish()
    world.host.wait_served(version)
    world.require_together(version)
    assert world.live["way"] == "live"


@pytest.mark.parametrize("step", ["engine.checked", "engine.paused", "engine.applied"])
def test_a_leader_that_is_killed_leaves_both_hosts_together(world: Over, step: str) -> None:
    world.require_together(killed_and_back(world, step))


@full
def test_an_engine_whose_second_node_dies_comes_back_current(world: Over) -> None:
    assert isinstance(world.server, SecondNode) and world.server.node is not None
    world.server.node.stop(grace=0)
    world.run.publish()
    world.server.restart()
    world.host.wait_served(world.run.newest)
    world.require_together(world.run.newest)
    version = world.run.publish()
    world.host.wait_served(version)
    world.require_together(version)
    assert world.live["way"] == "live"


@full
def test_each_node_loads_its_own_hosts_files(
    models: Path, judge: FreshLoad, site: Path, tmp_path: Path
) -> None:
    """Also of adapters, which both hosts have exported before the first node is asked to load one."""
    with two_hosts(tmp_path, models, judge, site, live=False) as world:
        for _ in range(3):
            version = served_under_traffic(world)
            World.require(world, version)
            assert world.member.status["local_version"] == version
        lora = Lora(world.run, world.server, world.host, judge, world.server)
        for _ in range(4):
            label = lora.publish()
            lora.wait_loaded(label)
            lora.require(label, version)
            assert world.member.status["adapters"][0]["loaded"][0] == len(lora.adapters)
        version = world.run.publish()
        wait_until(lambda: served(world.host) == version, "the main weights moved")
        assert lora.names().keys() == {"tiny"}
        label = lora.publish()
        lora.wait_loaded(label)
        lora.require(label, version)
