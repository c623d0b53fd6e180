"""Versions as patches of an engine's memory: through the real subscriber, against the plugin's routes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import groups
import pytest
from doubles import Answer, Call, Drop, Hang, nobody
from hosts import QUICK, Host, SGLang, Site, Weights, on_disk
from plugin_double import ROUTES, PluginDouble
from waiting import wait_until

from weightcast.shared.checkpoint.state.state import Mark
from weightcast.subscriber.daemon.report import describe
from weightcast.subscriber.engines.base import HeldWeights, parse_engines
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.status import LiveStatus


class World:
    """A run and a host with an engine that takes patches and was brought to the base."""

    def __init__(self, site: Site, *more: Any, policy: str = "recompute", **options: Any) -> None:
        self.site = site
        self.run = site.run()
        self.engine = PluginDouble(site.root / "host")
        self.option = f"vllm={site.serve(self.engine)},via=live,name=live,policy={policy}"
        self.host: Host = site.host(self.run, self.option, *more, **options)
        self.host.step()
        self.engine.calls.clear()

    def follow(self) -> None:
        """Publishes a version and follows it."""
        self.run.publish()
        self.host.step()

    @property
    def live(self) -> LiveStatus:
        found = self.host.status.engines[0].live
        assert found is not None
        return found

    def serves(self, version: int) -> bool:
        """Host, engine and status agree on it, and nothing of a patch is left."""
        run, host, engine = self.run, self.host, self.engine
        assert host.at(run, version) and host.journals == []
        assert (engine.held, engine.label, engine.paused) == (run.digest(version), str(version), False)
        assert (engine.version, engine.root) == (version, host.state.position.root)
        assert host.state.engines["live"].mark is Mark.SERVED and host.status.ready
        assert list((host.local / ".weightcast").glob("engine/*")) == []
        return True


@pytest.fixture
def world(site: Site) -> World:
    return World(site)


def test_versions_are_patched_into_memory_and_nothing_is_reloaded(world: World) -> None:
    assert world.engine.reloaded == 1 and world.live.because == {"align": 1}
    for version in (1, 2, 3):
        world.engine.calls.clear()
        world.follow()
        assert world.serves(version)
        assert world.engine.routes() == ["check", "update"]
    assert (world.live.way, world.live.patches, world.live.reloads, world.live.reason) == ("live", 3, 1, "")
    assert "offer" in world.host.status.updates[-1].seconds
    assert world.host.status.engines[0].via == "live"


def test_the_pause_is_what_the_engine_says_that_it_stood_still(world: World) -> None:
    world.follow()
    assert world.host.status.updates[-1].pause_seconds == 0.125
    reported = describe(world.host.status).updates[0]
    assert (reported.seconds["pause_total"], reported.outcome) == (0.125, "done")


@pytest.mark.parametrize("still", [None, -1.0, "1", True])
def test_an_engine_that_tells_no_such_time_is_measured_from_here(world: World, still: object) -> None:
    def odd(call: Call) -> Answer:
        told = world.engine.behave(call)
        return Answer(200, {**told.body, "seconds": {"still": still}})  # type: ignore[dict-item]

    world.engine.script(f"{ROUTES}/update", odd)
    world.follow()
    pause = world.host.status.updates[-1].pause_seconds
    assert world.serves(1) and pause is not None and pause > 0 and pause != 0.125


def test_an_engine_that_patched_and_did_not_resume_is_resumed(world: World) -> None:
    def stays(call: Call) -> Answer:
        told = world.engine.behave(call)
        world.engine.paused = True
        return Answer(200, {**told.body, "resumed": False})  # type: ignore[dict-item]

    world.engine.script(f"{ROUTES}/update", stays)
    world.follow()
    assert world.serves(1) and world.engine.routes() == ["check", "update", "resume"]
    assert world.live.patches == 1
    assert world.host.status.updates[-1].pause_seconds != 0.125, "it stood still until it was resumed"


def test_an_engine_that_does_not_pause_serves_on_and_the_version_is_not_blamed(world: World) -> None:
    world.follow()
    refusal = Answer(423, {"error": "the engine does not pause", "remedy": "see its log"})
    world.engine.script(f"{ROUTES}/update", refusal)
    world.engine.script(f"{ROUTES}/pause", Drop(after=True), Drop(after=True))
    world.follow()
    assert world.engine.held == world.run.digest(1) and not world.host.status.ready
    assert world.host.state.unanswered == {"live"} and world.host.state.blocked == ()
    world.host.retry()
    assert world.serves(2)


def test_where_requests_are_waited_for_the_pause_is_an_order_of_its_own(site: Site) -> None:
    world = World(site, policy="wait")
    world.follow()
    assert world.serves(1) and world.live.patches == 1
    assert world.engine.routes() == ["check", "pause", "apply", "resume"]


def test_the_disk_is_patched_before_the_engine_and_after_its_check(world: World) -> None:
    seen: dict[str, int] = {}

    def note(route: str) -> Callable[[Call], Answer]:
        def act(call: Call) -> Answer:
            seen[route] = world.host.state.position.version
            return world.engine.behave(call)

        return act

    for route in ("check", "update"):
        world.engine.script(f"{ROUTES}/{route}", note(route))
    world.follow()
    assert seen == {"check": 0, "update": 1}


def test_versions_that_come_together_are_one_patch(world: World) -> None:
    for _ in range(3):
        world.run.publish()
    world.host.step()
    assert world.serves(3) and world.engine.applied == 1
    assert world.host.status.updates[-1].folded == 3


def test_a_patch_that_several_steps_on_disk_lead_to(site: Site) -> None:
    """A version whose writers were others cannot be folded: two journals, one patch."""
    world = World(site)
    world.run.publish()
    world.run.publish_by_two()
    world.host.step()
    assert world.serves(2)
    assert world.engine.applied == 1 and world.engine.reloaded == 1


def test_same_bytes_under_a_new_number(world: World) -> None:
    world.follow()
    world.run.publish(world.run.versions[-1])
    world.host.step()
    assert world.serves(2)
    assert (world.engine.applied, world.engine.reloaded) == (1, 1)
    world.follow()
    assert world.serves(3) and world.engine.applied == 2


REFUSALS: list[tuple[str, Any, str]] = [
    ("check", Answer(422, {"error": "w is transposed", "tensor": "w", "remedy": "reload"}), "refused"),
    ("check", Answer(409, {"error": "base", "holds": {"version": 9, "root": "x"}}), "refused"),
    ("check", Answer(200, {"changes": 1}), "refused"),
    ("check", Answer(500, b"<html>"), "refused"),
    ("check", Drop(), "refused"),
    ("update", Answer(422, {"error": "w is not finite", "tensor": "w"}), "rolled-back"),
    ("update", Answer(409, {"error": "base", "holds": {"version": None, "root": None}}), "rolled-back"),
    ("update", Answer(404, {}), "rolled-back"),
]


@pytest.mark.parametrize(("route", "answer", "why"), REFUSALS)
def test_a_patch_that_is_not_taken_becomes_a_reload(world: World, route: str, answer: Any, why: str) -> None:
    world.engine.script(f"{ROUTES}/{route}", *([answer] * (2 if answer == Drop() else 1)))
    world.follow()
    assert world.serves(1)
    assert (world.engine.applied, world.engine.reloaded) == (0, 2)
    assert world.live.way == "reload" and world.live.because == {"align": 1, why: 1}
    assert f"{ROUTES}/{route}" in world.live.reason
    assert world.host.status.degraded == ()


def test_one_look_without_an_answer_makes_no_reload(world: World) -> None:
    """The one before the patch; a connection that is lost is tried twice."""
    world.engine.script(ROUTES, world.engine.behave, Drop(), Drop())
    world.follow()
    assert world.serves(1) and world.live.patches == 1 and world.live.reloads == 1


def test_what_was_rolled_back_is_reloaded_in_a_pause_of_its_own(world: World) -> None:
    world.engine.script(f"{ROUTES}/update", world.engine.rolls_back)
    world.follow()
    assert world.serves(1)
    assert world.engine.routes() == ["check", "update", "pause", "reload", "holds", "resume"]
    assert world.live.because["rolled-back"] == 1 and "out of memory" in world.live.reason


def test_an_engine_in_doubt_stays_paused_until_its_reload(world: World) -> None:
    marks = []

    def look(call: Call) -> Answer:
        marks.append((world.host.state.engines["live"].mark, world.engine.paused))
        return world.engine.behave(call)

    world.engine.script(f"{ROUTES}/update", world.engine.half_applied)
    world.engine.script(f"{ROUTES}/reload", look)
    world.follow()
    assert world.serves(1)
    assert marks == [(Mark.SUSPECT, True)]
    assert world.live.because["in-doubt"] == 1


@pytest.mark.parametrize("act", [Drop(), Drop(after=True), Answer(500, b"?"), Answer(200, {"version": 1})])
def test_an_answer_that_says_nothing_leads_to_a_reload(world: World, act: Any) -> None:
    world.engine.script(f"{ROUTES}/update", act)
    world.follow()
    assert world.serves(1)
    assert world.engine.reloaded == 2 and world.live.because["in-doubt"] == 1


def test_a_hanging_patch_is_given_up_and_its_late_effect_is_undone(site: Site) -> None:
    world = World(site, timeouts=replace(QUICK, reload=0.5))
    world.engine.script(f"{ROUTES}/update", Hang())
    world.engine.script(f"{ROUTES}/reload", lambda call: _late(world, call))
    world.follow()
    assert world.serves(1)
    assert world.live.because["in-doubt"] == 1


def _late(world: World, call: Call) -> Answer:
    world.engine.release()
    return world.engine.behave(call)


def test_an_engine_replaced_in_the_pause_is_reloaded(world: World) -> None:
    world.engine.script(f"{ROUTES}/update", world.engine.dies)
    world.follow()
    world.host.retry()
    assert world.serves(1)
    world.follow()
    assert world.serves(2) and world.engine.applied == 1


@pytest.mark.parametrize("moment", ["check", "update"])
def test_an_engine_that_started_since_is_reloaded_once(world: World, moment: str) -> None:
    world.engine.script(
        f"{ROUTES}/{moment}", lambda call: (world.engine.restart(), world.engine.behave(call))[1]
    )
    world.follow()
    world.host.retry()
    assert world.serves(1)
    world.follow()
    assert world.serves(2) and world.engine.applied == 1


def test_a_restarted_engine_is_reloaded_once_and_patched_again(world: World) -> None:
    world.follow()
    world.engine.restart()
    world.host.step()
    assert world.serves(1) and world.live.because == {"align": 2}
    world.follow()
    assert world.serves(2) and world.live.way == "live"


def test_a_restarted_subscriber_goes_on_with_patches(world: World) -> None:
    world.follow()
    world.host.restart()
    world.follow()
    assert world.serves(2)
    assert (world.engine.applied, world.engine.reloaded) == (2, 1)


def test_an_engine_that_somebody_else_reloaded_is_reloaded(world: World) -> None:
    world.engine.version, world.engine.root = None, None
    world.follow()
    assert world.serves(1) and world.live.because == {"align": 1, "unknown": 1}


def test_another_run_s_version_of_the_same_number_is_not_this_one(world: World) -> None:
    world.follow()
    other = Weights.make(5).tensors
    world.engine.weights = {name: data for name, (_, _, data) in other.items()}
    world.engine.root = "f" * 64
    assert world.host.step().ready and world.serves(1)
    assert world.engine.reloaded == 2


def test_an_engine_left_paused_with_another_run_s_version_is_not_resumed(world: World) -> None:
    world.follow()
    here = HeldWeights(1, world.host.state.position.root)
    [spec] = parse_engines([world.option], world.host.local)
    with closing(open_engine(spec)) as engine:
        engine.pause()
        assert not HostEngine(engine).resume_if_it_names(replace(here, root="f" * 64))
        assert world.engine.paused
        assert HostEngine(engine).resume_if_it_names(here)


def test_an_engine_that_says_that_it_is_in_doubt_is_reloaded(world: World) -> None:
    world.engine.in_doubt = True
    world.host.step()
    assert world.serves(0) and world.engine.reloaded == 2


def test_an_engine_that_cannot_be_patched_says_why(world: World) -> None:
    world.engine.patchable = False
    world.follow()
    assert world.serves(1)
    assert world.live.because["unpatchable"] == 1 and world.live.reason == "the weights are packed"
    assert "check" not in world.engine.routes()


def test_an_engine_that_cannot_be_told_what_it_holds_is_reloaded_the_next_time_too(world: World) -> None:
    world.engine.restart()
    world.engine.script(f"{ROUTES}/holds", Answer(500, b""))
    world.host.step()
    assert world.host.status.ready and world.engine.version is None
    assert f"{ROUTES}/holds" in world.live.reason
    world.follow()
    assert world.serves(1) and world.live.because == {"align": 2, "unknown": 1}


def test_a_tensor_that_is_refused_reloads_only_the_versions_that_change_it(world: World) -> None:
    world.engine.refused = {"model.layers.0.up.weight": "it is transposed"}
    world.run.publish(world.run.versions[-1].changed(5, "model.embed.weight", "model.steps"))
    world.host.step()
    assert world.serves(1) and world.live.way == "live"
    world.follow()
    assert world.serves(2) and world.live.way == "reload" and "it is transposed" in world.live.reason


def test_after_failures_in_the_pause_versions_are_reloaded_for_a_while(world: World) -> None:
    world.engine.script(f"{ROUTES}/update", *([world.engine.rolls_back] * 2))
    ways = []
    for _ in range(5):
        world.follow()
        ways.append(world.live.because.get("waiting", 0))
    assert world.serves(5)
    assert ways == [0, 0, 1, 1, 1] and world.engine.applied == 2


def test_a_patch_as_large_as_the_model_is_not_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcast.shared.checkpoint.update.engine_patch.ALWAYS_BYTES", 0)
    data = world.run.versions[-1].tensors
    world.run.publish(
        replace(
            world.run.versions[-1],
            tensors={n: (d, s, bytes(b ^ 1 for b in raw)) for n, (d, s, raw) in data.items()},
        )
    )
    world.host.step()
    assert world.serves(1) and world.live.because["patch"] == 1 and "not faster" in world.live.reason


def test_a_directory_for_patches_that_is_a_link_is_refused(world: World) -> None:
    elsewhere = world.site.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    (world.host.local / ".weightcast" / "engine").symlink_to(elsewhere)
    world.run.publish()
    world.host.step()
    assert world.live.because["patch"] == 1 and "symbolic link" in world.live.reason
    assert world.engine.held == world.run.digest(1)
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]


def test_without_the_plugin_the_host_says_what_is_missing(site: Site) -> None:
    run, engine = site.run(), PluginDouble(site.root / "host")
    engine.installed = False
    host = site.host(run, f"vllm={site.serve(engine)},via=live,name=live")
    host.step()
    assert not host.status.ready
    assert "install weightcast-engine" in host.status.not_ready_reasons[0]
    engine.installed = True
    host.step()
    assert host.status.ready


def test_an_absent_engine_is_patched_on_from_its_reload(world: World, site: Site) -> None:
    with nobody() as url:
        host = site.host(world.run, f"vllm={url},via=live,name=gone", name="other")
        host.step()
        world.run.publish()
        host.step()
    assert host.at(world.run, 1) and not host.status.ready
    assert [each.outcome for each in describe(host.status).updates[:1]] == ["refused"], (
        "files alone serve nobody"
    )


def test_the_api_key_opens_the_routes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "s3cret")
    run, engine = site.run(), PluginDouble(site.root / "host")
    engine.key = "s3cret"
    host = site.host(run, f"vllm={site.serve(engine)},via=live,name=live,api_key_env=ENGINE_KEY")
    host.step()
    run.publish()
    host.step()
    assert engine.applied == 1 and host.status.ready


@pytest.mark.parametrize("order", ["together", "rolling"])
def test_several_engines_of_a_host(site: Site, order: str) -> None:
    second, third = PluginDouble(site.root / "host"), SGLang()
    option = f"vllm={site.serve(second)},via=live,name=second"
    disk = f"sglang={site.serve(third)},name=disk"
    world = World(site, option, disk, conduct={"order": order})
    world.follow()
    assert world.serves(1) and second.held == world.run.digest(1)
    assert [engine.applied for engine in (world.engine, second)] == [1, 1]
    world.engine.script(f"{ROUTES}/update", world.engine.rolls_back)
    world.follow()
    assert world.serves(2) and (world.engine.applied, second.applied) == (1, 2)
    ways = {
        engine.name: None if engine.live is None else engine.live.way for engine in world.host.status.engines
    }
    assert ways == {"live": "reload", "second": "live", "disk": None}


def test_an_engine_that_holds_another_version_than_the_others_is_reloaded(site: Site) -> None:
    second = PluginDouble(site.root / "host")
    world = World(site, f"vllm={site.serve(second)},via=live,name=second")
    second.restart()
    world.follow()
    assert world.serves(1) and second.held == world.run.digest(1)
    assert (world.engine.applied, second.applied, second.reloaded) == (1, 0, 2)


def test_a_version_that_no_engine_takes_is_gone_back_from_on_disk_and_in_the_engine(world: World) -> None:
    world.follow()
    refusal = Answer(422, {"error": "no", "tensor": "w", "remedy": ""})
    world.engine.script(f"{ROUTES}/check", refusal)
    world.engine.script(f"{ROUTES}/reload", refusal)
    world.follow()
    assert world.host.state.blocked[0].version == 2
    assert world.host.at(world.run, 1) and world.engine.held == world.run.digest(1)
    world.follow()
    assert world.serves(3)


class OverHosts(PluginDouble):
    """Its workers lie on several hosts: each reads the patch from its own host's directory."""

    def __init__(self, *directories: Path) -> None:
        super().__init__(directories[0])
        self.directories = directories

    def judge(self, name: str) -> Any:
        files = [directory / ".weightcast" / "engine" / name for directory in self.directories]
        missing = [str(file) for file in files if not file.exists()]
        if missing:
            return Answer(422, {"error": f"{missing[0]} is not there", "tensor": None, "remedy": ""})
        assert len({file.read_bytes() for file in files}) == 1
        return super().judge(name)


@pytest.mark.parametrize(
    ("leader_patches", "member_patches", "because"),
    [(True, True, {}), (True, False, {"refused": 2}), (False, True, {"group": 2})],
)
def test_a_group_is_patched_when_every_host_stages_the_patch(
    site: Site, leader_patches: bool, member_patches: bool, because: dict[str, int]
) -> None:
    run, engine = site.run(), OverHosts(site.root / "leader", site.root / "member")
    member = groups.Host(run, site.root / "member", site.stack, group_follower=True)
    member.start(group_patch=member_patches)
    option = f"vllm={site.serve(engine)},via=live,name=live"
    leader = groups.Host(run, site.root / "leader", site.stack, engine=(option,))
    leader.start(group_member=(member.url,), group_patch=leader_patches)
    for version in (0, 1, 2):
        if version:
            run.publish()
            leader.daemon.wakeup.set()
        wait_until(lambda v=version: leader.status.served_version == v and leader.status.ready, 90)  # type: ignore[misc]
        wait_until(lambda: member.is_free, 90)
        assert engine.held == run.digest(version) == on_disk(member.local)
    live = leader.status.engines[0].live
    assert live is not None
    assert (live.patches, live.because) == (0 if because else 2, {"align": 1, **because})
    # the group is asked whether it stood, before the engine goes on
    assert "update" not in engine.routes()
