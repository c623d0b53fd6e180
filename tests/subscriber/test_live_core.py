"""Daemons beside engines that run weightcast-engine itself: what lies in their memory is a fresh load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import groups
import pytest
from core_engine import CoreEngine, base_tensors, next_tensors, patches_of, weights_of
from doubles import Answer, Call
from hosts import Host, Run, Site
from torch import Tensor
from waiting import wait_until

from weightcast.subscriber.engines.base import Timeouts
from weightcast.subscriber.engines.vllm import ROUTES

SECONDS = groups.SECONDS
PATIENT = Timeouts(connect=60, probe=60, control=60, drain=60, reload=60)
MOST_VERSIONS = 30


class World:
    """A run of a small model, and the tensors of each of its versions."""

    def __init__(self, site: Site, base: dict[str, Tensor] | None = None) -> None:
        self.site = site
        self.tensors = [base_tensors() if base is None else base]
        self.run = Run(site.root / "run", site.stack, base=weights_of(self.tensors[0]))

    def publish(self) -> int:
        self.tensors.append(next_tensors(self.tensors[-1], len(self.tensors)))
        return self.run.publish(weights_of(self.tensors[-1]))

    def engine(self, *hosts: str, name: str = "live", patches: Path | None = None) -> tuple[CoreEngine, str]:
        """An engine over these hosts, and its option."""
        engine = CoreEngine(*(self.site.root / host for host in hosts), patches=patches)
        self.site.stack.callback(engine.close)
        return engine, f"vllm={self.site.serve(engine)},via=live,name={name}"

    def daemon(self, name: str, **settings: Any) -> groups.Host:
        return groups.Host(self.run, self.site.root / name, self.site.stack, **settings)

    def await_served(self, leader: groups.Host, *engines: CoreEngine) -> None:
        """The newest version, by the daemon's status and in every engine's memory."""
        version = len(self.tensors) - 1
        leader.daemon.wakeup.set()
        wait_until(lambda: leader.status.served_version == version and leader.status.ready, SECONDS)
        for engine in engines:
            assert engine.holds(self.tensors[version]) and not engine.controls.is_paused


@pytest.fixture
def world(site: Site) -> World:
    return World(site)


def facts(leader: groups.Host) -> dict[str, Any]:
    return {engine.name: engine.live for engine in leader.status.engines}


def restarted(leader: groups.Host, engine: CoreEngine, name: str) -> None:
    """The engine is another process, and its daemon has brought it to the version that it was at."""
    before = facts(leader)[name].reloads
    engine.restart()
    wait_until(lambda: facts(leader)[name].reloads > before and leader.status.ready, SECONDS)


def until_patched(world: World, leader: groups.Host, *engines: CoreEngine) -> None:
    """Versions, each in every engine's memory, until two more of each came as patches. An engine that
    a busy machine lets answer late is loaded from disk."""
    wanted = {name: live.patches + 2 for name, live in facts(leader).items()}
    for _ in range(MOST_VERSIONS):
        world.publish()
        world.await_served(leader, *engines)
        if all(live.patches >= wanted[name] for name, live in facts(leader).items()):
            return
    raise AssertionError(facts(leader))


def test_an_engine_over_two_hosts_is_patched_from_both_hosts_files(world: World) -> None:
    engine, option = world.engine("leader", "member")
    member = world.daemon("member", group_follower=True, group_patch=True).start()
    leader = world.daemon("leader", engine=(option,), group_member=(member.url,), group_patch=True).start()
    world.await_served(leader, engine)
    until_patched(world, leader, engine)
    restarted(leader, engine, "live")
    until_patched(world, leader, engine)


def test_a_group_whose_member_staged_another_patch_loads_from_disk(world: World) -> None:
    engine, option = world.engine("leader", "member")
    member = world.daemon("member", group_follower=True, group_patch=True).start()
    leader = world.daemon("leader", engine=(option,), group_member=(member.url,), group_patch=True).start()
    world.await_served(leader, engine)

    def spoiled(call: Call) -> Answer:
        [file] = patches_of(member.local).iterdir()
        data = bytearray(file.read_bytes())
        data[-40] ^= 1
        file.write_bytes(data)
        return engine.behave(call)

    engine.script(f"{ROUTES}/check", spoiled)
    for _ in range(MOST_VERSIONS):
        world.publish()
        world.await_served(leader, engine)
        if "refused" in facts(leader)["live"].because:
            break
    assert "digest" in facts(leader)["live"].reason
    until_patched(world, leader, engine)


@pytest.mark.parametrize("order", ["together", "rolling"])
def test_two_engines_of_a_host_are_patched_from_one_file(world: World, order: str) -> None:
    first, one = world.engine("host", name="first")
    second, two = world.engine("host", name="second")
    host = world.daemon("host", engine=(one, two), reload=order).start()
    world.await_served(host, first, second)
    until_patched(world, host, first, second)
    restarted(host, second, "second")
    until_patched(world, host, first, second)


class Stepped:
    """A host that a test moves step by step, with one engine brought to the base."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine, option = world.engine("host")
        self.host: Host = world.site.host(world.run, option, timeouts=PATIENT)
        self.host.step()
        self.engine.calls.clear()

    def follow(self) -> None:
        self.world.publish()
        self.host.step()

    @property
    def local(self) -> Path:
        return self.host.local

    @property
    def live(self) -> Any:
        return self.host.status.engines[0].live

    def serves(self) -> bool:
        version = len(self.world.tensors) - 1
        assert self.engine.holds(self.world.tensors[version]) and not self.engine.controls.is_paused
        return bool(self.host.status.ready and self.host.state.engines["live"].version == version)


@pytest.fixture
def stepped(world: World) -> Stepped:
    return Stepped(world)


def before(stepped: Stepped, route: str, act: Any) -> None:
    """`act` happens right before the engine handles its next call of this route."""

    def handle(call: Call) -> Answer:
        act()
        return stepped.engine.behave(call)

    stepped.engine.script(f"{ROUTES}/{route}", handle)


def staged(stepped: Stepped) -> Path:
    [file] = patches_of(stepped.local).iterdir()
    return file


def test_a_file_that_is_another_after_its_check_is_not_read_again(stepped: Stepped) -> None:
    before(stepped, "update", lambda: staged(stepped).write_bytes(b"another patch"))
    stepped.follow()
    assert stepped.serves() and stepped.live.patches == 1


def test_a_file_that_is_removed_before_its_check_means_a_reload(stepped: Stepped) -> None:
    before(stepped, "check", lambda: staged(stepped).unlink())
    stepped.follow()
    assert stepped.serves() and stepped.live.because == {"align": 1, "refused": 1}
    stepped.follow()
    assert stepped.serves() and stepped.live.patches == 1


@pytest.mark.parametrize("route", ["check", "update"])
def test_an_engine_that_starts_anew_during_an_update_comes_to_the_version(
    stepped: Stepped, route: str
) -> None:
    before(stepped, route, stepped.engine.restart)
    stepped.follow()
    stepped.host.retry()
    assert stepped.serves()
    stepped.follow()
    assert stepped.serves() and stepped.live.way == "live"


def test_weights_that_somebody_changed_are_no_base(stepped: Stepped) -> None:
    name = "norm"
    getattr(stepped.engine.ranks[0].model, name).add_(1)
    stepped.follow()
    assert stepped.serves() and "not those of the patch's base" in stepped.live.reason


def test_an_engine_that_somebody_paused_is_patched_and_goes_on_when_they_say(stepped: Stepped) -> None:
    stepped.engine.controls.is_paused = True
    stepped.follow()
    assert stepped.live.patches == 1 and stepped.engine.controls.is_paused
    assert stepped.host.status.engines[0].state == "paused" and not stepped.host.status.ready
    stepped.engine.controls.is_paused = False
    assert stepped.host.step().ready and stepped.serves()


def test_a_patch_that_ends_on_a_full_disk_is_none(stepped: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> Iterator[bytes]:
        yield b"wcpatch1"
        raise OSError(28, "No space left on device", str(stepped.local))

    with monkeypatch.context() as patched:
        patched.setattr("weightcast.shared.checkpoint.update.engine_patch._content", full)
        stepped.follow()
    assert stepped.serves() and "No space left" in stepped.live.reason
    assert list(patches_of(stepped.local).iterdir()) == []
    stepped.follow()
    assert stepped.serves() and stepped.live.patches == 1


def test_a_patch_of_another_run_is_refused(world: World, stepped: Stepped) -> None:
    """Same model, same names, same numbers: its base is another."""
    site = Site(world.site.root / "other", world.site.stack)
    foreign = Stepped(World(site, next_tensors(base_tensors(), 77)))
    taken: list[bytes] = []
    before(foreign, "check", lambda: taken.append(staged(foreign).read_bytes()))
    foreign.follow()
    before(stepped, "check", lambda: staged(stepped).write_bytes(taken[0]))
    stepped.follow()
    assert stepped.serves() and stepped.live.because == {"align": 1, "refused": 1}


@pytest.mark.parametrize("spoken", [0, 2, None, "1", True])
def test_a_plugin_of_another_format_is_not_spoken_to(stepped: Stepped, spoken: object) -> None:
    def other(call: Call) -> Answer:
        found = stepped.engine.behave(call)
        return Answer(found.status, {**found.body, "format": spoken})  # type: ignore[dict-item]

    stepped.engine.script(ROUTES, *[other] * 50)
    stepped.follow()
    assert not stepped.host.status.ready and stepped.engine.routes() == []
    assert "not 1" in stepped.host.status.not_ready_reasons[0]


def test_versions_of_a_quantised_model_are_loaded_from_disk_and_the_status_says_why(stepped: Stepped) -> None:
    stepped.engine.ranks[0].said = "the model is quantised: fp8"
    for _ in range(2):
        stepped.follow()
        assert stepped.serves() and stepped.live.reason == "the model is quantised: fp8"
    assert stepped.live.because == {"align": 1, "unpatchable": 2} and stepped.live.patches == 0
    assert "check" not in stepped.engine.routes()


def test_an_engine_that_loads_another_directory_is_never_told_that_it_holds_a_version(world: World) -> None:
    """Its reloads would succeed, with the weights that lie there."""
    other = world.run.base.write(world.site.root / "elsewhere")
    engine, option = world.engine(other.name, patches=patches_of(world.site.root / "host"))
    host = world.site.host(world.run, option, timeouts=PATIENT)
    host.step()
    world.publish()
    host.step()
    assert not host.status.ready and engine.routes() == []
    [reason] = host.status.not_ready_reasons
    assert str(other) in reason and "not the same local checkpoint" in reason
