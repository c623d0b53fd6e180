"""SGLang patched in memory: the order of its calls, and what each failure leads to."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from doubles import Answer, Call, Drop
from hosts import Host, Run, Site
from hypothesis import given
from hypothesis import strategies as st
from sglang_plugin import SGLangPlugin

from weightcast.subscriber.engines.sglang_live import named_dummy
from weightcast.subscriber.status import LiveStatus

TENSORS = "/update_weights_from_tensor"
SESSION = ["/begin_weight_update", TENSORS, TENSORS, "/end_weight_update"]


class World:
    def __init__(self, site: Site) -> None:
        self.run: Run = site.run()
        self.engine = SGLangPlugin(site.root / "host")
        self.host: Host = site.host(self.run, f"sglang={site.serve(self.engine)},via=live,name=live")
        self.host.step()
        self.engine.calls.clear()

    def follow(self) -> None:
        self.run.publish()
        self.host.step()

    @property
    def live(self) -> LiveStatus:
        found = self.host.status.engines[0].live
        assert found is not None
        return found

    def serves(self, version: int) -> bool:
        engine = self.engine
        assert self.host.at(self.run, version) and self.host.status.ready
        assert (engine.held, engine.label, engine.paused) == (self.run.digest(version), str(version), False)
        assert not engine.crashed and not engine.session and engine.waited == 0
        return True


@pytest.fixture
def world(site: Site) -> World:
    return World(site)


def test_versions_are_patched_in_the_pause(world: World) -> None:
    for version in (1, 2):
        world.engine.calls.clear()
        world.follow()
        assert world.serves(version)
        assert world.engine.paths() == ["/pause_generation", *SESSION, "/continue_generation"]
    assert (world.engine.applied, world.engine.reloaded) == (2, 1)
    assert (world.live.way, world.live.patches, world.live.because) == ("live", 2, {"align": 1})


def test_a_restarted_subscriber_loads_from_disk_once(world: World) -> None:
    world.host.restart()
    world.follow()
    assert world.serves(1) and world.live.because == {"unknown": 1}
    world.follow()
    assert world.serves(2) and world.live.way == "live"


def test_a_restarted_engine_is_loaded_from_disk_once(world: World) -> None:
    world.engine.restart()
    world.host.step()
    assert world.serves(0)
    world.follow()
    assert world.serves(1) and (world.engine.applied, world.engine.reloaded) == (1, 2)


def answers(world: World, what: Any) -> Callable[[Call], Answer]:
    """To the order after the check."""

    def check(call: Call) -> Answer:
        world.engine.script(TENSORS, what)
        return world.engine.behave(call)

    return check


def refusal(status: int, state: str = "") -> Answer:
    told = {"status": status, "error": "out of memory"} | ({"state": state} if state else {})
    return SGLangPlugin.said(False, json.dumps(told))


@pytest.mark.parametrize(
    ("what", "because"),
    [
        (refusal(422), "rolled-back"),
        (refusal(409), "rolled-back"),
        (refusal(500, "rolled-back"), "rolled-back"),
        (refusal(500, "in-doubt"), "in-doubt"),
        (SGLangPlugin.said(False, "Weights were updated, but the cache was not flushed"), "in-doubt"),
        (SGLangPlugin.said(True, "Success"), "in-doubt"),
        (Answer(500, b""), "in-doubt"),
        (Drop(), "in-doubt"),
        (Drop(after=True), "in-doubt"),
    ],
)
def test_what_is_not_taken_is_loaded_from_disk(world: World, what: Any, because: str) -> None:
    world.engine.script(TENSORS, answers(world, what))
    world.follow()
    assert world.serves(1)
    assert world.live.because == {"align": 1, because: 1} and world.live.reason
    world.follow()
    assert world.serves(2) and world.live.way == "live"


def test_a_refusal_of_the_check_changes_nothing(world: World) -> None:
    world.engine.refused = {"model.embed.weight": "it is transposed"}
    world.follow()
    assert world.serves(1)
    assert world.live.because["rolled-back"] == 1 and "it is transposed" in world.live.reason
    assert world.engine.applied == 0


@pytest.mark.parametrize("path", ["/begin_weight_update", "/end_weight_update"])
def test_a_session_that_does_not_begin_or_end(world: World, path: str) -> None:
    world.engine.script(path, Answer(500, b""))
    world.follow()
    assert world.serves(1) and world.engine.reloaded == 2


def test_a_server_without_the_hook_is_never_sent_an_order(site: Site) -> None:
    run, engine = site.run(), SGLangPlugin(site.root / "host")
    engine.loaders = []
    host = site.host(run, f"sglang={site.serve(engine)},via=live,name=live")
    host.step()
    run.publish()
    host.step()
    assert host.status.ready and engine.held == run.digest(1) and not engine.crashed
    assert TENSORS not in engine.paths()
    live = host.status.engines[0].live
    assert live is not None and "was started without weightcast_engine" in live.reason
    assert live.because == {"align": 1, "unknown": 1}


@given(st.text(max_size=80))
def test_an_order_is_a_pickle_that_torch_reads(name: str) -> None:
    torch = pytest.importorskip("torch")
    [(found, tensor)] = pickle.loads(base64.b64decode(named_dummy(name)))  # noqa: S301
    assert found == name and type(tensor) is torch.Tensor and tensor.shape == (1,)
