"""SGLang patched in memory: the order of its calls, and what each failure leads to."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from doubles import Answer, Call, Drop
from hosts import Host, Run, Site
from hypothesis import given
from hypothesis import strategies as st
from plugin_double import lanes_of
from pydantic import TypeAdapter
from sglang_plugin import SGLangPlugin

from weightcast.shared.base.errors import EngineFailed
from weightcast.shared.checkpoint.update.engine_patch import EnginePatch
from weightcast.subscriber.engines.base import Timeouts, parse_engines
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.sglang import SGLangLive, named_dummy
from weightcast.subscriber.status import HostStatus, LiveStatus

ASKED = "/weights_checker"
TENSORS = "/update_weights_from_tensor"
BEGIN, END = "/begin_weight_update", "/end_weight_update"


class World:
    def __init__(self, site: Site, *, answers: bool = True) -> None:
        """`answers`: the hook can be asked while the server serves."""
        self.run: Run = site.run()
        self.engine = SGLangPlugin(site.root / "host")
        self.engine.answers = answers
        self.option = f"sglang={site.serve(self.engine)},via=live,name=live"
        self.host: Host = site.host(self.run, self.option)
        self.host.step()
        self.engine.calls.clear()

    def follow(self) -> None:
        self.run.publish()
        self.host.step()

    @contextmanager
    def spoken_to(self, **seconds: float) -> Iterator[SGLangLive]:
        """Beside the host."""
        [spec] = parse_engines([self.option], self.host.options.local)
        with closing(open_engine(spec, timeouts=Timeouts(**seconds))) as engine:
            assert isinstance(engine, SGLangLive)
            yield engine

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


@pytest.fixture
def silent(site: Site) -> World:
    return World(site, answers=False)


def since_the_pause(world: World) -> list[str]:
    paths = world.engine.paths()
    return paths[paths.index("/pause_generation") + 1 : paths.index("/continue_generation")]


def test_versions_are_checked_while_it_serves_and_patched_in_the_pause(world: World) -> None:
    for version in (1, 2):
        world.engine.calls.clear()
        world.follow()
        assert world.serves(version)
        assert ASKED in world.engine.paths()
        assert since_the_pause(world) == [BEGIN, TENSORS, END]
        assert not world.engine.of("/server_info"), "that takes longer than a patch"
    assert (world.engine.applied, world.engine.reloaded) == (2, 1)
    assert (world.live.way, world.live.patches, world.live.because) == ("live", 2, {"align": 1})


def test_a_hook_that_cannot_be_asked_is_sent_no_order(silent: World) -> None:
    silent.follow()
    assert silent.serves(1) and (silent.engine.applied, silent.engine.reloaded) == (0, 2)
    assert silent.live.because == {"align": 1, "unpatchable": 1} and "does not answer" in silent.live.reason
    assert TENSORS not in silent.engine.paths() and BEGIN not in silent.engine.paths()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pp_size": 2}, "only the first stage of a pipeline answers"),
        ({"dp_size": 2}, "only the first of data parallel replicas answers"),
        ({"enable_eplb": True}, "experts move between ranks"),
        ({"cpu_offload_gb": 0.5}, "weights are offloaded"),
        ({"offload_group_size": 4}, "weights are offloaded"),
        ({"enable_memory_saver": True}, "weights that are away can't be read"),
        ({"enable_lora": True}, "LoRA adapters are on"),
        ({"tp_size": 0}, "tells 0 tensor-parallel ranks"),
    ],
)
def test_servers_that_are_loaded_from_disk(site: Site, settings: dict[str, object], reason: str) -> None:
    run, engine = site.run(), SGLangPlugin(site.root / "host")
    engine.settings |= settings
    host = site.host(run, f"sglang={site.serve(engine)},via=live,name=live")
    for version in (1, 2):
        run.publish()
        host.step()
        live = host.status.engines[0].live
        assert host.status.ready and engine.held == run.digest(version) and engine.applied == 0
        assert live is not None and reason in live.reason
    assert TENSORS not in engine.paths()


def test_a_session_that_a_killed_subscriber_left_open_is_ended(world: World) -> None:
    world.engine.session = True
    world.follow()
    assert world.serves(1) and world.live.way == "live"
    assert since_the_pause(world) == [BEGIN, END, BEGIN, TENSORS, END]


def test_a_restarted_subscriber_asks_what_it_holds(world: World) -> None:
    world.host.restart()
    world.follow()
    assert world.serves(1) and (world.live.way, world.engine.reloaded) == ("live", 1)


def test_what_somebody_else_loaded_is_not_patched(world: World) -> None:
    world.engine.from_disk({"weight_version": "0"})
    world.follow()
    assert world.serves(1) and (world.engine.applied, world.engine.reloaded) == (0, 3)
    world.follow()
    assert world.serves(2) and world.live.way == "live"


def test_a_label_that_the_hook_was_not_told_is_of_other_weights(world: World) -> None:
    world.engine.known_label = "7"
    world.follow()
    assert world.serves(1) and world.engine.applied == 0
    world.follow()
    assert world.serves(2) and world.live.way == "live"


def test_an_engine_in_doubt_is_loaded_from_disk(world: World) -> None:
    world.engine.in_doubt = True
    world.host.step()
    assert world.serves(0) and not world.engine.in_doubt


def test_memory_is_read_while_it_serves(world: World) -> None:
    names = sorted(world.engine.weights)
    with world.spoken_to() as engine:
        found = engine.lanes(names)
    assert found.lanes == {name: lanes_of(world.engine.weights[name]) for name in names}
    assert (found.version, found.refused, found.changed) == (0, {}, False)


def test_memory_that_cannot_be_read_is_no_proof(silent: World) -> None:
    with silent.spoken_to() as engine, pytest.raises(EngineFailed, match="weightcast-engine does not answer"):
        engine.lanes(["model.embed.weight"])


def test_an_order_that_never_ends_is_refused_in_time(world: World) -> None:
    world.engine.steps = 1 << 30
    with world.spoken_to(reload=0.2) as engine, pytest.raises(EngineFailed, match=r"did not (end|answer)"):
        engine.check(EnginePatch("1-00000000.patch", 0, "", 1, "", (), 1, 0))


def test_a_restarted_engine_is_loaded_from_disk_once(world: World) -> None:
    world.engine.restart()
    world.host.step()
    assert world.serves(0)
    world.follow()
    assert world.serves(1) and (world.engine.applied, world.engine.reloaded) == (1, 2)


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
    world.engine.script(TENSORS, what)
    world.follow()
    assert world.serves(1)
    assert world.live.because == {"align": 1, because: 1} and world.live.reason
    world.follow()
    assert world.serves(2) and world.live.way == "live"


def test_what_the_hook_says_counts_only_as_the_server_says_it_too(world: World) -> None:
    def not_flushed(call: Call) -> Answer:
        told = world.engine.behave(call)
        assert isinstance(told.body, dict)
        return SGLangPlugin.said(False, told.body["message"])

    world.engine.script(TENSORS, not_flushed)
    world.follow()
    assert world.serves(1) and world.live.because == {"align": 1, "in-doubt": 1}


def test_a_refusal_of_the_check_changes_nothing(world: World) -> None:
    world.engine.refused = {"model.embed.weight": "it is transposed"}
    world.follow()
    assert world.serves(1)
    assert world.live.because["refused"] == 1 and "it is transposed" in world.live.reason
    assert world.engine.applied == 0 and TENSORS not in world.engine.paths()


@pytest.mark.parametrize("what", [Answer(500, b""), Drop(), Drop(after=True)])
def test_a_check_without_an_answer_is_no_success(world: World, what: Any) -> None:
    world.engine.script(ASKED, what, what, what)
    world.follow()
    assert world.serves(1)
    world.follow()
    assert world.serves(2) and world.live.way == "live"


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
    assert live.because == {"align": 1, "unpatchable": 1}


@given(st.text(max_size=80))
def test_an_order_is_a_pickle_that_torch_reads(name: str) -> None:
    torch = pytest.importorskip("torch")
    [(found, tensor)] = pickle.loads(base64.b64decode(named_dummy(name)))  # noqa: S301
    assert found == name and type(tensor) is torch.Tensor and tensor.shape == (1,)


@pytest.mark.parametrize("rest", ["-1", "NaN", "-Infinity", "1e999", "1" + "0" * 400, "null", '"soon"'])
def test_a_rest_that_is_none_is_no_rest(world: World, rest: str) -> None:
    """Where the hook's answer is no JSON it is no answer: the engine is loaded from disk."""
    again = SGLangPlugin.said(True, f'{{"status": 202, "rest": {rest}}}')
    world.engine.script(ASKED, again)
    world.follow()
    assert world.serves(1)


def test_text_of_the_hook_that_is_none_is_not_passed_on(world: World) -> None:
    refused = SGLangPlugin.said(False, '{"status": 409, "error": "\\ud800 busy"}')
    world.engine.script(ASKED, *[refused] * 4)
    world.run.publish()
    world.host.step()
    assert world.host.at(world.run, 1) and TypeAdapter(HostStatus).dump_json(world.host.status)
    world.host.retry()
    assert world.serves(1)
