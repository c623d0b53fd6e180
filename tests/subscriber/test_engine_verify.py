"""What lies in an engine's memory, against the lanes of the version: in the background, after every so many
versions, and by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doubles import Answer, Call, Drop
from hosts import Clock, Host, Run, Site, on_disk
from plugin_double import ROUTES, PluginDouble

from weightcast.shared.checkpoint.state.state import Mark
from weightcast.shared.cli.main import run
from weightcast.subscriber.engines.live import EngineVerify
from weightcast.subscriber.status import EngineVerifyStatus

RATE = 1 << 30


class World:
    def __init__(self, site: Site, rate: int = RATE, every: int = 0, *more: str) -> None:
        self.run: Run = site.run()
        self.engine = PluginDouble(site.root / "host")
        option = f"vllm={site.serve(self.engine)},via=live,name=live"
        self.host: Host = site.host(self.run, option, *more)
        self.clock = Clock()
        self.verify = EngineVerify(rate, every, clock=self.clock, now=self.clock)
        self.host.step()

    def turn(self, seconds: float = 1.0) -> dict[str, str]:
        self.clock.at += seconds
        return self.host.sync.verify_engines(self.verify)

    @property
    def status(self) -> EngineVerifyStatus:
        live = self.host.status.engines[0].live
        assert live is not None and live.verify is not None
        return live.verify


@pytest.fixture
def world(site: Site) -> World:
    return World(site)


def test_a_whole_pass_confirms_the_version_by_digest(world: World) -> None:
    assert world.host.status.confirmed_by == "label"
    assert world.turn() == {}
    assert (world.status.passes, world.status.version, world.status.refused) == (1, 0, 0)
    assert world.status.done_bytes == world.status.total_bytes > 0
    assert world.status.full_pass == world.clock.at
    assert world.host.status.confirmed_by == "digest" and world.host.status.ready
    world.run.publish()
    world.host.step()
    assert world.host.status.confirmed_by == "label" and world.engine.applied == 1


def test_what_was_read_of_a_process_that_is_gone_confirms_nothing(site: Site) -> None:
    world = World(site, rate=0, every=1)
    world.run.publish()
    world.host.step()
    world.turn()
    world.run.publish()
    world.host.step()
    world.turn()
    assert world.host.status.confirmed_by == "digest"
    world.engine.restart()
    world.host.step()
    world.turn()
    assert world.host.status.confirmed_by == "label" and world.host.status.ready


def test_a_flipped_bit_is_found_and_the_engine_reloaded(world: World) -> None:
    world.engine.flip("model.embed.weight")
    found = world.turn()
    assert "model.embed.weight" in found["live"]
    assert (world.status.faults, world.status.last_fault) == (1, found["live"])
    assert world.engine.held == on_disk(world.host.local) and world.engine.reloaded == 2
    assert world.host.state.engines["live"].mark is Mark.SERVED and world.host.status.ready
    assert world.turn() == {}


def test_an_engine_in_doubt_says_so_until_it_is_reloaded(world: World) -> None:
    seen = []

    def look(call: Call) -> Answer:
        seen.append((world.host.state.engines["live"].mark, world.engine.paused))
        return Answer(500, {"error": "?", "state": "in-doubt"})

    world.engine.flip("model.steps")
    world.engine.script(f"{ROUTES}/reload", *([look] * 2))
    world.turn()
    assert seen == [(Mark.SUSPECT, True)] * 2 and world.engine.paused
    assert not world.host.status.ready
    assert world.turn() == {} and world.status.faults == 1, "counts do not go back while it is in doubt"
    world.host.retry()
    assert world.host.status.ready and not world.engine.paused


def test_the_pace_is_that_of_the_rate(site: Site) -> None:
    world = World(site, rate=1000)
    for _ in range(3):
        world.turn()
    # the first piece is all of so small a model; the next one waits until it is paid for
    assert world.engine.routes().count("digest") == 1
    world.turn(10.0)
    assert world.status.passes == 2


def test_engines_of_a_host_are_read_by_turns(site: Site) -> None:
    second = PluginDouble(site.root / "host")
    world = World(site, 1000, 0, f"vllm={site.serve(second)},via=live,name=second")
    for _ in range(40):
        world.turn()
    asked = [engine.routes().count("digest") for engine in (world.engine, second)]
    assert min(asked) > 0 and abs(asked[0] - asked[1]) <= 1


def test_without_a_rate_only_every_nth_version_is_read(site: Site) -> None:
    world = World(site, rate=0, every=2)
    asked = []
    for _ in range(4):
        world.run.publish()
        world.host.step()
        world.turn()
        asked.append(world.engine.routes().count("digest"))
    assert asked == [0, 0, 1, 1]
    assert world.host.status.ready


def test_a_fault_after_a_version_is_found_by_the_reading_that_follows_it(site: Site) -> None:
    world = World(site, rate=0, every=1)
    world.turn()
    world.run.publish()
    world.host.step()
    world.engine.flip("model.layers.0.up.weight")
    assert "model.layers.0.up.weight" in world.turn()["live"]
    assert world.engine.held == world.run.digest(1)


def test_tensors_that_an_engine_cannot_read_back_are_counted(world: World) -> None:
    world.engine.refused = {"model.scale": "derived", "model.layers.0.scale": "it is packed"}
    assert world.turn() == {}
    assert (world.status.passes, world.status.refused, world.status.version) == (1, 1, None)
    assert world.host.status.confirmed_by == "label"


def test_a_tensor_that_is_neither_told_nor_refused_is_a_fault(world: World) -> None:
    lanes = Answer(200, {"version": 0, "lanes": {}, "refused": {}, "next": None, "changed": False})
    world.engine.script(f"{ROUTES}/digest", lanes)
    assert "model.embed.weight" in world.turn()["live"]


@pytest.mark.parametrize(
    "act",
    [
        Drop(),
        Answer(500, b"?"),
        Answer(200, {"version": 0, "lanes": {}, "refused": {}, "next": None, "changed": True}),
        Answer(200, {"version": 7, "lanes": {}, "refused": {}, "next": None, "changed": False}),
    ],
)
def test_an_answer_that_proves_nothing_is_asked_again(world: World, act: Answer | Drop) -> None:
    world.engine.script(f"{ROUTES}/digest", *([act] * 2 if isinstance(act, Drop) else [act]))
    assert world.turn() == {}
    assert world.turn(61.0) == {}
    assert world.status.passes == 1 and world.engine.reloaded == 1


def test_engines_that_are_not_patched_are_not_asked(site: Site) -> None:
    run = site.run()
    host = site.host(run)
    host.step()
    assert host.sync.verify_engines(EngineVerify(RATE)) == {}


def verify(world: World, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["local", "verify", "--json", "--local", str(world.host.local), *arguments])
    out = capsys.readouterr().out
    return code, json.loads(out) if code in (0, 3) and out else {}


def url_of(world: World) -> str:
    return world.host.urls[0].removeprefix("vllm=").partition(",")[0]


def test_local_verify_reads_the_engine_too(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    url = url_of(world)
    code, found = verify(world, capsys, "--engine", url)
    assert code == 0
    assert found["engines"][0]["root"] == found["root"] == world.host.state.position.root
    assert found["engines"][0]["tensors"] == len(world.run.base.tensors)
    world.engine.flip("model.steps")
    code, found = verify(world, capsys, "--engine", f"vllm={url},name=it")
    assert code == 3 and found["intact"]
    assert found["engines"][0]["differing"] == ["model.steps"] and found["engines"][0]["engine"] == "it"
    code, found = verify(world, capsys, "--engine", url, "--name", "model.embed.weight")
    assert code == 0 and found["engines"][0]["tensors"] == 1


def test_local_verify_of_an_engine_that_is_elsewhere(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(world)
    assert verify(world, capsys, "--engine", url, "--name", "nothing")[0] == 3
    assert verify(world, capsys, "--engine", f"{url},via=reload")[0] == 3
    assert verify(world, capsys, "--engine", "http://h/x y")[0] == 2
    world.engine.version = 9
    assert verify(world, capsys, "--engine", url)[0] == 75
    world.engine.installed = False
    assert verify(world, capsys, "--engine", url)[0] == 5
