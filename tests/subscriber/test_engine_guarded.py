"""An adapter that meets what nobody foresaw: its engine alone is without versions, and says why."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import QUICK, Host, SGLang, Site
from sglang_plugin import SGLangPlugin

from weightcast.shared.checkpoint.state.state import Mark
from weightcast.subscriber.engines.base import parse_engines
from weightcast.subscriber.engines.host import Engines, RetryPace
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.sync.host import Callbacks
from weightcast.subscriber.sync.sync import Sync


class Unprepared:
    """An adapter, as the one that it asks; the method `fails` raises what no adapter should."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.fails = ""

    @property
    def __class__(self) -> Any:
        return type(self._engine)

    def __getattr__(self, name: str) -> Any:
        if name == self.fails:
            return self._fail
        return getattr(self._engine, name)

    @staticmethod
    def _fail(*arguments: object) -> object:
        raise KeyError("weights")


def speak_through(site: Site, host: Host, *adapters: Any) -> None:
    """The host's engines are asked by these adapters from here on."""
    pace = RetryPace(attempts=2, first=0.0, longest=0.0, clock=host.clock)
    host.sync.close()
    engines = Engines(adapters, pace=pace)
    host.sync = Sync(host.options, engines, callbacks=Callbacks(clock=host.clock))
    site.stack.callback(host.sync.close)


class World:
    """A host with two engines; the adapter of one of them is not prepared."""

    def __init__(self, site: Site) -> None:
        self.run = site.run()
        self.odd, self.good = SGLang(), SGLang()
        options = (f"{site.option(self.odd)},name=odd", f"{site.option(self.good)},name=good")
        self.host = site.host(self.run, *options)
        adapters = [open_engine(spec, timeouts=QUICK) for spec in parse_engines(options, self.host.local)]
        self.adapter = Unprepared(adapters[0])
        speak_through(site, self.host, self.adapter, adapters[1])

    def is_safe(self) -> bool:
        """The odd engine generates from a whole version, or is paused and noted."""
        if not self.odd.paused:
            return self.odd.held in [self.run.digest(number) for number in range(len(self.run.versions))]
        return self.host.state.engines["odd"].mark in (Mark.PAUSING, Mark.SUSPECT)


@pytest.fixture
def world(site: Site) -> World:
    return World(site)


@pytest.mark.parametrize("call", ["probe", "pause", "reload", "read_back", "resume"])
def test_an_adapter_that_fails_in_an_unforeseen_way_stops_nobody_else(world: World, call: str) -> None:
    world.host.step()
    world.adapter.fails = call
    version = world.run.publish()
    world.host.step()
    assert world.host.at(world.run, version) and world.good.held == world.run.digest(version)
    assert not world.good.paused and world.is_safe()
    assert "unexpected error in the adapter of engine odd: KeyError" in " ".join(
        world.host.status.not_ready_reasons
    )
    world.adapter.fails = ""
    assert world.host.retry().ready
    assert world.odd.held == world.run.digest(version) and not world.odd.paused


@pytest.mark.parametrize("call", ["probe", "pause"])
def test_such_an_adapter_keeps_no_host_from_being_seeded(world: World, call: str) -> None:
    world.adapter.fails = call
    world.run.publish()
    world.host.step()
    assert world.host.at(world.run, 1) and world.good.held == world.run.digest(1)


def test_a_relabel_that_fails_so_is_a_reload(world: World) -> None:
    world.host.step()
    world.adapter.fails = "relabel"
    version = world.run.publish(world.run.versions[-1])
    assert world.host.step().local_version == version and world.good.label == str(version)
    assert world.host.step().ready and world.odd.label == str(version)


@pytest.mark.parametrize("call", ["check", "apply", "hold"])
def test_an_engine_that_takes_patches_is_loaded_from_disk_instead(site: Site, call: str) -> None:
    run, engine = site.run(), SGLangPlugin(site.root / "host")
    option = f"sglang={site.serve(engine)},via=live,name=live"
    host = site.host(run, option)
    [spec] = parse_engines([option], host.local)
    adapter = Unprepared(open_engine(spec, timeouts=QUICK))
    speak_through(site, host, adapter)
    host.step()
    adapter.fails = call
    version = run.publish()
    host.step()
    host.retry()
    assert host.at(run, version) and not (engine.paused and host.status.ready)
    adapter.fails = ""
    assert host.retry().ready and engine.held == run.digest(version) and not engine.paused
    run.publish()
    assert host.step().ready and engine.held == run.digest(version + 1)
